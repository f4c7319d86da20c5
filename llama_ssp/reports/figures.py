"""The figures of a report, drawn from finished runs; each is None if nothing was measured for it.

In the figures of a sweep, a numeric setting is an axis of its own; the other settings name its lines. Runs that
differ only in their seed stand at one place, and a line joins their means.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import Estimate, RunMeasures
from llama_ssp.reports.plots import COLOURS, GREY, GRID, INK, MOST_LINES, SOFT, look, panels
from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.reports.settings import Axis, Setting, axes_of, axis_of, labels
from llama_ssp.reports.summary import counted_rounds
from llama_ssp.settings.schema import ADAPTIVE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PAIRS = 60
"""Prompts that the figure of one run shows."""
_GIB, _MIB = 2**30, 2**20
_MOST_WINDOWS = 40  # points of a line along the text.
_BAR_WIDTH = 0.3
_FORECAST_BAND = 0.2
"""The planner's goal: forecasts within 20 % of measurements."""
_MOST_AXES = 4
_SPREAD = 0.03
"""Distance of the points of a few lines at one value; those of many stand closer."""


def acceptance_by_position(runs: Sequence[Run], names: Sequence[str]) -> "Figure | None":
    """For each position in a draft, the share of examined tokens that was accepted; a line for each name of runs."""
    rounds: dict[str, list[tuple[int, int]]] = {}
    for run, name in zip(runs, names, strict=True):
        rounds.setdefault(name, []).extend(counted_rounds(run.lines))
    rates = {name: _position_rates(counted) for name, counted in rounds.items() if counted}
    if not 1 <= len(rates) <= MOST_LINES:
        return None
    figure, (axes,) = panels("Acceptance by position in the draft")
    for number, (name, found) in enumerate(rates.items()):
        axes.plot(range(1, len(found) + 1), found, label=name, **look(number))
    axes.set(xlabel="position", ylabel="accepted of examined", ylim=(0, 1.05))
    _count_from(1, max(map(len, rates.values())), axes)
    return figure


