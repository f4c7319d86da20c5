"""Prompts from one text, a file, standard input or the task's own list. Imports no torch; `requests` encodes them.

The ending of a file's name says how it is read: JSON lines, JSON, CSV and Parquet as records, others as lines. A record
has a text, the turns of a question (Spec-Bench's format), or a list of messages. Each turn becomes a prompt after the
answers to earlier turns, and so does each message of a user that another one follows.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from llama_ssp.catalogue import ENDINGS_WITH_FIELDS, ending_of
from llama_ssp.errors import ConfigError
from llama_ssp.manifest import absent
from llama_ssp.reports.reading import is_storable, read_json
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import REQUEST_FILES, request_file, task_of

STANDARD_INPUT = "-"
_MOST_NAMED = 12
"""Most categories of a file that an error names."""
EXCERPT = 40
"""Longest excerpt of a prompt in an error."""
Message: TypeAlias = dict[str, Any]
"""One turn of a conversation: its `role`, its `content`, what else of `MORE_FIELDS` it has, and `tool_calls`."""
MORE_FIELDS = ("name", "reasoning_content", "tool_call_id")
"""Fields of a message that its template may read."""
_Record: TypeAlias = tuple[str, dict[str, Any] | str]
"""One entry of a file: its place, for messages, and its fields by name, or the text of a line or an entry."""

_CONTENTS = ("prompt", "turns", "messages")
"""Fields of a record, one of which holds the text to complete."""
_EXAMPLES = (
    '{"prompt": "def f(x):"}, {"turns": ["What is a prime?", "Name three."]} or '
    '{"messages": [{"role": "user", "content": "What is a prime?"}]}'
)
_LABELS = ("question_id", "category")
_IDS = ("id", "task_id", "custom_id")
_NEVER_LINES = frozenset(
    {
        ".arrow",
        ".bz2",
        ".doc",
        ".docx",
        ".feather",
        ".gz",
        ".html",
        ".npz",
        ".odt",
        ".orc",
        ".pdf",
        ".pkl",
        ".rtf",
        ".toml",
        ".xls",
        ".xlsx",
        ".xml",
        ".yaml",
        ".yml",
        ".zip",
        ".zst",
    }
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of a run; ranks send it to one another as JSON.

    Attributes:
        text: the text as the user wrote it; for a list of messages, the content of the last one.
        role: the role of the last message; the model continues the text of an assistant.
        more: the other fields of the last message.
        messages: the messages before the last one; None for other prompts.
        earlier: earlier turns of its conversation, which the model answers first.
        question_id, category: as the file has them; None if it does not.
        fields: the other fields of the prompt's record.
        ids: token ids, if the caller of the library has encoded the prompt.
        place: where the prompt is from, such as a line of a file; empty if there is nothing to say.
    """

    text: str
    role: str = "user"
    more: Message = field(default_factory=dict)
    messages: list[Message] | None = None
    earlier: list[str] = field(default_factory=list)
    question_id: str | None = None
    category: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None
    place: str = field(default="", compare=False)

    @property
    def last_message(self) -> Message | None:
        """The fields of the last message except its content; None for a prompt without messages."""
        return None if self.messages is None else {"role": self.role} | self.more

    @property
    def called(self) -> str:
        """The prompt's name in an error message: its `place`, the id of its record, and the beginning of its text."""
        own_id = self.question_id or next((str(self.fields[name]) for name in _IDS if name in self.fields), "")
        named = f" ({own_id})" if own_id else ""
        return f"{self.place}{named}{': ' if self.place else ''}prompt {self.text[:EXCERPT]!r}"

    @property
    def num_characters(self) -> int:
        """The number of characters of the prompt's text and of all text before it that is known before the run.

        The model's answers to earlier turns are not known then.
        """
        before = self.earlier if self.messages is None else [message["content"] for message in self.messages]
        return sum(map(len, (*before, self.text)))


def read_prompts(config: RunConfig) -> list[Prompt]:
    """Read the prompts of a run, each turn of a conversation on its own; none of a file of requests.

    Raises ConfigError if the file is unusable, an entry is no prompt, or the task takes no conversations.
    """
    task = task_of(config)
    if config.prompt is not None:
        return [Prompt(text=config.prompt)]
    if request_file(config):
        return []
    if config.prompts is None:
        own_prompts = task.prompts(config)
        if not own_prompts:
            raise ConfigError(
                f"task={config.task.name} needs prompt=TEXT, prompts=FILE, or prompts=- for standard input"
            )
        return [Prompt(text=text) for text in own_prompts[: config.num_prompts]]
    records = [[*_of_record(*record, config.prompts_column)] for record in _records(config.prompts)]
    if config.category is not None:
        categories = sorted({prompt.category for prompts in records for prompt in prompts if prompt.category})
        records = [prompts for prompts in records if prompts[0].category == config.category]
        if not records:
            found = f"it has {', '.join(categories[:_MOST_NAMED])}" if categories else "its records have none"
            raise ConfigError(f"prompts={config.prompts} has no category={config.category}: {found}")
    prompts = [prompt for prompts in records[: config.num_prompts] for prompt in prompts]
    if not prompts:
        one_per_line = "" if ending_of(config.prompts) in ENDINGS_WITH_FIELDS else ": write one per line"
        raise ConfigError(f"prompts={config.prompts} holds no prompt{one_per_line}")
    if any(prompt.earlier for prompt in prompts) and not task.takes_turns:
        raise ConfigError(
            f"task={config.task.name} takes prompts of one turn, and prompts={config.prompts} has conversations: "
            "use task=generate or task=compare for them"
        )
    return prompts


