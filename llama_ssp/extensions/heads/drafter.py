"""A draft head as the drafter: it reads hidden states of the target, and its own output where these do not exist yet.

    a round, K = 3, all pairs in slots of the head's cache      L-2-K ....... L-2   L-1    L
      the first step reads the pairs that may be new, of taps        g ....... g
      later steps read pairs of the head's own output                               h1    h2
      their tokens                                                  t ....... t     d1    d2

The pair of slot i joins the hidden state of token i with token i + 1. After a round at most K + 1 pairs are new; the
first step always reads K + 1 pairs, so that shapes stay the same, and overwrites the slots of drafted pairs.

Shapes: B sequences, S slots, K drafted tokens, T pairs of a chunk, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from llama_ssp.architectures.engine import CATCH_UP_CHUNK, PREFILL_CHUNK
from llama_ssp.models.graph_inputs import Workspace
from llama_ssp.models.prefill import Buckets, Held, Prompts, read_prompts
from llama_ssp.models.upload import to_device
from llama_ssp.speculate.drafters.drafter import DrafterParts, StepwiseDrafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.trees import Level, ReadLevel

if TYPE_CHECKING:
    from llama_ssp.extensions.heads.protocol import Head
    from llama_ssp.models.runner import Runner


class _Rows(Workspace):
    """A mapping of a head's rows to the target's rows."""

    def __init__(self, own: range, device: torch.device) -> None:
        self.rows_B = torch.arange(own.start, own.stop, device=device)


class _PairReader:
    """A head as a `Runner`, by which `read_prompts` reads pairs: token i of a prompt is the token of pair i."""

    is_recurrent = packs_prompts = False

    def __init__(self, head: "Head", read: Callable[..., Tensor]) -> None:
        self._read = read
        self.is_invariant, self.copy, self.uses_masks = head.is_invariant, head.copy, head.uses_masks

    def save(self, row: int, num_tokens: int) -> None:
        """Keep nothing: a head has no states."""

    def forward(
        self,
        ids_RT: Tensor,
        positions_RT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor,
        cache_rows_B: Tensor,
        **_others: object,
    ) -> Tensor:
        """Read pairs of these rows; see `Runner.forward`."""
        return self._read(
            ids_RT, positions_RT, bucket=bucket, score_positions_B1=score_positions_BR, cache_rows_B=cache_rows_B
        )


class HeadDrafter(StepwiseDrafter):
    """Drafts with a head, under the same processors as the target."""

    _num_modules = 1

    def __init__(self, parts: DrafterParts) -> None:
        assert parts.taps
        head = cast("Head", parts.runner)
        super().__init__(head, parts)
        self._head, self._taps, self._first_row = head, parts.taps, parts.first_row
        self._own_rows = range(0)
        self._width = (parts.tree.depth if parts.tree else parts.num_draft_tokens) + 1
        self._pairs_T = torch.arange(max(self._width, CATCH_UP_CHUNK), device=parts.device)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate the cache."""
        super().allocate(batch_size=batch_size, num_slots=num_slots)
        first = self._first_row(self._taps.num_rows)
        if self._own_rows != (own_rows := range(first, first + batch_size)):  # else graphs read what is there
            self._rows, self._own_rows = _Rows(own_rows, self._head.device), own_rows

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read the pairs of prompts that no row holds, except the last pair, whose token is not drawn yet."""
        places = [place for place, length in enumerate(prompts.lengths) if length > 1]
        if not places:
            return
        some = prompts.some(places)
        pairs = some._replace(
            tokens_RS=some.tokens_RS[:, 1:],
            lengths_R=some.lengths_R - 1,
            longest=prompts.longest - 1,
            saved=(),
            lengths=[length - 1 for length in some.lengths],
            held=[self._held(*both) for both in zip(some.held, some.lengths, strict=False)],
        )
        of_some = [rows[place] for place in places]
        read = self._reading_pairs(some, of_some)
        if ends := getattr(self._head, "ends", None):  # of a window, from the first pair on
            rows_R = to_device(of_some, self._head.device)
            first_R1 = torch.zeros_like(rows_R)[:, None]
            for positions_RT in ends(pairs.lengths_R, longest=max(pairs.lengths), rows_R=rows_R):
                ids_RT = pairs.tokens_RS.gather(1, positions_RT)
                read(ids_RT, positions_RT, cache_rows_B=rows_R, bucket=0, score_positions_B1=first_R1, begins=True)
            return
        reader = cast("Runner", _PairReader(self._head, read))
        read_prompts(reader, pairs, rows=of_some, buckets=buckets)

    def _reading_pairs(self, _prompts: Prompts, _rows: Sequence[int]) -> Callable[..., Tensor]:
        """Return a function that reads pairs of some of these prompts, and returns the logits of the scored ones."""

        def read(ids_RT: Tensor, positions_RT: Tensor, *, cache_rows_B: Tensor, **where: Any) -> Tensor:
            hidden_RTE = self._hidden_of_rows(positions_RT, cache_rows_B)
            _, logits_R1V = self._head.extend(ids_RT, hidden_RTE, positions_RT, cache_rows_B=cache_rows_B, **where)
            return logits_R1V

        return read

    def _held(self, held: Held, num_tokens: int) -> Held:
        """Return the pairs that a prompt shares with a held beginning, which may continue with another token.

        Module k reads tokens that are k positions later.
        """
        num_pairs = max(held.num_tokens - self._num_modules, 0)
        if not self._head.is_invariant and held.num_tokens < num_tokens:
            num_pairs -= num_pairs % PREFILL_CHUNK
        return Held(num_pairs, held.row)

    def _hidden_of_rows(self, positions_RT: Tensor, rows_R: Tensor) -> Tensor:
        return self._hidden(positions_RT, self._rows.rows_B.index_select(0, rows_R))

    def _hidden(self, positions_BT: Tensor, rows_B: Tensor) -> Tensor:
        return self._head.hidden_of(self._taps.read(positions_BT, rows_B))

    def _in_taps(self, rows: Rows) -> Tensor:
        """The rows (B,) of the taps of these rows."""
        return self._rows.rows_B if rows.places is None else self._rows.rows_B.index_select(0, rows.places)

    def _extend(
        self, rows: Rows, positions_BT: Tensor, score_B1: Tensor, *, bucket: int, **how: Any
    ) -> tuple[Tensor, Tensor]:
        return self._head.extend(
            rows.tokens_BS.gather(1, positions_BT + 1),
            self._hidden(positions_BT, self._in_taps(rows)),
            positions_BT,
            bucket=bucket,
            score_positions_B1=score_B1,
            cache_rows_B=rows.places,
            **how,
        )

    def _missed(self, rows: Rows, *, num_unread: int) -> Iterator[tuple[Tensor, dict[str, bool]]]:
        """Yield, by chunks, positions of pairs that are new since rounds without drafts, and how the head reads them.

        A row with fewer such pairs reads its first one several times. A head with a window that has missed more pairs
        than the window has begins anew.
        """
        lengths_B1, num_missed = rows.lengths_B[:, None], num_unread - 2
        if num_missed > getattr(self._head, "window", num_missed):
            stops_B1 = (lengths_B1 - 1 - self._width).clamp_min(0)
            for positions_BT in cast("Any", self._head).anew(stops_B1, rows.places):
                yield positions_BT, {"begins": True}
            return
        for distance in range(self._width + num_missed, self._width, -CATCH_UP_CHUNK):
            positions_BT = (lengths_B1 - 1 - distance + self._pairs_T[:CATCH_UP_CHUNK]).clamp_min(0)
            yield positions_BT, {"consecutive": False}

    def _catch_up(self, rows: Rows, *, bucket: int, num_unread: int) -> None:
        """Read pairs that are new since rounds that did not draft."""
        first_B1 = torch.zeros_like(rows.lengths_B)[:, None]
        for positions_BT, how in self._missed(rows, num_unread=num_unread):
            self._extend(rows, positions_BT, first_B1, bucket=bucket, **how)

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        """Return the reader of levels: a node's pair has its parent's output, its depth after the newest pair."""
        lengths_B1 = rows.lengths_B[:, None]
        hidden_BME: Tensor | None = None

        def logits_of(level: Level | None) -> Tensor:
            nonlocal hidden_BME
            if level is None:  # the pairs that may be new
                self._catch_up(rows, bucket=bucket, num_unread=num_unread)
                start_B1 = (lengths_B1 - 1 - self._width).clamp_min(0)
                hidden_BME, logits_BMV = self._extend(
                    rows, start_B1 + self._pairs_T[: self._width], lengths_B1 - 2 - start_B1, bucket=bucket
                )
                return logits_BMV
            assert hidden_BME is not None
            positions_BM, places = self._places(level, lengths_B1, before=2, bucket=bucket)
            if level.parents_BM is not None:
                hidden_BME = hidden_BME.gather(1, level.parents_BM[..., None].expand(-1, -1, hidden_BME.shape[2]))
            hidden_BME, logits_BMV = self._head.extend(
                level.ids_BM, hidden_BME, positions_BM, bucket=bucket, cache_rows_B=rows.places, tree=places
            )
            return logits_BMV

        return logits_of
