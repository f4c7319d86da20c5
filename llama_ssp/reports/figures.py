"""The charts of a report, made from finished runs; each is None if nothing was measured for it. `plots` draws them."""

from collections.abc import Sequence
from statistics import fmean

from llama_ssp.config.schema import ADAPTIVE
from llama_ssp.reports.charts import COLOURS, GREY, MOST_LINES, SOFT, Chart, look
from llama_ssp.reports.lines import PLAIN, SPECULATIVE, CompletionLine, SpeculativeSummary
from llama_ssp.reports.rounds.overlap import OverlapSummary
from llama_ssp.reports.runs import Run
from llama_ssp.reports.summary import counted_rounds

GIB, MIB = 2**30, 2**20
WIDEST_BAR = 0.3
MOST_WINDOWS = 40
"""Points of a line along the text."""
FORECAST_BAND = 0.2
"""The planner's goal: forecasts within 20 % of measurements."""


def acceptance_by_position(runs: Sequence[Run], names: Sequence[str] = ()) -> Chart | None:
    """For each position in a draft, the share of examined tokens that was accepted; a line for each name of runs."""
    series: dict[str, list[CompletionLine]] = {}
    for run, name in zip(runs, names or [f"{run.pair}, K={run.num_draft_tokens}" for run in runs], strict=True):
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
        colour, shape = look(number)
        chart.line(points, colour, name=name, shape=shape)
        for (position, rate), (_, examined) in zip(points, found, strict=True):
            says = f"{name}, position {position:.0f}: {100 * rate:.1f} % of {examined}"
            chart.dot(position, rate, colour, says=says, shape=shape)
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


def forecast_against_measured(runs: Sequence[Run], names: Sequence[str] = ()) -> Chart | None:
    """Forecast over measured ms/token, with the band that forecasts should stay in."""
    points = []
    for run, name in zip(runs, names or [run.name for run in runs], strict=True):
        summary, forecast = run.summary, run.summary.forecast
        plain = PLAIN, summary.plain, forecast.plain_ms_per_token
        speculative = SPECULATIVE, summary.speculative, forecast.speculative_ms_per_token
        for mode, part, expected in (plain, speculative):
            if part and part.ms_per_token and expected:
                points.append((part.ms_per_token, expected, mode, name))
        for cell in summary.cells:
            for mode, expected in cell.forecast_ms_per_token.items():
                if mode in cell.ms_per_token:
                    points.append((cell.ms_per_token[mode], expected, mode, f"{name}, {cell.name}"))
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
    """The mean round in time, divided by the rows that ran in it: K draft steps, the verification, and the rest."""
    measured = run.summary.speculative
    if measured is None or not measured.num_rounds or not measured.draft_s + measured.verify_s:
        return None
    if run.summary.overlap:
        return _two_streams(run, run.summary.overlap, measured)
    num_steps = 1 if run.drafting == ADAPTIVE else run.num_draft_tokens
    step, verify, other = (
        1e3 * seconds / measured.num_rounds
        for seconds in (measured.draft_s / num_steps, measured.verify_s, measured.other_s)
    )
    pieces = [(f"draft step {number}", step, COLOURS[1]) for number in range(1, num_steps + 1)]
    pieces += [("verification and rule", verify, COLOURS[0]), ("other", max(other, 0.0), GREY)]
    total = sum(length for _, length, _ in pieces)
    chart = Chart(
        title="A round of speculative decoding: one row's share, mean over all rounds",
        x_label="ms", y_label="", highest_x=total, highest_y=1.0,
    )  # fmt: skip
    passed = 0.0
    for place, (name, length, colour) in enumerate(pieces):
        kind, says = "draft steps" if colour == COLOURS[1] else name, f"{name}: {length:.3f} ms"
        chart.bar(passed + 0.003 * total * (place > 0), passed + length, 0.75, colour, says=says, name=kind)
        passed += length
    return chart


def _two_streams(run: Run, overlap: OverlapSummary, measured: SpeculativeSummary) -> Chart:
    """The mean round on the target's ranks, below on the draft's: work, then waiting for the other model."""
    total = 1e3 * (measured.draft_s + measured.verify_s + max(measured.other_s, 0.0)) / measured.num_rounds
    chart = Chart(
        title="A round of overlapped decoding on either model's ranks: one row's share, mean over all rounds",
        x_label="ms", y_label="", highest_x=total, highest_y=1.0,
    )  # fmt: skip
    streams = (
        ("target", "verification and rule", 1, overlap.target_idle_share, 0.55, COLOURS[0]),
        ("draft", "draft steps", run.num_draft_tokens, overlap.draft_idle_share, 0.1, COLOURS[1]),
    )
    for model, kind, num_pieces, idle_share, bottom, colour in streams:
        busy = total * (1 - (idle_share or 0.0))
        for piece in range(num_pieces):
            left, right = busy * piece / num_pieces, busy * (piece + 1) / num_pieces
            name = f"{model}, step {piece + 1}" if num_pieces > 1 else model
            chart.bar(
                left + 0.003 * total * (piece > 0), right, bottom + 0.35, colour, bottom=bottom,
                says=f"{name}: {right - left:.3f} ms", name=kind,
            )  # fmt: skip
        says = f"{model} idle: {total - busy:.3f} ms"
        chart.bar(busy, total, bottom + 0.35, GREY, bottom=bottom, says=says, name="waiting for the other model")
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
        colour, shape = look(place)
        chart.line(points, colour, name=name, shape=shape)
        for middle, mean in points:
            says = f"about token {middle:.0f}: {mean:.1f} {name}"
            chart.dot(middle, mean, colour, says=says, shape=shape)
    return chart
