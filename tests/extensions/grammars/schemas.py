"""200 schemas by hand, by feature: numbers, strings, enums, arrays, objects, unions, references, patterns, formats.

The features are those that public suites count; values are bounded, so that a small model ends its documents.
"""

from itertools import pairwise
from typing import Any

_SHORT = {"type": "string", "maxLength": 3}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_ENUMS: list[Any] = [
    ["a"],
    ["a", "b"],
    [1, 2, 3],
    [True],
    [None],
    ["x", 1, None, True],
    [{"a": 1}],
    [[1], [2]],
    ["é", "漢字"],
    [""],
    ["a b", 'say "x"', "back\\slash"],
    [-1, 0, 1],
    [1.5, 2.25],
    ["\n", "\t"],
    [[]],
    [{}],
    ["long text of some words"],
    [0],
    ["null", None],
    ["true", True],
]
_NUMBERS: list[dict[str, Any]] = (
    [
        {"type": "integer", "minimum": low, "maximum": high}
        for low, high in ((0, 9), (10, 99), (-9, 9), (-99, -10), (0, 1), (5, 5), (7, 123), (-1, 1000), (100, 200))
    ]
    + [
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in ((0, 9), (-5, 5), (10, 12), (0, 2), (-100, 100))
    ]
    + [{"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": number} for number in (2, 3, 5, 10, 25)]
    + [
        {"type": "number", "minimum": low, "maximum": high}
        for low, high in ((0, 1), (-1.5, 1.5), (0.25, 0.75), (10, 20.5))
    ]
    + [{"type": "boolean"}, {"type": "null"}, {"const": 3}, {"const": "three"}, {"const": {"a": [1]}}, {"const": None}]
)
_STRINGS: list[dict[str, Any]] = (
    [{"type": "string", "maxLength": number} for number in (0, 1, 2, 5)]
    + [{"type": "string", "minLength": low, "maxLength": high} for low, high in ((1, 1), (2, 4), (3, 3), (1, 6))]
    + [
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^[a-z]{3}$",
            "^[0-9]{5}$",
            "^(yes|no)$",
            "^a?b?c$",
            "^[A-Z][a-z]{0,4}$",
            "^x{2,4}$",
            "^[^a]{2}$",
            "^\\d{2}:\\d{2}$",
            "^[a-f0-9]{4}$",
            "^(ab|cd){1,3}$",
            "^-?[0-9]{1,3}$",
            "^\\w{1,4}$",
            "^[.]{3}$",
            "^a|b$",
            "^\\{[a-z]\\}$",
        )
    ]
    + [{"type": "string", "format": form} for form in ("date", "time", "date-time", "uuid", "ipv4")]
)
_ARRAYS: list[dict[str, Any]] = [
    {"type": "array", "items": item, "minItems": low, "maxItems": high}
    for item in (_DIGIT, {"enum": ["a", "b"]}, _SHORT, {"type": "boolean"})
    for low, high in ((0, 0), (0, 2), (1, 1), (2, 3))
] + [
    {"type": "array", "prefixItems": [_DIGIT, _SHORT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [_DIGIT], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": _DIGIT, "maxItems": 2}, "maxItems": 2},
    {
        "type": "array",
        "items": {"type": "object", "properties": {"a": _DIGIT}, "required": ["a"], "additionalProperties": False},
        "maxItems": 2,
    },
]


def _object(*, more: object = False, required: tuple[str, ...] = ("a",), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": more}


_VALUES = [_DIGIT, _SHORT, {"type": "boolean"}, {"type": "null"}, {"enum": ["x", "y"]}, {"const": 1}]
_OBJECTS: list[dict[str, Any]] = [
    *(_object(a=value) for value in _VALUES),
    *(_object(a=value, b=value, required=("a", "b")) for value in _VALUES),
    *(_object(a=value, b=value, required=()) for value in _VALUES),
    *(_object(a=_DIGIT, b=value, required=("b",)) for value in _VALUES),
    *(_object(a=_object(a=value)) for value in _VALUES),
    _object(a=_object(a=_object(a=_object(a=_DIGIT)))),
    _object(**{"a b": _DIGIT, 'c"d': _DIGIT, "é": _DIGIT}, required=("a b", 'c"d', "é")),
    _object(a={"type": "array", "items": _object(a=_DIGIT), "maxItems": 2}),
    _object(a=_DIGIT, b={"type": ["integer", "null"], "minimum": 0, "maximum": 3}, required=("a", "b")),
    _object(
        name=_SHORT,
        age={"type": "integer", "minimum": 0, "maximum": 150},
        is_student={"type": "boolean"},
        required=("name", "age", "is_student"),
    ),
]
_UNIONS: list[dict[str, Any]] = [
    *({"anyOf": [one, other]} for one, other in pairwise(_VALUES)),
    *({"oneOf": [{"const": number}, _object(a={"const": number})]} for number in range(5)),
    *({"type": [one, "null"], "maximum": 9, "minimum": 0, "maxLength": 3} for one in ("integer", "string", "boolean")),
    *(_object(a={"anyOf": [value, {"type": "null"}]}) for value in (_DIGIT, _SHORT)),
    {
        "oneOf": [
            _object(kind={"const": "cat"}, lives=_DIGIT, required=("kind", "lives")),
            _object(kind={"const": "dog"}, name=_SHORT, required=("kind", "name")),
        ]
    },
    {"anyOf": [{"type": "array", "items": _DIGIT, "maxItems": 2}, _object(a=_DIGIT)]},
    *({"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 5}]} for low in (0, 5, 10, 100)),
    {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 3}]},
]
_TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": _object(v=_DIGIT, l={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}, required=("v", "l"))
    },
}
_REFERENCES: list[dict[str, Any]] = [
    *({"$ref": "#/$defs/one", "$defs": {"one": value}} for value in _VALUES),
    *(_object(a={"$ref": "#/$defs/one"}) | {"$defs": {"one": value}} for value in _VALUES),
    *({"$ref": "#/definitions/one", "definitions": {"one": value}} for value in _VALUES),
    {"$ref": "#/$defs/one", "$defs": {"one": {"$ref": "#/$defs/two"}, "two": _DIGIT}},
    {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3, "$defs": {"one": _object(a=_DIGIT)}},
    _TREE,
]
_ADDITIONAL: list[dict[str, Any]] = [
    *(_object(a=_DIGIT, more=value) for value in _VALUES),
    *({"type": "object", "additionalProperties": value, "maxProperties": 2} for value in _VALUES),
    {"type": "object", "patternProperties": {"^x[0-9]$": _DIGIT}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": _SHORT}, "additionalProperties": False, "minProperties": 1},
    {"title": "a title", "description": "a description", "default": 3, "examples": [1], "$comment": "none"} | _DIGIT,
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/one"} | _object(a=_DIGIT),
]

_RECORDS: list[dict[str, Any]] = [
    _object(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        all={"type": "number", "minimum": 0, "maximum": 9},
        required=("id", "all"),
    ),
    _object(street=_SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"}, required=("street", "zip")),
    _object(
        x={"type": "integer", "minimum": -5, "maximum": 5},
        y={"type": "integer", "minimum": -5, "maximum": 5},
        required=("x", "y"),
    ),
    _object(
        tool={"const": "search"},
        arguments=_object(query=_SHORT, limit=_DIGIT, required=("query",)),
        required=("tool", "arguments"),
    ),
    _object(
        label={"enum": ["good", "bad", "unclear"]},
        score={"type": "integer", "minimum": 1, "maximum": 5},
        required=("label", "score"),
    ),
    _object(
        steps={"type": "array", "items": _object(do=_SHORT, required=("do",)), "minItems": 1, "maxItems": 2},
        required=("steps",),
    ),
    _object(day={"type": "string", "format": "date"}, open={"type": "boolean"}, required=("day", "open")),
    _object(
        host={"type": "string", "format": "ipv4"},
        port={"type": "integer", "minimum": 1, "maximum": 65535},
        required=("host", "port"),
    ),
    _object(red={"type": "boolean"}, green={"type": "boolean"}, blue={"type": "boolean"}, required=("green",)),
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": _object(q=_SHORT, a={"enum": ["yes", "no"]}, required=("q", "a")),
    },
]

SCHEMAS: list[Any] = [
    *({"enum": values} for values in _ENUMS),
    *_NUMBERS,
    *_STRINGS,
    *_ARRAYS,
    *_OBJECTS,
    *_UNIONS,
    *_REFERENCES,
    *_ADDITIONAL,
    *_RECORDS,
]
