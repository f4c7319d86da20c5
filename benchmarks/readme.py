"""What the repository says of measurements, out of the newest stored rows: `python -m benchmarks.readme` writes it.

In README.md the regions between `<!-- measured: NAME -->` and `<!-- end -->`; in docs the figures and the long table.
What has not been measured yet stays empty, and is not written.
"""

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import lengths, sweep
from benchmarks.curves import Quadratic
from benchmarks.placement_pages import document, precision
from benchmarks.timing import RESULTS

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]

_SETTING = (
    "`{target}` with `{draft}`, fp32, one rank with {num_threads} threads of an {processor}, K = {num_draft_tokens}, "
    "temperature {temperature:g}, 64 new tokens, medians; torch {torch}, transformers {transformers}. On such a shared "
    "machine only the ratios mean something."
)
_TABLE = """\
| | ours, ms/token | transformers, ms/token | ratio |
|---|---|---|---|
| plain | {ours_plain:.2f} | {generate:.2f} | **{plain_to_generate:.2f}** |
| speculative | {ours_speculative:.2f} | {assisted:.2f} | **{speculative_to_assisted:.2f}** |"""
_REST = (
    "Speculation gains {speedup:.2f}x over our own plain decoding, at {tokens_per_round:.2f} tokens per round. Timed "
    "alone, a round's forwards (one verification {verify_ms:.2f} ms, a draft step {draft_step_ms:.2f} ms) bound it at "
    "{bound_ms_per_token:.2f} ms/token; measured is {speculative_to_bound:.2f} times that. What is neither drafting "
    "nor verification takes {other_share:.1%} of a round. With 1500 tokens of context instead of 100, a token takes "
    "{plain_1500_to_100:.2f} times as long (plain) and {speculative_1500_to_100:.2f} times (speculative)."
)


_WEIGHTS = (
    " Those forwards take {forwards_to_weights:.2f} times what reading their weights once takes at the "
    "{gb_per_s:.1f} GB/s of a long read or copy, {cold_forwards_to_weights:.2f} times out of cold caches."
)


def newest(name: str) -> Row | None:
    """The last stored row of a program; None where there is none yet."""
    file = RESULTS / f"{name}.jsonl"
    rows = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    row: Row | None = json.loads(rows[-1]) if rows else None
    return row


def peers_text(row: Row) -> str:
    """What `peers` measured."""
    ms = row["ms_per_token"]
    figures = (
        row
        | row["versions"]
        | {
            "ours_plain": ms["ours, plain"],
            "ours_speculative": ms["ours, speculative"],
            "generate": ms["transformers, generate"],
            "assisted": ms["transformers, assisted"],
            "gb_per_s": row.get("memory_bytes_per_s", 0.0) / 1e9,
        }
    )
    rest = _REST + (_WEIGHTS if "forwards_to_weights" in row else "")
    return "\n\n".join(text.format(**figures) for text in (_SETTING, _TABLE, rest))


def lengths_text(row: Row) -> str:
    """What `lengths` measured."""
    curves = {name: Quadratic(**series["fit"]) for name, series in row["series"].items()}

    def growths(kind: str) -> str:
        return " and ".join(f"{curves[f'{kind}, {mode}'].growth:+.1%} ({mode})" for mode in lengths.MODES)

    said = "; ".join(
        f"{kind}, {mode}: {curves[f'{kind}, {mode}'].verdict}"
        for kind in (lengths.CONTEXT, lengths.TEXT)
        for mode in lengths.MODES
    )
    longest_pause = max(row["series"][f"{lengths.PAUSE}, {lengths.MODES[0]}"]["places"])
    return (
        "![Milliseconds per token behind longer contexts, late in a text, and after pauses](docs/lengths.svg)\n\n"
        f"Fitted to a + b n + c n², with 95 % intervals: {said}. Counted by a test, a round's operators do not grow, "
        "and its bytes grow in a straight line: where every round reads all slots, the text's length itself adds "
        f"{growths(lengths.ALL_READ)} from its beginning to its end. A bend, which runs on a busy machine may show, is "
        "the machine's: others push the models out of the cache that its processors share, so that after a pause of "
        f"{longest_pause:g} ms, in which nothing runs, a round takes {growths(lengths.PAUSE)} longer, and rounds that "
        "read more leave more time for that."
    )


def sweep_text(row: Row) -> str:
    """What `sweep` measured."""
    setting = f"{row['num_threads']} threads of an {row['processor']}, K = {sweep.BASE['num_draft_tokens'][0]}"
    return (
        "![Ours beside transformers over K, prompt length, batch and precision](docs/sweep.svg)\n\n"
        f"`task=benchmark` on the shipped pair ({setting}, {sweep.BASE['prompt_tokens'][0]} tokens of prompt and one "
        "row where nothing else is said). transformers assists one row at a time."
    )


TEXTS: dict[str, Callable[[Row], str]] = {
    "peers": peers_text,
    "lengths": lengths_text,
    "sweep": sweep_text,
    "placements": precision,
}
"""What goes into README.md, by the name of the rows and of the region."""
FILES: dict[str, tuple[str, Callable[[Row], str]]] = {
    "docs/lengths.svg": ("lengths", lengths.draw),
    "docs/sweep.svg": ("sweep", sweep.draw),
    "docs/PLACEMENTS.md": ("placements", document),
}
"""Files of their own, and the rows that they are made of."""


def filled(readme: str) -> str:
    """README.md with every region as the newest rows have it; a region without a row is empty."""

    def region(match: re.Match[str]) -> str:
        row = newest(match[1])
        text = f"{_wrapped(TEXTS[match[1]](row))}\n" if row else ""
        return f"<!-- measured: {match[1]} -->\n{text}<!-- end -->"

    return re.sub(r"<!-- measured: (\w+) -->\n.*?<!-- end -->", region, readme, flags=re.DOTALL)


def _wrapped(text: str) -> str:
    """Prose at 120 columns; tables and pictures as they are."""
    fill = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(line if line.startswith(("|", "!")) else fill(line) for line in text.splitlines())


def made_files() -> dict[str, str]:
    """The content of each of FILES that can be made."""
    return {name: make(row) for name, (rows, make) in FILES.items() if (row := newest(rows))}


def main() -> None:
    """Write README.md and the files in docs."""
    readme = ROOT / "README.md"
    contents = {"README.md": filled(readme.read_text(encoding="utf-8"))} | made_files()
    for name, content in contents.items():
        (ROOT / name).write_text(content, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
