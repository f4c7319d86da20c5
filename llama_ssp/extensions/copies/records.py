"""The record of prompt look-up: its settings with their checks, and the costs that a plan counts. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.catalogue import read_path
from llama_ssp.errors import ConfigError
from llama_ssp.settings.drafters import DrafterRecord, DraftTerms, RoundSizes
from llama_ssp.settings.extensions import Range
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from llama_ssp.settings.tasks import NoEffect
from llama_ssp.text.messages import said

MOST_CORPUS_TOKENS = 2**20
"""Tokens of the longest corpus."""
TABLE_BITS = 16
"""Base-2 logarithm of the number of entries that a table has for sequences of one length."""
OWN_KERNELS, NODE_KERNELS, OTHER_KERNELS, CORPUS_KERNELS = 30, 9, 68, 30
"""Numbers of kernels, as torch's dispatcher counted them: for a search in a row's own text, for each child that a node
of a level of a tree may have, for a search in other texts of the run, and for one in a corpus."""
_MOST_COMPARED = 64


@dataclass(kw_only=True)
class NgramConfig(DrafterConfig):
    """Prompt look-up."""

    longest: int = setting(
        4, "the most of the last tokens that are compared; a longer match is preferred to a shorter one."
    )
    shortest: int = setting(1, "the fewest of them that make a match.")
    history: int = setting(
        64,
        "newest other texts of the run that longer matches are copied from, such as samples of one prompt; 0 for none.",
    )
    corpus: str | None = setting(
        None, "a run.jsonl, or a file of text, that still longer matches are copied from, the most frequent ones."
    )

    @property
    def num_corpus_tokens(self) -> int:
        """The number of tokens of the corpus that there is room for: one for two bytes of the file.

        If the corpus has more tokens, its last ones are kept. Raises ConfigError if there is no such file.
        """
        if self.corpus is None:
            return 0
        file = read_path(self.corpus)
        if not file.is_file():
            raise ConfigError(f"draft.corpus={self.corpus} is no file: give a run.jsonl or a text")
        return min(file.stat().st_size // 2 + 1, MOST_CORPUS_TOKENS)


_RANGES: tuple[Range, ...] = (
    ("draft.longest", lambda n: 1 <= n <= _MOST_COMPARED, f"1 to {_MOST_COMPARED} tokens"),
    ("draft.shortest", lambda n: n >= 1, "at least 1"),
    ("draft.history", lambda n: n >= 0, "at least 0, which looks at no other text"),
)


def _problems(config: RunConfig) -> Iterator[str | NoEffect]:
    draft: Any = config.draft
    if draft.shortest > draft.longest:
        fewest, most = said("draft.shortest", draft.shortest), said("draft.longest", draft.longest)
        yield f"{fewest} is more than {most}: give fewer"
    if config.speculation.tree is not None:
        reason = "with speculation.tree, which copies its own text"
        yield from (NoEffect(key, reason) for key in ("draft.history", "draft.corpus"))


def _terms(draft: Any, round_: RoundSizes) -> DraftTerms:  # noqa: ANN401 - an `NgramConfig`
    """Count kernels, and the bytes of `drafter.History` and `drafter.Corpus`; ConfigError for a missing corpus file."""
    if round_.tree:
        return DraftTerms(num_kernels=OWN_KERNELS + NODE_KERNELS * sum(round_.tree.widths))
    num_lengths, num_texts = draft.longest - draft.shortest + 1, draft.history
    rows, table = num_texts + round_.batch_size + 1, num_lengths << TABLE_BITS
    texts_bytes = 8 * (rows * round_.num_slots + table) if num_texts else 0
    return DraftTerms(
        num_kernels=OWN_KERNELS + OTHER_KERNELS * bool(num_texts) + CORPUS_KERNELS * bool(draft.corpus),
        held_bytes=texts_bytes + draft.num_corpus_tokens * (4 + 12 * num_lengths),
    )


def _of_library(draft: Any, num_draft_tokens: int) -> dict[str, object]:  # noqa: ANN401 - an `NgramConfig`
    return {"prompt_lookup_num_tokens": num_draft_tokens, "max_matching_ngram_size": draft.longest}


# Copies what followed the last tokens where they stood before. Source: Saxena 2023, "Prompt Lookup Decoding".
NGRAM = DrafterRecord(
    name="ngram",
    make="llama_ssp.extensions.copies.drafter:NgramDrafter",
    config=NgramConfig,
    has_trees=True,
    prepare="llama_ssp.extensions.copies.corpus:read_corpus",
    ranges=_RANGES,
    problems=_problems,
    terms=_terms,
    step_name="search of copies",
    alone=lambda draft: replace(draft, history=0),
    of_library=_of_library,
)
