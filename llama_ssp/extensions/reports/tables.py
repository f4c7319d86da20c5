"""Percentiles of finished runs as a table, and `runs.csv`. Imports no matplotlib."""

import csv
import io
from collections.abc import Sequence
from itertools import chain

from llama_ssp.reports.measures import PERCENTILES, Estimate, measure
from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run, drifts_of, names_of, varying_settings
from llama_ssp.reports.tables import Table, number, speedup_of, table
from llama_ssp.text.messages import visible

_OWN_COLUMNS = ("task", "model", "draft", "ranks", "seed")
"""Facts that every table has, whether they vary or not."""


def percentiles_table(runs: Sequence[Run]) -> Table:
    """Lay out a row for each mode of each run: percentiles over its completions."""
    heads, names = names_of(runs) if len(runs) > 1 else ([], [[]])
    rows = [
        [*own, name, str(mode.num_completions), *map(number, mode.ms_percentiles + mode.first_token_percentiles)]
        for run, own in zip(runs, names, strict=True)
        for name, mode in run.measures.modes.items()
    ]
    ends = [f"p{percentile}, {kind}" for kind in ("ms/token", "ms to first token") for percentile in PERCENTILES]
    return table([*heads, "mode", "completions", *ends], rows, len(heads) + 1)


def runs_to_csv(runs: Sequence[Run], _missing: Sequence[str] = ()) -> str:
    """Return one row for each run: its settings that vary, medians with intervals, percentiles and forecasts."""
    rows, settings, drifts = [], varying_settings(runs), drifts_of(runs)
    for place, run in enumerate(runs):
        summary, fast, measured = run.summary, run.summary.speculative, run.measures
        num_pairs = len(measured.pairs) or None
        row: dict[str, object] = {"run": run.name, "task": summary.task, "model": summary.model, "draft": summary.draft}
        row |= {"num_draft_tokens": run.num_draft_tokens, "tree": summary.tree}
        row |= {"world_size": summary.world_size, "seed": summary.seed}
        row |= {setting.key: setting.values[place] for setting in settings if setting.key not in _OWN_COLUMNS}
        row |= {"status": run.status, "disturbed": summary.disturbed, "not_lossless": summary.caveat or None}
        row |= {"baseline": summary.baseline and summary.baseline.folder}
        row |= {"num_prompts": summary.num_prompts, "num_new_tokens": summary.num_new_tokens}
        for name in (PLAIN, SPECULATIVE):
            mode = measured.modes.get(name)
            row |= _columns(f"{name}_ms_per_token", measured.ms_per_token(name))
            row |= _spread(f"{name}_ms_per_token", mode.ms_percentiles if mode else None)
            row |= _spread(f"{name}_first_token_ms", mode.first_token_percentiles if mode else None)
        row |= _columns("speedup", speedup_of(run, measured.speedup, drifts))
        row |= {"num_paired": num_pairs, "num_faster": num_pairs and measured.num_faster}
        row |= _columns("acceptance", measured.acceptance)
        row |= {"tokens_per_round": fast and fast.tokens_per_round, "speedup_of_all_tokens": summary.speedup}
        for kind in sorted({line.category for line in run.lines if line.category}):
            found = measure([line for line in run.lines if line.category == kind])
            row |= _columns(f"speedup_of_{visible(kind)}", speedup_of(run, found.speedup, drifts))
            row |= _columns(f"acceptance_of_{visible(kind)}", found.acceptance)
        rows.append(row | {f"forecast_{name}": value for name, value in vars(summary.forecast).items()})
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys(chain.from_iterable(rows))], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(name: str, found: Estimate | None) -> dict[str, object]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), found or [None] * 3, strict=True))


def _spread(name: str, values: Sequence[float | None] | None) -> dict[str, object]:
    return {f"{name}_p{p}": value for p, value in zip(PERCENTILES, values or [None] * len(PERCENTILES), strict=True)}