def lines_of(source: str) -> list[str]:
    """The lines of a file of prompts that are not blank; ConfigError if it is no text."""
    return [str(line) for _, line in _lines(_text_of(source), source)]


def is_interactive(config: RunConfig) -> bool:
    """Whether prompts are typed one by one: `prompts=-` on a terminal."""
    return config.prompts == STANDARD_INPUT and sys.stdin.isatty()


def _records(source: str) -> Iterator[_Record]:
    """Yield the entries of a file or of standard input; ConfigError for one that the records of a run cannot hold."""
    ending = "" if source == STANDARD_INPUT else ending_of(source)
    if ending in _NEVER_LINES:
        raise ConfigError(
            f"prompts={source} cannot be read: {ending} is none of .txt (a prompt per line), .jsonl, .json, .csv, "
            ".tsv and .parquet; convert it to one of these"
        )
    text = "" if ending == ".parquet" else _text_of(source)
    for where, content in _READERS.get(ending, _lines)(text, source):
        if isinstance(content, dict):
            for name, value in content.items():
                if not is_storable(value):
                    raise ConfigError(f"{where} has a field `{name}` that is infinite or nested too deep: leave it out")
        yield where, content


def _text_of(source: str) -> str:
    try:
        text = sys.stdin.read() if source == STANDARD_INPUT else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts={source}: {error}; it must be a text file in UTF-8") from None
    return text.removeprefix("\ufeff")


def _lines(text: str, source: str) -> Iterator[_Record]:
    # Not `splitlines`, which also splits at form feeds and at characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number} of prompts={source}", line


def _json_lines(text: str, source: str) -> Iterator[_Record]:
    for where, line in _lines(text, source):
        try:
            content = read_json(str(line))
        except ValueError as error:
            raise ConfigError(f"{where} must be a JSON object: it cannot be read ({reason_of(error)})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{where} must be a JSON object, and not {_kind_of(content)}")
        yield where, content


def _json(text: str, source: str) -> Iterator[_Record]:
    wanted = 'a list such as [{"prompt": "def f(x):"}, {"prompt": "import"}]; one object per line is a .jsonl file'
    try:
        content = read_json(text)
    except ValueError as error:
        raise ConfigError(f"prompts={source} is not JSON ({reason_of(error)}): it must be {wanted}") from None
    if not isinstance(content, list):
        raise ConfigError(f"prompts={source} holds {_kind_of(content)}: it must be {wanted}")
    for number, entry in enumerate(content, start=1):
        where = f"entry {number} of prompts={source}"
        if not isinstance(entry, dict | str):
            raise ConfigError(f"{where} must be an object or a text, and not {_kind_of(entry)}")
        yield where, entry


def _csv(text: str, source: str, *, delimiter: str = ",") -> Iterator[_Record]:
    csv.field_size_limit(sys.maxsize)  # prompts can be longer than csv's 128 KiB
    records = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for record in records:
            where = f"line {records.line_num} of prompts={source}"
            if None in record or None in record.values():
                raise ConfigError(
                    f"{where} ends a row whose number of cells is not that of the first line, which names the columns "
                    f"{', '.join(records.fieldnames or ())}: quote cells that contain commas or line breaks"
                )
            yield where, record
    except csv.Error as error:
        raise ConfigError(f"line {records.reader.line_num} of prompts={source} is not CSV: {error}") from None


def _parquet(_text: str, source: str) -> Iterator[_Record]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"prompts={source} needs pyarrow: pip install pyarrow, or save the table as .jsonl or .csv"
        ) from None
    try:
        records = parquet.read_table(source).to_pylist()
    except Exception as error:  # noqa: BLE001 - pyarrow's own errors, which cannot be named without it
        raise ConfigError(f"prompts={source} is no Parquet file that can be read: {reason_of(error)}") from None
    for number, record in enumerate(records, start=1):
        # Times and the like become text, and what is not a number becomes null.
        as_json = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
        yield f"row {number} of prompts={source}", as_json


