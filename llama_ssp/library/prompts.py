"""Reads prompts as a notebook has them: texts, chats or token ids."""

import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.session.prompt_records import Message
from llama_ssp.session.prompts import encode, encode_messages

Chat: TypeAlias = Sequence[Message]
"""A conversation up to where the assistant speaks, or whose last message, the assistant's, it continues."""
TokenIds: TypeAlias = Sequence[int] | Tensor
AnyPrompt: TypeAlias = str | Chat | TokenIds
"""A text, a chat, or token ids in a list, a tensor or an array."""

_WANTED = (
    "a text, a chat such as [{'role': 'user', 'content': 'Hello'}], or token ids such as "
    "pair.tokenizer('Hello').input_ids, or a list of these"
)


def as_list(prompts: object) -> list[Any]:
    """The prompts of a call, which has one or several; raises ConfigError if it has none."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts={reprlib.repr(prompts)} must be {_WANTED}")
    if not prompts:
        raise ConfigError("at least one prompt is required")
    is_one = isinstance(prompts[0], Integral | Mapping)
    return [prompts] if is_one else [_plain(prompt) for prompt in prompts]


def _plain(prompt: object) -> object:
    """Lists for tensors and arrays."""
    to_list = getattr(prompt, "tolist", None)
    return to_list() if callable(to_list) else prompt


def encode_any(number: int, prompt: object, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> tuple[int, ...]:
    """Encode a prompt, the `number`th counted from 1; a text is a user's message if `chat`.

    Raises ConfigError for what is no prompt, or cannot be encoded, and CheckpointError for a damaged chat template.
    """
    if isinstance(prompt, str):
        return encode(prompt, tokenizer, chat=chat)
    if isinstance(prompt, Sequence) and prompt:
        if all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            ids = tuple(int(token) for token in prompt)
            if min(ids) < 0:
                raise ConfigError(f"prompt {number} has token id {min(ids)}: ids begin at 0")
            return ids
        if all(_is_message(message) for message in prompt):
            return encode_messages([dict(message) for message in prompt], tokenizer)
    raise ConfigError(f"prompt {number} is {reprlib.repr(prompt)}, and {_WANTED} is required")


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))
