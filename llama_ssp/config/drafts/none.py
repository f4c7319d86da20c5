"""Plain decoding: the target alone."""

from llama_ssp.config.drafts.drafter import DrafterRecord
from llama_ssp.config.schema import NO_DRAFT

DRAFTER = DrafterRecord(name=NO_DRAFT, make=None)