_READERS: dict[str, Callable[[str, str], Iterator[_Record]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}


def _kind_of(content: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(content), "a number")


def reason_of(error: Exception) -> str:
    """The beginning of an error's text, on one line; its kind if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _of_record(where: str, content: dict[str, Any] | str, column: str | None) -> Iterator[Prompt]:
    """Yield the prompt of a record, or all turns of its conversation; `column` names its field, if not as usual."""
    if isinstance(content, str):
        if column:
            raise ConfigError(f"{where} is a text, which has no prompts_column={column}: leave that out")
        yield Prompt(text=content, place=where)
        return
    name = column or _content_field(where, content)
    if name not in content:
        raise ConfigError(f"{where} has no prompts_column={name}: it has {', '.join(content)}")
    messages, turns = [], content[name] if name == "turns" else [content[name]]
    if name == "messages":
        wanted = "a list as `messages` that ends with a user's or an assistant's"
        messages = read_messages(content[name], where)
        fits = bool(messages) and messages[-1]["role"] in {"user", "assistant"}
    else:
        wanted = "a list of one or more texts as `turns`" if name == "turns" else f"a text as `{name}`"
        fits = isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)
    if not fits:
        raise ConfigError(f"{where} must be an entry with {wanted}, such as {_EXAMPLES}")
    labels = {key: str(content[key]) for key in _LABELS if key != name and type(content.get(key)) in {str, int}}
    others = {key: entry for key, entry in content.items() if key != name and key not in labels}
    common: dict[str, Any] = labels | {"fields": others, "place": where}
    if name == "messages":
        yield from _of_messages(messages, common)
    else:
        yield from (Prompt(text=turn, earlier=turns[:number], **common) for number, turn in enumerate(turns))


def _content_field(where: str, content: Mapping[str, Any]) -> str:
    """The field of a record that holds the text to complete."""
    found = [name for name in _CONTENTS if name in content]
    if len(found) > 1:
        raise ConfigError(
            f"{where} has both `{found[0]}` and `{found[1]}`: give one of them, or choose with "
            f"prompts_column={found[0]}"
        )
    if not found:
        if extension := next(filter(None, (absent("field", name) for name in content)), None):
            raise ConfigError(f"{where}: {extension}")
        texts = {name: len(value) for name, value in content.items() if isinstance(value, str)}
        hint = f": prompts_column={max(texts, key=texts.__getitem__)} takes that" if texts else ""
        if kind := next(filter(None, map(REQUEST_FILES.find, content)), None):
            hint = f": {kind.purpose} are read"
        raise ConfigError(
            f"{where} must be an entry with `prompt`, `turns` or `messages`, such as {_EXAMPLES}; it has "
            f"{', '.join(content) or 'nothing'}{hint}"
        )
    return found[0]


def read_messages(given: object, where: str, *, reads_calls: bool = False) -> list[Message]:
    """Return the messages of a chat, with the text parts of each content joined; empty if this is no chat.

    With `reads_calls`, a message may have tool calls, and then needs no content. A message with anything else raises
    ConfigError, which begins with `where`.
    """
    messages: list[Message] = []
    for number, message in enumerate(given if isinstance(given, Sequence) and not isinstance(given, str) else ()):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        found = message.get("tool_calls") if isinstance(message, Mapping) else None
        calls = {"tool_calls": found} if found else {}
        others = ["tool calls"] if calls and not reads_calls else []
        content = "" if content is None and calls and reads_calls else content
        if isinstance(content, Sequence) and not isinstance(content, str) and content:
            parts = [part if isinstance(part, Mapping) else {} for part in content]
            others += [str(part["type"]) for part in parts if part.get("type", "text") != "text"]
            texts = [part.get("text") for part in parts]
            content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        if others:
            raise ConfigError(
                f"{where} has {' and '.join(dict.fromkeys(others))} in message {number + 1}, and a message is a text: "
                "leave out what is none"
            )
        if not isinstance(role, str) or not isinstance(content, str):
            return []
        more = {name: message[name] for name in MORE_FIELDS if isinstance(message.get(name), str)}
        messages.append({"role": role, "content": content} | more | calls)
    return messages


def _of_messages(messages: Sequence[Message], common: dict[str, Any]) -> Iterator[Prompt]:
    """Yield a prompt for each message of a user that the next message does not answer, and for the last message."""
    earlier: list[str] = []
    for number, (message, following) in enumerate(zip(messages, [*messages[1:], None], strict=True)):
        if following is None or message["role"] == following["role"] == "user":
            more = {name: message[name] for name in MORE_FIELDS if name in message}
            text, role, before = message["content"], message["role"], list(messages[:number])
            yield Prompt(text=text, role=role, more=more, messages=before, earlier=[*earlier], **common)
            earlier.append(text)
