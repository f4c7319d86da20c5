"""Pages made of a stored row of `placements`: the whole table as a document, and what 8 bits cost, for its guide."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.placement_cells import ALONE, FORMS, FP32, ONE_RANK, PLACES

Row = Mapping[str, Any]
MIB = 2**20
UNLIKE = 0.03
"""A ratio within this of 1 is called the same."""
_REMARK = (
    "With a batch of 8, a round yields eight times the tokens. Each replica works on its own text, so two rounds take "
    "the time of one. Two ranks share the cores that one process has alone: compare placements on two ranks with each "
    "other, not with one rank."
)


def document(row: Row) -> str:
    """docs/benchmarks/placements.md."""
    row, names = _with_ratios(row), [form.name for form in FORMS]
    refused = [f"- {line}" for line in refusals(row["cells"])]
    parts = [
        "# A round in every placement and precision",
        "`python -m benchmarks.readme` makes this page from the newest row of `python -m benchmarks.placements`.",
        _setting(row),
        "## Milliseconds per round, or per plain step where the target is alone",
        _table(row, names, "round_ms", "{:.2f}"),
        _REMARK,
        "## Ratio to fp32 in the same line",
        _table(row, names, "to_fp32", "{:.2f}"),
        "## Speed-up by speculation over the same target alone",
        _table(row, names, "speedup", "{:.2f}x"),
    ]
    return "\n\n".join([*parts, *(["## Not measured", "\n".join(refused)] if refused else [])]) + "\n"


def _with_ratios(row: Row) -> Row:
    """The row with the ratios of its medians.

    `to_fp32` is the time over that of the same line in fp32, and `speedup` plain over speculative time for a token,
    where the same target was measured alone.
    """
    ms = {(each["place"], each["form"]): each["round_ms"] for each in row["cells"]}
    plain = {place.name: place.plain for place in PLACES}

    def ratios(cell: Row) -> Row:
        own, form, alone = cell["round_ms"], cell["form"], plain.get(cell["place"])
        in_fp32, alone_ms = ms.get((cell["place"], FP32)), ms.get((alone, form)) or ms.get((alone, FP32))
        return {
            "to_fp32": own / in_fp32 if own and in_fp32 else None,
            "speedup": cell["tokens_per_round"] * alone_ms / own if own and alone_ms else None,
        }

    return {**row, "cells": [{**cell, **ratios(cell)} for cell in row["cells"]]}


def refusals(cells: Iterable[Row]) -> list[str]:
    """Each reason for which nothing was measured, with the places and forms that it holds for."""
    forms: dict[tuple[str, str], list[str]] = {}
    for each in cells:
        if each["refused"]:
            forms.setdefault((each["refused"], each["place"]), []).append(each["form"])
    places: dict[str, list[str]] = {}
    for (reason, place), names in forms.items():
        places.setdefault(reason, []).append(f"{place} ({', '.join(names)})")
    return [f"{reason}: {'; '.join(each)}" for reason, each in places.items()]


def _setting(row: Row) -> str:
    versions = row["versions"]
    return (
        f"`{row['target']}` with `{row['draft']}`, K = {row['num_draft_tokens']}, temperature 0.8. The cells "
        "are medians, measured in turns, and ratios are those of the medians. The ranks share "
        f"{row['num_threads']} threads of an {row['processor']}; torch {versions['torch']}, commit "
        f"{str(row['git_commit'])[:12]}. A precision is the target's, unless the column names the draft. Everything "
        "else is fp32; in the bf16 and fp16 columns both models have that format."
    )


def _table(row: Row, names: Sequence[str], key: str, form: str) -> str:
    """Lines for places, columns for precisions; lines without any such figure are left out."""
    found = {(each["place"], each["form"]): each[key] for each in row["cells"]}
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for place in PLACES:
        values = [found.get((place.name, name)) for name in names]
        if any(values):
            shown = ("-" if value is None else form.format(value) for value in values)
            lines.append(f"| {place.name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def precision(row: Row) -> str:
    """What each precision of the target costs on one rank, as a table and in words."""
    row = _with_ratios(row)
    cells = {(each["place"], each["form"]): each for each in row["cells"]}
    lines = [
        "| target, one rank | weights, MiB | plain step / fp32's | round / fp32's | speculation gains |",
        "|---|---|---|---|---|",
    ]
    for name, num_bytes in row["target_bytes"].items():
        alone, both = cells.get((ALONE, name)), cells.get((ONE_RANK, name))
        if alone and both and alone["to_fp32"] and both["to_fp32"]:
            figures = f"{alone['to_fp32']:.2f} | {both['to_fp32']:.2f} | {both['speedup']:.2f}x"
            lines.append(f"| {name} | {num_bytes / MIB:.0f} | {figures} |")
    return "\n\n".join(["\n".join(lines), " ".join(_words(row, cells))])


def _words(row: Row, cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[str]:
    """What takes less and what takes more time than fp32, as it was measured."""
    in_place = {form: each for (place, form), each in cells.items() if place == ONE_RANK and each["to_fp32"]}
    kinds = {
        "8 or 4 bits in the target": [name for name in row["target_bytes"] if name.startswith(("int8", "nf4"))],
        "8 bits in the draft": [name for name in in_place if name.startswith("draft")],
        "16 bits in both models": ["bf16", "fp16"],
    }
    for kind, names in kinds.items():
        ratios = {name: in_place[name]["to_fp32"] for name in names if name in in_place}
        gained = [f"{name} {1 - ratio:.0%}" for name, ratio in ratios.items() if ratio < 1 - UNLIKE]
        lost = [f"{name} {ratio - 1:.0%}" for name, ratio in ratios.items() if ratio > 1 + UNLIKE]
        said = [f"shorten a round: {', '.join(gained)}"] if gained else []
        said += [f"lengthen a round: {', '.join(lost)}"] if lost else []
        if ratios:
            yield f"{kind} {'; '.join(said) if said else 'change nothing'}."
    threads, processor = row["num_threads"], row["processor"]
    yield (
        f"Measured on the shipped pair with {threads} threads of an {processor}, K = {row['num_draft_tokens']}. The "
        "fp32 line keeps its weights in 16 bits."
    )
