"""Schemas as public collections have them: few are refused, and what a text of one is, another library agrees on."""

import json
from functools import cache
from random import Random
from typing import Any

import jsonschema
import pytest
import torch

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.grammars.records import GrammarSampling, refusal_of
from llama_ssp.extensions.grammars.text import GrammarText, prepare
from llama_ssp.speculate.engine.masks import WORD, Vocabulary, forbidden
from tests.extensions.grammars.public_schemas import NUM, PUBLIC


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load("tiny")


def text_of(pair: Pair, schema: object) -> GrammarText:
    begun = prepare(GrammarSampling(json_schema=json.dumps(schema)), pair.models.request_maker.vocabulary)()
    assert isinstance(begun, GrammarText)
    return begun


def fits(pair: Pair, schema: object, document: object) -> bool:
    text, ids = text_of(pair, schema), pair.tokenizer(json.dumps(document), add_special_tokens=False).input_ids
    if text._matcher.validate_tokens(ids) < len(ids):
        return False
    for token in ids:
        text.extend(token)
    return bool(text.may_end)


_SHORT = {"type": "string", "maxLength": 2}
_TAGGED = {
    name: {
        "type": "object",
        "properties": {"t": {"const": name}, name: _SHORT},
        "required": ["t"],
        "additionalProperties": False,
    }
    for name in ("a", "b")
}
_OBJECT = {"type": "object", "properties": {"a": _SHORT, "b": _SHORT, "c": _SHORT}, "additionalProperties": False}
_OBJECTS = [{}, {"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}, {"a": "x", "c": "y"}, {"a": "x", "b": "y", "c": "z"}]
WRITTEN: dict[str, tuple[Any, list[Any]]] = {
    "an unknown format": ({"type": "string", "format": "binary", "maxLength": 3}, ["", "abc", "abcd", 3]),
    "constants": ({"oneOf": [{"const": 1}, {"const": True}, {"const": "a"}]}, [1, True, "a", 2, False]),
    "references": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": _TAGGED},
        [{"t": "a"}, {"t": "b"}, {"t": "c"}, {"t": "a", "a": "x"}, {"t": "a", "b": "x"}, {}],
    ),
    "dependentRequired": (_OBJECT | {"dependentRequired": {"a": ["b"], "c": ["a"]}}, _OBJECTS),
    "dependencies": (
        _OBJECT | {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}},
        _OBJECTS,
    ),
    "dependentSchemas": (_OBJECT | {"dependentSchemas": {"a": {"required": ["c"]}}}, _OBJECTS),
    "names by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": _SHORT},
        [{}, {"a": "x"}, {"ab": "x"}, {"b": "x"}, {"a": 1}],
    ),
    "names of an enum": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1}, {"c": 1}]),
    "unique items": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [[], ["a"], ["b", "a"], ["a", "a"], ["c", "a", "b"], ["a", "b", "c", "a"], ["d"]],
    ),
    "items that may repeat": ({"type": "array", "items": {"enum": [1]}, "uniqueItems": False}, [[], [1, 1]]),
    "then without if": ({"type": "integer", "then": {"const": 1}}, [1, 2, "a"]),
}


@pytest.mark.parametrize("keyword", list(WRITTEN))
def test_a_keyword_means_what_it_says(pair: Pair, keyword: str) -> None:
    schema, documents = WRITTEN[keyword]
    validator = jsonschema.validators.validator_for(schema)(schema)
    found = [fits(pair, schema, document) for document in documents]
    assert found == [validator.is_valid(document) for document in documents]
    assert len({*found}) == 2 or keyword == "items that may repeat"


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "array", "uniqueItems": True},
        {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        {"type": "object", "required": True, "properties": []},
        {"type": "object", "propertyNames": {"minLength": 2}},
        {"oneOf": 3},
        {"uniqueItems": True, "items": {"enum": 3}},
        {"dependentRequired": {"a": 1}, "type": "object"},
        {"oneOf": [{"$ref": "#/oneOf/0"}, {"$ref": "#/none"}]},
    ],
    ids=str,
)
def test_what_cannot_be_written_is_refused_with_a_sentence_or_right(schema: Any) -> None:
    said = refusal_of(GrammarSampling(json_schema=json.dumps(schema)))
    assert said is None or said.startswith("sampling.json_schema is refused: ")


@cache
def closing_of(vocabulary: Vocabulary) -> set[int]:
    """The tokens that end a string, an object or an array."""
    decode = vocabulary.tokenizer.decode
    return {token for token in range(vocabulary.size) if decode([token]) in {'"', "}", "]", '"}', '",'}}


def written_by_chance(text: GrammarText, vocabulary: Vocabulary, random: Random) -> list[int] | None:
    """The tokens of a text that prefers to end; None if it does not soon."""
    masks, ids, vocab = torch.zeros(1, -(-vocabulary.size // WORD), dtype=torch.int32), list[int](), vocabulary.size
    closing = closing_of(vocabulary)
    for _ in range(300):
        text.fill(masks, (), ())
        allowed = (~forbidden(masks[None], range(vocab))).flatten().nonzero().flatten().tolist()
        assert allowed
        if text.may_end:
            return ids
        ends = [token for token in allowed if token in closing]
        ids.append(random.choice(ends if ends and random.random() < 0.6 else allowed))
        text.extend(ids[-1])
    return None


@pytest.mark.seconds
@pytest.mark.parametrize("part", range(3))
def test_a_text_of_a_public_schema_is_valid_and_few_are_refused(pair: Pair, part: int) -> None:
    vocabulary, num_refused, num_ended = pair.models.request_maker.vocabulary, 0, 0
    schemas = PUBLIC[part::3]
    for number, schema in enumerate(schemas):
        jsonschema.validators.validator_for(schema).check_schema(schema)
        try:
            text = text_of(pair, schema)
        except ConfigError as error:
            assert "json_schema is refused: " in str(error)  # noqa: PT017 - a few are
            num_refused += 1
            continue
        if (ids := written_by_chance(text, vocabulary, Random(number))) is not None:
            num_ended += 1
            jsonschema.validate(json.loads(str(pair.tokenizer.decode(ids))), schema)
    assert (len(PUBLIC), len(schemas)) == (NUM, NUM // 3)
    assert num_refused <= 0.1 * len(schemas)
    assert num_ended >= 0.8 * (len(schemas) - num_refused)
