"""Reads prompts (one text, a file, standard input, or the task's own list) and encodes them as token ids.

Only rank 0 reads them, and broadcasts them to the others.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_ssp.config.schema import RunConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.reports.lines import CompletionLine

if TYPE_CHECKING:  # plans read prompts too, without transformers
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, str]
"""One turn of a conversation: its `role` and its `content`."""

_EXCERPT = 40
"""Longest excerpt of a prompt in an error."""
STANDARD_INPUT = "-"


def read_prompts(config: RunConfig) -> list[str]:
    """Read the prompts of a run; raises ConfigError if the file is unusable, or a .jsonl line lacks `prompt`."""
    if config.prompt is not None:
        return [config.prompt]
    default_prompts = getattr(config.task, "default_prompts", [])
    if config.prompts is None and not default_prompts:
        raise ConfigError(f"task={config.task.name} needs prompt=TEXT, prompts=FILE, or prompts=- for standard input")
    if config.prompts is None:
        return list(default_prompts)
    source = sys.stdin if config.prompts == STANDARD_INPUT else Path(config.prompts)
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts={config.prompts}: {error}; it must be a text file in UTF-8") from None
    # Not `splitlines`, which also splits at form feeds and at characters that JSON strings may contain.
    numbered = enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
    lines = {number: line for number, line in numbered if line.strip()}
    if not lines:
        raise ConfigError(f"prompts={config.prompts} holds no prompt: write one per line")
    if config.prompts.endswith(".jsonl"):
        return [_prompt_of(line, number, config.prompts) for number, line in lines.items()]
    return list(lines.values())


def check_unchanged(prompts: Sequence[str], lines: Sequence[CompletionLine], config: RunConfig) -> None:
    """Raise ConfigError if a finished completion's prompt has changed or is missing; new prompts may follow."""
    for line in sorted(lines, key=lambda line: line.index):
        new = prompts[line.index] if line.index < len(prompts) else None
        if new == line.prompt:
            continue
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(new or "", line.prompt, strict=False))
        begin = max(0, len(list(same)) - _EXCERPT // 2)
        now = f"missing, with {len(prompts)} left" if new is None else repr(new[begin : begin + _EXCERPT])
        raise ConfigError(
            f"prompt {line.index + 1} of prompts={config.prompts} was {line.prompt[begin : begin + _EXCERPT]!r} when "
            f"run_dir={config.run_dir} recorded its completion, and is now {now}; give the old prompts to resume that "
            "run (more may follow them), or name another run_dir"
        )


def is_interactive(config: RunConfig) -> bool:
    """Whether prompts are typed one by one: `prompts=-` on a terminal."""
    return config.prompts == STANDARD_INPUT and sys.stdin.isatty()


def _prompt_of(line: str, number: int, file: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f'line {number} of prompts={file} must be a JSON object such as {{"prompt": "def f(x):"}}')
    return str(record["prompt"])


def encode(prompt: str, tokenizer: "PreTrainedTokenizerBase", *, chat: bool) -> tuple[int, ...]:
    """Encode a prompt as the model expects it; an empty one becomes the begin-of-sequence token.

    With `chat`, the prompt is a user's message for the chat template. Raises CheckpointError if that is damaged, and
    ConfigError if there is none, or if the prompt has no token or is not valid Unicode.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt {prompt[:_EXCERPT]!r} holds {prompt[error.start]!r}, a lone surrogate: write it in UTF-8"
        ) from None
    if chat:
        text = in_template([{"role": "user", "content": prompt}], tokenizer)
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = tokenizer(prompt).input_ids
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise ConfigError("an empty prompt needs a begin-of-sequence token, which this tokenizer lacks: write a prompt")
    return tuple(ids)


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


def check_ids(ids: Sequence[int], *, max_new_tokens: int, context: int, vocab_size: int, prompt: str) -> None:
    """Raise ConfigError for a prompt that leaves no room for the new tokens, or has token ids that the model lacks."""
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"prompt {prompt[:_EXCERPT]!r} has token id {max(ids)}, and the model knows {vocab_size} ids, from 0 on: "
            "remove the text of that token"
        )
    if len(ids) + max_new_tokens > context:
        room = context - len(ids)
        remedy = f"max_new_tokens={room} would fit" if room > 0 else f"a prompt has room for {context - 1} at most"
        raise ConfigError(
            f"prompt {prompt[:_EXCERPT]!r} has {len(ids)} tokens, and with max_new_tokens={max_new_tokens} that is "
            f"more than the context of {context}; {remedy}"
        )
