"""Schemas in the spirit of public collections, made anew from a seed: functions, resources, configurations, records.

A third has keywords that a library often lacks: formats of other vocabularies, `oneOf` with a discriminator,
dependencies, names of properties, unique items. A few ask for what is refused.
"""

from random import Random
from typing import Any

_WORDS = [
    "name",
    "kind",
    "size",
    "owner",
    "port",
    "image",
    "region",
    "level",
    "tag",
    "unit",
    "price",
    "status",
    "count",
    "color",
    "path",
]
_FORMATS = ["date", "uuid", "email", "int64", "binary", "password", "byte", "regex", "iri", "uri-reference", "phone"]
NUM = 150


def _value(random: Random, depth: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": random.randint(1, 8)},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 4},
        {"enum": random.sample(_WORDS, 3)},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"const": random.choice(_WORDS)},
        {"type": "string", "maxLength": 6, "format": random.choice(_FORMATS[3:]), "description": "of another kind"},
        {"type": "string", "pattern": "^[a-z]{1,4}$"},
        {"type": "string", "format": random.choice(_FORMATS[:2])},
    ]
    if depth:
        item = _value(random, depth - 1)
        kinds += [_object(random, depth - 1), {"type": "array", "items": item, "maxItems": 2, "minItems": 1}]
    return random.choice(kinds)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(random, depth) for name in names},
        "required": names[: random.randint(1, len(names))],
        "additionalProperties": False,
        "title": names[0].title(),
    }


def _variant(random: Random, name: str) -> dict[str, Any]:
    one = _object(random, 0)
    one["properties"] = {"type": {"const": name}} | one["properties"]
    return one | {"required": ["type", *one["required"]]}


def _special(random: Random) -> dict[str, Any]:
    of, short = random.sample(_WORDS, 3), {"type": "string", "maxLength": 3}
    variants = {name: _variant(random, name) for name in of}
    kinds: list[dict[str, Any]] = [
        {"oneOf": [*variants.values()]},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": variants,
            "oneOf": [{"$ref": f"#/definitions/{name}"} for name in variants],
        },
        {
            "type": "object",
            "properties": {"value": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}},
            "required": ["value"],
            "additionalProperties": False,
        },
        {"oneOf": [{"const": number, "title": name} for number, name in enumerate(of)]},
        {
            "type": "object",
            "properties": dict.fromkeys(of, short),
            "dependentRequired": {of[0]: [of[1]]},
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": dict.fromkeys(of, short),
            "dependencies": {of[2]: of[:2]},
            "additionalProperties": False,
        },
        {"type": "object", "propertyNames": {"enum": of}, "additionalProperties": {"type": "integer", "maximum": 9}},
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "properties": {of[0]: short},
            "required": [of[0]],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"enum": of}, "uniqueItems": True, "minItems": 1},
        {"type": "array", "items": short, "uniqueItems": False, "maxItems": 2},
    ]
    return random.choice(kinds)


def _refused(random: Random) -> dict[str, Any]:
    of = random.sample(_WORDS, 2)
    return random.choice(
        [
            {"type": "object", "not": {"required": of}},
            {"type": "array", "contains": {"const": of[0]}, "maxItems": 3},
            {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            {"if": {"required": of[:1]}, "then": {"required": of}},
            {"oneOf": [{"required": of[:1]}, {"required": of[1:]}], "type": "object"},
        ]
    )


def _made(number: int) -> dict[str, Any]:
    random = Random(number)
    return (_refused if number % 17 == 16 else _special if number % 3 == 2 else _object)(
        random, *(() if number % 17 == 16 or number % 3 == 2 else (2,))
    )


PUBLIC = [_made(number) for number in range(NUM)]
