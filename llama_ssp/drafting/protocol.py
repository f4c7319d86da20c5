"""The interface of a drafter, which extends every row of a batch by K tokens.

Modules `broadcast` and `batch_split` decide which ranks draft.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, P = 2 uniforms per draw, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llama_ssp.config.schema import DrafterConfig
from llama_ssp.distributed.comms import Comm
from llama_ssp.drafting.host_time import HostTimed
from llama_ssp.drafting.translation import TokenizerPair
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.context import Rows
from llama_ssp.sampling.rules import Draft, Rule
from llama_ssp.shapes import static_shape


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """The arguments of a drafter's maker.

    Attributes:
        vocab_size: V of the target.
        runner: the draft model or this rank's slice of it, for kinds of draft that have a model.
        comm: the ranks that share the draft model; None if it is not split.
        tokenizers: both models' tokenizers, if the draft has its own.
    """

    config: DrafterConfig
    rule: Rule
    num_draft_tokens: int
    vocab_size: int
    device: torch.device
    runner: Runner | None = None
    comm: Comm | None = None
    tokenizers: TokenizerPair | None = None


class Drafter(Protocol):
    """Proposes tokens for the target to verify.

    Attributes:
        num_draft_tokens: the most tokens that a round drafts.
        on_host: drafting reads values on the host, so a round waits for it and no executor replays it.
        is_point_mass: each drafted token is certain; the draft has no probabilities, and rules use 1.
        reads_skipped: `propose` reads all tokens that it has not read, prompts too; else `prefill` must come first.
        repeats_operators: with the same shapes, `propose` calls the same operators on tensors that this object holds.
        reads_by_length: `propose` ignores the bucket; see `Runner`.
    """

    num_draft_tokens: int
    on_host: bool
    is_point_mass: bool
    reads_skipped: bool

    @property
    def repeats_operators(self) -> bool:
        """See the class."""

    @property
    def reads_by_length(self) -> bool:
        """See the class."""

    @property
    def num_allocations(self) -> int:
        """How often `allocate` has replaced tensors that `propose` reads on this rank."""

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate caches for `batch_size` rows of `num_slots` tokens."""

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts into the given rows; see `models.prefill.read_prompts`."""

    def propose(self, rows: Rows, *, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Extend every row by K tokens, at most `num_draft_tokens`.

        Args:
            rows: the batch, each with at least 2 tokens; the drafted ids are written after each row's text.
            uniforms_BKP: in [0, 1), two for each drafted token; see `processors.draw`.
            bucket: number of cache slots to read, at least length + K.
            num_unread: how many tokens at the end of the rows the drafter may not have read yet: 2 after its own round;
                2 and whole chunks of `sizes.CATCH_UP_CHUNK` after rounds that it did not draft.

        Returns:
            The drafted ids, the same on every rank, and the probabilities they were drawn from, unless the rule needs
            none or the draft is a point mass.
        """


class SharedDrafter(HostTimed):
    """The drafter of some ranks, which the others follow; `inner` is that of this rank, None on ranks without one."""

    reads_skipped = False

    def __init__(self, inner: Drafter | None, *, num_draft_tokens: int, device: torch.device) -> None:
        self._inner = inner
        self.num_draft_tokens = num_draft_tokens
        self.on_host = inner.on_host if inner else False
        self.is_point_mass = inner.is_point_mass if inner else False
        self._offsets_K = torch.arange(num_draft_tokens, device=device)

    @property
    def repeats_operators(self) -> bool:
        """See `Drafter`."""
        return self._inner.repeats_operators if self._inner else True

    @property
    def reads_by_length(self) -> bool:
        """See `Drafter`."""
        return self._inner.reads_by_length if self._inner else True

    @property
    def num_allocations(self) -> int:
        """See `Drafter`."""
        return self._inner.num_allocations if self._inner else 0

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate caches on the ranks that draft."""
        if self._inner:
            self._inner.allocate(batch_size=batch_size, num_slots=num_slots)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts on the ranks that draft."""
        if self._inner:
            self._inner.prefill(prompts, rows=rows, buckets=buckets)

    def take_host_s(self, most_s: float) -> float:
        """See `HostTimed`."""
        inner: object = self._inner
        return inner.take_host_s(most_s) if isinstance(inner, HostTimed) else 0.0

    def _write(self, ids_BK: Tensor, rows: Rows) -> None:
        _, num_drafted = static_shape(ids_BK)
        rows.tokens_BS.scatter_(1, rows.lengths_B[:, None] + self._offsets_K[:num_drafted], ids_BK)
