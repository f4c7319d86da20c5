"""The target as its own drafter: a step is a forward of some of its layers, or sees a part of its cache.

    target's cache      | prompt ........................ | text ........ L-2 |
    layers, no window     read and written as it is: the verification overwrites what drafting wrote
    window W, sinks S     | 0 .. S-1 | L-1-W ......... L-2 | L-1 | drafted .. |     a small cache, filled each round

The draft never reads again what the target has read: prompts, accepted tokens and tokens of rounds without drafts are
in the target's cache, from which the window is copied. Keys were turned by their positions before they were cached, so
the number of a slot need not be the position.

Shapes: B rows, C slots of sinks and window, M nodes of a level.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llama_ssp.architectures.engine import whole_steps
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.self_drafts.records import SelfConfig, chosen_layers, small_cache_slots
from llama_ssp.models.graph_inputs import OwnBuckets
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import TreePlaces
from llama_ssp.ranks.comms import Reads
from llama_ssp.speculate.drafters.drafter import DrafterParts, StepwiseDrafter, TreeTables
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.trees import Level, ReadLevel

if TYPE_CHECKING:
    from llama_ssp.models.cache import StaticCache


class _Part:
    """The layers that draft, over the target's cache; see `models.runner.Cached`."""

    def __init__(self, target: Any, numbers: Sequence[int], copied: Any = None) -> None:  # noqa: ANN401 - runners
        self._target, self.numbers = target, numbers
        self.model = target.part(numbers, of=copied) if copied else target.part(numbers)
        self.device, self.vocab_size = target.device, target.vocab_size
        self.repeats_operators = target.repeats_operators and (copied is None or copied.repeats_operators)
        self.reads_by_length = target.reads_by_length
        self.is_invariant = target.is_invariant and (copied is None or copied.is_invariant)
        self.places_are_invariant = self.is_invariant and getattr(target, "places_are_invariant", False)
        self.is_recurrent = False

    @property
    def num_allocations(self) -> int:
        """Allocations of the cache that it reads."""
        number: int = self._target.num_allocations
        return number

    def allocate(self, *, batch_size: int, capacity: int, reads: Reads = Reads.all, num_rolled_back: int = 0) -> None:
        """Follow the target, which allocates first."""
        self.model.follow(self._target, None, reads=reads)

    def fill(self, lengths_B1: Tensor, rows_B: Tensor | None) -> Tensor:
        """Fill the cache with what the newest token of each of these rows sees; returns its slot (B, 1)."""
        return lengths_B1 - 1


class _Window(_Part, OwnBuckets):
    """The layers that draft, over a small cache of the first and the last tokens."""

    def __init__(
        self,
        target: Any,  # noqa: ANN401 - runners
        numbers: Sequence[int],
        copied: Any = None,  # noqa: ANN401
        *,
        sinks: int,
        window: int,
        most_nodes: int,
    ) -> None:
        super().__init__(target, numbers, copied)
        self._num_kept, self._num_slots = sinks + window, whole_steps(sinks + window + most_nodes)
        self.reads_by_length, self._num_caches, self.is_invariant = True, 0, self.places_are_invariant
        self._cache: StaticCache | None = None
        slots_C = torch.arange(self._num_kept, device=target.device)
        self._slots_C, self._moves_C = slots_C, (slots_C >= sinks).long()

    @property
    def num_allocations(self) -> int:
        """Allocations of both caches."""
        return super().num_allocations + self._num_caches

    def own_bucket(self, bucket: int) -> int:
        """Return the number of slots of the small cache, which are all read."""
        return self._num_slots

    def allocate(self, *, batch_size: int, capacity: int, reads: Reads = Reads.all, num_rolled_back: int = 0) -> None:
        """Make the small cache of as many rows."""
        if self._cache is None or self._cache.num_rows != batch_size:
            self._cache = self._target.new_cache(num_slots=self._num_slots)
            self._target.make_buffers(self._cache, self.numbers)
            self._num_caches += 1
        self._target.make_buffers(self._target.cache, range(self._target.cache.num_layers))
        self.model.follow(self._target, self._cache, reads=reads)

    def fill(self, lengths_B1: Tensor, rows_B: Tensor | None) -> Tensor:
        """Copy sinks and window of each row; see `_Part.fill`."""
        assert self._cache is not None, "allocate comes first"
        num_read_B1 = lengths_B1 - 1
        skipped_B1 = (num_read_B1 - self._num_kept).clamp_min(0)
        from_BC = (self._slots_C + skipped_B1 * self._moves_C).minimum(num_read_B1)  # a row may be shorter
        self._cache.take_slots(self._target.cache, from_BC, rows_B)
        return num_read_B1.clamp_max(self._num_kept)


