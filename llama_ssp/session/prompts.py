"""Makes prompts of one text, a file, standard input or the task's own list, and encodes them as token ids.

Modules `prompt_files` and `prompt_records` read files. Only rank 0 reads them, and broadcasts them to the others.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llama_ssp.config.folders import ENDINGS_WITH_FIELDS, ending_of
from llama_ssp.config.schema import RunConfig
from llama_ssp.config.tasks import task_of
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.session.prompt_files import STANDARD_INPUT, read_records
from llama_ssp.session.prompt_records import Message, Prompt, prompts_of

if TYPE_CHECKING:  # plans read prompts too, without transformers
    from transformers import PreTrainedTokenizerBase

_EXCERPT = 40
"""Longest excerpt of a prompt in an error."""


def read_prompts(config: RunConfig) -> list[Prompt]:
    """Read the prompts of a run, each turn of a conversation on its own.

    Raises ConfigError if the file is unusable, an entry is no prompt, or the task takes no conversations.
    """
    prompts = list(_read_prompts(config))
    if any(prompt.earlier for prompt in prompts) and not task_of(config).takes_turns:
        raise ConfigError(
            f"task={config.task.name} takes prompts of one turn, and prompts={config.prompts} has conversations: "
            "use task=generate, compare or latency for them"
        )
    return prompts


def _read_prompts(config: RunConfig) -> Iterator[Prompt]:
    if config.prompt is not None:
        yield Prompt(text=config.prompt)
        return
    if config.prompts is None:
        own_prompts = task_of(config).prompts(config)
        if not own_prompts:
            raise ConfigError(
                f"task={config.task.name} needs prompt=TEXT, prompts=FILE, or prompts=- for standard input"
            )
        yield from (Prompt(text=text) for text in own_prompts)
        return
    records = list(read_records(config.prompts))
    if not records:
        one_per_line = "" if ending_of(config.prompts) in ENDINGS_WITH_FIELDS else ": write one per line"
        raise ConfigError(f"prompts={config.prompts} holds no prompt{one_per_line}")
    for record in records:
        yield from prompts_of(record, column=config.prompts_column)


def is_interactive(config: RunConfig) -> bool:
    """Whether prompts are typed one by one: `prompts=-` on a terminal."""
    return config.prompts == STANDARD_INPUT and sys.stdin.isatty()


def encode(
    prompt: str, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, earlier: Sequence[tuple[str, str]] = ()
) -> tuple[int, ...]:
    """Encode a prompt as the model expects it; an empty one becomes the begin-of-sequence token.

    Args:
        prompt: the text.
        tokenizer: the target's.
        chat: the prompt is a user's message for the chat template.
        earlier: the turns before it with their answers. Without a chat template the text has them as they were written,
            with a line break after each answer.

    Raises:
        CheckpointError: the chat template is damaged.
        ConfigError: there is no template, or the prompt has no token or is not valid Unicode.
    """
    _check_unicode(prompt)
    if chat:
        contents = [*itertools.chain(*earlier), prompt]
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return _encode_in_template(messages, tokenizer)
    ids = tokenizer("".join(f"{turn}{answer}\n" for turn, answer in earlier) + prompt).input_ids
    return _never_empty(ids, tokenizer)


def _never_empty(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise ConfigError("an empty prompt needs a begin-of-sequence token, which this tokenizer lacks: write a prompt")
    return tuple(ids)


def encode_messages(messages: list[Message], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Encode messages in the chat template, up to where the assistant speaks; its own last message stays open.

    Raises as `encode`.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"messages, such as {messages[-1]['content'][:_EXCERPT]!r}, need a tokenizer with a chat template: use a "
            "chat model, or give texts without roles"
        )
    return _encode_in_template(messages, tokenizer)


def _encode_in_template(messages: list[Message], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    for message in messages:
        _check_unicode(message["content"])
    text = in_template(messages, tokenizer, goes_on=messages[-1]["role"] == "assistant")
    return _never_empty(tokenizer(text, add_special_tokens=False).input_ids, tokenizer)


def encode_prompt(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, answers: Sequence[str]
) -> tuple[int, ...]:
    """Encode a prompt with the answers to the turns before it; a list of messages is always put in the chat template.

    Raises as `encode`.
    """
    if prompt.messages is None:
        return encode(prompt.text, tokenizer, chat=chat, earlier=[*zip(prompt.earlier, answers, strict=True)])
    return encode_messages(prompt.with_answers(answers), tokenizer)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt {text[:_EXCERPT]!r} holds {text[error.start]!r}, a lone surrogate: write it in UTF-8"
        ) from None


def in_template(messages: list[Message], tokenizer: "PreTrainedTokenizerBase", *, goes_on: bool = False) -> str:
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
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"the chat template in {tokenizer.name_or_path} fails ({reason}): copy tokenizer_config.json or "
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
            f"prompt {prompt[:_EXCERPT]!r} has token id {max(ids)}, and the model knows {vocab_size} ids, from 0 on: "
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
            f"prompt {prompt[:_EXCERPT]!r} has {len(ids)} tokens, and with max_new_tokens={max_new_tokens}{counted} "
            f"that is more than the context of {context}; {remedy}"
        )
