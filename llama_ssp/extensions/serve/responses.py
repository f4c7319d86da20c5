"""OpenAI's Responses API: a text or messages in, a text and calls of tools out, whole or streamed.

A body becomes that of a chat, and the chat's answer a response. Nothing is stored: `previous_response_id` is refused.
"""

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

from llama_ssp.extensions.serve.inbox import RequestError
from llama_ssp.extensions.serve.protocol import Answer, Asked
from llama_ssp.extensions.serve.tools import Call

_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "truncation": ("disabled", "auto"),
    "background": (False,),
    "store": (True, False),
}
"""With either `truncation`, an input that is too long is refused."""
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {_LOGPROBS, "reasoning.encrypted_content"}
"""What `include` may name; the second is of reasoning that is stored, of which there is none."""


def as_chat(body: object) -> dict[str, Any]:
    """The body of a chat that asks for the same; raises RequestError that names a field."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in _WITHOUT_EFFECT.keys() & given.keys():
        if given.pop(name) not in _WITHOUT_EFFECT[name]:
            raise RequestError(f"{name} is not supported: leave it out", param=name)
    for name in {"messages", "n", "logprobs", *_RENAMED.values()} & given.keys():
        raise RequestError(f"{name} is no field of responses: see /v1/chat/completions", param=name)
    included = given.pop("include", [])
    if not isinstance(included, list) or not all(one in _INCLUDED for one in included):
        raise RequestError(f"include may name {' and '.join(sorted(_INCLUDED))}", param="include")
    if _LOGPROBS in included or "top_logprobs" in given:
        given["logprobs"] = True
    messages = [*_messages(given.pop("input", None))]
    instructions = given.pop("instructions", None)
    if isinstance(instructions, str):
        messages.insert(0, {"role": "system", "content": instructions})
    elif instructions is not None:
        raise RequestError("instructions must be a text", param="instructions")
    reasoning = given.pop("reasoning", {})
    if not isinstance(reasoning, dict) or not {name for name, one in reasoning.items() if one} <= {"effort"}:
        raise RequestError("reasoning must be an object with effort", param="reasoning")
    effort = {"reasoning_effort": reasoning["effort"]} if reasoning.get("effort") else {}
    structure = _format(given.pop("text", {})) | _tools(given)
    renamed = {_RENAMED.get(name, name): value for name, value in given.items()}
    return renamed | effort | structure | {"messages": messages}


def _format(text: object) -> dict[str, Any]:
    """The `response_format` of a chat for the field `text`."""
    asked = text.get("format", {"type": "text"}) if isinstance(text, dict) and text.keys() <= {"format"} else None
    if not isinstance(asked, dict) or asked.get("type") not in {"text", "json_object", "json_schema"}:
        wanted = '{"format": {"type": "json_schema", "name": NAME, "schema": SCHEMA}}, or of type text or json_object'
        raise RequestError(f"text must be {wanted}", param="text")
    given = {name: value for name, value in asked.items() if name != "type"}
    inside = {"json_schema": given} if asked["type"] == "json_schema" else given
    return {"response_format": {"type": asked["type"]} | inside}


def _tools(given: dict[str, Any]) -> dict[str, Any]:
    """The tools of a chat, and the choice among them, for those of a response, which has their fields at one level."""
    found = dict[str, Any]()
    if tools := given.pop("tools", []):
        for tool in tools if isinstance(tools, list) else (None,):
            if not isinstance(tool, dict) or tool.get("type") != "function":
                wanted = '{"type": "function", "name": NAME, "parameters": SCHEMA}'
                raise RequestError(f"tools must be a list of {wanted}", param="tools")
        found["tools"] = [
            {"type": "function", "function": {name: one for name, one in tool.items() if name != "type"}}
            for tool in tools
        ]
    choice = given.pop("tool_choice", None)
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {name: one for name, one in choice.items() if name != "type"}}
    return found if choice is None else found | {"tool_choice": choice}


def _messages(asked: object) -> Iterator[dict[str, Any]]:
    """The messages of a chat for the items of an input: an assistant's text and its calls are one message."""
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(items, list) or not items or not all(isinstance(one, dict) for one in items):
        raise RequestError("input must be a text, or a list of messages with role and content", param="input")
    turn: dict[str, Any] = {}
    for message in map(_message, items):
        new = {name: value for name, value in message.items() if value}
        if message["role"] != "assistant" or {"content", "reasoning_content"} & new.keys() & turn.keys():
            yield from [{"content": ""} | turn] if turn else ()
            turn = {}
        if message["role"] == "assistant":
            calls = [*turn.get("tool_calls", ()), *new.get("tool_calls", ())]
            turn |= new | ({"tool_calls": calls} if calls else {})
        else:
            yield message
    yield from [{"content": ""} | turn] if turn else ()


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of an input as a message."""
    kind = item.get("type", "message")
    if kind == "function_call":
        called = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": called}],
        }
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "reasoning":
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return {"role": "assistant", "reasoning_content": "\n".join(texts)}
    if kind != "message":
        known = "messages, reasoning, function_call and function_call_output are read"
        raise RequestError(f"input has a {kind!r}, and only {known}", param="input")
    role = "system" if item.get("role") == "developer" else item.get("role")
    more = {name: value for name, value in item.items() if name not in {"type", "id", "status", "role", "content"}}
    return {"role": role, "content": _content(item.get("content"))} | more


def _content(content: object) -> object:
    """Return the content of a message, with the names that its parts have in chats."""
    if not isinstance(content, list):
        return content
    texts = {"input_text", "output_text"}
    return [
        {"type": "text", "text": one.get("text")} if isinstance(one, dict) and one.get("type") in texts else one
        for one in content
    ]


class Response:
    """The response to a body, which a chat answers; `body` is the response's own."""

    def __init__(self, asked: Asked, body: Mapping[str, Any]) -> None:
        self._asked, self._body, self._created, self._answer = asked, body, int(time.time()), asked.answers[0]
        self._id, self._ids = f"resp_{uuid4().hex}", {"message": f"msg_{uuid4().hex}", "reasoning": f"rs_{uuid4().hex}"}
        self._output, self._numbers = list[dict[str, Any]](), count()
        # Of the items that have begun and not ended.
        self._places = dict[str, dict[str, Any]]()

    def whole(self) -> dict[str, object]:
        """The response at its end, or as it is so far."""
        ended = self._answer.last
        is_cut = bool(ended and ended.finish_reason == "length")
        used = self._asked.usage()
        if ended and not self._output:
            self._output = [self._item(kind, is_done=True) for kind in self._kinds()]
            self._output += [self._of_call(call) for call in self._answer.calls]
        return self._echoes() | {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._asked.model,
            "status": "in_progress" if not ended else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output if ended else [],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "output_tokens": used["completion_tokens"],
                "total_tokens": used["total_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": self._answer.num_thought},
            }
            if ended
            else None,
        }

    def _echoes(self) -> dict[str, object]:
        """Return the fields of the response that repeat the body's, or else have the server's defaults."""
        sampling = self._asked.completions[0].sampling
        default: dict[str, object] = {
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling and sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": (sampling and sampling.top_p) or 1.0,
            "truncation": "disabled",
            "user": None,
            "background": False,
            "top_logprobs": 0,
        }
        return default | {name: self._body[name] for name in default if self._body.get(name) is not None}

    def _kinds(self) -> list[str]:
        """The items of a whole answer, before its calls."""
        thinks = ["reasoning"] if self._answer.thoughts else []
        return [*thinks, *(["message"] if self._answer.text or not (thinks or self._answer.calls) else ())]

    def _item(self, kind: str, *, is_done: bool) -> dict[str, Any]:
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        status, content = "completed" if is_done else "in_progress", [self._part(kind)] if is_done else []
        return {"id": self._ids[kind], "type": kind, "status": status, "content": content} | more

    def _part(self, kind: str) -> dict[str, object]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": self._answer.thoughts}
        return {"type": "output_text", "text": self._answer.text, "annotations": [], "logprobs": self._logprobs()}

    def _logprobs(self) -> list[object]:
        scores = self._answer.scores() if self._answer.last else None
        return scores["content"] if scores else []

    @staticmethod
    def _of_call(call: Call) -> dict[str, Any]:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"id": f"fc_{call.id}", "type": "function_call", "status": "completed"} | named

    async def events(self, pieces: AsyncIterator[tuple[Answer, str]]) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; a request that fails ends with an event for its error."""
        yield self._event("response.created", response=self.whole())
        yield self._event("response.in_progress", response=self.whole())
        try:
            async for answer, text in pieces:
                for event in self._events_of(answer.new_thoughts, text, answer.new_calls):
                    yield event
        except RequestError as error:
            yield self._event("error", message=error.message, code=error.code, param=error.param)
            return
        for event in self._last_events():
            yield event

    def _event(self, kind: str, **content: object) -> bytes:
        whole = json.dumps({"type": kind, "sequence_number": next(self._numbers)} | content)
        return f"event: {kind}\ndata: {whole}\n\n".encode()

    def _begin(self, kind: str) -> Iterator[bytes]:
        """Begin an item, if it has not begun."""
        if kind not in self._places:
            index, item = len(self._output), self._item(kind, is_done=False)
            self._places[kind] = {"item_id": item["id"], "output_index": index, "content_index": 0}
            self._output.append(item)
            yield self._event("response.output_item.added", output_index=index, item=item)
            yield self._event("response.content_part.added", **self._places[kind], part=self._part(kind) | {"text": ""})

    def _end(self, kind: str) -> Iterator[bytes]:
        """End an item, if it has begun."""
        if place := self._places.pop(kind, None):
            index, item, part = place["output_index"], self._item(kind, is_done=True), self._part(kind)
            self._output[index] = item
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{part['type']}.done", **place, **done)
            yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _events_of(self, thoughts: str, text: str, calls: Sequence[Call]) -> Iterator[bytes]:
        """Yield the events of a piece of the thoughts and of the text, and of calls, each of which is known at once."""
        if thoughts:
            yield from self._begin("reasoning")
            yield self._event("response.reasoning_text.delta", **self._places["reasoning"], delta=thoughts)
        if text or calls:
            yield from self._end("reasoning")
        if text:
            yield from self._begin("message")
            place = self._places["message"]
            yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])
        for call in calls:
            item, index = self._of_call(call), len(self._output)
            self._output.append(item)
            place = {"item_id": item["id"], "output_index": index}
            begun = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
            done = {"name": call.name, "arguments": call.arguments}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _last_events(self) -> Iterator[bytes]:
        if not self._output:
            yield from self._begin("message")
        for kind in ("reasoning", "message"):
            yield from self._end(kind)
        whole = self.whole()
        yield self._event(f"response.{whole['status']}", response=whole)
