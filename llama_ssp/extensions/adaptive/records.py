"""The record of the chooser of K for each round (`speculation.num_draft_tokens=auto`). Imports no torch."""

from llama_ssp.catalogue import ModelShape
from llama_ssp.settings.lengths import LengthChooser

LENGTHS = (1, 2, 3, 4, 6, 8)
"""The K that the chooser has, besides 0."""


def lengths_for(draft: ModelShape | None) -> tuple[int, ...]:
    """Return the K that the chooser has with a draft; none is larger than the block of a draft head."""
    most = (draft and draft.most_drafted) or max(LENGTHS)
    return tuple(sorted({min(number, most) for number in LENGTHS}))


AUTO = LengthChooser(
    name="auto",
    purpose="chooses it for each round",
    lengths=lengths_for,
    make="llama_ssp.extensions.adaptive.costs:make",
    simulate="llama_ssp.extensions.adaptive.costs:of_costs",
    finds_best=True,
)
