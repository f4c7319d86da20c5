"""The record of pairs on ranks that Python starts."""

from llama_ssp.api.elsewhere import Elsewhere

RANKS = Elsewhere(name="ranks", load="llama_ssp.extensions.python_ranks.pair:PairOnRanks")
