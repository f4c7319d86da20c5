"""The evidence of a suite: completions of both modes in pairs, and the target's probabilities of their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_ssp.evaluation.martingales import TextSums
from llama_ssp.reports.records import LineKey
from llama_ssp.reports.summary import CompletionPair
from llama_ssp.settings.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All pairs of a run, in order of prompts and samples.

    Attributes:
        log_probs: of the scored texts, a natural logarithm per new token.
        sums: of the speculative texts, if the suite needs them.
    """

    config: RunConfig
    pairs: Sequence[CompletionPair]
    log_probs: Mapping[LineKey, Sequence[float]]
    sums: Sequence[TextSums] = ()
