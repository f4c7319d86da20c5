"""What a run's checkpoints are, found and checked on every rank before any weight is loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from llama_ssp.config.layout import lay_out_copy
from llama_ssp.config.schema import Dtype, ModelConfig, RunConfig
from llama_ssp.distributed.agree import together
from llama_ssp.distributed.world import World
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models import hub
from llama_ssp.models.backends import check_model
from llama_ssp.models.checkpoint import Checkpoint, check_shape, inspect


@dataclass(frozen=True, kw_only=True)
class Source:
    """One model of the run, checked and not loaded.

    Attributes:
        entry: what the catalogue says of it.
        checkpoint: its files.
        tokenizer: from the same folder.
        dtype: number format to load it in; None takes that of the files.
    """

    entry: ModelConfig
    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype | None

    @property
    def context(self) -> int:
        """The most tokens that a sequence may have."""
        return self.checkpoint.shape.max_position_embeddings

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, as the checkpoint's generation config says, else its tokenizer."""
        ids = None
        if (self.checkpoint.folder / "generation_config.json").is_file():
            ids = GenerationConfig.from_pretrained(self.checkpoint.folder, local_files_only=True).eos_token_id
        if ids is None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (ids,)


def find_sources(config: RunConfig, world: World) -> tuple[Source, Source | None]:
    """Find and check the target's and the draft's checkpoints, with the same outcome on every rank.

    Args:
        config: names them.
        world: its first rank on each node downloads what has to be downloaded.

    Raises:
        CheckpointError: a checkpoint is missing or faulty.
        ConfigError: the vocabularies differ, or a model cannot be served.
        PlacementError: a model cannot be shared by so many ranks.
    """
    entries = [config.model] + ([config.draft.model] if config.draft.model else [])
    layout = lay_out_copy(config.placement, world_size=world.comm.size, has_draft=config.draft.model is not None)
    num_draft_ranks = 1 if layout.shares_rows else len(layout.draft_ranks)
    with together(world.comm):
        if world.ranks.local_rank == 0:
            for entry in entries:
                hub.resolve(entry)
    with together(world.comm):
        target = _check(config.model, num_ranks=len(layout.target_ranks))
        draft = _check(config.draft.model, num_ranks=num_draft_ranks) if config.draft.model else None
        if draft:
            _check_vocabularies(target, draft)
    return target, draft


def _check(entry: ModelConfig, *, num_ranks: int) -> Source:
    checkpoint = inspect(hub.resolve(entry))
    check_shape(entry, checkpoint)
    check_model(checkpoint, num_ranks=num_ranks)
    dtype = None if entry.dtype is Dtype.auto else getattr(torch, entry.dtype.value)
    return Source(entry=entry, checkpoint=checkpoint, tokenizer=_read_tokenizer(checkpoint.folder), dtype=dtype)


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizer files fail in as many ways as there are parsers
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read ({reason}); tokenizer.json and tokenizer_config.json, as "
            "save_pretrained writes them, are required"
        ) from error
    return tokenizer


def _check_vocabularies(target: Source, draft: Source) -> None:
    """Compare the tokenizers themselves; output heads that are padded to different widths do no harm."""
    target_ids, draft_ids = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if target_ids == draft_ids:
        return
    num_shared = len(target_ids.items() & draft_ids.items())
    raise ConfigError(
        f"the draft must have the target's vocabulary: of the target's {len(target_ids)} tokens the draft has "
        f"{num_shared} with the same id; choose a draft of the target's family"
    )
