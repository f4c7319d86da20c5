"""OpenAI's Responses API in its plain form: a text or messages in, one text out, whole or streamed.

A body becomes that of a chat, and the chat's answer a response. Nothing is stored: `previous_response_id` is refused.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import Any
from uuid import uuid4

from llama_ssp.rooms.serve.inbox import RequestError
from llama_ssp.rooms.serve.protocol import Answer, Asked

_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "truncation": ("disabled",), "include": ([],), "background": (False,),
    "store": (True, False), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
}  # fmt: skip


def as_chat(body: object) -> dict[str, Any]:
    """The body of a chat that asks for the same; raises RequestError that names a field."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in _WITHOUT_EFFECT.keys() & given.keys():
        if given.pop(name) not in _WITHOUT_EFFECT[name]:
            raise RequestError(f"{name} is not supported: leave it out", param=name)
    for name in {"messages", "n", *_RENAMED.values()} & given.keys():
        raise RequestError(f"{name} is no field of responses: use input or max_output_tokens", param=name)
    asked, instructions = given.pop("input", None), given.pop("instructions", None)
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise RequestError("input must be a text, or a list of messages with role and content", param="input")
    messages = [_message(one) for one in messages]
    if isinstance(instructions, str):
        messages.insert(0, {"role": "system", "content": instructions})
    elif instructions is not None:
        raise RequestError("instructions must be a text", param="instructions")
    reasoning = given.pop("reasoning", {})
    if not isinstance(reasoning, dict) or not reasoning.keys() <= {"effort"}:
        raise RequestError("reasoning must be an object with effort", param="reasoning")
    effort = {"reasoning_effort": reasoning["effort"]} if reasoning.get("effort") else {}
    structure = _format(given.pop("text", {}))
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


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the parts of its content called as in chats."""
    if given.get("type", "message") != "message":
        raise RequestError(f"input has a {given['type']!r}, and only messages are read", param="input")
    content = given.get("content")
    if isinstance(content, list):
        texts = {"input_text", "output_text"}
        content = [
            one | {"type": "text"} if isinstance(one, dict) and one.get("type") in texts else one for one in content
        ]
    role = "system" if given.get("role") == "developer" else given.get("role")
    return {"role": role, "content": content}


class Response:
    """The response to a body, which a chat answers."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._created, self._answer = asked, int(time.time()), asked.answers[0]
        self._id, self._item_id = f"resp_{uuid4().hex}", f"msg_{uuid4().hex}"

    def whole(self) -> dict[str, object]:
        """The response at its end, or as it is so far."""
        ended = self._answer.last
        is_cut = bool(ended and ended.finish_reason == "length")
        used = self._asked.usage()
        return {
            "id": self._id, "object": "response", "created_at": self._created, "model": self._asked.model,
            "status": "in_progress" if not ended else "incomplete" if is_cut else "completed", "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item()] if ended else [], "parallel_tool_calls": False, "tool_choice": "none", "tools": [],
            "usage": {
                "input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"],
                "total_tokens": used["total_tokens"], "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": 0},
            } if ended else None,
        }  # fmt: skip

    def _item(self) -> dict[str, object]:
        status = "completed" if self._answer.last else "in_progress"
        content = [self._part()] if self._answer.last else []
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, object]:
        return {"type": "output_text", "text": self._answer.text, "annotations": []}

    async def events(self, pieces: AsyncIterator[tuple[Answer, str]]) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; a request that fails ends with one of its own."""
        numbers, place = count(), {"item_id": self._item_id, "output_index": 0, "content_index": 0}

        def event(kind: str, **content: object) -> bytes:
            whole = json.dumps({"type": kind, "sequence_number": next(numbers)} | content)
            return f"event: {kind}\ndata: {whole}\n\n".encode()

        yield event("response.created", response=self.whole())
        yield event("response.in_progress", response=self.whole())
        yield event("response.output_item.added", output_index=0, item=self._item())
        yield event("response.content_part.added", **place, part=self._part())
        try:
            async for _, text in pieces:
                if text:
                    yield event("response.output_text.delta", **place, delta=text, logprobs=[])
        except RequestError as error:
            yield event("error", message=error.message, code=error.code, param=error.param)
            return
        yield event("response.output_text.done", **place, text=self._answer.text, logprobs=[])
        yield event("response.content_part.done", **place, part=self._part())
        yield event("response.output_item.done", output_index=0, item=self._item())
        whole = self.whole()
        yield event(f"response.{whole['status']}", response=whole)
