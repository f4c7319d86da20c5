"""Prompt look-up: copies what followed the last tokens where they stood before in the prompt or the text.

Source: Saxena 2023, "Prompt Lookup Decoding"; no model, so c = 0.
"""

from dataclasses import dataclass

from llama_ssp.config.drafts.drafter import DrafterRecord
from llama_ssp.config.schema import DrafterConfig

NGRAM_DRAFT = "ngram"


@dataclass(kw_only=True)
class NgramConfig(DrafterConfig):
    """How many of the last tokens must have stood in the text before, at most and at least."""

    longest: int = 4
    shortest: int = 1


DRAFTER = DrafterRecord(name=NGRAM_DRAFT, make="llama_ssp.drafting.ngram:make", config=NgramConfig)
