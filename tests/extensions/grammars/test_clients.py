"""Clients' own ways to documents of a schema: the openai package's `.parse`, for chats, tools and responses."""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from llama_ssp import load
from tests.extensions.serve.server import serving

HERMES = '{# <tool_call>{"name": N, "arguments": A}</tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}'


class Color(Enum):
    """An enum, which becomes a reference."""

    red, blue = "red", "blue"


class Part(BaseModel):
    """A model within another one."""

    color: Color
    size: int = Field(ge=0, le=99)


class Thing(BaseModel):
    """A thing, with what schemas of clients have."""

    kind: Literal["box", "ball"]
    parts: list[Part] = Field(max_length=2)
    note: str | None = Field(max_length=3)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    import openai  # all workers would, and it takes a second

    pair = load("tiny", "tiny-draft")
    pair.tokenizer.chat_template = HERMES
    with serving(pair) as server:
        address = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as made:
            yield made


ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0.7}
MESSAGES: Any = [{"role": "user", "content": "thing = "}]


@pytest.mark.seconds
@pytest.mark.parametrize("seed", [1, 2])
def test_chats_are_parsed(client: Any, seed: int) -> None:
    found = client.chat.completions.parse(**ASKED, messages=MESSAGES, response_format=Thing, max_tokens=300, seed=seed)
    [choice] = found.choices
    assert isinstance(choice.message.parsed, Thing)
    assert Thing.model_validate_json(choice.message.content) == choice.message.parsed
    with client.chat.completions.stream(
        **ASKED, messages=MESSAGES, response_format=Thing, max_tokens=300, seed=seed
    ) as stream:
        assert [*stream]
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


@pytest.mark.seconds
def test_calls_of_tools_are_parsed(client: Any) -> None:
    import openai

    tool = openai.pydantic_function_tool(Thing, name="keep")
    assert tool["function"]["strict"], "which the package asks for"
    [choice] = client.chat.completions.parse(
        **ASKED,
        messages=MESSAGES,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        seed=3,
    ).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "keep")
    assert isinstance(call.function.parsed_arguments, Thing)


@pytest.mark.seconds
@pytest.mark.parametrize("streams", [False, True])
def test_responses_are_parsed(client: Any, streams: bool) -> None:
    asked = ASKED | {"input": "thing = ", "max_output_tokens": 300, "text_format": Thing, "extra_body": {"seed": 1}}
    if streams:
        with client.responses.stream(**asked) as stream:
            assert [*stream]
            found = stream.get_final_response()
    else:
        found = client.responses.parse(**asked)
    assert isinstance(found.output_parsed, Thing)
    assert Thing.model_validate_json(found.output_text) == found.output_parsed


@pytest.mark.seconds
def test_responses_have_a_format(client: Any) -> None:
    schema = {
        "type": "json_schema",
        "name": "one",
        "schema": {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    found = client.responses.create(**ASKED, input="x", max_output_tokens=60, text={"format": schema})
    assert json.loads(found.output_text) == {"a": 1}
    found = client.responses.create(**ASKED, input="x", max_output_tokens=30, text={"format": {"type": "json_object"}})
    assert found.output_text.lstrip().startswith("{")
