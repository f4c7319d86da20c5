"""Tables of finished runs for a paper, in Markdown or LaTeX: times, and acceptance by position and kind of prompt."""

import re
from collections.abc import Callable, Sequence

from llama_ssp.reports.records import DISTURBED, NOT_LOSSLESS, SPECULATIVE
from llama_ssp.reports.runs import Run, names_of
from llama_ssp.reports.summary import accepted_by_position, counted_rounds
from llama_ssp.reports.tables import Cell, Table, kinds_table, number, remarks, repetitions_table, runs_table, table
from llama_ssp.text.messages import visible

_ESCAPED = {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    DISTURBED: r"$\dagger$",
    NOT_LOSSLESS: r"$\ddagger$",
}
_SPECIAL = re.compile(rf"[&%$#_{{}}~^\\{DISTURBED}{NOT_LOSSLESS}]")


def to_markdown(runs: Sequence[Run], _missing: Sequence[str] = ()) -> str:
    """Lay out the tables in Markdown."""
    return _laid_out(runs, _markdown, str)


def to_latex(runs: Sequence[Run], _missing: Sequence[str] = ()) -> str:
    """Lay out the tables in LaTeX, with the rules of booktabs; graphicx makes tables fit that are wider than a line."""
    return "% \\usepackage{booktabs, graphicx}\n" + _laid_out(runs, _latex, _tex)


def _laid_out(runs: Sequence[Run], lay_out: Callable[[str, Table], str], escape: Callable[[str], str]) -> str:
    found = {
        "Medians over prompts": runs_table(runs, brief=True),
        "Means over seeds": repetitions_table(runs),
        "Share of rounds that accepted the token at each position": _by_position(runs),
        "Kinds of prompts": kinds_table(runs),
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
        "In brackets: 95 % ranges, over prompts the bootstrap's, over seeds Student's. Speed-up: plain / speculative.",
        "; ".join([*versions, *(f"commit {commit}" for commit in commits), *machines]) + ".",
        *remarks(runs),
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
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(title)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{places}}}",
        r"\toprule",
        " & ".join(map(_tex, shown.columns)) + r" \\",
        r"\midrule",
        *(rf"{row} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _tex(text: str) -> str:
    return _SPECIAL.sub(lambda found: _ESCAPED.get(found[0], f"\\{found[0]}"), text)
