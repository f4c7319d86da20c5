"""Log-probabilities of the tokens of a text, as records and the library hold them. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprob:
    """A token that a position could have had, and its log-probability in nats."""

    token: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token of a text and its log-probability in nats.

    Attributes:
        top: the most probable tokens in its place, best first; none of probability 0.
    """

    token: int
    logprob: float
    top: list[TopLogprob]


def part(logprobs: Sequence[TokenLogprob], tokens: slice, *, num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of some tokens, with `num_top` of the most probable tokens in place of each."""
    return [replace(one, top=one.top[:num_top]) for one in logprobs[tokens]]


@dataclass(frozen=True, kw_only=True)
class CompletionLogProbs:
    """Log-probabilities of a completion, as `logprobs` and `prompt_logprobs` request them; None for others.

    Attributes:
        logprobs: those of the new tokens under the model, at temperature 1 and before all processors.
        drawn_logprobs: those of the new tokens under the law that they were drawn from; None if it is the model's own,
            and for greedy text, whose draws are certain.
        prompt_logprobs: those of the prompt's tokens but the first, under the model.
    """

    logprobs: list[TokenLogprob] | None = None
    drawn_logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
