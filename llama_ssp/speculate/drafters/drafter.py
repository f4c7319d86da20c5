"""The interface of a drafter, which extends every row of a batch by K tokens, and what drafters have in common.

Module `shared` decides which ranks draft.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, P = 2 uniforms per draw, T tokens of a chunk, V
vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llama_ssp.architectures.sizes import CATCH_UP_CHUNK
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import DrafterConfig
from llama_ssp.speculate.drafters.tokenizers import TokenizerPair
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Draft, Rule


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

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Extend every row by K tokens, at most `num_draft_tokens`.

        Args:
            rows: the batch, each with at least 2 tokens; the drafted ids are written after each row's text.
            num_tokens: K.
            uniforms_BKP: in [0, 1), two for each drafted token; see `processors.draw`.
            bucket: number of cache slots to read, at least length + K.
            num_unread: how many tokens at the end of the rows the drafter may not have read yet: 2 after its own round;
                2 and whole chunks of `sizes.CATCH_UP_CHUNK` after rounds that it did not draft.

        Returns:
            The drafted ids, the same on every rank, and the probabilities they were drawn from, unless the rule needs
            none or the draft is a point mass.
        """


class HostTimed:
    """Base class of drafters that work on the host between forwards."""

    _host_s = 0.0

    @contextmanager
    def timing_host(self) -> Iterator[None]:
        """Count the time of the block, which waits for no device."""
        started = time.perf_counter()
        yield
        self._host_s += time.perf_counter() - started

    def take_host_s(self, most_s: float) -> float:
        """Return the seconds that were counted, or `most_s` of them; the rest stays, and is returned later.

        A device passes a draft after the host has launched it.
        """
        taken_s = min(self._host_s, most_s)
        self._host_s -= taken_s
        return taken_s


class CatchUp:
    """Reads the end of each row into a model's cache, in chunks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._offsets_T = torch.arange(CATCH_UP_CHUNK, device=runner.device)

    def read(
        self,
        tokens_BS: Tensor,
        lengths_B1: Tensor,
        *,
        num_unread: int,
        num_kept: int,
        bucket: int,
        known: Callable[[Tensor], Tensor],
    ) -> None:
        """Read the last `num_unread` tokens of each row but for the last `num_kept`, which the caller reads.

        A row with fewer tokens reads its first one several times. `known` makes ids of the model from tokens.
        """
        for distance in range(num_unread, num_kept, -CATCH_UP_CHUNK):
            positions_BT = (lengths_B1 - distance + self._offsets_T).clamp_min(0)
            ids_BT, first_B1 = known(tokens_BS.gather(1, positions_BT)), torch.zeros_like(lengths_B1)
            self._runner.forward(ids_BT, positions_BT, bucket=bucket, score_positions_BR=first_B1, consecutive=False)
