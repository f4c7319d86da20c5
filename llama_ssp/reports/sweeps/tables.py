"""Tables of a report over runs: what each measured, percentiles of its completions, and `runs.csv`."""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_ssp.reports.lines import PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run, csv_of, settings_of_rows
from llama_ssp.reports.sweeps.intervals import Estimate
from llama_ssp.reports.sweeps.measures import PERCENTILES, RunMeasures
from llama_ssp.reports.sweeps.varying import Setting


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table of the page: its text, and the interval under it."""

    text: str
    interval: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page; the first `num_left` columns hold names."""

    columns: list[str]
    rows: list[list[Cell]]
    num_left: int


def cells(texts: Sequence[str]) -> list[Cell]:
    """Cells without intervals."""
    return [Cell(text=text) for text in texts]


def runs_table(runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each run: the settings that vary, and medians with their intervals."""
    rows = []
    for number, (run, measured) in enumerate(zip(runs, measures, strict=True)):
        paired, fast = measured.paired, run.summary.speculative
        faster = f"{paired.num_faster} of {paired.num_prompts}" if paired else ""
        rows.append(
            [
                *cells([str(number), *(setting.texts[number] for setting in settings)]),
                *(_estimated(mode.ms_per_token if mode else None) for mode in map(measured.mode, (PLAIN, SPECULATIVE))),
                _estimated(paired.speedup if paired else None, unit="x"),
                *cells([_number(run.summary.forecast.speedup, "x"), faster]),
                _estimated(measured.acceptance, places=3),
                *cells([_number(fast.tokens_per_round if fast else None), str(run.summary.num_prompts)]),
                *cells([str(run.summary.num_new_tokens), run.name, run.status]),
            ]
        )
    columns = [
        "#", *(setting.name for setting in settings), "plain", "speculative", "speed-up", "forecast", "faster on",
        "accepted", "tokens/round", "prompts", "tokens", "run", "status",
    ]  # fmt: skip
    return Table(columns=columns, rows=rows, num_left=1 + len(settings))


def percentiles_table(measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each mode of each run: percentiles over its completions, in ms."""
    rows = []
    for number, measured in enumerate(measures):
        names = [str(number), *(setting.texts[number] for setting in settings)] if len(measures) > 1 else []
        for mode in measured.modes:
            first = mode.first_token_percentiles or [None] * len(PERCENTILES)
            texts = [_number(value) for value in (*mode.ms_percentiles, *first)]
            rows.append(cells([*names, mode.mode, str(mode.num_completions), *texts]))
    ends = [f"p{percentile} {what}" for what in ("ms/token", "first token") for percentile in PERCENTILES]
    heads = ["#", *(setting.name for setting in settings)] if len(measures) > 1 else []
    return Table(columns=[*heads, "mode", "completions", *ends], rows=rows, num_left=len(heads) + 1)


def medians_table(measured: RunMeasures) -> Table:
    """Lay out the figures of one run with their intervals, a row each."""
    rows = [
        [Cell(text=f"ms/token, {mode.mode}"), *_row(mode.ms_per_token, num_prompts=mode.num_prompts)]
        for mode in measured.modes
    ]
    if paired := measured.paired:
        name = f"speed-up of a prompt (faster on {paired.num_faster} of {paired.num_prompts})"
        rows.append([Cell(text=name), *_row(paired.speedup, num_prompts=paired.num_prompts)])
    if measured.acceptance:
        fast = measured.mode(SPECULATIVE)
        row = _row(measured.acceptance, num_prompts=fast.num_prompts if fast else 0, places=3)
        rows.append([Cell(text="accepted of examined, all prompts"), *row])
    return Table(columns=["median over prompts", "value", "95 % interval", "prompts"], rows=rows, num_left=1)


def runs_to_csv(runs: Sequence[Run], measures: Sequence[RunMeasures]) -> str:
    """Return one row for each run: its settings that vary, medians with intervals, percentiles and forecasts."""
    rows = []
    for known, run, measured in zip(settings_of_rows(runs), runs, measures, strict=True):
        summary, paired, fast = run.summary, measured.paired, run.summary.speculative
        row: dict[str, object] = {"status": run.status, "num_prompts": summary.num_prompts}
        row["num_new_tokens"] = summary.num_new_tokens
        for name in (PLAIN, SPECULATIVE):
            mode = measured.mode(name)
            row |= _columns(f"{name}_ms_per_token", mode.ms_per_token if mode else None)
            spread = (
                {"ms_per_token": mode.ms_percentiles, "first_token_ms": mode.first_token_percentiles} if mode else {}
            )
            for what in ("ms_per_token", "first_token_ms"):
                values = spread.get(what) or [None] * len(PERCENTILES)
                row |= {f"{name}_{what}_p{p}": value for p, value in zip(PERCENTILES, values, strict=True)}
        row |= _columns("speedup", paired.speedup if paired else None)
        row |= {"num_paired": paired and paired.num_prompts, "num_faster": paired and paired.num_faster}
        row |= _columns("acceptance", measured.acceptance)
        row |= {"tokens_per_round": fast and fast.tokens_per_round, "speedup_of_all_tokens": summary.speedup}
        forecast = summary.forecast
        row |= {f"forecast_{name}": value for name, value in vars(forecast).items()}
        rows.append(known | row)
    return csv_of(rows[0], rows)


def _columns(name: str, found: Estimate | None) -> dict[str, object]:
    values = (found.value, found.low, found.high) if found else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _row(found: Estimate, *, num_prompts: int, places: int = 2) -> list[Cell]:
    shown = _estimated(found, places=places)
    return cells([shown.text, shown.interval, str(num_prompts)])


def _estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    if found is None:
        return Cell(text="")
    text = f"{found.value:.{places}f}{unit}"
    if found.low is None or found.high is None:
        return Cell(text=text)
    return Cell(text=text, interval=f"{found.low:.{places}f} to {found.high:.{places}f}")


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"
