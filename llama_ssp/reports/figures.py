"""The charts of a report, made from finished runs; each is None if nothing was measured for it. `plots` draws them.

In the charts of a sweep, a numeric setting is an axis of its own; the other settings name its lines. Runs that
differ only in their seed stand at one place, and a line joins their means.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from llama_ssp.reports.charts import COLOURS, GREY, INK, MOST_LINES, SOFT, Chart, Look, look
from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import Estimate, RunMeasures
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.reports.settings import Axis, Setting, axes_of, axis_of, labels
from llama_ssp.reports.summary import counted_rounds
from llama_ssp.settings.schema import ADAPTIVE

GIB, MIB = 2**30, 2**20
WIDEST_BAR = 0.3
MOST_WINDOWS = 40
"""Points of a line along the text."""
FORECAST_BAND = 0.2
"""The planner's goal: forecasts within 20 % of measurements."""
MOST_AXES = 4
SPREAD = 0.03
"""How far apart the points of a few lines stand at one value; those of many stand closer."""
MOST_PAIRS = 60
"""Prompts that the chart of one run shows."""
_OF_DRAFTING = ("draft", "speculation.", "placement.draft.")
"""Beginnings of the keys of settings that plain decoding does not depend on."""


def acceptance_by_position(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """For each position in a draft, the share of examined tokens that was accepted; a line for each name of runs."""
    series: dict[str, list[CompletionLine]] = {}
    for run, name in zip(runs, names, strict=True):
        if run.num_draft_tokens:
            series.setdefault(name, []).extend(run.lines)
    if len(series) > MOST_LINES:
        return None
    rates = {name: position_rates(lines) for name, lines in series.items()}
    rates = {name: found for name, found in rates.items() if found}
    if not rates:
        return None
    longest = max(map(len, rates.values()))
    chart = Chart(
        title="Acceptance by position in the draft",
        x_label="position", y_label="accepted of examined", highest_x=longest + 0.5, highest_y=1.0,
        x_names={position: str(position) for position in range(1, longest + 1)},
    )  # fmt: skip
    for number, (name, found) in enumerate(rates.items()):
        points = [(float(position), rate) for position, (rate, _) in enumerate(found, start=1)]
        says = [
            f"{name}, position {position}: {100 * rate:.1f} % of {examined}"
            for position, (rate, examined) in enumerate(found, start=1)
        ]
        chart.curve(points, look(number), says=says, name=name)
    return chart


def position_rates(lines: Sequence[CompletionLine]) -> list[tuple[float, int]]:
    """Acceptance rate and number of examined tokens at positions 1, 2, ... of the counted rounds."""
    rounds = counted_rounds(lines)
    longest = max((examined for _, examined in rounds), default=0)
    rates = []
    for position in range(1, longest + 1):
        examined = sum(seen >= position for _, seen in rounds)
        rates.append((sum(kept >= position for kept, _ in rounds) / examined, examined))
    return rates


def forecast_against_measured(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """Forecast over measured ms/token, with the band that forecasts should stay in."""
    points = []
    for run, name in zip(runs, names, strict=True):
        summary, forecast = run.summary, run.summary.forecast
        pairs = [
            (PLAIN, summary.plain and summary.plain.ms_per_token, forecast.plain_ms_per_token, name),
            (
                SPECULATIVE,
                summary.speculative and summary.speculative.ms_per_token,
                forecast.speculative_ms_per_token,
                name,
            ),
        ]
        for cell in summary.cells:
            pairs += [
                (mode, cell.ms_per_token.get(mode), expected, f"{name}, {cell.name}")
                for mode, expected in cell.forecast_ms_per_token.items()
            ]
        points += [(ms, expected, mode, of_run) for mode, ms, expected, of_run in pairs if ms and expected]
    if not points:
        return None
    highest = 1.05 * max(max(measured, expected) for measured, expected, *_ in points)
    chart = Chart(
        title="Forecast against measured", x_label="measured, ms/token", y_label="forecast, ms/token",
        highest_x=highest, highest_y=highest,
    )  # fmt: skip
    chart.line([(0, 0), (highest, highest)], GREY, name="equal")
    apart = f"{100 * FORECAST_BAND:.0f} % apart"
    chart.line([(0, 0), (highest, highest * (1 - FORECAST_BAND))], GREY, name=apart, dashed=True)
    chart.line([(0, 0), (highest / (1 + FORECAST_BAND), highest)], GREY, dashed=True)
    for measured, expected, mode, of_run in points:
        colour = SOFT if mode == PLAIN else COLOURS[0]
        says = f"{of_run}, {mode}: {expected:.2f} forecast, {measured:.2f} measured"
        chart.dot(measured, expected, colour, says=says, name=mode)
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
    unit, unit_name = (MIB, "MiB") if highest < GIB else (GIB, "GiB")
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
                left = place + 0.5 + (number - 1) * WIDEST_BAR
                says = f"{x_label} {name}: {size / unit:.2f} {unit_name} {kind}"
                chart.bar(left, left + 0.94 * WIDEST_BAR, size / unit, colour, says=says, name=kind)
    return chart


def round_timeline(run: Run) -> Chart | None:
    """The mean round in time, divided by the rows that ran in it: K draft steps, the verification, and the rest.

    Of overlapped rounds, the target's ranks above the draft's: work, then waiting for the other model.
    """
    measured, overlap = run.summary.speculative, run.summary.overlap
    if measured is None or not measured.num_rounds or not measured.draft_s + measured.verify_s:
        return None
    draft, verify, other = (
        1e3 * seconds / measured.num_rounds for seconds in (measured.draft_s, measured.verify_s, measured.other_s)
    )
    total = draft + verify + max(other, 0.0)
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

    if overlap:
        k = run.num_draft_tokens
        target_ms, draft_ms = (
            total * (1 - (idle or 0.0)) for idle in (overlap.target_idle_share, overlap.draft_idle_share)
        )
        idle_name = "waiting for the other model"
        target = [("target", target_ms, COLOURS[0], "verification and rule")]
        steps = [(f"draft, step {step}", draft_ms / k, COLOURS[1], "draft steps") for step in range(1, k + 1)]
        bars([*target, ("target idle", total - target_ms, GREY, idle_name)], bottom=0.55, top=0.9)
        bars([*steps, ("draft idle", total - draft_ms, GREY, idle_name)], bottom=0.1, top=0.45)
    else:
        num_steps = 1 if run.drafting == ADAPTIVE else run.num_draft_tokens
        steps = [
            (f"draft step {step}", draft / num_steps, COLOURS[1], "draft steps") for step in range(1, num_steps + 1)
        ]
        name = "verification and rule"
        bars(
            [*steps, (name, verify, COLOURS[0], name), ("other", max(other, 0.0), GREY, "other")], bottom=0.0, top=0.75
        )
    return chart


def draft_lengths(run: Run) -> Chart | None:
    """Drafted and accepted tokens per round along the text, for a run that chooses K for each round."""
    lines = [line for line in run.lines if line.draft_lengths]
    if not lines:
        return None
    longest = max(line.num_new_tokens for line in lines)
    width = max(longest / MOST_WINDOWS, 1.0)
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
        chart.dot(place, plain, GREY, says=f"plain: {plain:.2f} ms/token", name="plain")
        chart.dot(place, fast, COLOURS[0], says=f"speculative: {fast:.2f} ms/token", name="speculative")
    return chart


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A chart over a setting: its name for files, the estimate that it draws of a run, and the name of a lone line."""

    name: str
    title: str
    y_label: str
    pick: Callable[[RunMeasures], Estimate | None]
    format: str
    lone_line: str = ""
    highest: float = 0.0


_FIGURES = (
    _Figure(
        name="speedup", title="Speed-up", y_label="speed-up, median over prompts", format="{:.2f}x",
        pick=lambda measured: measured.speedup, highest=1.0, lone_line="measured",
    ),
    _Figure(
        name="time", title="Time per token", y_label="ms/token, median over prompts", format="{:.2f} ms/token",
        pick=lambda measured: measured.ms_per_token(SPECULATIVE) or measured.ms_per_token(PLAIN),
        lone_line=SPECULATIVE,
    ),
    _Figure(
        name="acceptance", title="Acceptance", y_label="accepted of examined", format="{:.3f}",
        pick=lambda measured: measured.acceptance, highest=1.0,
    ),
)  # fmt: skip


class _Series(NamedTuple):
    """A line of a chart over a setting: its name, its name in the legend, and the estimates of its runs."""

    name: str
    legend: str
    look: Look
    found: list[Estimate | None]


def sweep_charts(
    runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]
) -> Iterator[tuple[str, Chart]]:
    """Yield a name for files and a chart for every axis and figure that has been measured."""
    for setting in axes_of(settings, num_runs=len(runs))[:MOST_AXES]:
        others = [each for each in settings if each is not setting and each.key != "seed"]
        for figure in _FIGURES:
            if any(figure.pick(measured) for measured in measures):
                chart = _over(figure, axis_of(setting), others, runs, measures)
                yield f"{figure.name}_by_{setting.name.replace(' ', '_')}", chart


def _over(
    figure: _Figure, axis: Axis, others: Sequence[Setting], runs: Sequence[Run], measures: Sequence[RunMeasures]
) -> Chart:
    """Draw one figure over an axis; the values of `others` name its lines."""
    picks = [figure.pick(measured) for measured in measures]
    lines = labels(others) if others else [figure.lone_line] * len(runs)
    legend_of = dict(zip(lines, _legends(others, lines), strict=True))
    legends = list(dict.fromkeys(legend_of.values()))
    series = [
        _Series(name, legend, look(legends.index(legend)), _of(name, lines, picks))
        for name, legend in legend_of.items()
    ]
    if figure.name == "time":
        series = [*_plain_series(others, picks, measures, [look(legends.index(legend_of[line])) for line in lines]),
                  *series]  # fmt: skip
    tops = [max(found.value, found.high or 0.0) for each in series for found in each.found if found]
    chart = Chart(
        title=f"{figure.title} by {axis.label}", x_label=axis.label, y_label=figure.y_label,
        highest_x=1.0, highest_y=max(*tops, figure.highest), x_names=axis.names,
    )  # fmt: skip
    if figure.name == "speedup":
        chart.line([(0, 1), (1, 1)], GREY)
    step = SPREAD / max(len(series) / 4, 1)  # so that no interval covers another one
    shifts = {each.name: step * (number - (len(series) - 1) / 2) for number, each in enumerate(series)}
    for each in series:
        _draw(chart, axis, each, shift=shifts[each.name], form=figure.format)
    if figure.name == "speedup":
        half = step / 2 if len(series) > 1 else SPREAD
        for place, line, run in zip(axis.places, lines, runs, strict=True):
            if run.summary.speedup and (level := run.summary.forecast.speedup):
                middle = place + shifts[line]
                chart.line([(middle - half, level), (middle + half, level)], INK, name="forecast")
                chart.highest_y = max(chart.highest_y, level)
    return chart


def _legends(others: Sequence[Setting], lines: Sequence[str]) -> Sequence[str]:
    """Those of the lines, or, of more lines than there are looks, the values of one setting."""
    if len(set(lines)) <= MOST_LINES:
        return lines
    few = next((each for each in others if 1 < len(set(each.texts)) <= len(COLOURS)), None)
    return labels([few]) if few else [f"{len(set(lines))} lines"] * len(lines)


def _plain_series(
    others: Sequence[Setting],
    picks: Sequence[Estimate | None],
    measures: Sequence[RunMeasures],
    looks: Sequence[Look],
) -> Iterator[_Series]:
    """Yield the grey lines of plain decoding, if it is not all there is; runs that only draft otherwise share one."""
    found = [measured.ms_per_token(PLAIN) for measured in measures]
    if all(not plain or plain is pick for plain, pick in zip(found, picks, strict=True)):
        return
    kept = [each for each in others if not each.key.startswith(_OF_DRAFTING)]
    names = [f"plain, {label}" for label in labels(kept)] if kept else ["plain"] * len(found)
    for name in dict.fromkeys(names):
        own = Look(GREY, looks[names.index(name)].shape) if len(set(names)) > 1 else Look(GREY)
        yield _Series(name, PLAIN, own, _of(name, names, found))


def _of(name: str, names: Sequence[str], found: Sequence[Estimate | None]) -> list[Estimate | None]:
    """Keep the estimates of the runs with this name."""
    return [each if its_name == name else None for its_name, each in zip(names, found, strict=True)]


def _draw(chart: Chart, axis: Axis, series: _Series, *, shift: float, form: str) -> None:
    """Draw the runs of one line: dots with their intervals, joined at the means of equal places."""
    at: dict[float, list[Estimate]] = {}
    for place, found in zip(axis.places, series.found, strict=True):
        if found:
            at.setdefault(place, []).append(found)
    (colour, shape), name = series.look, series.legend
    if axis.is_line and len(at) > 1:
        means = [(place + shift, fmean(each.value for each in at[place])) for place in sorted(at)]
        chart.line(means, colour, name=name, shape=shape)
    for place, estimates in at.items():
        of_place = ", ".join(filter(None, (series.name, f"{axis.label}={axis.names[place]}")))
        for each in estimates:
            interval = ""
            if each.low is not None and each.high is not None:
                chart.line([(place + shift, each.low), (place + shift, each.high)], colour)
                interval = f" ({form.format(each.low)} to {form.format(each.high)})"
            says = f"{of_place}: {form.format(each.value)}{interval}"
            chart.dot(place + shift, each.value, colour, says=says, name=name, shape=shape)
