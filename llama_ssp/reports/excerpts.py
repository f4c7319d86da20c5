"""A few completions for the report, as records of `summary.json`: their text in spans, drafted or not."""

from dataclasses import dataclass, field

NUM_EXCERPTS = 3
"""Completions that a run keeps for its report."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Characters whose tokens were drafted and accepted, or chosen by the target."""

    text: str
    drafted: bool


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """One completion: the end of its prompt, and its text in spans."""

    index: int
    sample: int
    mode: str
    prompt: str
    spans: list[Span] = field(default_factory=list)
