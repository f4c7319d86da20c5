"""Tables of finished runs for a paper, in Markdown or LaTeX: times, and acceptance by position and kind of prompt."""

import re
from collections.abc import Callable, Sequence

from llama_ssp.reports.measures import measure, ratio
from llama_ssp.reports.records import DISTURBED, NOT_LOSSLESS, SPECULATIVE
from llama_ssp.reports.runs import Run, names_of
from llama_ssp.reports.summary import accepted_by_position, counted_rounds
from llama_ssp.reports.tables import Cell, Table, estimated, number, runs_table, table
from llama_ssp.words import visible

_ESCAPED = {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", DISTURBED: r"$\dagger$",
    NOT_LOSSLESS: r"$\ddagger$",
}  # fmt: skip
_SPECIAL = re.compile(rf"[&%$#_{{}}~^\\{DISTURBED}{NOT_LOSSLESS}]")


def to_markdown(runs: Sequence[Run], _missing: Sequence[str] = ()) -> str:
    """Lay out the tables in Markdown."""
    return _laid_out(runs, _markdown, str)


def to_latex(runs: Sequence[Run], _missing: Sequence[str] = ()) -> str:
    """Lay out the tables in LaTeX."""
    return _laid_out(runs, _latex, _tex)


def _laid_out(runs: Sequence[Run], lay_out: Callable[[str, Table], str], escape: Callable[[str], str]) -> str:
    found = {
        "Medians over prompts": runs_table(runs, brief=True),
        "Share of rounds that accepted the token at each position": _by_position(runs),
        "Kinds of prompts": _by_kind(runs),
    }
    texts = [lay_out(title, shown) for title, shown in found.items() if shown.rows]
    return "\n\n".join([*texts, escape(_notes(runs))])


def _by_position(runs: Sequence[Run]) -> Table:
    heads, names = names_of(runs)
    shares = [accepted_by_position([line for line in run.lines if line.mode == SPECULATIVE]) for run in runs]
    most = max(map(len, shares), default=0)
    rows = [
        [*own, *(number(share, places=3) for share in found), *[""] * (most - len(found))]
        for own, found in zip(names, shares, strict=True)
        if found
    ]
    return table([*heads, *map(str, range(1, most + 1))], rows, len(heads))


def _by_kind(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell | str]] = []
    heads, names = names_of(runs)
    for run, own in zip(runs, names, strict=True):
        for kind in sorted({line.category for line in run.lines if line.category}):
            lines = [line for line in run.lines if line.category == kind]
            found, fast = measure(lines), [line for line in lines if line.mode == SPECULATIVE]
            rounds = [(float(len(line.token_ids) - 1), float(line.num_rounds)) for line in fast if line.num_rounds]
            rows.append([
                *own, visible(kind), estimated(found.speedup, unit="x"), estimated(found.acceptance, places=3),
                estimated(ratio(rounds) if rounds else None), str(len({line.index - line.turn for line in lines})),
            ])  # fmt: skip
    return table([*heads, "kind", "speed-up", "accepted", "tokens/round", "prompts"], rows, len(heads) + 1)


def _notes(runs: Sequence[Run]) -> str:
    """Notes that a reader needs to repeat the runs."""
    summaries = [run.summary for run in runs]
    models = "; ".join(dict.fromkeys(run.pair for run in runs))
    versions = dict.fromkeys(
        ", ".join(f"{name} {number}" for name, number in summary.versions.items() if number) for summary in summaries
    )
    commits = dict.fromkeys(summary.git_commit[:12] for summary in summaries if summary.git_commit)
    machines = dict.fromkeys(summary.machine for summary in summaries if summary.machine)
    prompts = " or ".join(map(str, sorted({summary.num_prompts for summary in summaries})))
    num_rounds = sum(len(counted_rounds(run.lines)) for run in runs)
    sentences = [
        f"{models}. {prompts} prompts, {num_rounds} rounds.",
        "In brackets stand 95 % intervals over prompts, by the bootstrap; speed-ups are plain over speculative.",
        "; ".join([*versions, *(f"commit {commit}" for commit in commits), *machines]) + ".",
        *([f"{DISTURBED} The machine was disturbed."] if any(one.disturbed for one in summaries) else []),
        *dict.fromkeys(f"{NOT_LOSSLESS} {one.caveat[:1].upper()}{one.caveat[1:]}." for one in summaries if one.caveat),
    ]
    return visible(" ".join(sentences))


def _markdown(title: str, shown: Table) -> str:
    def text(cell: Cell) -> str:
        value = cell.text.replace("|", r"\|")
        return f"{value} ({cell.interval})" if cell.interval else value

    marks = ["---" if place < shown.num_left else "---:" for place in range(len(shown.columns))]
    rows = [shown.columns, marks, *([*map(text, row)] for row in shown.rows)]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _latex(title: str, shown: Table) -> str:
    def text(cell: Cell) -> str:
        interval = f" [{_tex(cell.interval.replace(' to ', ', '))}]" if cell.interval else ""
        return _tex(cell.text) + interval

    places = "l" * shown.num_left + "r" * (len(shown.columns) - shown.num_left)
    rows = [" & ".join(map(text, row)) for row in shown.rows]
    lines = [f"% {title}", rf"\begin{{tabular}}{{{places}}}", r"\hline", " & ".join(map(_tex, shown.columns)) + r" \\"]
    return "\n".join([*lines, r"\hline", *(rf"{row} \\" for row in rows), r"\hline", r"\end{tabular}"])


def _tex(text: str) -> str:
    return _SPECIAL.sub(lambda found: _ESCAPED.get(found[0], f"\\{found[0]}"), text)
