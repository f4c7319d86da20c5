"""From prompts to the jobs of a run: token ids as the model expects them, and the order of a conversation's turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, groupby

from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.reports.records import LineKey
from llama_ssp.run.prompts import Message, Prompt, reason_of
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.engine.state import Request, count_equal_before

EXCERPT = 40
"""Longest excerpt of a prompt in an error."""


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

    def key(self, mode: str) -> LineKey:
        """What names its completion in a mode."""
        return self.request.index, mode, self.request.sample

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
        """Encode prompts, a job for each requested sample; raises as `encode` and `check_ids`."""
        num_new, encoded = config.max_new_tokens, []
        for prompt in prompts:
            num_answers = len(prompt.earlier)
            ids = self._encode(prompt, num_new, chat=config.chat, answers=[""] * num_answers, num_missing=num_answers)
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
        ids = self._encode(job.source, job.request.max_new_tokens, chat=chat, answers=answers)
        return replace(job, request=replace(job.request, prompt_ids=ids))

    def _encode(
        self, prompt: Prompt, num_new: int, *, chat: bool, answers: Sequence[str], num_missing: int = 0
    ) -> tuple[int, ...]:
        ids = ids_of(prompt, self.tokenizer, chat=chat, answers=answers)
        check_ids(
            ids, max_new_tokens=num_new, context=self.context, vocab_size=self.vocab_size, prompt=prompt.text,
            num_answers=num_missing,
        )  # fmt: skip
        return ids


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


def ids_of(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, chat: bool, answers: Sequence[str] = ()
) -> tuple[int, ...]:
    """Encode a prompt with the answers to its earlier turns; raises as `encode`."""
    if prompt.ids is not None:
        return prompt.ids
    if prompt.messages is None:
        return encode(prompt.text, tokenizer, chat=chat, earlier=[*zip(prompt.earlier, answers, strict=True)])
    whole: list[Message] = []
    given = iter(answers)
    for message in (*prompt.messages, {"role": prompt.role, "content": prompt.text}):
        if whole and whole[-1]["role"] == message["role"] == "user":
            whole.append({"role": "assistant", "content": next(given)})
        whole.append(message)
    return encode_messages(whole, tokenizer)


def encode(
    text: str, tokenizer: PreTrainedTokenizerBase, *, chat: bool, earlier: Sequence[tuple[str, str]] = ()
) -> tuple[int, ...]:
    """Encode a text as the model expects it, after earlier turns with their answers.

    With `chat`, texts are a user's messages for the chat template. Otherwise each turn stands as it was written, with a
    line break after its answer. An empty text becomes the begin-of-sequence token. Raises CheckpointError if the chat
    template is damaged; ConfigError if there is none, or the prompt has no token or is not valid Unicode.
    """
    if chat:
        spoken = zip(cycle(("user", "assistant")), (*chain(*earlier), text), strict=False)
        return _encode_in_template([{"role": role, "content": content} for role, content in spoken], tokenizer)
    _check_unicode(text)
    ids = tokenizer("".join(f"{turn}{answer}\n" for turn, answer in earlier) + text).input_ids
    return _never_empty(ids, tokenizer)


def encode_messages(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Encode messages in the chat template, up to where the assistant speaks; its own last message stays open.

    Raises as `encode`.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"messages, such as {messages[-1]['content'][:EXCERPT]!r}, need a tokenizer with a chat template: use a "
            "chat model, or give texts without roles"
        )
    return _encode_in_template(messages, tokenizer)


def _encode_in_template(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    for message in messages:
        _check_unicode(message["content"])
    text = in_template(messages, tokenizer, goes_on=messages[-1]["role"] == "assistant")
    return _never_empty(tokenizer(text, add_special_tokens=False).input_ids, tokenizer)


def _never_empty(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if not ids and tokenizer.bos_token_id is None:
        raise ConfigError("an empty prompt needs a begin-of-sequence token, which this tokenizer lacks: write a prompt")
    return tuple(ids) or (tokenizer.bos_token_id,)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt {text[:EXCERPT]!r} holds {text[error.start]!r}, a lone surrogate: write it in UTF-8"
        ) from None


def in_template(messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, goes_on: bool = False) -> str:
    """Write messages in the tokenizer's chat template, up to where the assistant speaks.

    With `goes_on`, the last message stays open, for the assistant to continue it. Raises CheckpointError if the
    template is damaged, and ConfigError if there is none.
    """
    if not tokenizer.chat_template:
        raise ConfigError("chat=true needs a tokenizer with a chat template; leave chat out, or use a chat model")
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=not goes_on, continue_final_message=goes_on, tokenize=False
            )
        )
    except Exception as error:  # a template can raise anything
        raise CheckpointError(
            f"the chat template in {tokenizer.name_or_path} fails ({reason_of(error)}): copy tokenizer_config.json or "
            "chat_template.jinja again, or leave chat out"
        ) from error


def check_ids(
    ids: Sequence[int], *, max_new_tokens: int, context: int, vocab_size: int, prompt: str, num_answers: int = 0
) -> None:
    """Raise ConfigError for a prompt that leaves no room for the new tokens, or has token ids that the model lacks.

    `num_answers` to earlier turns, each as long as the new tokens, are still to come before it.
    """
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"prompt {prompt[:EXCERPT]!r} has token id {max(ids)}, and the model knows {vocab_size} ids, from 0 on: "
            "remove the text of that token"
        )
    num_texts = num_answers + 1
    if len(ids) + num_texts * max_new_tokens > context:
        room = (context - len(ids)) // num_texts
        remedy = (
            f"max_new_tokens={room} would fit" if room > 0 else f"a prompt has room for {context - num_texts} at most"
        )
        counted = f" for each of {num_texts} answers" if num_answers else ""
        raise ConfigError(
            f"prompt {prompt[:EXCERPT]!r} has {len(ids)} tokens, and with max_new_tokens={max_new_tokens}{counted} "
            f"that is more than the context of {context}; {remedy}"
        )
