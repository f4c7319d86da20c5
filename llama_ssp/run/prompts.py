"""Prompts from one text, a file, standard input or the task's own list, and their token ids. Imports no torch.

The ending of a file's name says how it is read: JSON lines, JSON, CSV and Parquet as records, others as lines. A record
has a text, the turns of a question (Spec-Bench's format), or a list of messages. Each turn becomes a prompt that
follows the answers to those before it, and so does each message of a user that another one follows.
"""

import csv
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.reports.reading import is_storable, read_json
from llama_ssp.settings.folders import ENDINGS_WITH_FIELDS, ending_of
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import task_of

if TYPE_CHECKING:  # plans read prompts too, without transformers
    from transformers import PreTrainedTokenizerBase

STANDARD_INPUT = "-"
EXCERPT = 40
"""Longest excerpt of a prompt in an error."""
Message: TypeAlias = dict[str, str]
"""One turn of a conversation: its `role` and its `content`."""

_CONTENTS = ("prompt", "turns", "messages")
"""Fields of a record, one of which holds the text to complete."""
_EXAMPLES = (
    '{"prompt": "def f(x):"}, {"turns": ["What is a prime?", "Name three."]} or '
    '{"messages": [{"role": "user", "content": "What is a prime?"}]}'
)
_LABELS = ("question_id", "category")
_NEVER_LINES = frozenset(
    {".arrow", ".bz2", ".feather", ".gz", ".html", ".npz", ".orc", ".pkl", ".toml", ".xls", ".xlsx", ".xml", ".yaml",
     ".yml", ".zip", ".zst"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of a run.

    Attributes:
        text: as the user wrote it; of a list of messages, the last one's content.
        role: of that message; the model continues the text of an assistant.
        messages: of a list of messages, those before the last; None for a prompt that is none.
        earlier: the turns before it in its conversation that the model answers first.
        question_id, category: those of the file, where it has them.
        fields: the other fields of its record.
        ids: its token ids, if the library's user has encoded it.
    """

    text: str
    role: str = "user"
    messages: tuple[Message, ...] | None = None
    earlier: tuple[str, ...] = ()
    question_id: str | None = None
    category: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Prompt":
        """Restore a prompt that another rank has sent as JSON."""
        messages = content["messages"]
        lists = {"earlier": tuple(content["earlier"]), "messages": None if messages is None else tuple(messages)}
        return cls(**{**content, **lists})

    @property
    def num_characters(self) -> int:
        """The length of its text with all that precedes it and is known."""
        before = self.earlier if self.messages is None else [message["content"] for message in self.messages]
        return sum(map(len, (*before, self.text)))

    def encode(
        self, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, answers: Sequence[str] = ()
    ) -> tuple[int, ...]:
        """Encode it as the model expects it; an empty text becomes the begin-of-sequence token.

        Args:
            tokenizer: the target's.
            chat: texts are a user's messages for the chat template, in which a list of messages always goes.
            answers: to the turns before it. Without a chat template each turn stands as it was written, with a line
                break after its answer.

        Raises:
            CheckpointError: the chat template is damaged.
            ConfigError: there is no template, or the prompt has no token or is not valid Unicode.
        """
        if self.ids is not None:
            return self.ids
        if self.messages is not None:
            return encode_messages(self._conversation(answers), tokenizer)
        return encode(self.text, tokenizer, chat=chat, earlier=[*zip(self.earlier, answers, strict=True)])

    def _conversation(self, answers: Sequence[str]) -> list[Message]:
        """All messages, with the answers to those of the user that have none."""
        whole: list[Message] = []
        given = iter(answers)
        for message in (*(self.messages or ()), {"role": self.role, "content": self.text}):
            if whole and whole[-1]["role"] == message["role"] == "user":
                whole.append({"role": "assistant", "content": next(given)})
            whole.append(message)
        return whole


def read_prompts(config: RunConfig) -> list[Prompt]:
    """Read the prompts of a run, each turn of a conversation on its own.

    Raises ConfigError if the file is unusable, an entry is no prompt, or the task takes no conversations.
    """
    task = task_of(config)
    if config.prompt is not None:
        return [Prompt(text=config.prompt)]
    if config.prompts is None:
        own_prompts = task.prompts(config)
        if not own_prompts:
            raise ConfigError(
                f"task={config.task.name} needs prompt=TEXT, prompts=FILE, or prompts=- for standard input"
            )
        return [Prompt(text=text) for text in own_prompts]
    prompts = [prompt for record in _records(config.prompts) for prompt in _of_record(record, config.prompts_column)]
    if not prompts:
        one_per_line = "" if ending_of(config.prompts) in ENDINGS_WITH_FIELDS else ": write one per line"
        raise ConfigError(f"prompts={config.prompts} holds no prompt{one_per_line}")
    if any(prompt.earlier for prompt in prompts) and not task.takes_turns:
        raise ConfigError(
            f"task={config.task.name} takes prompts of one turn, and prompts={config.prompts} has conversations: "
            "use task=generate, compare or latency for them"
        )
    return prompts


def is_interactive(config: RunConfig) -> bool:
    """Whether prompts are typed one by one: `prompts=-` on a terminal."""
    return config.prompts == STANDARD_INPUT and sys.stdin.isatty()


class _Record(NamedTuple):
    """One entry of a file: its place, for messages, and its fields by name, or the text of a line or an entry."""

    where: str
    content: dict[str, Any] | str


def _records(source: str) -> Iterator[_Record]:
    """Yield the entries of a file or of standard input, without empty lines; ConfigError for one that is damaged."""
    ending = "" if source == STANDARD_INPUT else ending_of(source)
    if ending in _NEVER_LINES:
        raise ConfigError(
            f"prompts={source} cannot be read: {ending} is none of .txt (a prompt per line), .jsonl, .json, .csv, "
            ".tsv and .parquet; convert it to one of these"
        )
    if ending == ".parquet":
        yield from _parquet(source)
        return
    try:
        text = sys.stdin.read() if source == STANDARD_INPUT else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts={source}: {error}; it must be a text file in UTF-8") from None
    yield from _READERS.get(ending, _lines)(text.removeprefix("\ufeff"), source)


def _lines(text: str, source: str) -> Iterator[_Record]:
    # Not `splitlines`, which also splits at form feeds and at characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _Record(f"line {number} of prompts={source}", line)


def _json_lines(text: str, source: str) -> Iterator[_Record]:
    for where, line in _lines(text, source):
        try:
            content = read_json(str(line))
        except ValueError as error:
            raise ConfigError(f"{where} must be a JSON object: it cannot be read ({_reason(error)})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{where} must be a JSON object, and not {_kind_of(content)}")
        yield _checked(where, content)


def _json(text: str, source: str) -> Iterator[_Record]:
    wanted = 'a list such as [{"prompt": "def f(x):"}, {"prompt": "import"}]; one object per line is a .jsonl file'
    try:
        content = read_json(text)
    except ValueError as error:
        raise ConfigError(f"prompts={source} is not JSON ({_reason(error)}): it must be {wanted}") from None
    if not isinstance(content, list):
        raise ConfigError(f"prompts={source} holds {_kind_of(content)}: it must be {wanted}")
    for number, entry in enumerate(content, start=1):
        where = f"entry {number} of prompts={source}"
        if not isinstance(entry, dict | str):
            raise ConfigError(f"{where} must be an object or a text, and not {_kind_of(entry)}")
        yield _checked(where, entry) if isinstance(entry, dict) else _Record(where, entry)


def _csv(text: str, source: str, *, delimiter: str = ",") -> Iterator[_Record]:
    csv.field_size_limit(sys.maxsize)  # prompts can be longer than csv's 128 KiB
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            where = f"line {rows.line_num} of prompts={source}"
            if None in row or None in row.values():
                raise ConfigError(
                    f"{where} ends a row whose number of cells is not that of the first line, which names the columns "
                    f"{', '.join(rows.fieldnames or ())}: quote cells that contain commas or line breaks"
                )
            yield _Record(where, row)
    except csv.Error as error:
        raise ConfigError(f"line {rows.reader.line_num} of prompts={source} is not CSV: {error}") from None


def _parquet(source: str) -> Iterator[_Record]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"prompts={source} needs pyarrow: pip install pyarrow, or save the table as .jsonl or .csv"
        ) from None
    try:
        rows = parquet.read_table(source).to_pylist()
    except Exception as error:  # noqa: BLE001 - pyarrow's own errors, which cannot be named without it
        raise ConfigError(f"prompts={source} is no Parquet file that can be read: {_reason(error)}") from None
    for number, row in enumerate(rows, start=1):
        # Times and the like become text, and what is not a number becomes null.
        as_json = json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
        yield _checked(f"row {number} of prompts={source}", as_json)


_READERS: dict[str, Callable[[str, str], Iterator[_Record]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": partial(_csv, delimiter="\t"),
}  # fmt: skip


def _checked(where: str, content: dict[str, Any]) -> _Record:
    """Refuse fields that the records of a run could not hold."""
    if wrong := [name for name, value in content.items() if not is_storable(value)]:
        raise ConfigError(f"{where} has a field `{wrong[0]}` that is infinite or nested too deep: leave it out")
    return _Record(where, content)


def _kind_of(content: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(content), "a number")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _of_record(record: _Record, column: str | None) -> Iterator[Prompt]:
    """Yield the prompt of a record, or all turns of its conversation; `column` names its field, if not as usual."""
    where, content = record
    if isinstance(content, str):
        if column:
            raise ConfigError(f"{where} is a text, which has no prompts_column={column}: leave that out")
        yield Prompt(text=content)
        return
    name = column or _content_field(where, content)
    if name not in content:
        raise ConfigError(f"{where} has no prompts_column={name}: it has {', '.join(content)}")
    value = content[name]
    if name == "turns":
        wanted, fits = "a list of one or more texts as `turns`", _is_list_of_texts(value)
    elif name == "messages":
        wanted, fits = "a list as `messages` that ends with a user's or an assistant's", _is_conversation(value)
    else:
        wanted, fits = f"a text as `{name}`", isinstance(value, str)
    if not fits:
        raise ConfigError(f"{where} must be an entry with {wanted}, such as {_EXAMPLES}")
    labels = {key: str(content[key]) for key in _LABELS if key != name and type(content.get(key)) in {str, int}}
    others = {key: entry for key, entry in content.items() if key != name and key not in labels}
    common: dict[str, Any] = labels | {"fields": others}
    if name == "messages":
        yield from _of_messages(value, common)
    elif name == "turns":
        yield from (Prompt(text=turn, earlier=tuple(value[:number]), **common) for number, turn in enumerate(value))
    else:
        yield Prompt(text=value, **common)


def _content_field(where: str, content: Mapping[str, Any]) -> str:
    """The field of a record that holds the text to complete."""
    found = [name for name in _CONTENTS if name in content]
    if len(found) > 1:
        raise ConfigError(
            f"{where} has both `{found[0]}` and `{found[1]}`: give one of them, or choose with "
            f"prompts_column={found[0]}"
        )
    if not found:
        texts = {name: len(value) for name, value in content.items() if isinstance(value, str)}
        hint = f": prompts_column={max(texts, key=texts.__getitem__)} takes that" if texts else ""
        raise ConfigError(
            f"{where} must be an entry with `prompt`, `turns` or `messages`, such as {_EXAMPLES}; it has "
            f"{', '.join(content) or 'nothing'}{hint}"
        )
    return found[0]


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, str) for turn in value)


def _is_conversation(value: object) -> bool:
    """Whether these are messages that somebody can answer or continue."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return False
    parts = [(message.get("role"), message.get("content")) for message in value]
    return all(isinstance(part, str) for pair in parts for part in pair) and parts[-1][0] in {"user", "assistant"}


def _of_messages(given: Sequence[Mapping[str, Any]], common: dict[str, Any]) -> Iterator[Prompt]:
    """A prompt for every message of a user that the next one does not answer, and for an assistant's last one."""
    messages = [{"role": str(message["role"]), "content": str(message["content"])} for message in given]
    earlier: list[str] = []
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        if is_last or (message["role"] == messages[number + 1]["role"] == "user"):
            yield Prompt(
                text=message["content"], role=message["role"], messages=tuple(messages[:number]),
                earlier=tuple(earlier), **common,
            )  # fmt: skip
            earlier.append(message["content"])


def encode(
    text: str, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, earlier: Sequence[tuple[str, str]] = ()
) -> tuple[int, ...]:
    """Encode a text, after earlier turns with their answers; see `Prompt.encode`."""
    _check_unicode(text)
    if chat:
        roles = itertools.cycle(("user", "assistant"))
        contents = (*itertools.chain(*earlier), text)
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return _encode_in_template(messages, tokenizer)
    ids = tokenizer("".join(f"{turn}{answer}\n" for turn, answer in earlier) + text).input_ids
    return _never_empty(ids, tokenizer)


def encode_messages(messages: list[Message], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Encode messages in the chat template, up to where the assistant speaks; its own last message stays open.

    Raises as `Prompt.encode`.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"messages, such as {messages[-1]['content'][:EXCERPT]!r}, need a tokenizer with a chat template: use a "
            "chat model, or give texts without roles"
        )
    return _encode_in_template(messages, tokenizer)


def _encode_in_template(messages: list[Message], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    for message in messages:
        _check_unicode(message["content"])
    text = in_template(messages, tokenizer, goes_on=messages[-1]["role"] == "assistant")
    return _never_empty(tokenizer(text, add_special_tokens=False).input_ids, tokenizer)


def _never_empty(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
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
        reason = _reason(error) or type(error).__name__
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
