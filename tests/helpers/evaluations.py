"""Completions for tests of suites, which say what matters to a verdict and nothing else."""

from collections.abc import Sequence
from dataclasses import replace

from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from tests.helpers import runs


def line(
    mode: str, token_ids: Sequence[int], *, index: int = 0, sample: int = 0, prompt: str = "p", text: str = "t"
) -> CompletionLine:
    """One completion."""
    fast = {"num_rounds": 1, "accepted_lengths": [1], "examined_lengths": [2]} if mode == SPECULATIVE else {}
    own = {"token_ids": list(token_ids), "num_new_tokens": len(token_ids), "prompt": prompt, "text": text}
    return replace(runs.PLAIN, index=index, sample=sample, mode=mode, **own, **fast)  # type: ignore[arg-type]


def both(
    plain: Sequence[int], fast: Sequence[int], *, index: int = 0, sample: int = 0
) -> tuple[CompletionLine, CompletionLine]:
    """A pair of completions with these tokens."""
    return line(PLAIN, plain, index=index, sample=sample), line(SPECULATIVE, fast, index=index, sample=sample)
