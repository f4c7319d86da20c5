"""Chats: messages in the words of the model's chat template, which is foreign code and runs within limits.

The template runs in the sandbox of transformers. A thread watches it, and interrupts it when it takes too much time or
memory; jinja2 hands control back at every step of a loop, so that only a single operation can be late. Powers are such
operations, so a template with one is refused.
"""

import ctypes
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any

import jinja2.meta
from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.ranks.memory import anonymous_bytes
from llama_ssp.run.prompts import EXCERPT, Message, reason_of
from llama_ssp.text.messages import said

MOST_S, MOST_BYTES, MOST_CHARS = 10.0, 1 << 30, 1 << 24
"""The most time, additional memory, and text of a template."""
_LOOK_EVERY_S = 0.02
NO_ARGUMENTS: Mapping[str, Any] = {}
_PLAIN = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
_FUNCTIONS = {*_PLAIN.globals, "raise_exception", "strftime_now"}
"""Names that transformers and jinja2 give to templates."""


class _TooMuchError(BaseException):
    """A template exceeds its limits; not an Exception, which jinja2's filters handle."""


def in_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    goes_on: bool = False,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Write messages in the tokenizer's chat template, up to where the assistant speaks.

    With `goes_on`, the last message stays open, for the assistant to continue it. `arguments` are the template's own,
    such as `enable_thinking`; `tools` are in OpenAI's form.

    Raises:
        CheckpointError: the template is damaged, does not end, or writes too much.
        ConfigError: there is none, it refuses the messages, or it does not read one of the arguments.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{said('chat', True)} needs a tokenizer with a chat template; leave chat out, or use a chat model"
        )
    of_template = f"the chat template in {tokenizer.name_or_path}"
    damage = ""
    try:
        given: Any = [*tools] or None
        source = tokenizer.get_chat_template(tools=given)
        _check_arguments(arguments, source, tokenizer)
        if _has_power(source):
            damage = "computes a power"
        else:
            with _limited():
                text = str(
                    tokenizer.apply_chat_template(
                        list(messages),
                        add_generation_prompt=not goes_on,
                        continue_final_message=goes_on,
                        tokenize=False,
                        tools=given,
                        **arguments,
                    )
                )
            text.encode()
            damage = f"writes {len(text)} characters" if len(text) > MOST_CHARS else ""
    except ConfigError:
        raise
    except _TooMuchError:
        damage = f"takes more than {MOST_S:g} s or {MOST_BYTES >> 20} MiB"
    except UnicodeEncodeError as error:
        damage = f"writes {str(error.object)[error.start]!r}, a lone surrogate"
    except Exception as error:
        if type(error) is jinja2.TemplateError:  # by `raise_exception`, a function that templates have for this
            raise ConfigError(_refusal(of_template, messages, str(error.message))) from error
        damage = f"fails ({reason_of(error)})"
    if damage:
        remedy = "copy tokenizer_config.json or chat_template.jinja again, or leave chat out"
        raise CheckpointError(f"{of_template} {damage}: {remedy}")
    return text


def _refusal(of_template: str, messages: Sequence[Message], reason: str) -> str:
    excerpt, said = messages[-1]["content"][:EXCERPT], " ".join(reason.split())[:200]
    if any(message["role"] == "system" for message in messages):
        remedy = "if it takes no system message, put its text at the beginning of the first one of the user"
    else:
        remedy = "give messages in the roles and the order that it takes"
    return f"{of_template} refuses the messages that end with {excerpt!r} ({said}): {remedy}"


def _check_arguments(arguments: Mapping[str, Any], source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for arguments that the template does not read, or that are not the template's."""
    taken = {*signature(tokenizer.apply_chat_template).parameters, "messages", *_FUNCTIONS}
    for name in arguments:
        if name not in _variables(source) - taken:
            raise ConfigError(
                f"chat_arguments.{name} has no effect: the chat template in {tokenizer.name_or_path} reads no argument "
                "of this name"
            )


@cache
def _variables(source: str) -> frozenset[str]:
    """The names that a template reads and does not set, functions included."""
    # Blocks of transformers' own, which mark what the assistant has said, mean nothing here.
    source = re.sub(r"{%[+-]?\s*(end)?generation\s*[+-]?%}", "", source)
    return frozenset(jinja2.meta.find_undeclared_variables(_PLAIN.parse(source)))


def _has_power(source: str) -> bool:
    """Whether a template computes a power; the `**` that unpacks arguments of a call does not count."""
    words = [text for _, kind, text in _PLAIN.lex(source) if kind not in {"whitespace", "comment", "data"}]
    return any(word == "**" and before not in {"(", ","} for before, word in pairwise(words))


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt the block when it takes too much time or memory; raises _TooMuchError."""
    thread, lock, is_over = threading.get_ident(), threading.Lock(), threading.Event()
    deadline, most_bytes = time.monotonic() + MOST_S, (anonymous_bytes() or 0) + MOST_BYTES

    def watch() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            if time.monotonic() > deadline or (anonymous_bytes() or 0) > most_bytes:
                with lock:
                    if not is_over.is_set():
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(_TooMuchError)
                        )
                return

    threading.Thread(target=watch, daemon=True, name="chat template").start()
    try:
        yield
    finally:
        with lock:
            is_over.set()
