"""What `Pair.generate` returns for each completion."""

from dataclasses import dataclass
from itertools import chain
from typing import cast

from transformers import PreTrainedTokenizerBase

from llama_ssp.continuation import decode_after
from llama_ssp.engine.completion import FinishReason, RowCompletion

_SHOWN = 40
"""Characters of a text in a `repr`."""


@dataclass(frozen=True, kw_only=True)
class CompletionTimes:
    """Seconds of one completion; those of its batch's rounds are shared equally among the rows.

    Attributes:
        total_s: from the start of its prefill to its end.
        first_token_s: to its first token.
        draft_s, verify_s, other_s: its share of the rounds' parts; prefill is no part of them.
    """

    total_s: float
    first_token_s: float
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """A completion by `Pair.generate`, without its prompt.

    Attributes:
        index: the place of its prompt in the list.
        sample: which of the samples of its prompt.
        prompt_ids: what the model read.
        text: continues the prompt exactly; special tokens are left out.
        finish_reason: "length", "eos" or "stop".
        accepted_lengths: for each round, the accepted drafted tokens.
        draft_lengths: for each round, the drafted tokens.
        is_drafted: for each new token, whether it was drafted and accepted; the target chose the others.
        acceptance: share of the examined drafted tokens that were accepted; None without any.
        num_target_forwards: forwards of the target, including the prefill.
    """

    index: int
    sample: int
    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    accepted_lengths: list[int]
    draft_lengths: list[int]
    is_drafted: list[bool]
    acceptance: float | None
    num_target_forwards: int
    times: CompletionTimes

    @property
    def accepted_ids(self) -> list[int]:
        """The new tokens that were drafted and accepted, in order."""
        return [token for token, drafted in zip(self.token_ids, self.is_drafted, strict=True) if drafted]

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per new token, prefill included."""
        return 1e3 * self.times.total_s / len(self.token_ids)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        accepted = "" if self.acceptance is None else f", acceptance {self.acceptance:.2f}"
        speed = f"{self.ms_per_token:.1f} ms/token"
        return f"Completion({text!r}, {len(self.token_ids)} tokens, {self.finish_reason}{accepted}, {speed})"


def of_row(row: RowCompletion, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Make the completion of a finished row."""
    request, part_s = row.request, row.part_s
    examined = [(number, of) for number, of in zip(row.accepted_lengths, row.examined_lengths, strict=True) if of]
    num_examined = sum(of for _, of in examined)
    # The prefill gives the first token; a round gives its accepted tokens and one that the target chose.
    drafted = chain([False], *([True] * number + [False] for number in row.accepted_lengths))
    return Completion(
        index=request.index, sample=request.sample, prompt_ids=[*request.prompt_ids],
        text=decode_after(tokenizer, request.prompt_ids, row.token_ids), token_ids=row.token_ids,
        finish_reason=cast("FinishReason", row.finish_reason),
        accepted_lengths=row.accepted_lengths, draft_lengths=row.draft_lengths,
        is_drafted=[next(drafted, False) for _ in row.token_ids],
        acceptance=sum(number for number, _ in examined) / num_examined if num_examined else None,
        num_target_forwards=row.num_target_forwards,
        times=CompletionTimes(
            total_s=row.busy_s, first_token_s=row.first_token_s,
            draft_s=part_s["draft"], verify_s=part_s["verify"], other_s=part_s["other"],
        ),
    )  # fmt: skip
