"""What a stored row of `overlap` says: its table for the terminal, and the text of its guide.

The renewal model (`planning.overlap`) is given the acceptance that was measured, and of a round one after the other
what drafting and verification took.

Shapes: K drafted tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self

from rich.table import Table

from llama_ssp.planning.acceptance.rounds import overlapped_tokens, tokens_per_round
from llama_ssp.planning.overlap import OverlappedTime, alone_s
from llama_ssp.reports.reading import restore

MATCHED_K = 4
"""As many draft steps take about as long as a forward of the target."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The counted repetitions of a candidate, after the prefill: sums, and medians of times.

    Attributes:
        waits: rows wait for a block after a rejection (`OverlappedRound.waits`).
        num_accepted, num_examined: drafted tokens.
        round_s: a round; `draft_s` and `verify_s` are its parts on the target's rank.
        idle_shares: of each rank.
        forecast_ms: what a plan expects of a token, if it knows the machine.
    """

    overlaps: bool
    num_draft_tokens: int
    waits: bool
    num_tokens: int
    num_rounds: int
    num_accepted: int
    num_examined: int
    round_s: float
    draft_s: float
    verify_s: float
    idle_shares: list[float]
    forecast_ms: float | None = None

    @property
    def ms_per_token(self) -> float:
        """Of a median round."""
        return 1e3 * self.round_s / self.tokens_per_round

    @property
    def tokens_per_round(self) -> float:
        """The mean, with rounds that the end of a text cut."""
        return self.num_tokens / self.num_rounds

    @property
    def time(self) -> OverlappedTime:
        """What the two parts of a round took, and what a block before it takes by its draft steps."""
        num_alone = self.num_draft_tokens - 1
        return OverlappedTime(
            draft_s=self.draft_s, forward_s=self.verify_s, refill_s=self.draft_s * num_alone / self.num_draft_tokens
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two ranks, in both ways, and one process with the threads of both; a figure for each K.

    Attributes:
        agreement, quantization: settings of the synthetic pair.
    """

    agreement: float
    quantization: str
    width: int
    target_layers: int
    draft_layers: int
    apart: list[Figures] = field(default_factory=list)
    together: list[Figures] = field(default_factory=list)

    @classmethod
    def of(cls, row: Row) -> Self:
        """A stored row."""
        return restore(cls, {name: row[name] for name in cls.__dataclass_fields__})

    def row(self) -> dict[str, object]:
        """What is stored."""
        return asdict(self)

    @property
    def acceptance(self) -> float:
        """Accepted over examined, of all candidates: a property of the pair."""
        return sum(each.num_accepted for each in self.apart) / sum(each.num_examined for each in self.apart)

    @property
    def lengths(self) -> list[int]:
        """Each K."""
        return sorted({each.num_draft_tokens for each in self.apart})

    def at(self, num_draft_tokens: int, *, overlaps: bool) -> Figures:
        """The candidate of a K."""
        key = num_draft_tokens, overlaps
        return next(each for each in self.apart if (each.num_draft_tokens, each.overlaps) == key)

    def best_of(self, overlaps: bool, /) -> Figures:
        """The fastest K of one way."""
        return min((each for each in self.apart if each.overlaps is overlaps), key=lambda each: each.ms_per_token)

    def alone(self, num_draft_tokens: int) -> Figures:
        """One process with that K."""
        return next(each for each in self.together if each.num_draft_tokens == num_draft_tokens)

    def gain(self, num_draft_tokens: int) -> float:
        """Of overlapping, as measured."""
        before, after = (self.at(num_draft_tokens, overlaps=each) for each in (False, True))
        return before.ms_per_token / after.ms_per_token

    def modelled_gain(self, num_draft_tokens: int) -> float:
        """The same by the renewal model."""
        time = self.at(num_draft_tokens, overlaps=False).time
        round_s = time.round_s
        if self.at(num_draft_tokens, overlaps=True).waits:
            round_s += alone_s(time, acceptance=self.acceptance, num_draft_tokens=num_draft_tokens, batch_size=1)
        one_by_one = (time.draft_s + time.forward_s) / tokens_per_round(self.acceptance, num_draft_tokens)
        return one_by_one / (round_s / self.modelled_tokens(num_draft_tokens))

    def modelled_tokens(self, num_draft_tokens: int) -> float:
        """Tokens of an overlapped round by the renewal model."""
        if self.at(num_draft_tokens, overlaps=True).waits:
            return tokens_per_round(self.acceptance, num_draft_tokens - 1)
        return overlapped_tokens(self.acceptance, num_draft_tokens)

    @property
    def best_gain(self) -> float:
        """The best overlapped rounds against the best one after the other, each with its own K."""
        return self.best_of(False).ms_per_token / self.best_of(True).ms_per_token

    def forecast_ratio(self, num_draft_tokens: int, *, overlaps: bool) -> float | None:
        """Forecast over measured; None without a forecast."""
        found = self.at(num_draft_tokens, overlaps=overlaps)
        return None if found.forecast_ms is None else found.forecast_ms / found.ms_per_token


