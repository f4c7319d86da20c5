"""`report.html`: one page of finished runs that opens anywhere, offline; no script, no font, no file beside it.

Figures come from `figures`, numbers from the summaries; here is only the page around them.
"""

from collections.abc import Sequence
from html import escape

from llama_ssp.reports import figures, svg
from llama_ssp.reports.lines import PLAIN, SPECULATIVE, BenchmarkRow
from llama_ssp.reports.runs import Run

STYLE = """
:root { --ink: #1b1f23; --soft: #5f6b76; --line: #dfe3e6; --paper: #fff; --accent: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 75rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .2rem 0; color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem; min-width: 9rem; }
.tile b { display: block; font-size: 1.45rem; font-weight: 600; } .tile span { color: var(--soft); font-size: .85rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(25rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } .left { text-align: left; }
details { border-top: 1px solid var(--line); padding: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
@media print { figure, .tile { break-inside: avoid; } }
"""
COLUMNS = (
    "", "run", "models", "K", "ranks", "prompts", "tokens", "plain", "speculative", "speed-up", "forecast",
    "tokens/round", "accepted", "status",
)  # fmt: skip
NUM_LEFT = 3
CELL_COLUMNS = (
    "cell", "plain", "forecast", "generate", "speculative", "forecast", "assisted", "tokens/round",
)  # fmt: skip


def report(runs: Sequence[Run], *, missing: Sequence[str] = ()) -> str:
    """The page.

    Args:
        runs: at least one.
        missing: sentences about runs that could not be shown.
    """
    title = _title(runs)
    head = [
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}{svg.STYLE}</style>", "</head>", "<body>",
        f"<h1>{escape(title)}</h1>",
    ]  # fmt: skip
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    notes = [_paragraph(sentence) for sentence in missing]
    return "\n".join([*head, *body, *notes, "</body>", "</html>", ""])


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        run = runs[0]
        drafting = f", K = {run.num_draft_tokens}" if run.num_draft_tokens else ""
        return f"{run.pair}{drafting}"
    pairs = list(dict.fromkeys(run.pair for run in runs))
    return f"{len(runs)} runs of {pairs[0]}" if len(pairs) == 1 else f"{len(runs)} runs of {len(pairs)} pairs"


def _one(run: Run) -> list[str]:
    summary = run.summary
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items() if version)
    commit = f", commit {summary.git_commit[:12]}" if summary.git_commit else ""
    cells = f"{len(summary.cells)} cells, " if summary.cells else ""
    return [
        _paragraph(
            f"task {summary.task}, {ranks}, {cells}{summary.num_prompts} prompts, {summary.num_new_tokens} new tokens, "
            f"seed {summary.seed}{f', {run.status}' if run.status else ''}"
        ),
        _paragraph(versions + commit),
        _tiles(run),
        *_cell_table(summary.cells),
        _figures([
            figures.round_timeline(run),
            figures.acceptance_by_position([run]),
            figures.forecast_against_measured([run]),
            figures.speedup_by_k([run]),
            figures.memory_by_rank([run]),
        ]),
    ]  # fmt: skip


def _several(runs: Sequence[Run]) -> list[str]:
    parts = [
        _figures([
            figures.speedup_by_k(runs),
            figures.acceptance_by_position(runs),
            figures.forecast_against_measured(runs),
            figures.memory_by_rank(runs),
        ]),
        "<h2>All runs</h2>",
        _paragraph("plain and speculative in ms/token; forecast is that of the speed-up"),
        _table(runs),
        "<h2>Each run</h2>",
    ]  # fmt: skip
    for run in runs:
        parts += ["<details>", f"<summary>{escape(f'{run.name}: {_title([run])}')}</summary>", *_one(run), "</details>"]
    return parts


def _tiles(run: Run) -> str:
    summary, fast = run.summary, run.summary.speculative
    tiles = [
        (_number(summary.speedup, "x"), "speed-up"),
        (_number(summary.plain.ms_per_token if summary.plain else None), "ms/token, plain"),
        (_number(fast.ms_per_token if fast else None), "ms/token, speculative"),
        (_number(fast.tokens_per_round if fast else None), "tokens per round"),
        (_percent(fast.acceptance_rate if fast else None), "of examined tokens accepted"),
    ]
    shown = [f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles if value]
    return f'<div class="tiles">{"".join(shown)}</div>'


def _table(runs: Sequence[Run]) -> str:
    rows = [[str(number), *_cells(run)] for number, run in enumerate(runs)]
    return _rows(COLUMNS, rows, num_left=NUM_LEFT)


def _cell_table(cells: Sequence[BenchmarkRow]) -> list[str]:
    """What a benchmark measured, with the forecasts; nothing for other tasks."""
    if not cells:
        return []
    rows = []
    for cell in cells:
        measured, forecast = cell.ms_per_token, cell.forecast_ms_per_token
        ours = [(measured.get(mode), forecast.get(mode)) for mode in (PLAIN, SPECULATIVE)]
        times = (*ours[0], measured.get("generate"), *ours[1], measured.get("assisted"), cell.tokens_per_round)
        rows.append([cell.name, *map(_number, times)])
    told = _paragraph("ms/token over the tokens of all rows; generate and assisted are transformers'")
    return [told, _rows(CELL_COLUMNS, rows, num_left=1)]


def _rows(names: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    sides = [' class="left"' if place < num_left else "" for place in range(len(names))]
    head = [f"<th{side}>{name}</th>" for side, name in zip(sides, names, strict=True)]
    table = [f"<tr>{''.join(head)}</tr>"]
    for row in rows:
        cells = [f"<td{side}>{escape(cell)}</td>" for side, cell in zip(sides, row, strict=True)]
        table.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(table)}</table></div>'


def _cells(run: Run) -> list[str]:
    summary, fast = run.summary, run.summary.speculative
    return [
        run.name,
        run.pair,
        str(run.num_draft_tokens or ""),
        str(summary.world_size),
        str(summary.num_prompts),
        str(summary.num_new_tokens),
        _number(summary.plain.ms_per_token if summary.plain else None),
        _number(fast.ms_per_token if fast else None),
        _number(summary.speedup, "x"),
        _number(summary.forecast.speedup, "x"),
        _number(fast.tokens_per_round if fast else None),
        _percent(fast.acceptance_rate if fast else None),
        run.status,
    ]


def _figures(drawn: Sequence[str | None]) -> str:
    shown = [f"<figure>{figure}</figure>" for figure in drawn if figure]
    return f'<div class="figures">{"".join(shown)}</div>'


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
