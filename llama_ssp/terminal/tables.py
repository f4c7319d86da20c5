"""The closing table and the closing line of a run, laid out for 80 columns; pure functions of a `Summary`."""

from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import PaddingDimensions
from rich.table import Table
from rich.text import Text

from llama_ssp.reports import records
from llama_ssp.reports import tables as reports
from llama_ssp.text.messages import count, decimal, share, visible

ACCEPTED_STYLE = "green"
OWN_STYLE = "magenta"
_PART_STYLES = {"draft": "green", "verify": "magenta", "other": "bright_black"}
_BAR_WIDTH = 32


def _figures(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], *, padding: PaddingDimensions) -> Table:
    """Lay out a table of figures; forecasts are grey."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=padding, pad_edge=False)
    for heading in headings:
        style = "bright_black" if heading in {"forecast", "fore-\ncast"} else None
        justify: Literal["left", "right"] = "right" if heading else "left"
        table.add_column(heading, justify=justify, vertical="bottom", style=style, header_style=style, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def summary_table(summary: records.Summary) -> RenderableType:
    """Lay out plain and speculative decoding, a line per mode that ran, with forecasts; a missing number is "-"."""
    headings = ("", "ms/token", "forecast", "tokens/s", "tokens\n/round", "accepted", "speed-up", "forecast")
    rows, first, forecast = list[Sequence[str | Text]](), list[str](), summary.forecast
    plain, fast = summary.plain, summary.speculative
    for name, mode, expected_ms in (
        (records.PLAIN, plain, forecast.plain_ms_per_token),
        (records.SPECULATIVE, fast, forecast.speculative_ms_per_token),
    ):
        if mode:
            drafted: list[str | Text] = ["-"] * 4
            if mode is fast:
                gain = Text(decimal(summary.speedup, unit="x"), style="bold")
                drafted = [decimal(fast.tokens_per_round), share(fast.acceptance_rate), gain]
                drafted += [decimal(forecast.speedup, unit="x")]
            ms = [decimal(mode.ms_per_token), decimal(expected_ms)]
            rows.append([name, *ms, decimal(mode.tokens_per_s, 1), *drafted])
            if mode.first_token_ms is not None:
                first.append(f"{name} after {mode.first_token_ms:.1f} ms")
    meaning = "ms/token of a completion, prompt included; tokens/s over all rows and replicas"
    meaning += f"\nfirst token: {', '.join(first)}" if first else ""
    table = _figures(headings, rows, padding=(0, 0, 0, 1))
    parts: list[RenderableType] = [Text(), _title(summary), Text(), table, Text(meaning, style="bright_black")]
    if fast:
        parts += _lines_of_rounds(fast, forecast)
    if overlap := summary.overlap:
        idle = f"target idle {share(overlap.target_idle_share)}, draft idle {share(overlap.draft_idle_share)}"
        dropped = f"{overlap.num_dropped_tokens} of {overlap.num_drafted_tokens} drafted tokens dropped"
        parts.append(Text(f"overlap:  {idle}; {dropped}"))
    if experts := summary.experts:
        line = Text(f"experts:  a verification read {experts.num_read:.1f} in each layer")
        parts.append(line.append(f", forecast {experts.num_expected:.1f}", style="bright_black"))
    if measured := [rank for rank in summary.memory if rank.measured_peak_bytes]:
        fullest = max(measured, key=lambda rank: rank.measured_peak_bytes or 0)
        line = Text(f"memory:   {_gibibytes(fullest.measured_peak_bytes)} at its peak on rank {fullest.rank}")
        if fullest.planned_bytes:
            line.append(f", forecast {_gibibytes(fullest.planned_bytes)}", style="bright_black")
        parts.append(line)
    return Group(*parts)


def results_table(results: Sequence[records.Result]) -> RenderableType:
    """Lay out the results of a task, one per line."""
    (title, *meanings), headings, rows = type(results[0]).on_screen(results)
    lines = [Text(title, style="bold"), *(Text(meaning, style="bright_black") for meaning in meanings), Text()]
    return Group(*lines, _figures(headings, rows, padding=0))


def runs_table(shown: reports.Table) -> RenderableType:
    """Lay out the table of a sweep: a line for each run, and its intervals below."""

    def text(cell: reports.Cell) -> str:
        return f"{cell.text}\n{cell.interval.replace(' to ', '..')}" if cell.interval else cell.text

    headings = [visible(name.replace(", ", "\n").replace("s/r", "s\n/r")) for name in shown.columns]
    table = _figures(headings, [[*map(text, row)] for row in shown.rows], padding=(0, 0, 0, 1))
    for column in table.columns[: shown.num_left]:
        column.justify = "left"
    notes = {
        records.DISTURBED: "disturbed: summary.json of the run says by what",
        records.NOT_LOSSLESS: "not lossless: speculation.forced_lengths says what rounds accept",
    }
    found = [f"\n{mark} {note}" for mark, note in notes.items() if any(mark in row[0].text for row in shown.rows)]
    meaning = "medians over prompts, with 95 % intervals from 6 prompts on; speed-up: plain over speculative"
    title = Text("All points", style="bold")
    return Group(Text(), title, Text(meaning, style="bright_black"), Text(), table, Text("".join(found)))


def verdict_table(evaluation: records.Evaluation) -> RenderableType:
    """Lay out the verdict of an evaluation: its figures, one per line, and the sentence."""
    rows = [[*map(visible, measure.cells)] for measure in evaluation.measures]
    table = _figures(records.MEASURE_COLUMNS, rows, padding=(0, 0, 0, 1))
    sentence = Text(visible(evaluation.outcome), style="bold green" if evaluation.passed else "bold red")
    sentence.append(f": {visible(evaluation.reason)}", style="not bold default")
    return Group(Text(), table, Text(), sentence)


def closing_line(summary: records.Summary) -> Text:
    """Sum up in one line what was generated and how fast; of two modes the speculative one."""
    if summary.cells:
        return Text(
            "; ".join(filter(None, [f"{count(len(summary.cells), summary.cells[0].noun)} measured", summary.caveat]))
        )
    mode = summary.speculative or summary.plain
    if mode is None:
        return Text(summary.evaluation.outcome if summary.evaluation else "nothing was completed")
    name = "speculative " if summary.plain and summary.speculative else ""
    text = (
        f"{count(summary.num_new_tokens, 'token')} for {count(summary.num_prompts, 'prompt')}: "
        f"{name}{decimal(mode.ms_per_token)} ms/token, {decimal(mode.tokens_per_s, 1)} tokens/s"
    )
    if summary.speculative:
        text += f", {decimal(summary.speculative.tokens_per_round)} tokens/round"
    text += f"; {summary.caveat}" if summary.caveat else ""
    return Text(f"{summary.evaluation.outcome}; {text}" if summary.evaluation else text)


def _title(summary: records.Summary) -> Text:
    models = summary.model
    if summary.speculative:
        models += f" with {summary.draft}, {summary.drafting}"
    if summary.weights != "checkpoint":
        models += f", {summary.weights} weights"
    counts = ((summary.num_prompts, "prompt"), (summary.num_new_tokens, "token"), (summary.world_size, "rank"))
    return Text(f"{visible(models)}: {', '.join(count(*counted) for counted in counts)}", style="bold")


def _lines_of_rounds(fast: records.SpeculativeSummary, forecast: records.Forecast) -> Iterator[RenderableType]:
    """The parts of a round, and its tokens beside what texts that were read before have promised."""
    if fast.verify_s:
        yield from (Text(), _round_line(fast))
    if forecast.tokens_per_round:
        ends = " to ".join(f"{end:.2f}" for end in forecast.tokens_per_round_range)
        line = Text(f"accepted: {decimal(fast.tokens_per_round)} tokens per round")
        yield line.append(f", by the trace {forecast.tokens_per_round:.2f} ({ends})", style="bright_black")


def _round_line(fast: records.SpeculativeSummary) -> Text:
    parts_s = {"draft": fast.draft_s, "verify": fast.verify_s, "other": max(fast.other_s, 0.0)}
    total_s, done_s = sum(parts_s.values()), 0.0
    line, bar = Text("a round:  "), Text()
    for part, part_s in parts_s.items():
        done_s += part_s
        bar.append("━" * (round(_BAR_WIDTH * done_s / total_s) - len(bar)), style=_PART_STYLES[part])
        line.append(part, style=_PART_STYLES[part]).append(f" {share(part_s / total_s)}  ")
    return line.append_text(bar)


def _gibibytes(num_bytes: int | None) -> str:
    return f"{(num_bytes or 0) / 2**30:.2f} GiB"
