"""Charts over the settings that vary: speed-up, ms/token and acceptance, with the intervals of each run.

A numeric setting is an axis of its own set of charts; the other settings tell the lines apart. Runs that differ only in
their seed stand at one place, and a line joins their means.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from llama_ssp.reports.charts import COLOURS, GREY, INK, MOST_LINES, Chart, Look, look
from llama_ssp.reports.lines import PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run
from llama_ssp.reports.sweeps.axes import Axis, axes_of, axis_of
from llama_ssp.reports.sweeps.intervals import Estimate
from llama_ssp.reports.sweeps.measures import RunMeasures
from llama_ssp.reports.sweeps.varying import Setting, labels

MOST_AXES = 4
SPREAD = 0.03
"""How far apart the points of a few lines stand at one value; those of many stand closer."""
MOST_PAIRS = 60
"""Prompts that the chart of one run shows."""
_OF_DRAFTING = ("draft", "speculation.", "placement.draft.")
"""Beginnings of the keys of settings that plain decoding does not depend on."""
_Pick = Callable[[RunMeasures], Estimate | None]


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """One kind of chart over a setting: a name for files, what it draws of each run, and the name of a lone line."""

    name: str
    title: str
    y_label: str
    pick: _Pick
    format: str
    lone_line: str = ""
    background: _Pick | None = None
    highest: float = 0.0


def _ms_of(mode: str) -> _Pick:
    def pick(measured: RunMeasures) -> Estimate | None:
        found = measured.mode(mode)
        return found.ms_per_token if found else None

    return pick


_FIGURES = (
    _Figure(
        name="speedup", title="Speed-up", y_label="speed-up, median over prompts", format="{:.2f}x",
        pick=lambda measured: measured.paired.speedup if measured.paired else None, highest=1.0, lone_line="measured",
    ),
    _Figure(
        name="time", title="Time per token", y_label="ms/token, median over prompts", format="{:.2f} ms/token",
        pick=lambda measured: (_ms_of(SPECULATIVE)(measured) or _ms_of(PLAIN)(measured)),
        background=_ms_of(PLAIN), lone_line=SPECULATIVE,
    ),
    _Figure(
        name="acceptance", title="Acceptance", y_label="accepted of examined", format="{:.3f}",
        pick=lambda measured: measured.acceptance, highest=1.0,
    ),
)  # fmt: skip


def sweep_charts(
    runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]
) -> Iterator[tuple[str, Chart]]:
    """Yield a name for files and a chart for every axis and figure that has been measured."""
    for setting in axes_of(settings, num_runs=len(runs))[:MOST_AXES]:
        axis = axis_of(setting)
        kept = [each for each in settings if each is not setting and each.key != "seed"]
        for figure in _FIGURES:
            if any(figure.pick(measured) for measured in measures):
                lines = labels(kept) if kept else [figure.lone_line] * len(runs)
                names = _Names(lines=lines, colours=_colour_names(kept, lines), plain=_plain_names(kept, lines))
                chart = _over(figure, axis, names, measures)
                _add_forecasts(figure, chart, axis, names.lines, runs)
                yield f"{figure.name}_by_{setting.name.replace(' ', '_')}", chart


@dataclass(frozen=True, kw_only=True)
class _Names:
    """For each run the names of its line, of its colour in the legend, and of the grey line of its plain decoding."""

    lines: Sequence[str]
    colours: Sequence[str]
    plain: Sequence[str]


def _colour_names(settings: Sequence[Setting], lines: Sequence[str]) -> Sequence[str]:
    """Those of the lines, or, of more lines than can be told apart, the values of one setting."""
    if len(set(lines)) <= MOST_LINES:
        return lines
    few = next((each for each in settings if 1 < len(set(each.texts)) <= len(COLOURS)), None)
    return labels([few]) if few else [f"{len(set(lines))} lines"] * len(lines)


def _plain_names(settings: Sequence[Setting], lines: Sequence[str]) -> list[str]:
    """Runs that differ only in how they draft have the same."""
    kept = [each for each in settings if not each.key.startswith(_OF_DRAFTING)]
    return [f"plain, {label}" for label in labels(kept)] if kept else ["plain"] * len(lines)


def _over(figure: _Figure, axis: Axis, names: _Names, measures: Sequence[RunMeasures]) -> Chart:
    picks = [figure.pick(measured) for measured in measures]
    grounds = [figure.background(measured) if figure.background else None for measured in measures]
    tops = [max(found.value, found.high or 0.0) for found in chain(picks, grounds) if found]
    chart = Chart(
        title=f"{figure.title} by {axis.label}", x_label=axis.label, y_label=figure.y_label,
        highest_x=1.0, highest_y=max(*tops, figure.highest), x_names=axis.names,
    )  # fmt: skip
    if figure.name == "speedup":
        chart.line([(0, 1), (1, 1)], GREY)
    has_plain = any(found is not shown for found, shown in zip(grounds, picks, strict=True) if found)
    plain = dict.fromkeys(names.plain) if has_plain else {}
    legends = list(dict.fromkeys(names.colours))
    legend_of = dict(zip(names.lines, names.colours, strict=True))
    shifts = _shifts(len(plain) + len(legend_of))
    for name, shift in zip(plain, shifts, strict=False):
        found = _of(name, names.plain, grounds)
        of_line = names.colours[names.plain.index(name)]
        seen = Look(GREY, look(legends.index(of_line)).shape) if len(plain) > 1 else Look(GREY)
        _draw(chart, axis, found, seen=seen, name=name, legend=PLAIN, shift=shift, form=figure.format)
    for (name, legend), shift in zip(legend_of.items(), shifts[len(plain) :], strict=True):
        own = _of(name, names.lines, picks)
        if any(own):
            seen = look(legends.index(legend))
            _draw(chart, axis, own, seen=seen, name=name, legend=legend, shift=shift, form=figure.format)
    return chart


def _shifts(num_lines: int) -> list[float]:
    """How far each line stands from the places of its values, so that no interval covers another one."""
    step = SPREAD / max(num_lines / 4, 1)
    return [step * (number - (num_lines - 1) / 2) for number in range(num_lines)]


def _of(name: str, names: Sequence[str], found: Sequence[Estimate | None]) -> list[Estimate | None]:
    """Keep what was found of the runs with this name."""
    return [each if its_name == name else None for its_name, each in zip(names, found, strict=True)]


def _draw(
    chart: Chart,
    axis: Axis,
    found: Sequence[Estimate | None],
    *,
    seen: Look,
    name: str,
    legend: str,
    shift: float,
    form: str,
) -> None:
    """Draw the runs of one line: dots with their intervals, joined at the means of equal places."""
    at: dict[float, list[Estimate]] = {}
    for place, each in zip(axis.places, found, strict=True):
        if each:
            at.setdefault(place, []).append(each)
    if axis.is_line and len(at) > 1:
        means = [(place + shift, fmean(each.value for each in at[place])) for place in sorted(at)]
        chart.line(means, seen.colour, name=legend, shape=seen.shape)
    for place, estimates in at.items():
        for each in estimates:
            says = ", ".join(filter(None, (name, f"{axis.label}={axis.names[place]}")))
            interval = ""
            if each.low is not None and each.high is not None:
                chart.line([(place + shift, each.low), (place + shift, each.high)], seen.colour)
                interval = f" ({form.format(each.low)} to {form.format(each.high)})"
            says = f"{says}: {form.format(each.value)}{interval}"
            chart.dot(place + shift, each.value, seen.colour, says=says, name=legend, shape=seen.shape)


def _add_forecasts(figure: _Figure, chart: Chart, axis: Axis, lines: Sequence[str], runs: Sequence[Run]) -> None:
    """Draw the forecast of each run's speed-up as a bar across its interval."""
    if figure.name != "speedup":
        return
    shift_of = dict(zip(dict.fromkeys(lines), _shifts(len(set(lines))), strict=True))
    half = SPREAD / 2 / max(len(shift_of) / 4, 1) if len(shift_of) > 1 else SPREAD
    for place, line, run in zip(axis.places, lines, runs, strict=True):
        if run.summary.speedup and (level := run.summary.forecast.speedup):
            middle = place + shift_of[line]
            chart.line([(middle - half, level), (middle + half, level)], INK, name="forecast")
            chart.highest_y = max(chart.highest_y, level)


def prompts_of_run(measured: RunMeasures) -> Chart | None:
    """Both modes of one run, prompt by prompt, in the order of their plain times."""
    if measured.paired is None:
        return None
    pairs = sorted(measured.paired.ms_per_token)
    step = -(-len(pairs) // MOST_PAIRS)
    pairs = pairs[::step]
    chart = Chart(
        title="ms/token, prompt by prompt", x_label="prompts, by their plain time", y_label="ms/token",
        highest_x=len(pairs) + 1.0, highest_y=max(max(pair) for pair in pairs), x_names={},
    )  # fmt: skip
    for place, (plain, fast) in enumerate(pairs, start=1):
        chart.line([(place, plain), (place, fast)], COLOURS[0] if fast < plain else COLOURS[1])
        chart.dot(place, plain, GREY, says=f"plain: {plain:.2f} ms/token", name="plain")
        chart.dot(place, fast, COLOURS[0], says=f"speculative: {fast:.2f} ms/token", name="speculative")
    return chart
