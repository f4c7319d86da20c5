"""The jobs of a run, one per requested completion, and the order in which the turns of conversations are answered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from llama_ssp.run.prompts import Prompt, check_ids
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.engine.state import Request, count_equal_before


@dataclass(frozen=True, kw_only=True)
class PromptTask:
    """A requested completion, and its prompt.

    Attributes:
        request: for a later turn of a conversation it has as many ids as the prompt can have, until `with_answers`.
    """

    request: Request
    source: Prompt

    @property
    def prompt(self) -> str:
        """The prompt's text, as the user wrote it."""
        return self.source.text

    @property
    def earlier_indices(self) -> range:
        """The indices of the turns before it in its conversation."""
        return range(self.request.index - len(self.source.earlier), self.request.index)


@dataclass(frozen=True, kw_only=True)
class JobMaker:
    """Encodes prompts for the target; `context` is the most tokens of prompt and completion together."""

    tokenizer: PreTrainedTokenizerBase
    context: int
    vocab_size: int

    def jobs(self, prompts: Sequence[Prompt], config: RunConfig, *, first_index: int = 0) -> list[PromptTask]:
        """Encode prompts, a job for each requested sample; raises ConfigError as `Prompt.encode` and `check_ids` do."""
        num_new, encoded = config.max_new_tokens, []
        for prompt in prompts:
            num_answers = len(prompt.earlier)
            ids = prompt.encode(self.tokenizer, chat=config.chat, answers=[""] * num_answers)
            self._check(ids, prompt, num_new, num_answers=num_answers)
            encoded.append(ids + ids[-1:] * (num_answers * num_new))
        counted = zip(prompts, encoded, count_equal_before(encoded), strict=True)
        return [
            PromptTask(
                request=Request(
                    index=index, sample=sample, prompt_ids=ids, max_new_tokens=num_new, num_equal_before=number
                ),
                source=prompt,
            )
            for index, (prompt, ids, number) in enumerate(counted, start=first_index)
            for sample in range(config.num_samples)
        ]  # fmt: skip

    def with_answers(self, job: PromptTask, answers: Sequence[str], *, chat: bool) -> PromptTask:
        """Put the answers to the earlier turns into a job's prompt; raises ConfigError if they leave no room."""
        ids = job.source.encode(self.tokenizer, chat=chat, answers=answers)
        self._check(ids, job.source, job.request.max_new_tokens)
        return replace(job, request=replace(job.request, prompt_ids=ids))

    def _check(self, ids: Sequence[int], prompt: Prompt, num_new: int, *, num_answers: int = 0) -> None:
        check_ids(
            ids, max_new_tokens=num_new, context=self.context, vocab_size=self.vocab_size, prompt=prompt.text,
            num_answers=num_answers,
        )  # fmt: skip


def in_turns(jobs: Sequence[PromptTask], *, keeps_order: bool) -> Iterator[list[PromptTask]]:
    """Divide jobs so that earlier turns of a conversation come in earlier groups: as few as possible, or in order.

    Jobs without conversations are one group. `keeps_order` is for texts that somebody reads as they come.
    """
    if not keeps_order:
        by_turn = sorted(jobs, key=_turn)
        yield from (list(group) for _, group in groupby(by_turn, key=_turn))
        return
    group: list[PromptTask] = []
    for job in jobs:
        if any(other.request.index in job.earlier_indices for other in group):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def _turn(job: PromptTask) -> int:
    return len(job.source.earlier)
