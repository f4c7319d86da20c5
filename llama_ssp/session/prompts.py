"""Reads prompts (one text, a file, standard input, or the task's own list) and encodes them as token ids.

A question in Spec-Bench's format has several turns. Each becomes a prompt that follows the answers to those before it.

Only rank 0 reads them, and broadcasts them to the others.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_ssp.config.schema import RunConfig
from llama_ssp.config.tasks.spec import task_of
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.reports.lines import CompletionLine

if TYPE_CHECKING:  # plans read prompts too, without transformers
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, str]
"""One turn of a conversation: its `role` and its `content`."""

_EXCERPT = 40
"""Longest excerpt of a prompt in an error."""
STANDARD_INPUT = "-"
_EXAMPLES = '{"prompt": "def f(x):"} or {"turns": ["What is a prime?", "Name three."]}'


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of a run.

    Attributes:
        text: as the user wrote it.
        earlier: the turns before it in its conversation.
        question_id, category: those of the file, where it has them.
    """

    text: str
    earlier: tuple[str, ...] = ()
    question_id: str | None = None
    category: str | None = None


def read_prompts(config: RunConfig) -> list[Prompt]:
    """Read the prompts of a run, each turn of a conversation on its own.

    Raises ConfigError if the file is unusable, a .jsonl line is no prompt, or the task takes no conversations.
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
    for number, line in lines.items():
        if config.prompts.endswith(".jsonl"):
            yield from _prompts_of(line, where=f"line {number} of prompts={config.prompts}")
        else:
            yield Prompt(text=line)


def check_unchanged(prompts: Sequence[Prompt], lines: Sequence[CompletionLine], config: RunConfig) -> None:
    """Raise ConfigError if a finished completion's prompt has changed or is missing; new prompts may follow."""
    for line in sorted(lines, key=lambda line: line.index):
        prompt = prompts[line.index] if line.index < len(prompts) else None
        new = prompt.text if prompt else None
        if prompt and (prompt.text, len(prompt.earlier)) == (line.prompt, line.turn):
            continue
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(new or "", line.prompt, strict=False))
        begin = max(0, len(list(same)) - _EXCERPT // 2)
        now = f"missing, with {len(prompts)} left" if new is None else repr(new[begin : begin + _EXCERPT])
        source = "" if config.prompts is None else f" of prompts={config.prompts}"
        raise ConfigError(
            f"prompt {line.index + 1}{source} was {line.prompt[begin : begin + _EXCERPT]!r} when "
            f"run_dir={config.run_dir} recorded its completion, and is now {now}; give the old prompts to resume that "
            "run (more may follow them), or name another run_dir"
        )


def is_interactive(config: RunConfig) -> bool:
    """Whether prompts are typed one by one: `prompts=-` on a terminal."""
    return config.prompts == STANDARD_INPUT and sys.stdin.isatty()


def _prompts_of(line: str, *, where: str) -> Iterator[Prompt]:
    """The prompt of a line, or all turns of its conversation."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not {"prompt", "turns"} & record.keys():
        raise ConfigError(f"{where} must be a JSON object such as {_EXAMPLES}")
    if "prompt" in record and "turns" in record:
        raise ConfigError(f"{where} has both `prompt` and `turns`: give one of them")
    turns = [record["prompt"]] if "prompt" in record else record["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        field = "a text as `prompt`" if "prompt" in record else "a list of one or more texts as `turns`"
        raise ConfigError(f"{where} must be a JSON object with {field}, such as {_EXAMPLES}")
    question_id, category = (
        str(record[name]) if isinstance(record.get(name), str | int) else None for name in ("question_id", "category")
    )
    for number, turn in enumerate(turns):
        yield Prompt(text=turn, earlier=tuple(turns[:number]), question_id=question_id, category=category)


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
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt {prompt[:_EXCERPT]!r} holds {prompt[error.start]!r}, a lone surrogate: write it in UTF-8"
        ) from None
    if chat:
        contents = [*itertools.chain(*earlier), prompt]
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        ids = tokenizer(in_template(messages, tokenizer), add_special_tokens=False).input_ids
    else:
        ids = tokenizer("".join(f"{turn}{answer}\n" for turn, answer in earlier) + prompt).input_ids
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
