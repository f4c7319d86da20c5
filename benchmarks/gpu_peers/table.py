"""The table of a row of results: of all turns the median."""

import statistics

from benchmarks.measured import Row, markdown

_HEADS = ["ms/token", "a step or round, ms", "tokens a round", "of a copy's speed", "first token, ms"]


def text(row: Row) -> str:
    """How it was measured, a table for each prompt length and temperature, and a line for each that is not in it."""
    versions = ", ".join(f"{name} {version}" for name, version in row["peers"].items())
    dial = "" if row["agreement"] is None else f" (synthetic weights, agreement set to {row['agreement']:g})"
    how = (
        f"{row['target']} with {row['draft']} in bf16{dial}, K = {row['num_draft_tokens']}, {row['max_new_tokens']} "
        f"new tokens, medians of {row['turns']} turns: one {row['device']}, where a copy moves "
        f"{row['copy_bytes_per_s'] / 1e12:.3g} TB/s; {versions}."
    )
    parts = [how]
    for key in dict.fromkeys((cell["prompt_tokens"], cell["temperature"]) for cell in row["cells"]):
        cells = [cell for cell in row["cells"] if (cell["prompt_tokens"], cell["temperature"]) == key]
        heads = ["behind {} tokens, temperature {:g}".format(*key), *_HEADS]
        parts.append(markdown(heads, [_line(cell, row) for cell in cells]))
    return "\n\n".join([*parts, *(f"{name}: {reason}." for name, reason in row["lost"].items())])


def step_ms(cell: Row) -> float:
    """Milliseconds of a step, or of a round, after the first token."""
    times = zip(cell["s"], cell["first_s"], cell["rounds"], strict=True)
    return 1e3 * float(statistics.median((s - first_s) / rounds for s, first_s, rounds in times))


def _line(cell: Row, row: Row) -> list[str]:
    num_new, ms = row["max_new_tokens"], step_ms(cell)
    drafts = cell["drafts"]
    read_bytes = row["target_bytes"] + drafts * row["num_draft_tokens"] * row["draft_bytes"]
    tokens = statistics.median((num_new - 1) / rounds for rounds in cell["rounds"])
    figures = [
        f"{1e3 * statistics.median(cell['s']) / num_new:.2f}", f"{ms:.2f}", f"{tokens:.2f}" if drafts else "",
        f"{1e3 * read_bytes / row['copy_bytes_per_s'] / ms:.0%}", f"{1e3 * statistics.median(cell['first_s']):.1f}",
    ]  # fmt: skip
    return [cell["line"], *figures]