def _position_rates(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Accepted over examined tokens at positions 1, 2, ... of rounds of (accepted, examined) tokens."""
    return [
        sum(accepted >= position for accepted, _ in rounds) / sum(examined >= position for _, examined in rounds)
        for position in range(1, max(examined for _, examined in rounds) + 1)
    ]


def forecast_against_measured(runs: Sequence[Run]) -> "Figure | None":
    """Forecast over measured ms/token, with the band that forecasts should stay in."""
    pairs: dict[str, list[tuple[float, float]]] = {PLAIN: [], SPECULATIVE: []}
    for run in runs:
        for mode, found in pairs.items():
            whole = getattr(run.summary, mode)
            times = [(whole and whole.ms_per_token, getattr(run.summary.forecast, f"{mode}_ms_per_token"))]
            times += [(cell.ms_per_token.get(mode), cell.forecast_ms_per_token.get(mode)) for cell in run.summary.cells]
            found += [(measured, expected) for measured, expected in times if measured and expected]
    if not any(pairs.values()):
        return None
    highest = 1.05 * max(ms for found in pairs.values() for pair in found for ms in pair)
    figure, (axes,) = panels("Forecast against measured")
    axes.plot([0, highest], [0, highest], color=GREY, label="equal")
    low, high = ([0, highest * (1 + sign * _FORECAST_BAND)] for sign in (-1, 1))
    axes.fill_between([0, highest], low, high, color=GRID, label=f"within {100 * _FORECAST_BAND:.0f} %")
    for colour, (mode, found) in zip((SOFT, COLOURS[0]), pairs.items(), strict=True):
        if found:
            axes.plot(*zip(*found, strict=True), "o", color=colour, label=mode)
    axes.set(xlabel="measured, ms/token", ylabel="forecast, ms/token", xlim=(0, highest), ylim=(0, highest))
    return figure


def memory_by_rank(runs: Sequence[Run]) -> "Figure | None":
    """Planned and measured memory of every rank of one run, or of the fullest rank of each of several."""
    bars = []
    for place, run in enumerate(runs):
        ranks = [rank for rank in run.summary.memory if rank.measured_peak_bytes]
        if len(runs) > 1:
            ranks = sorted(ranks, key=lambda rank: rank.measured_peak_bytes or 0)[-1:]
        bars += [(rank.rank if len(runs) == 1 else place, rank) for rank in ranks]
    if not bars:
        return None
    highest = max(max(rank.planned_bytes or 0, rank.measured_peak_bytes or 0) for _, rank in bars)
    unit, unit_name = (_MIB, "MiB") if highest < _GIB else (_GIB, "GiB")
    of_what, x_label = ("Memory", "rank") if len(runs) == 1 else ("Memory of the fullest rank", "run")
    figure, (axes,) = panels(f"{of_what}, planned and measured")
    for side, name, colour in ((-1, "planned", GREY), (1, "measured_peak", COLOURS[2])):
        places = [place + side * _BAR_WIDTH / 2 for place, _ in bars]
        sizes = [(getattr(rank, f"{name}_bytes") or 0) / unit for _, rank in bars]
        axes.bar(places, sizes, _BAR_WIDTH, color=colour, label=name.partition("_")[0])
    axes.set(xlabel=x_label, ylabel=unit_name)
    _count_from(bars[0][0], bars[-1][0], axes)
    return figure


def _count_from(first: int, last: int, axes: "Axes") -> None:
    """Let the x axis count from one whole number to another."""
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.locator_params(axis="x", integer=True)


def round_timeline(run: Run) -> "Figure | None":
    """The mean round in time, divided by the rows that ran in it: K draft steps, the verification, and the rest.

    Of overlapped rounds, the target's ranks above the draft's: work, then waiting for the other model.
    """
    measured, overlap = run.summary.speculative, run.summary.overlap
    if measured is None or not measured.num_rounds or not measured.draft_s + measured.verify_s:
        return None
    draft, verify, other = (
        1e3 * max(seconds, 0.0) / measured.num_rounds
        for seconds in (measured.draft_s, measured.verify_s, measured.other_s)
    )
    num_steps = 1 if run.drafting == ADAPTIVE else run.num_draft_tokens
    if overlap:
        total = draft + verify + other
        idle = [total * (share or 0.0) for share in (overlap.draft_idle_share, overlap.target_idle_share)]
        draft, verify = total - idle[0], total - idle[1]
    steps = [(draft / num_steps, COLOURS[1], f"draft: {num_steps} x {draft / num_steps:.3f} ms")] * num_steps
    rest = [(verify, COLOURS[0], f"verification and rule: {verify:.3f} ms")]
    if overlap:
        waits = [[(each, GREY, "waiting for the other model")] for each in idle]
        rows = {"draft": steps + waits[0], "target": rest + waits[1]}
    else:
        rows = {"": [*steps, *rest, (other, GREY, f"other: {other:.3f} ms")]}
    of_what = "overlapped decoding on either model's ranks" if overlap else "speculative decoding"
    figure, (axes,) = panels(f"A round of {of_what}: one row's share, mean over all rounds")
    for place, pieces in enumerate(rows.values()):
        passed = 0.0
        for length, colour, name in pieces:
            axes.barh(place, length, left=passed, color=colour, edgecolor="white", label=name)
            passed += length
    axes.set_yticks(range(len(rows)), [*rows])
    axes.set_xlabel("ms")
    axes.grid(visible=False)
    return figure


def draft_lengths(run: Run) -> "Figure | None":
    """Drafted and accepted tokens per round along the text, for a run that chooses K for each round."""
    lines = [line for line in run.lines if line.draft_lengths]
    if not lines:
        return None
    width = max(max(line.num_new_tokens for line in lines) / _MOST_WINDOWS, 1.0)
    windows: dict[int, list[tuple[int, int]]] = {}
    for line in lines:
        position = 1
        for drafted, accepted in zip(line.draft_lengths or (), line.accepted_lengths, strict=True):
            windows.setdefault(int(position / width), []).append((drafted, accepted))
            position += accepted + 1
    figure, (axes,) = panels("Drafted tokens per round, chosen along the text")
    middles = [(window + 0.5) * width for window in sorted(windows)]
    for place, name in enumerate(("drafted", "accepted")):
        means = [fmean(each[place] for each in rounds) for _, rounds in sorted(windows.items())]
        axes.plot(middles, means, label=name, **look(place))
    axes.set(xlabel="new tokens before the round", ylabel="tokens, mean of all texts")
    axes.set_ylim(bottom=0)
    return figure


def prompts_of_run(measured: RunMeasures) -> "Figure | None":
    """Both modes of one run, prompt by prompt, in the order of their plain times."""
    if not measured.pairs:
        return None
    pairs = sorted(measured.pairs)[:: -(-len(measured.pairs) // MOST_PAIRS)]
    figure, (axes,) = panels("ms/token, prompt by prompt")
    plain, fast = zip(*pairs, strict=True)
    places = range(1, len(pairs) + 1)
    axes.vlines(places, plain, fast, color=[COLOURS[0] if after < before else COLOURS[1] for before, after in pairs])
    axes.plot(places, plain, "o", color=GREY, label=PLAIN)
    axes.plot(places, fast, "o", color=COLOURS[0], label=SPECULATIVE)
    axes.set(xlabel="prompts, by their plain time", ylabel="ms/token", xticks=[])
    axes.set_ylim(bottom=0)
    return figure


class _Figure(NamedTuple):
    """A figure over a setting: its name for files, what it shows, and the estimates of a run, the second one dashed."""

    name: str
    title: str
    y_label: str
    picks: tuple[Callable[[RunMeasures], Estimate | None], ...]


_FIGURES = (
    _Figure("speedup", "Speed-up", "speed-up, median over prompts", (lambda measured: measured.speedup,)),
    _Figure("time", "Time per token", "ms/token, median over prompts", (
        lambda measured: measured.ms_per_token(SPECULATIVE), lambda measured: measured.ms_per_token(PLAIN),
    )),
    _Figure("acceptance", "Acceptance", "accepted of examined", (lambda measured: measured.acceptance,)),
)  # fmt: skip


def sweep_figures(
    runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]
) -> "Iterator[tuple[str, Figure]]":
    """Yield a name for files and a figure for every axis and quantity that has been measured."""
    for setting in axes_of(settings, num_runs=len(runs))[:_MOST_AXES]:
        others = [each for each in settings if each is not setting and each.key != "seed"]
        for kind in _FIGURES:
            if any(pick(measured) for pick in kind.picks for measured in measures):
                figure, (axes,) = panels(f"{kind.title} by {setting.name}")
                _draw_over(axes, kind, axis_of(setting), others, list(zip(runs, measures, strict=True)))
                yield f"{kind.name}_by_{setting.name.replace(' ', '_')}", figure


def _draw_over(
    axes: "Axes", kind: _Figure, axis: Axis, others: Sequence[Setting], runs: Sequence[tuple[Run, RunMeasures]]
) -> None:
    """Draw estimates over an axis; the values of `others` name the lines, or one of them the colours of many lines."""
    lines = labels(others) if others else [SPECULATIVE] * len(runs)
    names = list(dict.fromkeys(lines))
    legends = lines
    if len(names) > MOST_LINES:
        legends = labels([min(others, key=lambda setting: len(set(setting.texts)))])
    step = _SPREAD / max(len(names) / 4, 1)  # so that no interval covers another one
    forecasts: list[tuple[float, float | None]] = []
    for number, name in enumerate(names):
        places = [place for place, line in enumerate(lines) if line == name]
        xs = [axis.places[place] + step * (number - (len(names) - 1) / 2) for place in places]
        legend = legends[places[0]]
        seen = look(list(dict.fromkeys(legends)).index(legend))
        for pick, style, label in zip(kind.picks, ("-", "--"), (legend, PLAIN), strict=False):
            hollow = {"markerfacecolor": "white"} if label == PLAIN else {}
            found = [(x, each) for x, place in zip(xs, places, strict=True) if (each := pick(runs[place][1]))]
            _draw_line(axes, found, seen | hollow, style=style if axis.is_line else "none", label=label)
        forecasts += [(x, runs[place][0].summary.forecast.speedup) for x, place in zip(xs, places, strict=True)]
    if kind.name == "speedup":
        axes.axhline(1, color=GREY)
        if known := [(x, level) for x, level in forecasts if level]:
            axes.plot(*zip(*known, strict=True), "_", color=INK, markersize=14, label="forecast")
    axes.set(xlabel=axis.label, ylabel=kind.y_label, xlim=(-0.1, 1.1))
    axes.set_xticks([*axis.names], [*axis.names.values()])
    axes.set_ylim(bottom=0)


def _draw_line(
    axes: "Axes", found: Sequence[tuple[float, Estimate]], seen: dict[str, Any], *, style: str, label: str
) -> None:
    """Draw the runs of one line: dots with their intervals, joined at the means of equal places."""
    at: dict[float, list[float]] = {}
    for x, each in found:
        at.setdefault(x, []).append(each.value)
        axes.plot(x, each.value, linestyle="none", **seen)
        if each.low is not None and each.high is not None:
            axes.vlines(x, each.low, each.high, color=seen["color"])
    if found:
        means = [fmean(at[x]) for x in sorted(at)]
        axes.plot(sorted(at), means, linestyle=style, color=seen["color"], zorder=1)
        of_legend = seen | ({"color": GREY} if label == PLAIN else {})
        axes.plot([], [], linestyle=style, label=label, **of_legend)
