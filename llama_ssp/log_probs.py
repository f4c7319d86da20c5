"""Log-probabilities of the tokens of a text, as records and the library hold them. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Log-probabilities of tokens of a text, in nats, and for each the most probable tokens in its place, best first.

    Tokens of probability 0 are not among these.
    """

    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]

    def part(self, tokens: slice, num_top: int) -> "LogProbs":
        """Log-probabilities of some tokens, with `num_top` of the most probable tokens in place of each."""
        return LogProbs(
            log_probs=self.log_probs[tokens], top_ids=[top[:num_top] for top in self.top_ids[tokens]],
            top_log_probs=[top[:num_top] for top in self.top_log_probs[tokens]],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompletionLogProbs:
    """Log-probabilities of a completion, as `logprobs` and `prompt_logprobs` ask; None for what was not asked.

    Attributes:
        logprobs: of the new tokens under the model, at temperature 1 and before all processors.
        drawn_logprobs: the same under the law that they were drawn from; None if it is the model's own, and of greedy
            text, whose draws are certain.
        prompt_logprobs: of the prompt's tokens but the first, under the model.
    """

    logprobs: LogProbs | None
    drawn_logprobs: LogProbs | None
    prompt_logprobs: LogProbs | None
