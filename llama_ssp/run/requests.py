"""Makes the requests of a run from prompts: token ids as the model expects them, turns of conversations in order."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.reports.records import LineKey
from llama_ssp.run.chat import NO_ARGUMENTS, in_template
from llama_ssp.run.lengths import problem_of_length, refuse
from llama_ssp.run.prompts import EXCERPT, Message, Prompt
from llama_ssp.settings.schema import RunConfig, TooLong
from llama_ssp.speculate.engine.masks import Vocabulary
from llama_ssp.speculate.engine.state import Request, count_equal_before


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest(Request):
    """A requested completion, and the prompt that it is for.

    For a later turn of a conversation, `prompt_ids` has the greatest length that the prompt can have, until
    `RequestMaker.with_answers` fills in the model's answers to the earlier turns.
    """

    source: Prompt = field(compare=False)

    @property
    def prompt(self) -> str:
        """The prompt's text, as the user wrote it."""
        return self.source.text

    def line_key(self, mode: str) -> LineKey:
        """The key of the completion's line in a mode."""
        return self.index, mode, self.sample

    @property
    def earlier_indices(self) -> range:
        """The indices of the earlier turns of the same conversation."""
        return range(self.index - len(self.source.earlier), self.index)


@dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Encodes prompts for the target.

    Attributes:
        context: the most tokens of prompt and completion together.
        eos_ids: tokens that end a completion.
    """

    tokenizer: PreTrainedTokenizerBase
    context: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of completions."""
        return Vocabulary(self.tokenizer, self.vocab_size, self.eos_ids)

    def requests(self, prompts: Sequence[Prompt], config: RunConfig, *, first_index: int = 0) -> list[PromptRequest]:
        """Encode prompts, and make a request for each sample of each prompt.

        With too_long=skip, prompts that do not fit get no requests. Raises as `encode`, and ConfigError for a prompt
        that the model cannot take.
        """
        num_new, encoded, problems = config.max_new_tokens, list[tuple[int, ...]](), list[tuple[Prompt, str]]()
        for prompt in prompts:
            num_answers = len(prompt.earlier)
            ids = ids_of(prompt, self.tokenizer, config, answers=[""] * num_answers)
            if problem := self._problem(prompt, ids, config, num_answers=num_answers):
                problems.append((prompt, problem))
            ids += ids[-1:] * (num_answers * num_new)
            encoded.append(self._cut(ids, config) if config.too_long is TooLong.truncate else ids)
        if config.too_long is TooLong.refuse:
            refuse(problems)
        left_out = {id(prompt) for prompt, _ in problems} if config.too_long is TooLong.skip else set()
        counted = zip(prompts, encoded, count_equal_before(encoded), strict=True)
        return [
            PromptRequest(
                index=index,
                sample=sample,
                prompt_ids=ids,
                max_new_tokens=num_new,
                num_equal_before=number,
                source=prompt,
            )
            for index, (prompt, ids, number) in enumerate(counted, start=first_index)
            for sample in range(config.num_samples)
            if id(prompt) not in left_out
        ]

    def with_answers(self, request: PromptRequest, answers: Sequence[str], config: RunConfig) -> PromptRequest:
        """Put the answers to the earlier turns into a request's prompt; raises ConfigError if they leave no room."""
        ids = ids_of(request.source, self.tokenizer, config, answers=answers)
        if config.too_long is TooLong.truncate:
            ids = self._cut(ids, config)
        elif problem := self._problem(request.source, ids, config):
            raise ConfigError(problem)
        return replace(request, prompt_ids=ids)

    def _problem(self, prompt: Prompt, ids: Sequence[int], config: RunConfig, num_answers: int = 0) -> str | None:
        check_vocabulary(prompt, ids, vocab_size=self.vocab_size)
        return problem_of_length(
            prompt, len(ids), max_new_tokens=config.max_new_tokens, context=self.context, num_answers=num_answers
        )

    def _cut(self, ids: tuple[int, ...], config: RunConfig) -> tuple[int, ...]:
        """Cut off the beginning of a prompt, but for its begin-of-sequence token, so that the new tokens have room."""
        most, begin = self.context - config.max_new_tokens, ids[: int(ids[0] == self.tokenizer.bos_token_id)]
        return ids if len(ids) <= most else begin + ids[len(ids) - most + len(begin) :]


