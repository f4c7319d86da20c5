"""Names that vLLM, transformers, llama.cpp and others give to settings, and the settings here."""

from typing import NamedTuple

_RANKS = "llama-ssp run ranks=N starts N ranks on this machine, and llama-ssp plan takes hardware.num_gpus=N"


class Counterpart(NamedTuple):
    """The setting that does the same, by its dotted key, and a sentence for the command line; either may be empty."""

    key: str
    sentence: str


_NAMES: dict[str, Counterpart] = {
    "no_repeat_ngram_size": Counterpart(
        "",
        "it forbids every n-gram that the whole text has at each drafted position, which is not supported; "
        "sampling.repetition_penalty=1.1 or sampling.frequency_penalty=0.5 also make repetition rarer",
    ),
    "stop stop_strings stop_sequences stop_token until eos": Counterpart(
        "stop_strings", """stop_strings='["END"]' ends a completion at a text"""
    ),
    "max_tokens max_length n_predict num_tokens length": Counterpart(
        "max_new_tokens", "max_new_tokens=64 limits the new tokens of a completion"
    ),
    "K k gamma lookahead num_speculative_tokens num_assistant_tokens draft_tokens": Counterpart(
        "speculation.num_draft_tokens",
        "speculation.num_draft_tokens=4 is K, the number of drafted tokens per round",
    ),
    "ranks rank num_ranks gpus num_gpus nproc nproc_per_node world_size": Counterpart("hardware.num_gpus", _RANKS),
    "tp tensor_parallel_size": Counterpart("", f"the target is tensor parallel over all ranks, and {_RANKS}"),
    "nodes nnodes num_nodes": Counterpart(
        "hardware.num_nodes",
        "several nodes are started by sbatch --nodes N launch/slurm.sbatch, or by torchrun --nnodes N launch/run.py",
    ),
    "load_in_8bit load_in_4bit int8 bits": Counterpart(
        "model.quantization",
        "model.quantization=int8 or nf4 stores the target so, and draft.model.quantization the draft",
    ),
    "target target_model model_name model": Counterpart("model", "model=NAME is the target"),
    "draft_model assistant_model speculative_model": Counterpart("draft", "draft=NAME is the draft"),
    "device_map": Counterpart("device", "placement=accelerate puts the layers one after another over the GPUs"),
    "do_sample": Counterpart("sampling.temperature", "sampling=greedy draws nothing, and all other sampling draws"),
    "n num_return_sequences": Counterpart("num_samples", "num_samples=4 completes each prompt 4 times"),
    "torch_dtype": Counterpart("model.dtype", "model.dtype=bf16 is the number format of the target"),
    "machine": Counterpart("hardware", "hardware=NAME is the machine of a forecast"),
}
FOREIGN = {name: counterpart for names, counterpart in _NAMES.items() for name in names.split()}
"""By name."""
