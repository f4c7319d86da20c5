"""The lines of the comparison by number format, what was measured of each, and what is said of that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Goal, print_goals

OURS, LLAMA_CPP, OPENVINO = "llama-ssp", "llama.cpp", "openvino"
ADAPTERS = {LLAMA_CPP: "benchmarks.by_format.llama_cpp", OPENVINO: "benchmarks.by_format.openvino"}
"""Libraries that run in processes of their own."""
PLAIN, SPECULATIVE = "plain", "speculative"
AT_MOST = 0.95
"""Ours over the best of the others, which is the goal in every column."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A library in a form that it has for a column; both models have it.

    Attributes:
        column: number format, as the columns of the goal name it.
        form: as the library's adapter names it; of ours, `model.quantization`.
        from_fp32: ours reads weights that only fp32 holds, instead of 16 bits.
    """

    column: str
    library: str
    form: str
    from_fp32: bool = False

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.library != OURS:
            return f"{self.library}, {self.form}"
        stored = "fp32 weights" if self.from_fp32 else "16-bit weights"
        return f"{OURS}, {stored}" if self.form == "none" else f"{OURS}, {self.form}"


LINES = (
    Line(column="fp32", library=OURS, form="none", from_fp32=True),
    Line(column="fp32", library=LLAMA_CPP, form="F32"),
    Line(column="fp32", library=OPENVINO, form="fp32"),
    Line(column="16 bits", library=OURS, form="none"),
    Line(column="16 bits", library=LLAMA_CPP, form="F16"),
    Line(column="16 bits", library=LLAMA_CPP, form="BF16"),
    Line(column="16 bits", library=OPENVINO, form="bf16"),
    Line(column="8 bits", library=OURS, form="int8_weight_only"),
    Line(column="8 bits", library=OURS, form="int8"),
    Line(column="8 bits", library=LLAMA_CPP, form="Q8_0"),
    Line(column="8 bits", library=OPENVINO, form="int8"),
    Line(column="4 bits", library=OURS, form="int4_weight_only"),
    Line(column="4 bits", library=LLAMA_CPP, form="Q4_0"),
    Line(column="4 bits", library=OPENVINO, form="int4"),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of a line.

    Attributes:
        ms: milliseconds per token with prefill, by mode, in the order of repetitions.
        tokens_per_round: of speculative rounds; None without them.
    """

    column: str
    library: str
    label: str
    ms: Mapping[str, Sequence[float]]
    tokens_per_round: float | None


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def goals(figures: Sequence[Figures]) -> list[Goal]:
    """For each column and mode, our best line over the best of the others, by their medians."""
    found = []
    for column in dict.fromkeys(each.column for each in figures):
        for mode in figures[0].ms:
            sides: dict[bool, list[Figures]] = {True: [], False: []}
            for each in figures:
                if each.column == column:
                    sides[each.library == OURS].append(each)
            if all(sides.values()):
                ours, other = (min(sides[side], key=lambda each: median(each.ms[mode])) for side in (True, False))
                ratio = median(ours.ms[mode]) / median(other.ms[mode])
                found.append(
                    Goal(name=f"{column}, {mode}: {ours.label} / {other.label}", measured=ratio, at_most=AT_MOST)
                )
    return found


def figures_of(row: Mapping[str, Any]) -> list[Figures]:
    """The figures of a stored row."""
    return [Figures(**each) for each in row["lines"]]


def cells(figures: Figures) -> list[str]:
    """A line of the table."""
    tokens = figures.tokens_per_round
    said = [figures.column, figures.label, *(f"{median(values):.2f}" for values in figures.ms.values())]
    return [*said, f"{tokens:.2f}"] if tokens else said


def headings(figures: Sequence[Figures]) -> list[str]:
    """The columns of the table."""
    said = ["", "", *(f"{mode}, ms/token" for mode in figures[0].ms)]
    return [*said, "tokens per round"] if SPECULATIVE in figures[0].ms else said


def show(row: Mapping[str, Any], console: Console) -> None:
    """Print the table and the goals."""
    figures = figures_of(row)
    table = Table(*headings(figures), title=" with ".join(row["models"]), title_justify="left", show_edge=False)
    for each in figures:
        table.add_row(*cells(each))
    console.print(table)
    console.print(f"processor time that waiting processes took: {row['idle_cpu_share']:.1%} of a core at most")
    print_goals(console, goals(figures))


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """What docs/benchmarks/cpus.md says of the newest row of each target."""
    newest = {row["models"][0]: row for row in rows}
    return "\n\n".join(_section(row) for row in newest.values())


def _section(row: Mapping[str, Any]) -> str:
    figures, made_with = figures_of(row), ", ".join([f"torch {row['versions']['torch']}", *row["libraries"].values()])
    drafting = f", K = {row['num_draft_tokens']}" if len(row["models"]) > 1 else ""
    table = [headings(figures), ["---"] * len(headings(figures)), *map(cells, figures)]
    ratios = "; ".join(f"{goal.name} {goal.measured:.2f}" for goal in goals(figures))
    return (
        f"{' with '.join(f'`{name}`' for name in row['models'])}{drafting}, temperature {row['temperature']:g}, "
        f"{row['num_prompts']} prompt(s) with {row['num_new_tokens']} new tokens each, {row['num_threads']} threads of "
        f"an {row['processor']}; {made_with}. Medians of {row['num_repetitions']} turns:\n\n"
        + "\n".join(f"| {' | '.join(line)} |" for line in table)
        + f"\n\nOurs over the best of the others: {ratios}."
    )
