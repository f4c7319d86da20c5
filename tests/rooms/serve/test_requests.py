"""A served request is one record, which passes whole from a body to the rows of all ranks."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from llama_ssp import Pair
from llama_ssp.rooms.serve.inbox import ServedRequest
from llama_ssp.rooms.serve.protocol import BodyReader

BODIES: list[dict[str, Any]] = [
    {"prompt": "def f"}, {"prompt": ["a", "a", [5, 6]], "n": 2, "seed": 7, "stop": ["\n", "x"], "ignore_eos": True},
    {"prompt": "x", "logit_bias": {"198": -2.5, "7": 1}, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "temperature": 0},
    {"prompt": "x", "echo": True, "logprobs": 3, "max_tokens": 0, "presence_penalty": 1, "repetition_penalty": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_request_reaches_other_ranks_with_all_its_fields(pair: Pair, body: dict[str, Any]) -> None:
    config = replace(pair.config, sampling=replace(pair.config.sampling, frequency_penalty=0.5, min_new_tokens=3))
    asked = BodyReader(config, pair.models.request_maker, length=64).read(body, is_chat=False)
    assert len(asked.completions) == (6 if "n" in body else 1)
    for request in asked.completions:
        found = ServedRequest.from_json(json.loads(json.dumps(request.as_json())), pair.tokenizer)
        differing = {one.name for one in fields(request) if getattr(found, one.name) != getattr(request, one.name)}
        assert differing == ({"stops"} if "stop" in body else set())
        texts = [each.stops and [*each.stops.texts] for each in (request, found)]
        assert texts == [body.get("stop")] * 2
        assert found.sampling
        assert found.sampling.logit_bias == {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
        assert (found.sampling.frequency_penalty, found.sampling.min_new_tokens) == (0.5, None)
