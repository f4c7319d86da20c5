"""transformers' own generation, plain and assisted, as the peer that a benchmark compares ours with.

It gets the same prompts, sampling and number of drafted tokens, in a constant schedule without early stops and without
end-of-sequence tokens. It reads checkpoints, and runs in one process.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from llama_ssp.config.formats import format_of
from llama_ssp.config.model_files import GENERATION_CONFIG_FILE
from llama_ssp.config.schema import RunConfig, SamplingConfig, WeightsKind
from llama_ssp.config.tasks import BenchmarkConfig
from llama_ssp.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A target and what assists it in transformers: a draft model, or prompt look-up with so long a match."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    longest_match: int | None = None

    @property
    def can_assist(self) -> bool:
        """Whether the library has an assistant of this kind."""
        return bool(self.draft or self.longest_match)

    def ms_per_token(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        num_new_tokens: int,
        sampling: SamplingConfig,
        num_draft_tokens: int | None,
    ) -> float:
        """Complete the prompts; returns milliseconds per new token, including prefill.

        Plain prompts of one length are completed together, others one by one: the library assists one row only.
        `num_draft_tokens` is None for `generate` without an assistant.
        """
        is_one_batch = num_draft_tokens is None and len({len(ids) for ids in prompts}) == 1
        batches = [list(prompts)] if is_one_batch else [[ids] for ids in prompts]
        options = {"max_new_tokens": num_new_tokens, **_generation_options(sampling)}
        if num_draft_tokens and self.draft:
            self.draft.generation_config.num_assistant_tokens = num_draft_tokens
            options["assistant_model"] = self.draft
        elif num_draft_tokens:
            options |= {"prompt_lookup_num_tokens": num_draft_tokens, "max_matching_ngram_size": self.longest_match}
        num_tokens, started = 0, time.perf_counter()
        for rows in batches:
            ids_BT = torch.tensor(rows, device=self.target.device)
            mask_BT = torch.ones_like(ids_BT)
            out_BT = self.target.generate(ids_BT, attention_mask=mask_BT, **options)  # type: ignore[operator]
            num_tokens += out_BT[:, ids_BT.shape[1] :].numel()
        return 1e3 * (time.perf_counter() - started) / num_tokens


def _generation_options(sampling: SamplingConfig) -> dict[str, object]:
    penalty = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature == 0:
        return {"do_sample": False, **penalty}
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    filters = {"top_k": sampling.top_k or 0, "top_p": top_p, "min_p": sampling.min_p}
    return {"do_sample": True, "temperature": sampling.temperature, **filters, **penalty}


def has_peers(config: RunConfig, *, world_size: int) -> bool:
    """Whether a benchmark also measures transformers: one rank, checkpoints, no quantization, penalties that it has."""
    entries = [config.model, *([config.draft.model] if config.draft.model else [])]
    is_whole = not any(format_of(entry.quantization).is_quantized for entry in entries)
    is_requested = isinstance(config.task, BenchmarkConfig) and config.task.peers
    is_known = config.sampling.frequency_penalty == config.sampling.presence_penalty == 0
    return is_requested and world_size == 1 and config.weights is WeightsKind.checkpoint and is_whole and is_known


def check_peers(config: RunConfig, folders: Sequence[Path], *, world_size: int) -> None:
    """Before loading, raise CheckpointError if transformers is measured and refuses a generation config."""
    if not has_peers(config, world_size=world_size):
        return
    for file in filter(Path.is_file, (folder / GENERATION_CONFIG_FILE for folder in folders)):
        try:
            GenerationConfig.from_pretrained(file.parent, local_files_only=True)
        except Exception as error:  # it checks some values and crashes on others
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointError(
                f"transformers, which this benchmark measures too, refuses {file} ({reason}): copy or download it "
                "again, or set task.peers=false"
            ) from error


def load_peer(folder: Path, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a checkpoint with transformers alone, for a constant schedule without early stops."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.eval().to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model
