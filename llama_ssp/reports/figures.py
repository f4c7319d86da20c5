"""The charts of a report, made from finished runs; each is None if nothing was measured for it. `plots` draws them.

In the charts of a sweep, a numeric setting is an axis of its own; the other settings name its lines. Runs that
differ only in their seed stand at one place, and a line joins their means.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from llama_ssp.reports.charts import COLOURS, GREY, INK, MOST_LINES, SOFT, Chart, Look, look
from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import Estimate, RunMeasures
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.reports.settings import Axis, Setting, axes_of, axis_of, labels
from llama_ssp.reports.summary import counted_rounds
from llama_ssp.settings.schema import ADAPTIVE

MOST_PAIRS = 60
"""Prompts that the chart of one run shows."""
_GIB, _MIB = 2**30, 2**20
_MOST_WINDOWS = 40  # points of a line along the text.
_WIDEST_BAR = 0.3
_FORECAST_BAND = 0.2
"""The planner's goal: forecasts within 20 % of measurements."""
_MOST_AXES = 4
_SPREAD = 0.03
"""Distance of the points of a few lines at one value; those of many stand closer."""
_OF_DRAFTING = ("draft", "speculation.", "placement.draft.")
"""Beginnings of the keys of settings that plain decoding does not depend on."""


def acceptance_by_position(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """For each position in a draft, the share of examined tokens that was accepted; a line for each name of runs."""
    series: dict[str, list[CompletionLine]] = {}
    for run, name in zip(runs, names, strict=True):
        if run.num_draft_tokens:
            series.setdefault(name, []).extend(run.lines)
    rates = {name: found for name, lines in series.items() if (found := _position_rates(lines))}
    if not rates or len(series) > MOST_LINES:
        return None
    longest = max(map(len, rates.values()))
    chart = Chart(
        title="Acceptance by position in the draft",
        x_label="position", y_label="accepted of examined", highest_x=longest + 0.5, highest_y=1.0,
        x_names={position: str(position) for position in range(1, longest + 1)},
    )  # fmt: skip
    for number, (name, found) in enumerate(rates.items()):
        says = [
            f"{name}, position {position}: {100 * rate:.1f} % of {examined}"
            for position, (rate, examined) in enumerate(found, start=1)
        ]
        points = [(float(position), rate) for position, (rate, _) in enumerate(found, start=1)]
        chart.curve(points, look(number), says=says, name=name)
    return chart


def _position_rates(lines: Sequence[CompletionLine]) -> list[tuple[float, int]]:
    """Acceptance rate and number of examined tokens at positions 1, 2, ... of the counted rounds."""
    rounds, rates = counted_rounds(lines), []
    for position in range(1, max((examined for _, examined in rounds), default=0) + 1):
        examined = sum(seen >= position for _, seen in rounds)
        rates.append((sum(kept >= position for kept, _ in rounds) / examined, examined))
    return rates


def forecast_against_measured(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """Forecast over measured ms/token, with the band that forecasts should stay in."""
    points = []
    for run, name in zip(runs, names, strict=True):
        for mode, measured in ((PLAIN, run.summary.plain), (SPECULATIVE, run.summary.speculative)):
            expected = getattr(run.summary.forecast, f"{mode}_ms_per_token")
            points.append((measured.ms_per_token if measured else None, expected, mode, name))
        for cell in run.summary.cells:
            for mode, expected in cell.forecast_ms_per_token.items():
                points.append((cell.ms_per_token.get(mode), expected, mode, f"{name}, {cell.name}"))
    drawn = [(measured, expected, mode, name) for measured, expected, mode, name in points if measured and expected]
    if not drawn:
        return None
    highest = 1.05 * max(max(measured, expected) for measured, expected, *_ in drawn)
    chart = Chart(
        title="Forecast against measured", x_label="measured, ms/token", y_label="forecast, ms/token",
        highest_x=highest, highest_y=highest,
    )  # fmt: skip
    chart.line([(0, 0), (highest, highest)], GREY, name="equal")
    apart = f"{100 * _FORECAST_BAND:.0f} % apart"
    chart.line([(0, 0), (highest, highest * (1 - _FORECAST_BAND))], GREY, name=apart, dashed=True)
    chart.line([(0, 0), (highest / (1 + _FORECAST_BAND), highest)], GREY, dashed=True)
    for ms, expected, mode, name in drawn:
        says = f"{name}, {mode}: {expected:.2f} forecast, {ms:.2f} measured"
        chart.dot(ms, expected, SOFT if mode == PLAIN else COLOURS[0], says=says, name=mode)
    return chart


def memory_by_rank(runs: Sequence[Run]) -> Chart | None:
    """Planned and measured memory of every rank of one run, or of the fullest rank of each of several."""
    bars = []
    for place, run in enumerate(runs):
        ranks = [rank for rank in run.summary.memory if rank.measured_peak_bytes]
        if len(runs) > 1:
            ranks = sorted(ranks, key=lambda rank: rank.measured_peak_bytes or 0)[-1:]
        bars += [(str(rank.rank if len(runs) == 1 else place), rank) for rank in ranks]
    if not bars:
        return None
    highest = max(max(rank.planned_bytes or 0, rank.measured_peak_bytes or 0) for _, rank in bars)
    unit, unit_name = (_MIB, "MiB") if highest < _GIB else (_GIB, "GiB")
    of_what, x_label = ("Memory", "rank") if len(runs) == 1 else ("Memory of the fullest rank", "run")
    chart = Chart(
        title=f"{of_what}, planned and measured",
        x_label=x_label, y_label=unit_name, highest_x=len(bars), highest_y=highest / unit,
        x_names={place + 0.5: name for place, (name, _) in enumerate(bars)},
    )  # fmt: skip
    for place, (name, rank) in enumerate(bars):
        sizes = (("planned", rank.planned_bytes, GREY), ("measured", rank.measured_peak_bytes, COLOURS[2]))
        for number, (kind, size, colour) in enumerate(sizes):
            if size:
                left = place + 0.5 + (number - 1) * _WIDEST_BAR
                says = f"{x_label} {name}: {size / unit:.2f} {unit_name} {kind}"
                chart.bar(left, left + 0.94 * _WIDEST_BAR, size / unit, colour, says=says, name=kind)
    return chart


def round_timeline(run: Run) -> Chart | None:
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
    total, k, verification = draft + verify + other, run.num_draft_tokens, "verification and rule"
    of_what = "overlapped decoding on either model's ranks" if overlap else "speculative decoding"
    chart = Chart(
        title=f"A round of {of_what}: one row's share, mean over all rounds",
        x_label="ms", y_label="", highest_x=total, highest_y=1.0,
    )  # fmt: skip

    def bars(pieces: Sequence[tuple[str, float, str, str]], *, bottom: float, top: float) -> None:
        """Draw pieces of (text, length, colour, name in the legend) one after the other."""
        passed = 0.0
        for name, length, colour, kind in pieces:
            left = passed + 0.003 * total * (passed > 0)
            chart.bar(left, passed + length, top, colour, bottom=bottom, says=f"{name}: {length:.3f} ms", name=kind)
            passed += length

    def steps(name: str, length: float, number: int) -> list[tuple[str, float, str, str]]:
        return [(f"{name} {step}", length / number, COLOURS[1], "draft steps") for step in range(1, number + 1)]

    if overlap:
        works = [total * (1 - (idle or 0.0)) for idle in (overlap.target_idle_share, overlap.draft_idle_share)]
        idles = [(f"{name} idle", total - work, GREY, "waiting for the other model")
                 for name, work in zip(("target", "draft"), works, strict=True)]  # fmt: skip
        bars([("target", works[0], COLOURS[0], verification), idles[0]], bottom=0.55, top=0.9)
        bars([*steps("draft, step", works[1], k), idles[1]], bottom=0.1, top=0.45)
    else:
        drafts = steps("draft step", draft, 1 if run.drafting == ADAPTIVE else k)
        rest = [(verification, verify, COLOURS[0], verification), ("other", other, GREY, "other")]
        bars([*drafts, *rest], bottom=0.0, top=0.75)
    return chart


def draft_lengths(run: Run) -> Chart | None:
    """Drafted and accepted tokens per round along the text, for a run that chooses K for each round."""
    lines = [line for line in run.lines if line.draft_lengths]
    if not lines:
        return None
    longest = max(line.num_new_tokens for line in lines)
    width = max(longest / _MOST_WINDOWS, 1.0)
    windows: dict[int, list[tuple[int, int]]] = {}
    for line in lines:
        position = 1
        for drafted, accepted in zip(line.draft_lengths or (), line.accepted_lengths, strict=True):
            windows.setdefault(int(position / width), []).append((drafted, accepted))
            position += accepted + 1
    chart = Chart(
        title="Drafted tokens per round, chosen along the text",
        x_label="new tokens before the round", y_label="tokens, mean of all texts",
        highest_x=longest, highest_y=max(max(line.draft_lengths or ()) for line in lines),
    )  # fmt: skip
    middles = {(window + 0.5) * width: rounds for window, rounds in sorted(windows.items())}
    for place, name in enumerate(("drafted", "accepted")):
        points = [(middle, fmean(each[place] for each in rounds)) for middle, rounds in middles.items()]
        says = [f"about token {middle:.0f}: {mean:.1f} {name}" for middle, mean in points]
        chart.curve(points, look(place), says=says, name=name)
    return chart


def prompts_of_run(measured: RunMeasures) -> Chart | None:
    """Both modes of one run, prompt by prompt, in the order of their plain times."""
    if not measured.pairs:
        return None
    pairs = sorted(measured.pairs)[:: -(-len(measured.pairs) // MOST_PAIRS)]
    chart = Chart(
        title="ms/token, prompt by prompt", x_label="prompts, by their plain time", y_label="ms/token",
        highest_x=len(pairs) + 1.0, highest_y=max(max(pair) for pair in pairs), x_names={},
    )  # fmt: skip
    for place, (plain, fast) in enumerate(pairs, start=1):
        chart.line([(place, plain), (place, fast)], COLOURS[0] if fast < plain else COLOURS[1])
        chart.dot(place, plain, GREY, says=f"plain: {plain:.2f} ms/token", name=PLAIN)
        chart.dot(place, fast, COLOURS[0], says=f"speculative: {fast:.2f} ms/token", name=SPECULATIVE)
    return chart


class _Figure(NamedTuple):
    """A chart over a setting: its name for files, the estimate that it draws of a run, and the name of a lone line."""

    name: str
    title: str
    y_label: str
    format: str
    lone_line: str
    highest: float
    pick: Callable[[RunMeasures], Estimate | None]


_FIGURES = (
    _Figure(
        "speedup", "Speed-up", "speed-up, median over prompts", "{:.2f}x", "measured", 1.0,
        lambda measured: measured.speedup,
    ),
    _Figure(
        "time", "Time per token", "ms/token, median over prompts", "{:.2f} ms/token", SPECULATIVE, 0.0,
        lambda measured: measured.ms_per_token(SPECULATIVE) or measured.ms_per_token(PLAIN),
    ),
    _Figure(
        "acceptance", "Acceptance", "accepted of examined", "{:.3f}", "", 1.0, lambda measured: measured.acceptance,
    ),
)  # fmt: skip


class _Point(NamedTuple):
    """A run in a chart over a setting: the line through it, the line's name in the legend, its place and estimate."""

    line: str
    legend: str
    look: Look
    place: float
    found: Estimate | None


def sweep_charts(
    runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]
) -> Iterator[tuple[str, Chart]]:
    """Yield a name for files and a chart for every axis and figure that has been measured."""
    for setting in axes_of(settings, num_runs=len(runs))[:_MOST_AXES]:
        others = [each for each in settings if each is not setting and each.key != "seed"]
        for figure in _FIGURES:
            if any(figure.pick(measured) for measured in measures):
                chart = _over(figure, axis_of(setting), others, runs, measures)
                yield f"{figure.name}_by_{setting.name.replace(' ', '_')}", chart


def _over(
    figure: _Figure, axis: Axis, others: Sequence[Setting], runs: Sequence[Run], measures: Sequence[RunMeasures]
) -> Chart:
    """Draw one figure over an axis; the values of `others` name its lines."""
    names = labels(others) if others else [figure.lone_line] * len(runs)
    legends = _legends(others, names)
    order = list(dict.fromkeys(legends))
    looks = [look(order.index(legend)) for legend in legends]
    points = list(map(_Point, names, legends, looks, axis.places, map(figure.pick, measures)))
    drawn = [*_plain_points(points, others, measures), *points] if figure.name == "time" else points
    lines = list(dict.fromkeys(point.line for point in drawn))
    tops = [max(point.found.value, point.found.high or 0.0) for point in drawn if point.found]
    chart = Chart(
        title=f"{figure.title} by {axis.label}", x_label=axis.label, y_label=figure.y_label,
        highest_x=1.0, highest_y=max(*tops, figure.highest), x_names=axis.names,
    )  # fmt: skip
    if figure.name == "speedup":
        chart.line([(0, 1), (1, 1)], GREY)
    step = _SPREAD / max(len(lines) / 4, 1)  # so that no interval covers another one
    shifts = {line: step * (number - (len(lines) - 1) / 2) for number, line in enumerate(lines)}
    for line, shift in shifts.items():
        _draw(chart, axis, [point for point in drawn if point.line == line], shift=shift, form=figure.format)
    if figure.name == "speedup":
        half = step / 2 if len(lines) > 1 else _SPREAD
        for point, run in zip(points, runs, strict=True):
            if run.summary.speedup and (level := run.summary.forecast.speedup):
                middle = point.place + shifts[point.line]
                chart.line([(middle - half, level), (middle + half, level)], INK, name="forecast")
                chart.highest_y = max(chart.highest_y, level)
    return chart


def _legends(others: Sequence[Setting], names: Sequence[str]) -> Sequence[str]:
    """The lines' names, or, of more lines than there are looks, the values of one setting."""
    if len(set(names)) <= MOST_LINES:
        return names
    few = next((each for each in others if 1 < len(set(each.texts)) <= len(COLOURS)), None)
    return labels([few]) if few else [f"{len(set(names))} lines"] * len(names)


def _plain_points(
    points: Sequence[_Point], others: Sequence[Setting], measures: Sequence[RunMeasures]
) -> Iterator[_Point]:
    """Yield plain decoding in grey, if it is not all there is; runs that only draft otherwise share a line."""
    found = [measured.ms_per_token(PLAIN) for measured in measures]
    if all(not plain or plain is point.found for plain, point in zip(found, points, strict=True)):
        return
    kept = [each for each in others if not each.key.startswith(_OF_DRAFTING)]
    names = [f"plain, {label}" for label in labels(kept)] if kept else [PLAIN] * len(found)
    for name, plain, point in zip(names, found, points, strict=True):
        first = points[names.index(name)].look
        yield _Point(name, PLAIN, Look(GREY, first.shape) if len(set(names)) > 1 else Look(GREY), point.place, plain)


def _draw(chart: Chart, axis: Axis, points: Sequence[_Point], *, shift: float, form: str) -> None:
    """Draw the runs of one line: dots with their intervals, joined at the means of equal places."""
    at: dict[float, list[Estimate]] = {}
    for point in points:
        if point.found:
            at.setdefault(point.place, []).append(point.found)
    line, legend, (colour, shape), *_ = points[0]
    if axis.is_line and len(at) > 1:
        means = [(place + shift, fmean(each.value for each in at[place])) for place in sorted(at)]
        chart.line(means, colour, name=legend, shape=shape)
    for place, estimates in at.items():
        of_place = ", ".join(filter(None, (line, f"{axis.label}={axis.names[place]}")))
        for each in estimates:
            interval = ""
            if each.low is not None and each.high is not None:
                chart.line([(place + shift, each.low), (place + shift, each.high)], colour)
                interval = f" ({form.format(each.low)} to {form.format(each.high)})"
            says = f"{of_place}: {form.format(each.value)}{interval}"
            chart.dot(place + shift, each.value, colour, says=says, name=legend, shape=shape)
