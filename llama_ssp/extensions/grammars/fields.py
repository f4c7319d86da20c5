"""Structured text in served requests: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`."""

import json
from dataclasses import replace
from typing import Any

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.grammars.records import KINDS, names_file
from llama_ssp.speculate.engine.state import Request

_OBJECT = {"type": "object"}
_NAMES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def _asked(request: Request, kind: str, value: object, field: str) -> Request:
    """Return the request with one kind of structure; raises ConfigError for a value of another type."""
    if kind == "json_schema" and not isinstance(value, str):
        value = json.dumps(value)
    is_texts = isinstance(value, list) and value and all(isinstance(text, str) for text in value)
    if not (is_texts if kind == "choice" else isinstance(value, str)):
        raise ConfigError(f"{field} must be {'a list of texts' if kind == 'choice' else 'a text'}")
    if names_file(kind, value):  # clients read no files of the server
        raise ConfigError(f"{field} must be the text itself, and not the name of a file")
    sampling: Any = request.sampling
    if any(getattr(sampling, other) for other in KINDS):
        raise ConfigError(f"{field} comes with another structure of the text: give one")
    return replace(request, sampling=replace(sampling, **{kind: value}))


_JSON_SCHEMA = '{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}'
_FORMATS = {
    "text": {"type"},
    "json_object": {"type", "schema"},
    "json_schema": {"type", "json_schema"},
    "schema": {"name", "description", "schema", "strict"},
}
"""The keys of each type of format, and of the object that holds a schema."""


def response_format(value: dict[str, Any], request: Request) -> Request:
    """Read OpenAI's `response_format`: text, a JSON object, which llama.cpp's `schema` may restrict, or a schema."""
    kind = str(value.get("type"))
    holder = value.get("json_schema") if kind == "json_schema" else value
    asked = holder.get("schema") if isinstance(holder, dict) else None
    needs_schema = kind == "json_schema" or (kind == "json_object" and asked is not None)
    if kind not in ("text", "json_object", "json_schema") or (needs_schema and not isinstance(asked, dict | bool)):
        raise ConfigError(f'response_format must be {{"type": "text"}}, {{"type": "json_object"}} or {_JSON_SCHEMA}')
    inside = holder.keys() - _FORMATS["schema"] if isinstance(holder, dict) and holder is not value else ()
    if unknown := [*(value.keys() - _FORMATS[kind]), *inside]:
        raise ConfigError(f"response_format of type {kind} has no {unknown[0]!r}: leave it out")
    if kind == "text":
        return request
    return _asked(request, "json_schema", asked if needs_schema else _OBJECT, "response_format")


def structured_outputs(value: dict[str, Any], request: Request) -> Request:
    """Read `structured_outputs` of vLLM, which has one of json, regex, choice, grammar and json_object."""
    given = {name: one for name, one in value.items() if one not in (None, False)}
    if len(given) != 1 or not given.keys() <= {*_NAMES, "json_object"}:
        raise ConfigError(f"structured_outputs must have one of {', '.join([*_NAMES, 'json_object'])}")
    [(name, one)] = given.items()
    if name == "json_object":
        return _asked(request, "json_schema", _OBJECT, "structured_outputs")
    return _asked(request, _NAMES[name], one, f"structured_outputs.{name}")


def guided_json(value: object, request: Request) -> Request:
    """Read a JSON schema."""
    return _asked(request, "json_schema", value, "guided_json")


def guided_regex(value: object, request: Request) -> Request:
    """Read a regular expression."""
    return _asked(request, "regex", value, "guided_regex")


def guided_choice(value: object, request: Request) -> Request:
    """Read the texts to choose from."""
    return _asked(request, "choice", value, "guided_choice")


def guided_grammar(value: object, request: Request) -> Request:
    """Read a grammar."""
    return _asked(request, "grammar", value, "guided_grammar")
