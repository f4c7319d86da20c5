"""Tables of finished runs: those of the report's page, `runs.csv`, `report.csv` and `cells.csv`."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from typing import NamedTuple

from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import PERCENTILES, Estimate, RunMeasures
from llama_ssp.reports.records import PLAIN, SPECULATIVE, BenchmarkRow, CompletionLine
from llama_ssp.reports.settings import Setting, varying_settings

_TEXTS = {"prompt", "text", "token_ids", "accepted_lengths", "examined_lengths", "draft_lengths", "messages", "fields"}
_OWN_COLUMNS = ("task", "model", "draft", "ranks", "seed")
"""Facts that every table has, whether they vary or not."""


class Cell(NamedTuple):
    """A cell of a table of the page: its text, and the interval under it."""

    text: str
    interval: str


class Table(NamedTuple):
    """A table of the page; the first `num_left` columns hold names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    num_left: int = 1


def number(value: float | None, unit: str = "") -> str:
    """Write a figure; nothing for one that was not measured."""
    return "" if value is None else f"{value:.2f}{unit}"


def cells_table(cells: Sequence[BenchmarkRow]) -> Table:
    """Lay out the cells of a benchmark, a row each."""
    columns = ["cell", "plain", "forecast", "generate", "speculative", "forecast", "assisted", "tokens/round"]
    return Table(columns, [[cell.name, *map(number, [*cell.columns, cell.tokens_per_round])] for cell in cells])


def runs_table(runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each run: the settings that vary, and medians with their intervals."""
    columns = [
        "#", *(setting.name for setting in settings), "plain", "speculative", "speed-up", "forecast", "faster on",
        "accepted", "tokens/round", "prompts", "tokens", "run", "status",
    ]  # fmt: skip
    rows: list[list[Cell | str]] = []
    for place, (run, measured) in enumerate(zip(runs, measures, strict=True)):
        summary, fast, num_pairs = run.summary, run.summary.speculative, len(measured.pairs)
        rows.append([
            str(place), *(setting.texts[place] for setting in settings),
            *(_estimated(measured.ms_per_token(mode)) for mode in (PLAIN, SPECULATIVE)),
            _estimated(measured.speedup, unit="x"), number(summary.forecast.speedup, "x"),
            f"{measured.num_faster} of {num_pairs}" if num_pairs else "", _estimated(measured.acceptance, places=3),
            number(fast.tokens_per_round if fast else None), str(summary.num_prompts), str(summary.num_new_tokens),
            run.name, run.status,
        ])  # fmt: skip
    return Table(columns, rows, 1 + len(settings))


def percentiles_table(measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each mode of each run: percentiles over its completions, in ms."""
    heads, rows = ["#", *(setting.name for setting in settings)] if len(measures) > 1 else [], []
    for place, measured in enumerate(measures):
        names = [str(place), *(setting.texts[place] for setting in settings)] if heads else []
        for name, mode in measured.modes.items():
            figures = map(number, mode.ms_percentiles + mode.first_token_percentiles)
            rows.append([*names, name, str(mode.num_completions), *figures])
    ends = [f"p{percentile} {kind}" for kind in ("ms/token", "first token") for percentile in PERCENTILES]
    return Table([*heads, "mode", "completions", *ends], rows, len(heads) + 1)


def runs_to_csv(runs: Sequence[Run], measures: Sequence[RunMeasures]) -> str:
    """Return one row for each run: its settings that vary, medians with intervals, percentiles and forecasts."""
    rows = []
    for known, run, measured in zip(_settings_of_rows(runs), runs, measures, strict=True):
        summary, fast, num_pairs = run.summary, run.summary.speculative, len(measured.pairs) or None
        row = known | {"status": run.status}
        row |= {"num_prompts": summary.num_prompts, "num_new_tokens": summary.num_new_tokens}
        for name in (PLAIN, SPECULATIVE):
            mode = measured.modes.get(name)
            row |= _columns(f"{name}_ms_per_token", measured.ms_per_token(name))
            row |= _spread(f"{name}_ms_per_token", mode.ms_percentiles if mode else None)
            row |= _spread(f"{name}_first_token_ms", mode.first_token_percentiles if mode else None)
        row |= _columns("speedup", measured.speedup)
        row |= {"num_paired": num_pairs, "num_faster": num_pairs and measured.num_faster}
        row |= _columns("acceptance", measured.acceptance)
        row |= {"tokens_per_round": fast and fast.tokens_per_round, "speedup_of_all_tokens": summary.speedup}
        rows.append(row | {f"forecast_{name}": value for name, value in vars(summary.forecast).items()})
    return _csv_of(rows)


def to_csv(runs: Sequence[Run]) -> str:
    """Return all completions of all runs as one table, a row each, without texts."""
    known = _settings_of_rows(runs)
    measured = [entry.name for entry in fields(CompletionLine) if entry.name not in _TEXTS]
    rows = [
        facts
        | {name: getattr(line, name) for name in measured}
        | {"num_accepted": sum(line.accepted_lengths), "num_examined": sum(line.examined_lengths)}
        for facts, run in zip(known, runs, strict=True)
        for line in run.lines
    ]
    return _csv_of(rows, [*known[0], *measured, "num_accepted", "num_examined"])


def cells_to_csv(runs: Sequence[Run]) -> str:
    """Return the cells of all benchmarks as one table, a row each; empty without a benchmark."""
    rows = []
    for run in runs:
        for cell in run.summary.cells:
            row = {name: value for name, value in asdict(cell).items() if not isinstance(value, dict)}
            row |= {f"{name}_ms_per_token": value for name, value in cell.ms_per_token.items()}
            row |= {f"{name}_forecast_ms_per_token": value for name, value in cell.forecast_ms_per_token.items()}
            rows.append({"run": run.name} | row | cell.versions)
    return _csv_of(rows) if rows else ""


def _settings_of_rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return the cells that identify each run in a table: its name, models, ranks, seed and the settings that vary."""
    others = [setting for setting in varying_settings(runs) if setting.key not in _OWN_COLUMNS]
    rows = []
    for place, run in enumerate(runs):
        row: dict[str, object] = {"run": run.name, "task": run.summary.task, "model": run.summary.model}
        row |= {"draft": run.summary.draft, "num_draft_tokens": run.num_draft_tokens}
        row |= {"world_size": run.summary.world_size, "seed": run.summary.seed}
        rows.append(row | {setting.key: setting.values[place] for setting in others})
    return rows


def _csv_of(rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> str:
    """Write rows as CSV, by default with all columns that a row has; a missing value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or [*dict.fromkeys(chain.from_iterable(rows))], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(name: str, found: Estimate | None) -> dict[str, object]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), found or [None] * 3, strict=True))


def _spread(name: str, values: Sequence[float | None] | None) -> dict[str, object]:
    return {f"{name}_p{p}": value for p, value in zip(PERCENTILES, values or [None] * len(PERCENTILES), strict=True)}


def _estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    if found is None:
        return Cell("", "")
    has_interval = found.low is not None and found.high is not None
    interval = f"{found.low:.{places}f} to {found.high:.{places}f}" if has_interval else ""
    return Cell(f"{found.value:.{places}f}{unit}", interval)
