"""Names that vLLM, transformers, llama.cpp and others give to settings, and the settings here."""

from functools import cache
from typing import NamedTuple

from llama_ssp.registry import Registry

_RANKS = "llama-ssp run ranks=N starts N ranks on this machine, and llama-ssp plan takes hardware.num_gpus=N"


class Counterpart(NamedTuple):
    """The counterpart here of a setting that other programs have.

    Attributes:
        name: the names that other programs give the setting, separated by spaces.
        key: the dotted key of the setting with the same effect; empty if there is none.
        sentence: a sentence for the command line; may be empty.
    """

    name: str
    key: str
    sentence: str


_NAMES = {
    "no_repeat_ngram_size": (
        "",
        (
            "it forbids every n-gram that the whole text has at each drafted position, which is not supported; "
            "sampling.repetition_penalty=1.1 or sampling.frequency_penalty=0.5 also make repetition rarer"
        ),
    ),
    "stop stop_sequences stop_token until eos": (
        "stop_strings",
        """stop_strings='["END"]' ends a completion at a text""",
    ),
    "rule verification_rule acceptance_method": (
        "verification",
        "verification=NAME is the rule that accepts drafted tokens: --help verification lists them",
    ),
    "top_logprobs num_logprobs return_logprobs output_scores echo": (
        "logprobs",
        "logprobs=5 gives log-probabilities of the new tokens, and prompt_logprobs=5 of the prompt's",
    ),
    "min_tokens min_length": ("min_new_tokens", "sampling.min_new_tokens=8 is the least length"),
    "bad_words_ids suppress_tokens": ("bad_words", """sampling.bad_words='["no"]' forbids texts"""),
    "sequence_bias": ("logit_bias", "sampling.logit_bias={198: -2.5} adds to the logits of tokens"),
    "max_model_len max_seq_len ctx_size n_ctx context_length": (
        "",
        (
            "a run allocates what its longest prompt and max_new_tokens need, up to the model's context; too_long says "
            "what becomes of longer prompts"
        ),
    ),
    "gpu_memory_utilization mem_fraction_static max_num_seqs max_batch_size": (
        "batch_size",
        "batch_size=8 decodes so many rows together; dry_run=true says whether they fit, and the most that would",
    ),
    "wandb report_to mlflow tensorboard": (
        "",
        "trackers are not here: a run folder has run.jsonl and summary.json, and llama-ssp report writes runs.csv",
    ),
    "tools tool_choice beam_size num_beams use_beam_search best_of": (
        "",
        "it is not here: completions are drawn one by one, and num_samples=4 draws four of each prompt",
    ),
    "max_tokens max_length n_predict num_tokens length": (
        "max_new_tokens",
        "max_new_tokens=64 limits the new tokens of a completion",
    ),
    "K k gamma lookahead num_speculative_tokens num_assistant_tokens draft_tokens": (
        "speculation.num_draft_tokens",
        "speculation.num_draft_tokens=4 is K, the number of drafted tokens per round",
    ),
    "ranks rank num_ranks gpus num_gpus nproc nproc_per_node world_size": ("hardware.num_gpus", _RANKS),
    "tp tensor_parallel_size": ("", f"the target is tensor parallel over all ranks, and {_RANKS}"),
    "nodes nnodes num_nodes": (
        "hardware.num_nodes",
        "several nodes are started by sbatch --nodes N launch/slurm.sbatch, or by torchrun --nnodes N launch/run.py",
    ),
    "target target_model model_name model": ("model", "model=NAME is the target"),
    "draft_model assistant_model speculative_model": ("draft", "draft=NAME is the draft"),
    "do_sample": ("sampling.temperature", "sampling=greedy draws nothing, and all other sampling draws"),
    "n num_return_sequences": ("num_samples", "num_samples=4 completes each prompt 4 times"),
    "torch_dtype": ("model.dtype", "model.dtype=bf16 is the number format of the target"),
    "machine": ("hardware", "hardware=NAME is the machine of a forecast"),
}
COUNTERPARTS: Registry[Counterpart] = Registry(setting="a setting", kind=Counterpart)
for _name, (_key, _sentence) in _NAMES.items():
    COUNTERPARTS.register(Counterpart(_name, _key, _sentence))


@cache
def counterparts() -> dict[str, Counterpart]:
    """All counterparts, by each of their names."""
    return {name: found for found in COUNTERPARTS.all().values() for name in found.name.split()}
