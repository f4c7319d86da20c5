"""Tables of finished runs: those of the report's page, `runs.csv`, `report.csv` and `cells.csv`."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import NamedTuple

from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import PERCENTILES, Estimate, RunMeasures
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.reports.settings import Setting, varying_settings

_TEXTS = {"prompt", "text", "token_ids", "accepted_lengths", "examined_lengths", "draft_lengths", "messages", "fields"}
_OWN_COLUMNS = ("task", "model", "draft", "ranks", "seed")
"""Facts that every table has, whether they vary or not."""
CELL_COLUMNS = ["cell", "plain", "forecast", "generate", "speculative", "forecast", "assisted", "tokens/round"]


class Cell(NamedTuple):
    """A cell of a table of the page: its text, and the interval under it."""

    text: str
    interval: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page; the first `num_left` columns hold names."""

    columns: list[str]
    rows: Sequence[Sequence[Cell | str]]
    num_left: int = 1


def number(value: float | None, unit: str = "") -> str:
    """Write a figure; nothing for one that was not measured."""
    return "" if value is None else f"{value:.2f}{unit}"


def runs_table(runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each run: the settings that vary, and medians with their intervals."""
    columns = [
        "#", *(setting.name for setting in settings), "plain", "speculative", "speed-up", "forecast", "faster on",
        "accepted", "tokens/round", "prompts", "tokens", "run", "status",
    ]  # fmt: skip
    rows = []
    for place, (run, measured) in enumerate(zip(runs, measures, strict=True)):
        summary, fast, num_pairs = run.summary, run.summary.speculative, len(measured.pairs)
        texts = [number(fast.tokens_per_round if fast else None), str(summary.num_prompts), str(summary.num_new_tokens)]
        rows.append([
            *_cells(str(place), *(setting.texts[place] for setting in settings)),
            *(_estimated(measured.ms_per_token(mode)) for mode in (PLAIN, SPECULATIVE)),
            _estimated(measured.speedup, unit="x"), Cell(number(summary.forecast.speedup, "x")),
            Cell(f"{measured.num_faster} of {num_pairs}" if num_pairs else ""),
            _estimated(measured.acceptance, places=3),
            *_cells(*texts, run.name, run.status),
        ])  # fmt: skip
    return Table(columns=columns, rows=rows, num_left=1 + len(settings))


def percentiles_table(measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each mode of each run: percentiles over its completions, in ms."""
    heads, rows = ["#", *(setting.name for setting in settings)] if len(measures) > 1 else [], []
    for place, measured in enumerate(measures):
        names = [str(place), *(setting.texts[place] for setting in settings)] if heads else []
        for name, mode in measured.modes.items():
            texts = map(number, mode.ms_percentiles + mode.first_token_percentiles)
            rows.append(_cells(*names, name, str(mode.num_completions), *texts))
    ends = [f"p{percentile} {kind}" for kind in ("ms/token", "first token") for percentile in PERCENTILES]
    return Table(columns=[*heads, "mode", "completions", *ends], rows=rows, num_left=len(heads) + 1)


def medians_table(measured: RunMeasures) -> Table:
    """Lay out the figures of one run with their intervals, a row each."""
    found = [(f"ms/token, {name}", _estimated(mode.ms_per_token), mode.num_prompts)
             for name, mode in measured.modes.items()]  # fmt: skip
    if measured.speedup:
        num_pairs = len(measured.pairs)
        name = f"speed-up of a prompt (faster on {measured.num_faster} of {num_pairs})"
        found.append((name, _estimated(measured.speedup), num_pairs))
    if measured.acceptance:
        fast = measured.modes.get(SPECULATIVE)
        cell = _estimated(measured.acceptance, places=3)
        found.append(("accepted of examined, all prompts", cell, fast.num_prompts if fast else 0))
    rows = [_cells(name, cell.text, cell.interval, str(num_prompts)) for name, cell, num_prompts in found]
    return Table(columns=["median over prompts", "value", "95 % interval", "prompts"], rows=rows)


def runs_to_csv(runs: Sequence[Run], measures: Sequence[RunMeasures]) -> str:
    """Return one row for each run: its settings that vary, medians with intervals, percentiles and forecasts."""
    rows = []
    for known, run, measured in zip(_settings_of_rows(runs), runs, measures, strict=True):
        summary, fast, num_pairs = run.summary, run.summary.speculative, len(measured.pairs) or None
        row: dict[str, object] = {"status": run.status, "num_prompts": summary.num_prompts}
        row["num_new_tokens"] = summary.num_new_tokens
        for name in (PLAIN, SPECULATIVE):
            mode = measured.modes.get(name)
            row |= _columns(f"{name}_ms_per_token", measured.ms_per_token(name))
            row |= _spread(f"{name}_ms_per_token", mode.ms_percentiles if mode else None)
            row |= _spread(f"{name}_first_token_ms", mode.first_token_percentiles if mode else None)
        row |= _columns("speedup", measured.speedup)
        row |= {"num_paired": num_pairs, "num_faster": num_pairs and measured.num_faster}
        row |= _columns("acceptance", measured.acceptance)
        row |= {"tokens_per_round": fast and fast.tokens_per_round, "speedup_of_all_tokens": summary.speedup}
        row |= {f"forecast_{name}": value for name, value in vars(summary.forecast).items()}
        rows.append(known | row)
    return _csv_of(rows[0], rows)


def to_csv(runs: Sequence[Run]) -> str:
    """Return all completions of all runs as one table, a row each, without texts."""
    known = _settings_of_rows(runs)
    measured = [entry.name for entry in fields(CompletionLine) if entry.name not in _TEXTS]
    rows = []
    for facts, run in zip(known, runs, strict=True):
        for line in run.lines:
            sums = {"num_accepted": sum(line.accepted_lengths), "num_examined": sum(line.examined_lengths)}
            rows.append(facts | {name: getattr(line, name) for name in measured} | sums)
    return _csv_of([*known[0], *measured, "num_accepted", "num_examined"], rows)


def cells_to_csv(runs: Sequence[Run]) -> str:
    """Return the cells of all benchmarks as one table, a row each; empty without a benchmark."""
    rows = []
    for run in runs:
        for cell in run.summary.cells:
            row = {name: value for name, value in asdict(cell).items() if not isinstance(value, dict)}
            row |= {f"{name}_ms_per_token": value for name, value in cell.ms_per_token.items()}
            row |= {f"{name}_forecast_ms_per_token": value for name, value in cell.forecast_ms_per_token.items()}
            rows.append({"run": run.name} | row | cell.versions)
    return _csv_of(dict.fromkeys(chain.from_iterable(rows)), rows) if rows else ""


def _settings_of_rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return the cells that identify each run in a table: its name, models, ranks, seed and the settings that vary."""
    others = [setting for setting in varying_settings(runs) if setting.key not in _OWN_COLUMNS]
    rows = []
    for place, run in enumerate(runs):
        summary = run.summary
        row: dict[str, object] = {"run": run.name, "task": summary.task, "model": summary.model, "draft": summary.draft}
        row |= {"num_draft_tokens": run.num_draft_tokens, "world_size": summary.world_size, "seed": summary.seed}
        rows.append(row | {setting.key: setting.values[place] for setting in others})
    return rows


def _csv_of(columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Write rows as CSV; a missing value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(name: str, found: Estimate | None) -> dict[str, object]:
    values = (found.value, found.low, found.high) if found else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _spread(name: str, values: Sequence[float | None] | None) -> dict[str, object]:
    return {f"{name}_p{p}": value for p, value in zip(PERCENTILES, values or [None] * len(PERCENTILES), strict=True)}


def _cells(*texts: str) -> list[Cell]:
    return [Cell(text) for text in texts]


def _estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    if found is None:
        return Cell("")
    text = f"{found.value:.{places}f}{unit}"
    if found.low is None or found.high is None:
        return Cell(text)
    return Cell(text, f"{found.low:.{places}f} to {found.high:.{places}f}")