def in_turns(requests: Sequence[PromptRequest], *, keeps_order: bool) -> Iterator[list[PromptRequest]]:
    """Divide requests into groups, such that earlier turns of a conversation come in earlier groups.

    Without conversations there is one group. By default there are as few groups as possible. With `keeps_order`, for
    texts that are shown as they are generated, the requests keep their order.
    """
    if not keeps_order:
        by_turn = sorted(requests, key=_turn)
        yield from (list(group) for _, group in groupby(by_turn, key=_turn))
        return
    group: list[PromptRequest] = []
    for request in requests:
        if any(other.index in request.earlier_indices for other in group):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _turn(request: PromptRequest) -> int:
    return len(request.source.earlier)


def ids_of(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: RunConfig, *, answers: Sequence[str] = ()
) -> tuple[int, ...]:
    """Encode a prompt with the answers to its earlier turns, as the chat settings say; raises as `encode_messages`.

    Outside of a chat, the text of each turn is followed by its answer and a line break.
    """
    if prompt.ids is not None:
        return prompt.ids
    if prompt.messages is None and not config.chat:
        earlier = (f"{turn}{answer}\n" for turn, answer in zip(prompt.earlier, answers, strict=True))
        return encode("".join((*earlier, prompt.text)), tokenizer)
    before = [{"role": "user", "content": turn} for turn in prompt.earlier]
    whole, given = list[Message](), iter(answers)
    for message in (*(prompt.messages or before), {"role": prompt.role, "content": prompt.text} | prompt.more):
        if whole and whole[-1]["role"] == message["role"] == "user":
            whole.append({"role": "assistant", "content": next(given)})
        whole.append(message)
    encoded = _encode_in_template if prompt.messages is None else encode_messages
    return encoded(whole, tokenizer, config.chat_arguments)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Encode a text; an empty one becomes the begin-of-sequence token.

    Raises ConfigError for a prompt without a token, or that is not valid Unicode.
    """
    _check_unicode(text)
    return _never_empty(tokenizer(text).input_ids, tokenizer)


def encode_messages(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    """Encode messages in the chat template, up to where the assistant speaks; its own last message stays open.

    Raises as `encode` and `in_template`.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"messages, such as {messages[-1]['content'][:EXCERPT]!r}, need a tokenizer with a chat template: use a "
            "chat model, or give texts without roles"
        )
    return _encode_in_template(messages, tokenizer, arguments, tools)


def _encode_in_template(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    for entry in (*chain.from_iterable(message.values() for message in messages), *tools):
        _check_unicode(entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False))
    for name, value in arguments.items():
        for text in (name, value):
            if isinstance(text, str):
                _check_unicode(text, f"chat_arguments.{name!r}")
    text = in_template(
        messages, tokenizer, goes_on=messages[-1]["role"] == "assistant", arguments=arguments, tools=tools
    )
    return _never_empty(tokenizer(text, add_special_tokens=False).input_ids, tokenizer)


def _never_empty(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if not ids and tokenizer.bos_token_id is None:
        raise ConfigError("an empty prompt needs a begin-of-sequence token, which this tokenizer lacks: write a prompt")
    return tuple(ids) or (tokenizer.bos_token_id,)


def _check_unicode(text: str, said: str = "") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        said = said or f"prompt {text[:EXCERPT]!r}"
        raise ConfigError(f"{said} holds {text[error.start]!r}, a lone surrogate: write it in UTF-8") from None


def check_vocabulary(prompt: Prompt, ids: Sequence[int], *, vocab_size: int) -> None:
    """Raise ConfigError for a prompt with token ids that the model lacks."""
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"{prompt.called} has token id {max(ids)}, and the model knows {vocab_size} ids, from 0 on: remove the "
            "text of that token"
        )
