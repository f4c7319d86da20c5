"""A draft model or head that sees the first tokens of a text and the newest ones, from a cache of these alone.

    text                | 0 .. S-1 | ............. | L-2-W ........ L-3 | L-2 | L-1 | drafted .. |
    cache               | 0 .. S-1 |                | S ....... S+W-1    | S+W ................. |

A round moves its window forward before it drafts. Keys were turned by the positions of their tokens before they were
kept, so that a slot need not be a position: `position - skipped`, where a row has skipped that many tokens after its
first S. Of a prompt the draft reads the first S and the last W tokens, as if there were no others.

Shapes: B rows, R rows being read, T positions of a forward, C slots of sinks and window, U slots of a row, E width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llama_ssp.architectures.engine import PREFILL_CHUNK, window_slots
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.windows.records import WindowConfig
from llama_ssp.models.graph_inputs import OwnBuckets, Workspace
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import TreePlaces
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Reads
from llama_ssp.speculate.drafters.drafter import DrafterParts
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.text.messages import key_of


class _Tables(Workspace):
    """The tokens that each row has skipped, and the numbers of slots."""

    def __init__(self, batch_size: int, num_slots: int, *, sinks: int, num_kept: int, device: torch.device) -> None:
        self.skipped_B1 = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.rows_B = torch.arange(batch_size, device=device)
        self.slots_U = torch.arange(num_slots, device=device)
        self.slots_C, self.moves_C = self.slots_U[:num_kept], (self.slots_U[:num_kept] >= sinks).long()


class Windowed(OwnBuckets):
    """A draft model over a cache of its sinks and its window: a `models.runner.Runner` for drafters."""

    is_recurrent = packs_prompts = False
    reads_by_length = True  # of no bucket

    def __init__(self, runner: Any, *, sinks: int, window: int, most_nodes: int) -> None:  # noqa: ANN401 - or a head
        self._runner, self._sinks, self.num_kept = runner, sinks, sinks + window
        self._num_slots = window_slots(self.num_kept, most_nodes)
        self.device, self.vocab_size = runner.device, runner.vocab_size
        self.is_invariant = self.places_are_invariant = bool(getattr(runner, "places_are_invariant", False))
        self.repeats_operators = runner.repeats_operators
        self._num_tables = self._batch_size = 0
        self._layers = range(runner.num_layers)

    @property
    def num_allocations(self) -> int:
        """Allocations of the model, and of tables."""
        number: int = self._runner.num_allocations + self._num_tables
        return number

    def own_bucket(self, bucket: int) -> int:
        """Return the number of slots of a row, which are all read."""
        return self._num_slots

    def allocate(self, *, batch_size: int, capacity: int, reads: Reads = Reads.all, num_rolled_back: int = 0) -> None:
        """Make room for a window of each row, at positions up to `capacity`."""
        how = {"num_positions": capacity} if isinstance(self._runner, LeanRunner) else {}
        self._runner.allocate(batch_size=batch_size, capacity=self._num_slots, reads=reads, **how)
        self._runner.make_buffers(self._runner.cache, self._layers)
        if self._batch_size != batch_size:
            self._tables = _Tables(
                batch_size, self._num_slots, sinks=self._sinks, num_kept=self.num_kept, device=self.device
            )
            self._batch_size, self._num_tables = batch_size, self._num_tables + 1

    def ends(self, lengths_R: Tensor, *, longest: int, rows_R: Tensor) -> Iterator[Tensor]:
        """Begin new texts of these lengths in some rows; yields the positions (R, T) that are to be read, by chunks."""
        skipped_R1 = (lengths_R[:, None] - self.num_kept).clamp_min(0)
        self._tables.skipped_B1.index_copy_(0, rows_R, skipped_R1)
        num_read = min(longest, self.num_kept)
        for start in range(0, num_read, PREFILL_CHUNK):
            slots_T = torch.arange(start, min(start + PREFILL_CHUNK, num_read), device=rows_R.device)
            slots_RT = slots_T.expand(len(rows_R), -1).contiguous()
            yield slots_RT + skipped_R1 * (slots_RT >= self._sinks)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        tree: TreePlaces | None = None,
        begins: bool = False,
        **_others: object,
    ) -> Tensor:
        """See `Runner.forward`."""
        logits_BRV: Tensor = self._runner.forward(
            ids_BT,
            positions_BT,
            bucket=self._num_slots,
            score_positions_BR=score_positions_BR,
            cache_rows_B=cache_rows_B,
            tree=self._places(positions_BT, cache_rows_B, tree, begins=begins),
        )
        return logits_BRV

    def _places(
        self, positions_BT: Tensor, rows_B: Tensor | None, tree: TreePlaces | None = None, *, begins: bool = False
    ) -> TreePlaces:
        """Places of the tokens of a forward that `begins` texts, see `ends`, or is of a round.

        In rounds, several that are no tree are the first ones, or what has been missed.
        """
        if not begins and tree is None and positions_BT.shape[1] > 1:
            self._move(positions_BT[:, :1], rows_B)
        slots_BT, skipped_B1 = tree.slots_BT if tree else positions_BT, self._skipped(rows_B)
        slots_BT = slots_BT - (skipped_B1 * (slots_BT >= self._sinks) if begins else skipped_B1)
        sees_BTA = tree.sees_BTA if tree else None
        if sees_BTA is None:  # some may be the first token several times
            num_tokens = slots_BT.shape[1]
            behind_BA = slots_BT[:, -1:] - (num_tokens - 1) + self._tables.slots_U[:num_tokens]
            sees_BTA = behind_BA[:, None] <= slots_BT[..., None]
        return TreePlaces(slots_BT, sees_BTA, self._tables.slots_U)

    def _skipped(self, rows_B: Tensor | None) -> Tensor:
        """The tokens that each of these rows has skipped (B, 1)."""
        skipped_B1 = self._tables.skipped_B1
        return skipped_B1 if rows_B is None else skipped_B1.index_select(0, rows_B)

    def _move(self, first_B1: Tensor, rows_B: Tensor | None) -> None:
        """Skip tokens that are farther than the window before the first token that is read next."""
        tables, cache = self._tables, self._runner.cache
        before_B1, most_B1 = self._skipped(rows_B), (first_B1 - self._sinks).clamp_min(0)
        skipped_B1 = before_B1.maximum(first_B1 - self.num_kept).minimum(most_B1)
        from_BC = tables.slots_C + (skipped_B1 - before_B1) * tables.moves_C
        cache.take_slots(cache, from_BC.clamp(0, self._num_slots - 1), rows_B)
        if rows_B is None:
            tables.skipped_B1.copy_(skipped_B1)
        else:
            tables.skipped_B1.index_copy_(0, rows_B, skipped_B1)


class WindowedHead(Windowed):
    """A draft head over a cache of the sinks and the window of pairs; for the head's drafter it is a `Head`."""

    @property
    def window(self) -> int:
        """The number of newest pairs that the head sees."""
        return self.num_kept - self._sinks

    def anew(self, stops_B1: Tensor, rows_B: Tensor | None) -> Iterator[Tensor]:
        """Begin the texts of a round again, up to these positions; yields the positions to read as `ends` does."""
        rows_R = self._tables.rows_B if rows_B is None else rows_B
        for positions_RT in self.ends(stops_B1[:, 0], longest=self.num_kept, rows_R=rows_R):
            yield positions_RT.minimum((stops_B1 - 1).clamp_min(0))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any head
        """Take from the head what does not depend on its cache."""
        return getattr(vars(self)["_runner"], name)

    def extend(
        self,
        ids_BT: Tensor,
        hidden_BTE: Tensor,
        positions_BT: Tensor,
        *,
        cache_rows_B: Tensor | None = None,
        tree: TreePlaces | None = None,
        begins: bool = False,
        bucket: int,
        consecutive: bool = True,
        **how: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `Head.extend`; for `begins` see `ends`."""
        places = self._places(positions_BT, cache_rows_B, tree, begins=begins)
        found: tuple[Tensor, Tensor] = self._runner.extend(
            ids_BT, hidden_BTE, positions_BT, bucket=self._num_slots, cache_rows_B=cache_rows_B, tree=places, **how
        )
        return found

    def draft(
        self,
        ids_BT: Tensor,
        context_BCE: Tensor,
        positions_BT: Tensor,
        *,
        cache_rows_B: Tensor | None = None,
        **how: Any,
    ) -> Any:  # noqa: ANN401 - see there
        """See `OnePassHead.draft`."""
        places = self._places(positions_BT, cache_rows_B)
        how |= {"bucket": self._num_slots, "cache_rows_B": cache_rows_B, "tree": places}
        return self._runner.draft(ids_BT, context_BCE, positions_BT, **how)


def of_head(head: Any, parts: DrafterParts) -> WindowedHead:  # noqa: ANN401 - any head
    """Give a draft head a cache of the window that the draft's settings ask for.

    Source: arXiv:2309.17453 (the first tokens and a window).
    """
    config = parts.config
    assert isinstance(config, WindowConfig)
    assert config.window is not None
    return WindowedHead(head, sinks=config.sinks, window=config.window, most_nodes=parts.num_draft_tokens)


class WindowDrafter(ModelDrafter):
    """Drafts with a model that sees a window, under the same processors as the target.

    Source: arXiv:2309.17453 (the first tokens and a window).
    """

    _windowed: Windowed

    def __init__(self, parts: DrafterParts) -> None:
        config, runner = parts.config, parts.runner
        assert isinstance(config, WindowConfig)
        assert config.window is not None
        if not isinstance(runner, LeanRunner):
            raise ConfigError(f"{key_of('draft.window')} needs a draft whose layers are like Llama's: leave it out")
        most_nodes = parts.num_draft_tokens + parts.num_ahead
        self._windowed = Windowed(runner, sinks=config.sinks, window=config.window, most_nodes=most_nodes)
        super().__init__(replace(parts, runner=self._windowed))

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read the first and the last tokens of new prompts."""
        known_RS, rows_R = self._known(prompts.tokens_RS), to_device(rows, self.runner.device)
        first_R1 = torch.zeros_like(rows_R)[:, None]
        for positions_RT in self._windowed.ends(prompts.lengths_R, longest=max(prompts.lengths), rows_R=rows_R):
            self._windowed.forward(
                known_RS.gather(1, positions_RT),
                positions_RT,
                score_positions_BR=first_R1,
                cache_rows_B=rows_R,
                begins=True,
            )
