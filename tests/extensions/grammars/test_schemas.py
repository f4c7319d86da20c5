"""Every finished document of 200 schemas validates, with and without a draft, alone and in a batch of others."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from llama_ssp import Pair, load
from llama_ssp.extensions.grammars.records import GrammarSampling, refusal_of
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.state import Request
from tests.extensions.grammars.schemas import SCHEMAS
from tests.helpers.decoders import complete

MOST_NEW = 96
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load("tiny", "tiny-draft", dtype="fp32")


def documents(pair: Pair, schemas: list[Any], *, plain: bool, batch_size: int, temperature: float) -> list[Any]:
    """The text of each schema, or None if it was cut, by one decoder whose rows have settings of their own."""
    sampling = whole(SamplingConfig)(temperature=1.0, by_row=True)
    config = replace(pair.config, sampling=sampling, batch_size=batch_size)
    decoder = build_decoder(pair.models, config, speculative=not plain)
    prompt = tuple(pair.tokenizer("data = ").input_ids)
    requests = [
        Request(
            index=index,
            prompt_ids=prompt,
            max_new_tokens=MOST_NEW,
            sampling=whole(SamplingConfig)(temperature=temperature, json_schema=json.dumps(schema | COMPACT)),
        )
        for index, schema in enumerate(schemas)
    ]
    done = complete(decoder, requests)
    return [
        pair.tokenizer.decode(each.token_ids, skip_special_tokens=True) if each.finish_reason == "eos" else None
        for each in done
    ]


@pytest.mark.seconds
def test_there_are_200_and_none_is_refused() -> None:
    assert len(SCHEMAS) >= 200
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS)
    for schema in SCHEMAS:
        jsonschema.validators.validator_for(schema).check_schema(schema)
        assert refusal_of(GrammarSampling(json_schema=json.dumps(schema))) is None, schema


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_finished_document_validates(pair: Pair, temperature: float) -> None:
    """Greedy ones are equal with and without a draft, alone and in a batch."""
    found = documents(pair, SCHEMAS, plain=False, batch_size=8, temperature=temperature)
    for schema, text in zip(SCHEMAS, found, strict=True):
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
    assert sum(text is not None for text in found) > len(SCHEMAS) * 0.8
    if not temperature:
        assert documents(pair, SCHEMAS[::5], plain=True, batch_size=1, temperature=temperature) == found[::5]
