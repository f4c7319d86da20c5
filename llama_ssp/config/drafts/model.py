"""A smaller model. Source: arXiv:2302.01318, arXiv:2211.17192."""

from llama_ssp.config.drafts.drafter import DrafterRecord
from llama_ssp.config.schema import MODEL_DRAFT

DRAFTER = DrafterRecord(name=MODEL_DRAFT, make="llama_ssp.drafting.model:make", has_model=True)
