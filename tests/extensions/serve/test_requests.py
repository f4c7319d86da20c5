"""A served request is one record, which passes whole from a body to the rows of all ranks."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from llama_ssp import Pair
from llama_ssp.extensions.serve.inbox import Part, ServedRequest
from llama_ssp.extensions.serve.protocol import Answer, BodyReader
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.text.log_probs import TokenLogprob, TopLogprob
from tests.helpers.extensions import need

BODIES: list[dict[str, Any]] = [
    {"prompt": "def f"},
    {"prompt": ["a", "a", [5, 6]], "n": 2, "seed": 7, "stop": ["\n", "x"], "ignore_eos": True},
    {"prompt": "x", "logit_bias": {"198": -2.5, "7": 1}, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "temperature": 0},
    {"prompt": "x", "echo": True, "logprobs": 3, "max_tokens": 0, "presence_penalty": 1, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("body", BODIES)
def test_a_request_reaches_other_ranks_with_all_its_fields(pair: Pair, body: dict[str, Any]) -> None:
    config = replace(pair.config, sampling=replace(pair.config.sampling, frequency_penalty=0.5, min_new_tokens=3))
    asked = BodyReader(config, pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids).read(
        body, is_chat=False
    )
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


@pytest.mark.parametrize(
    ("body", "number", "keeps"),
    [({"seed": 3}, 4, True), ({}, 4, False), ({"seed": 3, "temperature": 0}, 4, False), ({"seed": 3}, "auto", False)],
)
def test_a_sampled_text_with_a_seed_keeps_the_number_of_drafted_tokens(
    pair: Pair, body: dict[str, Any], number: int | str, keeps: bool
) -> None:
    """Others may have fewer, which makes another sample of their law."""
    if number == "auto":
        need("adaptive")
    config = replace(pair.config, speculation=replace(pair.config.speculation, num_draft_tokens=number))
    reader = BodyReader(config, pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids)
    [request] = reader.read({"prompt": "x", "temperature": 0.8, **body}, is_chat=False).completions
    assert request.keeps_lengths is keeps


def answered(pair: Pair, text: str, *, is_chat: bool, stop: str = "", echoes: bool = False) -> dict[str, Any]:
    """The choice of an answer that is a text, each token of which has log-probability -1, another one -0.5."""
    ids = pair.tokenizer(text, add_special_tokens=False).input_ids
    prompt_ids = tuple(ids) if echoes else (pair.tokenizer.bos_token_id, 80)
    new_ids = [80] if echoes else ids
    scored = [*ids[1:], *new_ids] if echoes else new_ids
    request = ServedRequest(
        index=0,
        prompt_ids=prompt_ids,
        max_new_tokens=len(new_ids),
        num_top=1,
        scores_prompt=echoes,
        stops=StopStrings(pair.tokenizer, [stop]) if stop else None,
    )
    answer = Answer(request, pair.tokenizer, 0, is_chat=is_chat)
    for token in new_ids[:-1]:
        answer.push(Part([token]))
    top = [TopLogprob(token=9, logprob=-0.5)]
    scores = [TokenLogprob(token=token, logprob=-1.0, top=top) for token in scored]
    answer.push(Part(new_ids[-1:], "stop" if stop else "length", logprobs=scores))
    return answer.choice()


TEXTS = ("def f(x):", "é€ x", "naïve 漢字 = 5", "a\n\n")


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_those_of_the_text(pair: Pair, text: str) -> None:
    """Also where a character has several tokens."""
    content = answered(pair, text, is_chat=True)["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("stop", "echoes"), [("", False), ("", True), ("x", False)])
def test_tokens_begin_within_the_text_and_are_among_the_most_probable(
    pair: Pair, text: str, stop: str, echoes: bool
) -> None:
    choice = answered(pair, text, is_chat=False, stop=stop, echoes=echoes)
    scores, shown = choice["logprobs"], choice["text"]
    assert [*scores["text_offset"]] == sorted(scores["text_offset"])
    for token, offset, top in zip(scores["tokens"], scores["text_offset"], scores["top_logprobs"], strict=True):
        assert offset <= len(shown)
        begins = shown[offset:].startswith(token) or "\N{REPLACEMENT CHARACTER}" in token
        assert begins or (stop and stop in text)
        assert top is None or (top[token], len(top)) == (-1.0, 2)