_COLUMNS: dict[str, Callable[[Comparison, int], str]] = {
    "K": lambda _, k: str(k),
    "sequential\nms/token": lambda each, k: f"{each.at(k, overlaps=False).ms_per_token:.2f}",
    "draft\nms": lambda each, k: f"{1e3 * each.at(k, overlaps=False).time.draft_s:.2f}",
    "verify\nms": lambda each, k: f"{1e3 * each.at(k, overlaps=False).time.forward_s:.2f}",
    "overlapped\nms/token": lambda each, k: f"{each.at(k, overlaps=True).ms_per_token:.2f}",
    "rows\nwait": lambda each, k: "yes" if each.at(k, overlaps=True).waits else "no",
    "gain": lambda each, k: f"{each.gain(k):.2f}x",
    "model": lambda each, k: f"{each.modelled_gain(k):.2f}x",
    "tokens\n/round": lambda each, k: f"{each.at(k, overlaps=True).tokens_per_round:.2f}",
    "model ": lambda each, k: f"{each.modelled_tokens(k):.2f}",
    "target\nidle": lambda each, k: f"{each.at(k, overlaps=True).idle_shares[0]:.0%}",
    "draft\nidle": lambda each, k: f"{each.at(k, overlaps=True).idle_shares[1]:.0%}",
    "1 process\nms/token": lambda each, k: f"{each.alone(k).ms_per_token:.2f}",
    "forecast/measured\nsequential": lambda each, k: _ratio(each.forecast_ratio(k, overlaps=False)),
    "forecast/measured\noverlapped": lambda each, k: _ratio(each.forecast_ratio(k, overlaps=True)),
}


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(found: Comparison) -> Table:
    """A line for each K."""
    shown = Table(title=f"acceptance {found.acceptance:.3f}", title_justify="left", show_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", vertical="bottom")
    for number in found.lengths:
        shown.add_row(*(cell(found, number) for cell in _COLUMNS.values()))
    return shown


def summary(found: Comparison) -> str:
    """The best K of either way."""
    after, before = found.best_of(True), found.best_of(False)
    return (
        f"best: overlapped K = {after.num_draft_tokens}, {after.ms_per_token:.2f} ms/token; sequential K = "
        f"{before.num_draft_tokens}, {before.ms_per_token:.2f} ms/token: {found.best_gain:.2f}x"
    )


def text(rows: Sequence[Row]) -> str:
    """Of all pairs, by acceptance: of each agreement the rows that have most; see `_most`."""
    by_agreement: dict[float, list[Comparison]] = {}
    for row in rows:
        by_agreement.setdefault(row["agreement"], []).append(Comparison.of(row))
    pairs = sorted(by_agreement.values(), key=lambda found: found[-1].acceptance)
    whole = [_most(found, lambda each: len(each.lengths)) for found in pairs]
    return "\n\n".join([_setting(rows[-1]), _gains(whole), *_by_length(pairs)])


def _most(found: Sequence[Comparison], size: Callable[[Comparison], int]) -> Comparison:
    """The row with most of something; of equals the newest."""
    return max(reversed(found), key=size)


def _setting(row: Row) -> str:
    return (
        f"Synthetic pairs of {row['target_layers']} and {row['draft_layers']} layers of width {row['width']} in "
        f"{row['quantization']}, on two processes with a thread each of an {row['processor']}. {MATCHED_K} draft steps "
        "take about as long as a forward of the target. All ways took turns on the same prompts; times are per token."
    )


def _gains(found: Sequence[Comparison]) -> str:
    names = (
        "acceptance", "draft + verify, ms", "one by one", "overlapped", "gain", "model", "target idle", "draft idle",
        "best one by one", "best overlapped", "gain", "one process",
    )  # fmt: skip
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for each in found:
        before, after = (each.at(MATCHED_K, overlaps=overlaps) for overlaps in (False, True))
        cells = [
            f"{each.acceptance:.2f}",
            f"{1e3 * before.time.draft_s:.1f} + {1e3 * before.time.forward_s:.1f}",
            f"{before.ms_per_token:.2f}",
            f"{after.ms_per_token:.2f}",
            f"{each.gain(MATCHED_K):.2f}x",
            f"{each.modelled_gain(MATCHED_K):.2f}x",
            *(f"{share:.0%}" for share in after.idle_shares),
            *(f"{best.ms_per_token:.2f} (K = {best.num_draft_tokens})" for best in map(each.best_of, (False, True))),
            f"**{each.best_gain:.2f}x**",
            f"{each.alone(MATCHED_K).ms_per_token:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_length(pairs: Sequence[Sequence[Comparison]]) -> Iterator[str]:
    """Tables by K, each cell from the row with the most tokens in both ways: gains, then what plans expected."""
    lengths = sorted({number for found in pairs for each in found for number in each.lengths})

    def shown(cell: Callable[[Comparison, int], str], *, has: Callable[[Comparison], bool]) -> str:
        lines = [
            f"| acceptance | {' | '.join(f'K = {number}' for number in lengths)} |",
            f"|{'---|' * (len(lengths) + 1)}",
        ]
        for found in pairs:
            cells = []
            for number in lengths:
                known = [each for each in found if has(each) and number in each.lengths]
                best = _most(known, partial(_num_tokens, number)) if known else None
                cells.append(cell(best, number) if best else "-")
            if {*cells} != {"-"}:
                acceptance = _most(found, lambda each: len(each.lengths)).acceptance
                lines.append(f"| {acceptance:.2f} | {' | '.join(cells)} |")
        return "\n".join(lines)

    yield "The gain at each K, and by the model in brackets:"
    yield shown(lambda each, k: f"{each.gain(k):.2f}x ({each.modelled_gain(k):.2f}x)", has=lambda _: True)
    if any(map(_has_forecasts, chain.from_iterable(pairs))):
        yield "The planner's forecast of overlapped rounds over the measured time, after `task=calibrate` on two ranks:"
        yield shown(lambda each, k: _ratio(each.forecast_ratio(k, overlaps=True)), has=_has_forecasts)


def _num_tokens(num_draft_tokens: int, found: Comparison) -> int:
    return found.at(num_draft_tokens, overlaps=True).num_tokens


def _has_forecasts(found: Comparison) -> bool:
    return found.apart[0].forecast_ms is not None
