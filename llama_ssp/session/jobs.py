"""The jobs of a run, one per requested completion, and the order in which the turns of conversations are answered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from llama_ssp.config.schema import RunConfig
from llama_ssp.engine.state import Request, count_equal_before
from llama_ssp.session.prompt_records import Prompt
from llama_ssp.session.prompts import check_ids, encode_prompt


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


def make_prompt_tasks(
    prompts: Sequence[Prompt],
    config: RunConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    vocab_size: int,
    first_index: int = 0,
) -> list[PromptTask]:
    """Encode prompts, a job for each requested sample; raises ConfigError as `encode` and `check_ids` do."""
    encoded = []
    for prompt in prompts:
        num_new, num_answers = config.max_new_tokens, len(prompt.earlier)
        ids = encode_prompt(prompt, tokenizer, chat=config.chat, answers=[""] * num_answers)
        check_ids(
            ids, max_new_tokens=num_new, context=context, vocab_size=vocab_size, prompt=prompt.text,
            num_answers=num_answers,
        )  # fmt: skip
        encoded.append(ids + ids[-1:] * (num_answers * num_new))
    counted = zip(prompts, encoded, count_equal_before(encoded), strict=True)
    return [
        PromptTask(
            request=Request(
                index=index, sample=sample, prompt_ids=ids, max_new_tokens=config.max_new_tokens,
                num_equal_before=number,
            ),
            source=prompt,
        )
        for index, (prompt, ids, number) in enumerate(counted, start=first_index)
        for sample in range(config.num_samples)
    ]  # fmt: skip


def with_answers(
    job: PromptTask,
    answers: Sequence[str],
    *,
    chat: bool,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    vocab_size: int,
) -> PromptTask:
    """Put the answers to the earlier turns into a job's prompt; raises ConfigError if they leave no room."""
    request, ids = job.request, encode_prompt(job.source, tokenizer, chat=chat, answers=answers)
    num_new = request.max_new_tokens
    check_ids(ids, max_new_tokens=num_new, context=context, vocab_size=vocab_size, prompt=job.prompt)
    return replace(job, request=replace(request, prompt_ids=ids))


def waves(jobs: Sequence[PromptTask], *, keeps_order: bool) -> Iterator[list[PromptTask]]:
    """Divide jobs so that earlier turns of a conversation come in earlier waves: as few as possible, or in order.

    Jobs without conversations are one wave. `keeps_order` is for texts that somebody reads as they come.
    """
    if not keeps_order:
        by_turn = sorted(jobs, key=_turn)
        yield from (list(wave) for _, wave in groupby(by_turn, key=_turn))
        return
    wave: list[PromptTask] = []
    for job in jobs:
        if job.source.earlier and any(other.request.index in job.earlier_indices for other in wave):
            yield wave
            wave = []
        wave.append(job)
    if wave:
        yield wave


def _turn(job: PromptTask) -> int:
    return len(job.source.earlier)
