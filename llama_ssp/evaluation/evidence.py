"""The evidence of a suite: completions of both modes in pairs, and the target's probabilities of their tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llama_ssp.evaluation.martingales import TextSums
from llama_ssp.reports.records import PLAIN, CompletionLine, LineKey
from llama_ssp.settings.schema import RunConfig


class CompletionPair(NamedTuple):
    """The plain and the speculative completion of the same prompt and sample."""

    plain: CompletionLine
    speculative: CompletionLine


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


def pairs_of(lines: Iterable[CompletionLine]) -> list[CompletionPair]:
    """CompletionPair the lines of a run, whatever their order; those without a counterpart are left out."""
    by_mode: dict[bool, dict[tuple[int, int], CompletionLine]] = {True: {}, False: {}}
    for line in lines:
        by_mode[line.mode == PLAIN][line.index, line.sample] = line
    common = sorted(by_mode[True].keys() & by_mode[False].keys())
    return [CompletionPair(by_mode[True][key], by_mode[False][key]) for key in common]