class SelfDrafter(StepwiseDrafter):
    """Drafts with the target's own weights, under the same processors.

    Source: arXiv:2404.16710 (first layers), arXiv:2410.06916 (skipped layers), arXiv:2408.11049 (window and sinks).
    """

    def __init__(self, parts: DrafterParts) -> None:
        config, target = parts.config, parts.target
        assert isinstance(config, SelfConfig)
        if not hasattr(target, "part"):
            raise ConfigError(
                "draft=self needs every rank to hold a part of the target: leave placement out, or give a draft model "
                "or head with draft=NAME"
            )
        assert (parts.prepared is None) == (config.quantization is None), "a second copy is loaded before"
        self._target: Any = target  # found first, so that its cache counts at the round's bucket
        numbers = chosen_layers(config, target.num_layers)
        most_nodes = 1 + parts.num_draft_tokens
        if small_cache_slots(config) is None:
            part: Any = _Part(target, numbers, parts.prepared)
        else:
            how = {"sinks": config.sinks, "window": config.window or 0, "most_nodes": most_nodes}
            part = _Window(target, numbers, parts.prepared, **how)
        super().__init__(part, parts)
        self._part: _Part = part
        writes = config.restores and small_cache_slots(config) is None
        self._slots_T = torch.arange(most_nodes * writes, device=target.device)
        self._places_of = TreeTables(parts.num_draft_tokens, parts.device)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Do nothing, since the target has read the prompts."""

    def propose(self, rows: Rows, **how: Any) -> Draft:
        """See `Drafter.propose`."""
        if not self._slots_T.numel():
            return super().propose(rows, **how)
        cache, slots_BT = self._target.cache, rows.lengths_B[:, None] - 1 + self._slots_T
        layers = range(cache.num_layers)
        held, states = cache.slots(slots_BT, layers, rows.places), self._target.state_tensors
        kept = [state.clone() for state in states]
        draft = super().propose(rows, **how)
        cache.put_slots(slots_BT, layers, held, rows.places)
        for state, before in zip(states, kept, strict=True):
            state.copy_(before)
        return draft

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        newest_B1 = rows.lengths_B[:, None] - 1
        root_B1 = self._part.fill(newest_B1 + 1, rows.places)
        has_window = isinstance(self._part, _Window)
        own_bucket = self._part.own_bucket(bucket) if isinstance(self._part, _Window) else bucket
        taken_B: Tensor | None = None
        if self._target.is_recurrent and rows.limits_B.numel():
            # States of rows that ended, or whose prompt is being read, stay.
            taken_B = (rows.lengths_B < rows.limits_B).long()
        one_B11 = torch.ones_like(newest_B1, dtype=torch.bool)[..., None]

        def logits_of(level: Level | None) -> Tensor:
            ids_BM = level.ids_BM if level else rows.tokens_BS.gather(1, newest_B1)
            depth: Any = level.depth if level else 0
            places: TreePlaces | None = None
            if level and level.sees_BMA is not None:
                _, places = self._places_of.places(root_B1, level.first, 0, level.sees_BMA, bucket=own_bucket)
                positions_BM = (newest_B1 + depth).expand_as(places.slots_BT)
            else:
                positions_BM = newest_B1 + depth
                if has_window:
                    slots_U = self._places_of.slots[own_bucket]
                    assert slots_U is not None
                    places = TreePlaces(root_B1 + depth, one_B11, slots_U)
            logits_BMV: Tensor = self._part.model.forward(
                ids_BM, positions_BM, bucket=own_bucket, cache_rows_B=rows.places, tree=places, taken_B=taken_B
            )
            return logits_BMV

        return logits_of
