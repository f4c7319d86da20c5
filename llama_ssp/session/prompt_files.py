"""Reads a file of prompts by the ending of its name: JSON lines, JSON, CSV and Parquet as records, others as lines.

What the fields of a record mean is in module `prompt_records`.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from llama_ssp.config.folders import ending_of
from llama_ssp.errors import ConfigError
from llama_ssp.reports.reading import is_storable, read_json

STANDARD_INPUT = "-"


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One entry of a file of prompts.

    Attributes:
        where: its place, for messages.
        content: its fields by name; a text for a line or for an entry that is one.
    """

    where: str
    content: dict[str, Any] | str


def read_records(source: str) -> Iterator[PromptRecord]:
    """Yield the entries of a file, or of standard input; raises ConfigError for one that cannot be read as what it is.

    Empty lines are no entries.
    """
    ending = "" if source == STANDARD_INPUT else ending_of(source)
    if ending in _NEVER_LINES:
        raise ConfigError(
            f"prompts={source} cannot be read: {ending} is none of .txt (a prompt per line), .jsonl, .json, .csv, "
            ".tsv and .parquet; convert it to one of these"
        )
    if ending == ".parquet":
        yield from _parquet(source)
        return
    yield from _READERS.get(ending, _lines)(_text_of(source), source)


def _text_of(source: str) -> str:
    try:
        text = sys.stdin.read() if source == STANDARD_INPUT else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts={source}: {error}; it must be a text file in UTF-8") from None
    return text.removeprefix("\ufeff")


def _lines(text: str, source: str) -> Iterator[PromptRecord]:
    # Not `splitlines`, which also splits at form feeds and at characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield PromptRecord(where=f"line {number} of prompts={source}", content=line)


def _json_lines(text: str, source: str) -> Iterator[PromptRecord]:
    for line in _lines(text, source):
        try:
            content = read_json(str(line.content))
        except ValueError as error:
            raise ConfigError(f"{line.where} must be a JSON object: it cannot be read ({_reason(error)})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{line.where} must be a JSON object, and not {_kind_of(content)}")
        yield PromptRecord(where=line.where, content=_checked(content, line.where))


def _json(text: str, source: str) -> Iterator[PromptRecord]:
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
        yield PromptRecord(where=where, content=_checked(entry, where) if isinstance(entry, dict) else entry)


def _csv(text: str, source: str, *, delimiter: str = ",") -> Iterator[PromptRecord]:
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
            yield PromptRecord(where=where, content=row)
    except csv.Error as error:
        raise ConfigError(f"line {rows.reader.line_num} of prompts={source} is not CSV: {error}") from None


def _tsv(text: str, source: str) -> Iterator[PromptRecord]:
    return _csv(text, source, delimiter="\t")


def _parquet(source: str) -> Iterator[PromptRecord]:
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
        where = f"row {number} of prompts={source}"
        yield PromptRecord(where=where, content=_checked(_as_json(row), where))


_READERS: dict[str, Callable[[str, str], Iterator[PromptRecord]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _tsv,
}  # fmt: skip
_NEVER_LINES = frozenset(
    {".arrow", ".bz2", ".feather", ".gz", ".html", ".npz", ".orc", ".pkl", ".toml", ".xls", ".xlsx", ".xml", ".yaml",
     ".yml", ".zip", ".zst"}
)  # fmt: skip


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """The values of a row as JSON has them: times and the like as text, and no value where it is not a number."""
    restored: dict[str, Any] = json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
    return restored


def _checked(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Refuse what the records of a run could not hold."""
    if wrong := [name for name, value in content.items() if not is_storable(value)]:
        raise ConfigError(f"{where} has a field `{wrong[0]}` that is infinite or nested too deep: leave it out")
    return content


def _kind_of(content: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(content), "a number")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
