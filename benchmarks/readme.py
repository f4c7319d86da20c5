"""Writes what was measured into README and pages, from the newest stored rows: `python -m benchmarks.readme`.

It fills the regions between `<!-- measured: NAME -->` and `<!-- end -->` in README.md and docs. A region stays empty
until its program has stored a row.
"""

import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks import chats, long_prompts, precisions
from benchmarks.measured import ROOT, Row, markdown, stored

_SETTING = (
    "The shipped pair, `{target}` with `{draft}`, and transformers' `generate` and assisted generation: fp32, one rank "
    "with {num_threads} threads of an {processor}, K = {num_draft_tokens}, temperature {temperature:g}, 64 new tokens, "
    "medians; torch {torch}, transformers {transformers}. The machine was shared: compare ratios, not milliseconds."
)
_TABLE = """\
| | llama-ssp, ms/token | transformers, ms/token | ratio |
|---|---|---|---|
| plain | {ours_plain:.3g} | {generate:.3g} | **{plain_to_generate:.2f}** |
| speculative | {ours_speculative:.3g} | {assisted:.3g} | **{speculative_to_assisted:.2f}** |"""
_GAIN = (
    "Speculation gains {speedup:.2f}x over llama-ssp's own plain decoding, at {tokens_per_round:.2f} tokens per round."
)
_REST = (
    "The forward passes of a round, timed alone, take {verify_ms:.2f} ms (verification) and {draft_step_ms:.2f} ms "
    "(each draft step). They bound a token at {bound_ms_per_token:.3g} ms; measured is {ours_speculative:.3g} ms, "
    "{speculative_to_bound:.2f} times that. Everything that is neither drafting nor verification takes "
    "{other_share:.1%} of a round. With 1500 tokens of context instead of 100, a token takes {plain_1500_to_100:.2f} "
    "times as long (plain) and {speculative_1500_to_100:.2f} times as long (speculative). Reading the weights once, at "
    "the {gb_per_s:.1f} GB/s of a long read or copy, is the limit of a forward pass. The forward passes take "
    "{forwards_to_weights:.2f} times that."
)


_HEADS = ["ms/token", "a step or round, ms", "tokens a round", "of a copy's speed", "first token, ms"]


def _figures(row: Row) -> Row:
    """What the texts of `peers` name; a ratio is that of the two medians as the texts show them."""
    ms = {name: float(f"{each:.3g}") for name, each in row["ms_per_token"].items()}
    bound, late = float(f"{row['bound_ms_per_token']:.3g}"), row["at_context_ms"]
    versions: Row = row["versions"]
    plain, speculative = ms["ours, plain"], ms["ours, speculative"]
    generate, assisted = ms["transformers, generate"], ms["transformers, assisted"]
    return {
        **row,
        **versions,
        "ours_plain": plain,
        "ours_speculative": speculative,
        "generate": generate,
        "assisted": assisted,
        "bound_ms_per_token": bound,
        "plain_to_generate": plain / generate,
        "speculative_to_assisted": speculative / assisted,
        "speedup": plain / speculative,
        "speculative_to_bound": speculative / bound,
        **{f"{mode}_1500_to_100": late[f"{mode}, 1500"] / late[f"{mode}, 100"] for mode in ("plain", "speculative")},
        "gb_per_s": row["memory_bytes_per_s"] / 1e9,
    }


def peers_text(row: Row) -> str:
    """The table of `peers`, for the front page."""
    return "\n\n".join(text.format(**_figures(row)) for text in (_SETTING, _TABLE, _GAIN))


def round_text(row: Row) -> str:
    """What `peers` measured of a round."""
    return _REST.format(**_figures(row))


def gpu_peers_text(row: Row) -> str:
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
        parts.append(markdown(heads, [_gpu_line(cell, row) for cell in cells]))
    return "\n\n".join([*parts, *(f"{name}: {reason}." for name, reason in row["lost"].items())])


def _step_ms(cell: Row) -> float:
    """Milliseconds of a step, or of a round, after the first token."""
    times = zip(cell["s"], cell["first_s"], cell["rounds"], strict=True)
    return 1e3 * float(statistics.median((s - first_s) / rounds for s, first_s, rounds in times))


def _gpu_line(cell: Row, row: Row) -> list[str]:
    num_new, ms = row["max_new_tokens"], _step_ms(cell)
    drafts = cell["drafts"]
    read_bytes = row["target_bytes"] + drafts * row["num_draft_tokens"] * row["draft_bytes"]
    tokens = statistics.median((num_new - 1) / rounds for rounds in cell["rounds"])
    figures = [
        f"{1e3 * statistics.median(cell['s']) / num_new:.2f}",
        f"{ms:.2f}",
        f"{tokens:.2f}" if drafts else "",
        f"{1e3 * read_bytes / row['copy_bytes_per_s'] / ms:.0%}",
        f"{1e3 * statistics.median(cell['first_s']):.1f}",
    ]
    return [cell["line"], *figures]


TEXTS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "peers": ("peers", peers_text),
    "round": ("peers", round_text),
    "precisions": ("precisions", precisions.text),
    "gpu_peers": ("gpu_peers", gpu_peers_text),
    "long_prompts": ("long_prompts", long_prompts.text),
    "chats": ("chats", chats.text),
}
"""By region, the program whose newest row it shows, and the text of a row."""


def pages() -> list[Path]:
    """README.md and every page that is written by hand or filled here."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: str) -> str:
    """A page with every region as the newest rows have it; a region without a row is empty."""

    def region(match: re.Match[str]) -> str:
        program, make = TEXTS[match[1]]
        rows = stored(program)
        text = f"{_wrapped(make(rows[-1]))}\n" if rows else ""
        return f"<!-- measured: {match[1]} -->\n{text}<!-- end -->"

    return re.sub(r"<!-- measured: (\w+) -->\n.*?<!-- end -->", region, page, flags=re.DOTALL)


def _wrapped(text: str) -> str:
    """Prose at 120 columns; tables and pictures as they are."""
    fill = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(line if line.startswith(("|", "!")) else fill(line) for line in text.splitlines())


def main() -> None:
    """Fill the regions of all pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            print(f"filled {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
