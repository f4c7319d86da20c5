"""The records of structured texts: settings, served fields, and what does not combine with them. Imports no torch.

Every kind becomes a grammar in the notation of llguidance, which is refused before a model is loaded.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

from llama_ssp.catalogue import read_path
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.grammars.schemas import written
from llama_ssp.settings.aliases import Counterpart
from llama_ssp.settings.combinations import Ability
from llama_ssp.settings.constraints import ConstraintRecord
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.schema import RunConfig, SamplingConfig
from llama_ssp.settings.tasks import NoEffect, ServedField, task_of
from llama_ssp.text.messages import installing, key_of, listed, said

MOST_BYTES = 1 << 18
"""The most bytes of a grammar: larger ones take seconds to read."""
MOST_SPACES = 16
"""The most spaces and line breaks between two parts of a document: a small model could write them for ever."""
KINDS = ("json_schema", "regex", "choice", "grammar")
_EVERY_TOKEN = '%llguidance {"no_forcing": true}\n'
"""Makes a grammar allow each token whose bytes fit, not only those that a tokenizer would choose for the text."""
_OPTIONS, _FEW_SPACES = "x-guidance", {"whitespace_pattern": f"[ \\n\\r\\t]{{0,{MOST_SPACES}}}"}
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_SCHEMA_LINE = re.compile(r"(?m)^(\w+: %json )(\{.*\})$")
_SPECIAL = re.compile(r"[][\\.+*?()|{}^$#&~/-]")


@dataclass(kw_only=True)
class GrammarSampling(SamplingConfig):
    """Sampling of texts with a given structure."""

    json_schema: str | None = setting(
        None, "the text is a JSON document that this schema, or the file .json with one, allows."
    )
    regex: str | None = setting(None, "the whole text matches this regular expression.")
    choice: list[str] = made(list, "the text is one of these.")
    grammar: str | None = setting(None, "the text follows this grammar in Lark's notation, or the file .lark with one.")


def given_of(sampling: object) -> dict[str, Any]:
    """Return the structures that the user asks for, by kind; none if the sampling lacks these settings."""
    return {kind: value for kind in KINDS if (value := getattr(sampling, kind, None)) not in (None, [])}


def has_grammar(sampling: object) -> bool:
    """Whether the user asks for a structure of any kind."""
    values = [*map(getattr, repeat(sampling), KINDS, repeat(None))]
    return values.count(None) + values.count([]) < len(KINDS)


def grammar_of(sampling: object) -> str:
    """Return the grammar of a text; raises ConfigError for one that cannot be read or is too large."""
    (kind, given), *others = given_of(sampling).items()
    if others:
        both = listed([key_of(f"sampling.{name}") for name in given_of(sampling)], "and")
        raise ConfigError(f"{both} exclude each other: give one")
    text = "\n".join(given) if kind == "choice" else _text_of(kind, given)
    if (size := len(text.encode(errors="replace"))) > MOST_BYTES:
        raise ConfigError(f"{_key(kind)} has {size} bytes: at most {MOST_BYTES} are read")
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{_key(kind)} is no JSON: {error}") from None
        if isinstance(schema, dict):
            schema = {_OPTIONS: _FEW_SPACES} | schema
        return f"{_EVERY_TOKEN}start: %json {json.dumps(written(schema))}"
    if kind == "grammar":
        return _EVERY_TOKEN + _SCHEMA_LINE.sub(_written_line, text)
    return f"{_EVERY_TOKEN}start: /{_in_lark('|'.join(map(_literal, given)) if kind == 'choice' else text)}/"


def _written_line(found: re.Match[str]) -> str:
    with suppress(ValueError, RecursionError):
        return f"{found[1]}{json.dumps(written(json.loads(found[2])))}"
    return found[0]


def refusal_of(sampling: object) -> str | None:
    """Return a sentence that says why the requested structure is no grammar; None if it is one."""
    try:
        reason = _refused(grammar_of(sampling))
    except ConfigError as error:
        return str(error)
    (kind,) = given_of(sampling)
    return f"{_key(kind)} is refused: {reason}" if reason else None


def _key(kind: str) -> str:
    return key_of(f"sampling.{kind}")


def names_file(kind: str, given: object) -> bool:
    """Whether a requested structure is the name of a file."""
    ending = {"json_schema": ".json", "grammar": ".lark"}.get(kind)
    return isinstance(given, str) and ending is not None and given.endswith(ending) and "\n" not in given


def _text_of(kind: str, given: str) -> str:
    if not names_file(kind, given):
        return given
    try:
        return Path(read_path(given)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_key(kind)}={given} cannot be read: {error}") from None


def _literal(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


def _in_lark(regex: str) -> str:
    from llguidance import regex_to_lark

    return f"(?s:{regex_to_lark(regex, '')})".replace("\n", r"\n")


@lru_cache(maxsize=64)
def _refused(grammar: str) -> str:
    from llguidance import LLMatcher

    found: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    if found.startswith("WARNING"):
        return ""
    reason, _, where = found.partition("\n   ")  # the place in the text that was made
    causes = [line for line in where.splitlines() if line.startswith("error: ")]
    return " ".join(_PLACE.sub("", " ".join([reason, *causes])).split())


def _schema(value: object) -> str | None:
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, Mapping | bool) else None


def _texts(value: object) -> list[str] | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        return None
    return [*value]


def _problems(config: RunConfig) -> Iterator[str | NoEffect]:
    if not (given := given_of(config.sampling)):
        return
    keys = [f"sampling.{kind}" for kind in given]
    if not find_spec("llguidance"):
        yield f"{key_of(keys[0])} needs llguidance: {installing('grammars')}"
        return
    # Of requests it is asked when their grammar is made, apart from what waits for no grammar.
    if not config.sampling.by_row and (reason := refusal_of(config.sampling)):
        yield reason
    yield NoEffect("ignore_eos", f"with {keys[0]}, at whose end the text ends")
    task = task_of(config)
    if task.reads_prompts(config) and config.task.name not in {"generate", "compare"}:
        yield f"{key_of(keys[0])} needs texts that are kept: use task=generate or task=compare"


GRAMMAR = ConstraintRecord(name="grammar", is_asked=has_grammar, prepare="llama_ssp.extensions.grammars.text:prepare")
SETTINGS = MoreSettings(
    name="grammars",
    config=GrammarSampling,
    after="min_new_tokens",
    paths=("sampling.json_schema", "sampling.regex", "sampling.grammar"),
    readers={
        "json_schema": (_schema, "a schema as a mapping or a text"),
        "choice": (_texts, "a list of texts"),
    },
)
OF_JSON = Counterpart(
    "guided_json json_schema response_format structured_outputs",
    "sampling.json_schema",
    "sampling.json_schema=FILE.json makes documents of a schema",
)
OF_REGEX = Counterpart("guided_regex", "sampling.regex", "sampling.regex=[0-9]+ makes texts that it matches")
OF_CHOICE = Counterpart("guided_choice", "sampling.choice", "sampling.choice=[yes,no] makes one of these texts")
OF_GRAMMAR = Counterpart("guided_grammar", "sampling.grammar", "sampling.grammar=FILE.lark makes texts of a grammar")


def _words(config: RunConfig) -> Mapping[str, object]:
    structured = key_of(f"sampling.{next(iter(given_of(config.sampling)), KINDS[0])}")
    return {"structured": structured, "logprobs": said("logprobs", config.logprobs)}


STRUCTURED = Ability(
    name="structured text",
    has=lambda config: has_grammar(config.sampling),
    clashes={
        "overlap": "{structured} waits for the drafted tokens in each round: leave {overlap} out",
        "forced lengths": "{structured} would forbid tokens that {forced} accepts: leave one out",
        "log-probabilities": "{structured} makes a law that {logprobs} does not know: leave one out",
    },
    words=_words,
    problems=_problems,
)


def _field(name: str, kind: str) -> ServedField:
    return ServedField(name=name, kind=kind, read=f"llama_ssp.extensions.grammars.fields:{name}")


RESPONSE_FORMAT = _field("response_format", "an object")
STRUCTURED_OUTPUTS = _field("structured_outputs", "an object")
GUIDED_JSON = _field("guided_json", "an object or a text")
GUIDED_REGEX = _field("guided_regex", "a text")
GUIDED_CHOICE = _field("guided_choice", "a list of texts")
GUIDED_GRAMMAR = _field("guided_grammar", "a text")
