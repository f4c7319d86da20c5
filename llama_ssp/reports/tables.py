"""Tables of finished runs, for a terminal and for reports. Imports no matplotlib."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llama_ssp.reports.measures import Estimate, RunMeasures, measure, over_runs, ratio
from llama_ssp.reports.records import DISTURBED, NOT_LOSSLESS, PLAIN, SPECULATIVE
from llama_ssp.reports.runs import SEED, Run, drifts_of, names_of, varying_settings
from llama_ssp.text.messages import decimal, visible

MODES = PLAIN, SPECULATIVE
MOST_DRIFT = 0.1
"""Drift of shared plain completions up to which speed-ups over them have intervals, which know prompts alone."""
_ONLY_IN_REPORTS = ("forecast speed-up", "prompts faster", "prompts", "tokens", "run", "status")


class Cell(NamedTuple):
    """A cell of a table: its text, and the interval under it."""

    text: str
    interval: str = ""


class Table(NamedTuple):
    """A table; the first `num_left` columns hold names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    num_left: int = 1


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], num_left: int = 1) -> Table:
    """Make a table of the columns that have a text in any row."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    kept = [place for place in range(len(columns)) if any(row[place].text for row in cells)]
    left = sum(place < num_left for place in kept)
    return Table([columns[place] for place in kept], [[row[place] for place in kept] for row in cells], left)


def runs_table(runs: Sequence[Run], *, brief: bool = False) -> Table:
    """Lay out a row for each run: its varying settings, and medians with intervals; with `brief`, medians alone."""
    heads, names = names_of(runs)
    columns = [
        "plain, ms/token",
        "speculative, ms/token",
        "speed-up",
        "forecast speed-up",
        "prompts faster",
        "accepted",
        "tokens/round",
        "prompts",
        "tokens",
        "run",
        "status",
    ]
    kept = [place for place, name in enumerate(columns) if not (brief and name in _ONLY_IN_REPORTS)]
    rows: list[list[Cell | str]] = []
    drifts, statuses = drifts_of(runs), {run.status for run in runs}
    for run, own in zip(runs, names, strict=True):
        summary, fast, measured, num_pairs = run.summary, run.summary.speculative, run.measures, len(run.measures.pairs)
        figures: list[Cell | str] = [
            *(estimated(measured.ms_per_token(mode)) for mode in (PLAIN, SPECULATIVE)),
            estimated(speedup_of(run, measured.speedup, drifts), unit="x"),
            number(summary.forecast.speedup if fast else None, "x"),
            f"{measured.num_faster} of {num_pairs}" if num_pairs else "",
            estimated(measured.acceptance, places=3),
            number(fast.tokens_per_round if fast else None),
            str(summary.num_prompts),
            str(summary.num_new_tokens),
            run.name,
            run.status if len(statuses) > 1 else "",
        ]
        rows.append([*own, *(figures[place] for place in kept)])
    return table([*heads, *(columns[place] for place in kept)], rows, len(heads))


def speedup_of(run: Run, found: Estimate | None, drifts: Mapping[str, float]) -> Estimate | None:
    """Return a run's speed-up; if its shared plain completions drifted (`drifts_of`), without an interval."""
    shared = run.summary.baseline
    has_drifted = shared is not None and abs(drifts.get(shared.folder, 0.0)) > MOST_DRIFT
    return Estimate(found.value) if found and has_drifted else found


def repetitions_table(runs: Sequence[Run]) -> Table:
    """Lay out a row for each group of runs that differ only in their seed: means, with intervals over seeds.

    The table is empty if there are no such groups.
    """
    settings = varying_settings(runs)
    names = [setting.name for setting in settings if setting.key != SEED]
    seeds = next((setting.texts for setting in settings if setting.key == SEED), ())
    alike: dict[tuple[str, ...], dict[str, RunMeasures]] = {}
    for place, (run, seed) in enumerate(zip(runs, seeds, strict=False)):  # no seeds if all runs have the same
        own = *(setting.texts[place] for setting in settings if setting.key != SEED), run.summary.machine or ""
        alike.setdefault(own, {})[seed] = run.measures
    rows: list[list[Cell | str]] = [
        [
            *own[:-1],
            str(len(found)),
            *(estimated(over_runs([one.ms_per_token(mode) for one in found])) for mode in MODES),
            estimated(over_runs([one.speedup for one in found]), unit="x"),
            estimated(over_runs([one.acceptance for one in found]), places=3),
        ]
        for own, found in ((own, by_seed.values()) for own, by_seed in alike.items())
        if len(found) > 1
    ]
    heads = [*names, "seeds", "plain, ms/token", "speculative, ms/token", "speed-up", "accepted"]
    return table(heads, rows, len(names))


def kinds_table(runs: Sequence[Run]) -> Table:
    """Lay out a row for each kind of prompts of each run."""
    rows: list[list[Cell | str]] = []
    heads, names = names_of(runs) if len(runs) > 1 else ([], [[]])
    drifts = drifts_of(runs)
    for run, own in zip(runs, names, strict=True):
        for kind in sorted({line.category for line in run.lines if line.category}):
            lines = [line for line in run.lines if line.category == kind]
            found, fast = measure(lines), [line for line in lines if line.mode == SPECULATIVE]
            rounds = [(float(len(line.token_ids) - 1), float(line.num_rounds)) for line in fast if line.num_rounds]
            rows.append(
                [
                    *own,
                    visible(kind),
                    estimated(speedup_of(run, found.speedup, drifts), unit="x"),
                    estimated(found.acceptance, places=3),
                    estimated(ratio(rounds) if rounds else None),
                    str(len({line.index - line.turn for line in lines})),
                ]
            )
    return table([*heads, "kind", "speed-up", "accepted", "tokens/round", "prompts"], rows, len(heads) + 1)


def remarks(runs: Sequence[Run]) -> list[str]:
    """Sentences on the meaning of marks, and on what intervals leave out."""
    summaries = [run.summary for run in runs]
    drifted = [
        f"Plain completions of {visible(folder)} took {100 * abs(drift):.0f} % {'more' if drift > 0 else 'less'} time "
        "when they were made again at the end"
        + ("; speed-ups over them have no interval." if abs(drift) > MOST_DRIFT else ".")
        for folder, drift in drifts_of(runs).items()
    ]
    return [
        *([f"{DISTURBED} The machine was disturbed."] if any(one.disturbed for one in summaries) else []),
        *dict.fromkeys(f"{NOT_LOSSLESS} {one.caveat[:1].upper()}{one.caveat[1:]}." for one in summaries if one.caveat),
        *drifted,
    ]


def number(value: float | None, unit: str = "", *, places: int = 2) -> str:
    """A figure of a table, empty if it was not measured."""
    return decimal(value, places, unit=unit, missing="")


def estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    """A figure with its interval."""
    if found is None:
        return Cell("")
    low, high = (decimal(end, places, missing="") for end in (found.low, found.high))
    return Cell(decimal(found.value, places, unit=unit), f"{low} to {high}" if low and high else "")
