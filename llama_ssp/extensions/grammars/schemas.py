"""Rewrites JSON schemas in the keywords that llguidance knows, where that means the same.

Unknown formats are left out, as the specification says. A `oneOf` of branches that exclude each other is an `anyOf`;
`dependentRequired`, `dependentSchemas` and `dependencies` are choices between a schema without the property and one
with it; `propertyNames` become properties or patterns; an array of unique items of few values becomes a choice among
all such arrays. Keywords that cannot be rewritten are left as they are, for the library to refuse by name.
"""

from collections.abc import Mapping
from itertools import combinations, permutations
from typing import Any

_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_OF_NAMES = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalItems", "additionalProperties", "items", "propertyNames")
_MOST_UNIQUE, _MOST_BRANCHES, _MOST_DEPENDENT, _MOST_DEEP = 4, 64, 6, 64
"""Sizes above which a keyword is left to the library: its equivalent would take long to write or to read."""


def written(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a schema that allows the same values with fewer keywords.

    Returns a value that is no schema as it is, for the library to say what is wrong.
    """
    try:
        return _written(schema, schema)
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError):
        return schema


def _written(schema: Any, root: Any) -> Any:  # noqa: ANN401
    """See `written`; references name parts of `root`."""
    if not isinstance(schema, dict):
        return schema
    one = dict(schema)
    for key in {*_OF_NAMES} & one.keys():
        if isinstance(one[key], dict):
            one[key] = {name: _written(value, root) for name, value in one[key].items()}
    for key in {*_LISTS} & one.keys():
        if isinstance(one[key], list):
            one[key] = [_written(value, root) for value in one[key]]
    for key in {*_SINGLE} & one.keys():
        one[key] = _written(one[key], root)
    if isinstance(one.get("format"), str) and one["format"] not in _FORMATS:
        del one["format"]
    if "if" not in one or not {"then", "else"} & one.keys():
        one = {key: value for key, value in one.items() if key not in {"if", "then", "else"}}
    branches = one.get("oneOf", ())
    if 0 < len(branches) <= _MOST_BRANCHES and all(_exclude(*pair, root) for pair in combinations(branches, 2)):
        _also(one, {"anyOf": one.pop("oneOf")})
    _write_dependencies(one)
    _write_names(one)
    _write_unique(one, root)
    return one


def _also(schema: dict[str, Any], other: Mapping[str, Any]) -> None:
    schema["allOf"] = [*schema.get("allOf", ()), other]


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Return the keywords of a schema after following references in this document; none if one cannot be followed."""
    for _ in range(_MOST_DEEP):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            break
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
        schema = schema if reference.startswith("#/") else None
    return schema if isinstance(schema, dict) else {}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows, if it names them; else None."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None and schema.get("type") == "boolean":
        values = [False, True]
    return values if isinstance(values, list) else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type", ())
    return {"number" if one == "integer" else str(one) for one in ([given] if isinstance(given, str) else given)}


def _exclude(one: Any, other: Any, root: Any, *, is_property: bool = False) -> bool:  # noqa: ANN401
    """Whether types, constants and required properties show that no value fits both schemas."""
    if one is False or other is False:
        return True
    one, other = _resolved(one, root), _resolved(other, root)
    if (values := _values(one)) is not None and (others := _values(other)) is not None:
        return not any(_equal(value, another) for value in values for another in others)
    types, other_types = _types(one), _types(other)
    if types and other_types and not types & other_types:
        return True
    if types != {"object"} or other_types != {"object"} or is_property:
        return False
    names = {*one.get("required", ()), *other.get("required", ())} & {*one.get("properties", ())}
    return any(
        name in other.get("properties", ())
        and _exclude(one["properties"][name], other["properties"][name], root, is_property=True)
        for name in names
    )


def _equal(one: object, other: object) -> bool:
    """Whether two values of JSON are equal; true is no number."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _write_dependencies(schema: dict[str, Any]) -> None:
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if 0 < len(schema.get(key, ())) <= _MOST_DEPENDENT and schema.get("type") == "object":
            for name, needed in schema.pop(key).items():
                more = (
                    {"required": [name, *needed]}
                    if isinstance(needed, list)
                    else {"required": [name], "allOf": [needed]}
                )
                _also(schema, {"anyOf": [{"properties": {name: False}}, more]})


def _write_names(schema: dict[str, Any]) -> None:
    names = schema.get("propertyNames")
    if names is True or (isinstance(names, dict) and names.keys() <= {"type", "title", "description"}):
        del schema["propertyNames"]
    elif isinstance(names, dict) and "patternProperties" not in schema and not schema.get("properties"):
        value = schema.get("additionalProperties", True)
        if (values := _values(names)) is not None:
            made: dict[str, Any] = {"properties": {name: value for name in values if isinstance(name, str)}}
        elif isinstance(names.get("pattern"), str) and names.keys() <= {"type", "pattern"}:
            made = {"patternProperties": {names["pattern"]: value}}
        else:
            return
        del schema["propertyNames"]
        schema |= made | {"additionalProperties": False}


def _write_unique(schema: dict[str, Any], root: Any) -> None:  # noqa: ANN401
    if "uniqueItems" not in schema:
        return
    values, most = _values(_resolved(schema.get("items"), root)), schema.get("maxItems")
    if schema["uniqueItems"] is False or (isinstance(most, int) and most <= 1):
        del schema["uniqueItems"]
    elif values and len(values) <= _MOST_UNIQUE and schema.get("type") == "array" and "prefixItems" not in schema:
        counts = range(schema.pop("minItems", 0), min(schema.pop("maxItems", len(values)), len(values)) + 1)
        lists = [[*chosen] for count in counts for chosen in permutations(values, count)]
        del schema["uniqueItems"], schema["items"]
        _also(
            schema,
            {
                "anyOf": [
                    {
                        "type": "array",
                        "prefixItems": [{"const": value} for value in one],
                        "items": False,
                        "minItems": len(one),
                    }
                    for one in lists
                ]
            },
        )
