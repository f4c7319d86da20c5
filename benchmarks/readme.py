"""The README's table of measured figures, out of the newest stored row: `python -m benchmarks.readme` prints it."""

import json
from typing import Any

from benchmarks.timing import RESULTS

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
    "nor verification takes {other_share:.1%} of a round. Behind 1500 tokens of context a token takes "
    "{plain_1500_to_100:.2f} (plain) and {speculative_1500_to_100:.2f} times (speculative) what it takes behind 100."
)


def measured() -> str:
    """What `peers.py` measured last, as Markdown."""
    rows = (RESULTS / "peers.jsonl").read_text(encoding="utf-8").splitlines()
    row: dict[str, Any] = json.loads(rows[-1])
    ms = row["ms_per_token"]
    figures = (
        row
        | row["versions"]
        | {
            "ours_plain": ms["ours, plain"],
            "ours_speculative": ms["ours, speculative"],
            "generate": ms["transformers, generate"],
            "assisted": ms["transformers, assisted"],
        }
    )
    return "\n\n".join(text.format(**figures) for text in (_SETTING, _TABLE, _REST))


if __name__ == "__main__":
    print(measured())
