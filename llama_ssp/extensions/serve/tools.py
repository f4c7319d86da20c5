"""Tools of chats: the form in which a model writes calls, grammars that make it write them, and calls in its answer.

A chat template teaches its model a form. Known forms are told apart by the template's own words:

    Hermes, Qwen 2.5 and 3    <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>, for each call
    Llama 3                   {"name": NAME, "parameters": OBJECT}, and nothing else
    Mistral, up to tokenizer 7    [TOOL_CALLS][{"name": NAME, "arguments": OBJECT}, ...], at the end
    Apriel                    <tool_calls>[{"name": NAME, "arguments": OBJECT}, ...]</tool_calls>
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ssp.architectures.model_files import is_deep
from llama_ssp.extensions.serve.inbox import RequestError
from llama_ssp.speculate.engine.text import IncrementalText, Piece
from llama_ssp.types import Parsed

MOST_TOOLS, MOST_DEPTH = 128, 256
"""Tools of a request, and objects and lists that may stand inside each other."""
_NAME, _CHOICES, _ID_LENGTH = re.compile(r"[A-Za-z0-9_-]{1,64}"), ("auto", "none", "required"), 9
_FIELDS: dict[str, type] = {"name": str, "description": str, "parameters": dict, "strict": bool}
_KINDS = {str: "a text", dict: "the schema of an object", bool: "true or false"}
_SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Makes grammars write arguments with the white space that templates use."""
_NOTHING = {"properties": {}, "additionalProperties": False}
_DECODER = json.JSONDecoder()
_QUOTED = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


class Form(NamedTuple):
    """The form in which a model writes calls.

    Attributes:
        taught_by: the pattern that finds the form in a template.
        mark: the text that begins a call, or a list of calls.
        end: the text that ends a call; empty if calls end the answer.
        key: the key of the arguments.
        many, single: in a grammar, what follows the first mark, with `mark` and `end` to be filled in, and `one` for an
            object.
        is_bare: an object is a call without a mark.
    """

    taught_by: re.Pattern[str]
    mark: str
    end: str
    key: str
    many: str
    single: str
    is_bare: bool = False


_HERMES = Form(
    re.compile(r'(?s)(?!.*<(?:function=|arg_key>)).*<tool_call>.*arguments\\?"'),
    "<tool_call>",
    "</tool_call>",
    "arguments",
    r'"\n" one "\n" {end} ("\n" {mark} "\n" one "\n" {end})*',
    r'"\n" one "\n" {end}',
)
_MISTRAL = Form(
    re.compile(r"(?s)(?!.*\[ARGS\]).*\[TOOL_CALLS\]"),
    "[TOOL_CALLS]",
    "",
    "arguments",
    '" "? "[" one (", " one)* "]"',
    '" "? "[" one "]"',
)
_LLAMA = Form(
    re.compile(r'(?s)(?=.*ipython).*parameters\\?"'), "<|python_tag|>", "", "parameters", "one", "one", is_bare=True
)
_APRIEL = Form(
    re.compile(r"(?s).*<tool_calls>\["),
    "<tool_calls>",
    "</tool_calls>",
    "arguments",
    '"[" one (", " one)* "]" {end}',
    '"[" one "]" {end}',
)
_FORMS = (_MISTRAL, _APRIEL, _HERMES, _LLAMA)
_BARE = '{"name"'
"""Begins a call without a mark after text; at the beginning of an answer { does."""


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        form: the form of their calls.
        names: names of the tools that may be called.
        marks: special tokens, which have no text, that begin and end calls; none if the marks are ordinary text.
        grammar: the grammar of the answer, in the notation of `guided_grammar`; None if it may be any text.
        offered: the tools that the template gets.
        follow_thoughts: whether thoughts may come before calls.
    """

    form: Form
    names: frozenset[str]
    marks: Mapping[int, str]
    grammar: str | None
    offered: Sequence[Mapping[str, Any]]
    follow_thoughts: bool


class Call(NamedTuple):
    """A call of a tool; `arguments` is a JSON object."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, object]:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tools_of(given: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Tools | None:
    """The tools that a body lets its model call; None for none. Raises RequestError that names a field."""
    tools = given.get("tools", [])
    functions = [_function(tool, number) for number, tool in enumerate(tools if isinstance(tools, list) else (), 1)]
    names = [one["name"] for one in functions]
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS or len({*names}) < len(names):
        raise RequestError(f"tools must be a list of up to {MOST_TOOLS} functions of different names", param="tools")
    choice = _choice(given, names)
    if choice == "none" or not functions:
        return None
    offered = [{"type": "function", "function": one} for one in functions]
    form = form_of(tokenizer, offered, "tools")
    is_single = given.get("parallel_tool_calls") is False or choice in names
    is_constrained = choice != "auto" or is_single or any(one.get("strict") for one in functions)
    if choice in names:
        functions = [one for one in functions if one["name"] == choice]
    grammar = _grammar(form, functions, tokenizer, is_single=is_single, may_be_text=choice == "auto")
    called = frozenset(one["name"] for one in functions)
    return Tools(
        form,
        called,
        special_marks((form.mark, form.end), tokenizer),
        grammar if is_constrained else None,
        offered,
        follow_thoughts=not is_constrained or (choice == "auto" and not form.is_bare),
    )


def _choice(given: Mapping[str, Any], names: Collection[str]) -> str:
    """The choice about calls: `auto`, `none`, `required`, or the name of the tool to call."""
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = next((name for name in names if choice == {"type": "function", "function": {"name": name}}), None)
        if named:
            return named
        raise RequestError("tool_choice must name one of tools", param="tool_choice")
    if choice not in _CHOICES or (choice == "required" and not names):
        wanted = f'{", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": NAME}}}}'
        raise RequestError(f"tool_choice must be {wanted}, the last two with tools", param="tool_choice")
    return str(choice)


def _function(tool: object, number: int) -> dict[str, Any]:
    """The function of a tool, with the fields that have a value."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    is_named = isinstance(name, str) and _NAME.fullmatch(name)
    if not (isinstance(tool, dict) and isinstance(function, dict) and is_named):
        wanted = '{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}'
        raise RequestError(f"entry {number} of tools must be {wanted}, with a name of {_NAME.pattern}", param="tools")
    function = {key: value for key, value in function.items() if value is not None}
    if unknown := [*(tool.keys() - {"type", "function"}), *(function.keys() - _FIELDS.keys())]:
        raise RequestError(f"{unknown[0][:64]!r} of {name} in tools is not supported: leave it out", param="tools")
    if wrong := next((key for key, value in function.items() if not isinstance(value, _FIELDS[key])), None):
        raise RequestError(f"{wrong} of {name} in tools must be {_KINDS[_FIELDS[wrong]]}", param="tools")
    if function.get("parameters", {}).get("type", "object") != "object":
        raise RequestError(f"parameters of {name} in tools must be the schema of an object", param="tools")
    return function


def form_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any], param: str) -> Form:
    """The form that the chat template teaches; raises RequestError for an unknown one."""
    source = tokenizer.get_chat_template(tools=[*tools]) if tokenizer.chat_template else ""
    if found := next((form for form in _FORMS if form.taught_by.match(source)), None):
        return found
    known = (
        "of Hermes and Qwen 3 (<tool_call> around JSON), Llama 3, Mistral ([TOOL_CALLS] before a list) and Apriel "
        "(<tool_calls> around a list)"
    )
    raise RequestError(f"the chat template of this model has no tool calls in a known form: those {known}", param=param)


def special_marks(texts: Collection[str], tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens among some marks, which have no text."""
    added = tokenizer.added_tokens_decoder
    return {token: one.content for token, one in added.items() if one.special and one.content in texts}


def _grammar(
    form: Form,
    functions: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_single: bool,
    may_be_text: bool,
) -> str:
    """Write the grammar of calls of these functions, or of a text before or in place of them."""
    ids = {text: token for token, text in special_marks((form.mark, form.end), tokenizer).items()}
    mark, end = (f"<[{ids[text]}]>" if text in ids else json.dumps(text) for text in (form.mark, form.end))
    lines = [f"after: {(form.single if is_single else form.many).format(mark=mark, end=end)}"]
    lines.append("one: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        begin = f'{{"name": "{function["name"]}", "{form.key}": '
        schema = _SPACING | {"type": "object"} | (function.get("parameters") or _NOTHING)
        lines.append(f'call_{number}: {json.dumps(begin)} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: %json {json.dumps(schema)}")
    begun = "after" if form.is_bare else f"{mark} after"
    if not may_be_text:
        return "\n".join([f"start: {begun}", *lines])
    if form.is_bare:
        lines += [f"start: TEXT? | {begun}", r"TEXT: /(?s:.+)/ & ~/(?s:\s*\{.*)/"]
    elif form.mark in ids:
        lines += [f"start: TEXT? ({begun})?", "TEXT: /(?s:.+)/"]
    else:  # a text ends at its first mark
        lines += ["start: TEXT? | lead after", "TEXT: /(?s:.+)/", f"lead[suffix={mark}]: /(?s:.*)/"]
    return "\n".join(lines)


def with_calls(messages: object, tokenizer: PreTrainedTokenizerBase) -> object:
    """Messages whose calls are as templates read them, with arguments as objects; raises RequestError.

    A null or empty content of an assistant or a tool is the empty text.
    """
    if not isinstance(messages, list):
        return messages
    found = []
    for number, message in enumerate(messages, start=1):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        is_silent = isinstance(message, dict) and message.get("content") in (None, [])
        more: dict[str, Any] = {"content": ""} if is_silent and message.get("role") in ("assistant", "tool") else {}
        if calls and (number == len(messages) or message.get("role") != "assistant"):
            reason = (
                f"message {number} has tool_calls, which an assistant makes, and a message of the role tool answers"
            )
            raise RequestError(reason, param="messages")
        more |= {"tool_calls": _read_calls(calls, number, tokenizer)} if calls else {}
        found.append({**message, **more} if more else message)
    return found


def _read_calls(calls: Parsed, number: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    form_of(tokenizer, (), "messages")
    try:
        functions = [(str(call["id"]), str(call["function"]["name"]), call["function"]["arguments"]) for call in calls]
        return [
            {
                "id": name,
                "type": "function",
                "function": {"name": called, "arguments": _object({} if given in ("", None) else given)},
            }
            for name, called, given in functions
        ]
    except (KeyError, TypeError, ValueError, RecursionError):
        wanted = '{"id": ID, "type": "function", "function": {"name": NAME, "arguments": JSON}}'
        reason = f"tool_calls of message {number} must be a list of {wanted}"
        raise RequestError(reason, param="messages") from None


def _object(given: object) -> dict[str, Any]:
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict) or is_deep(found, MOST_DEPTH):
        raise TypeError
    return found


class CallReader:
    """Divides the text of an answer, while it arrives, into text for the user and calls.

    A call is one once it is whole, and names a tool of the request; anything else is text. White space after calls
    and marks that are repeated there are left out. Each character is looked at once as it arrives, and twice more when
    the call is read that it belongs to. What is open at the end of an answer is read once more.
    """

    def __init__(self, tools: Tools) -> None:
        self._form, self._names = tools.form, tools.names
        # A grammar leaves a text before a bare call free, so that such a call would be free too.
        self._marks = [tools.form.mark, *filter(None, [tools.form.end])]
        self._marks += [_BARE] if tools.form.is_bare and not tools.grammar else []
        self._begins = re.compile("|".join(map(re.escape, self._marks)))
        self._between = re.compile(rf"(?:{re.escape(tools.form.mark)}|[ \n\r\t,;\[\]])*+")
        self._ends = re.compile(f'"|{re.escape(tools.form.end)}')
        # Text that has not been shown: white space before what may be a call, the open call, and what may begin a mark.
        self._spaces, self._block, self._rest = list[str](), list[str](), ""
        self._is_quoted = self._has_text = self._has_calls = self._follows_call = False
        self._shown, self._calls = list[str](), list[Call]()

    def push(self, text: str, *, is_over: bool = False) -> tuple[str, list[Call]]:
        """Take text; returns text and calls that are known now."""
        self._shown, self._calls = [], []
        self._scan(text)
        if not is_over:
            return "".join(self._shown), self._calls
        if self._block:
            self._finish("".join([*self._block, self._rest]))
        else:
            self._show(self._rest)
        shown = "".join([*self._shown, *self._spaces])
        return shown.rstrip() if self._has_calls else shown, self._calls

    def _scan(self, text: str) -> None:
        """Read text, but for what at its end may begin a mark."""
        text, at, self._rest = self._rest + text, 0, ""
        while at < len(text):
            at = self._go_on(text, at) if self._block else self._begin(text, at)

    def _begin(self, text: str, at: int) -> int:
        """Show text up to the place where a call may begin, and return that; the end if there is none."""
        found = self._begins.search(text, at)
        place, mark = (found.start(), found[0]) if found else (len(text), "")
        if self._form.is_bare and not self._has_text and text[at:place].lstrip()[:1] == "{":
            mark, place = "{", text.index("{", at)
        end = place if mark else len(text) - max(num_begun(text, one, at) for one in self._marks)
        self._show(text[at:end])
        if not mark:
            self._rest = text[end:]
            return len(text)
        if mark != self._form.end:
            self._block = [mark]
        elif not self._follows_call:
            self._show(mark)
        return place + len(mark)

    def _go_on(self, text: str, at: int) -> int:
        """Add text to the open call, and return the place where that ends: arguments may quote what ends a call."""
        mark, end = self._form.end, at if self._form.end else len(text)
        while end < len(text):
            if self._is_quoted:
                found = _QUOTED.match(text, end)
                end = found.end() if found else end
                if text[end : end + 1] != '"':
                    break
                self._is_quoted, end = False, end + 1
            if not (found := self._ends.search(text, end)):
                end = len(text) - num_begun(text, mark, end)
                break
            end, self._is_quoted = found.end(), found[0] == '"'
            if not self._is_quoted:
                self._close("".join([*self._block, text[at:end]]))
                return end
        self._block.append(text[at:end])
        self._rest = text[end:]
        return len(text)

    def _close(self, block: str) -> None:
        """End the open call, which is text if it is none; it may begin at the last of several marks."""
        self._block = []
        for at in dict.fromkeys((0, block.rfind(self._form.mark))):
            calls, end, _ = self._read(block, at)
            if calls and end + len(self._form.end) == len(block):
                self._show(block[:at])
                self._add(calls)
                return
        self._show(block)

    def _finish(self, block: str) -> None:
        """Read an open call where the answer ends, and what follows it: an odd quote may have hidden its end."""
        mark, at = self._form.end, 0
        last = block.rfind(mark)
        while at < len(block):
            calls, end, reached = self._read(block, at)
            is_closed = block.startswith(mark, end)
            if calls and (is_closed or end > last):
                self._add(calls)
                end += len(mark) * is_closed
            else:
                place = block.find(mark, at) if mark else -1
                end = place + len(mark) if place >= 0 else len(block) if mark else max(reached, at + 1)
                self._show(block[at:end])
            found = self._begins.search(block, end)
            at = found.start() if found else len(block)
            self._show(block[end:at])

    def _add(self, calls: list[Call]) -> None:
        self._calls += calls
        self._spaces = self._spaces if self._has_text else []
        self._has_calls = self._follows_call = True

    def _show(self, text: str) -> None:
        """Show text, but for white space at its end and after a call."""
        text = text.lstrip() if self._follows_call else text
        if shown := text.rstrip():
            self._shown += [*self._spaces, shown]
            self._spaces, self._has_text, self._follows_call = [], True, False
        self._spaces.append(text[len(shown) :])

    def _read(self, text: str, at: int) -> tuple[list[Call], int, int]:
        """The calls that stand one after another from a place on, the place after them, and where it stopped."""
        calls, at = list[Call](), self._after(text, at)
        reached = at
        try:
            while at < len(text):
                reached = len(text)
                one, reached = _DECODER.raw_decode(text, at)
                if one["name"] not in self._names:
                    break
                given = one.get(self._form.key, one.get("arguments"))
                arguments = json.dumps(_object(given), ensure_ascii=False, allow_nan=False)
                calls.append(Call(one["name"], arguments, secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]))
                at = self._after(text, reached)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and error.doc is text:
                reached = error.pos
        return calls, at, reached

    def _after(self, text: str, at: int) -> int:
        """The place after what may stand between calls."""
        found = self._between.match(text, at)
        return found.end() if found else at


def num_begun(text: str, mark: str, at: int) -> int:
    """The characters at the end of a text, after a place, that may begin a mark."""
    return next((number for number in range(len(mark) - 1, 0, -1) if text.endswith(mark[:number], at)), 0)


class MarkedText(IncrementalText):
    """The text of an answer in which the special tokens that begin and end calls and thoughts have text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], marks: Mapping[int, str]) -> None:
        super().__init__(tokenizer, prompt_ids)
        self._marks = marks

    def push(self, token_ids: Sequence[int], *, num_accepted: int = 0) -> list[Piece]:
        """See `IncrementalText`."""
        pieces, ids = list[Piece](), [*token_ids]
        while (place := next((place for place, token in enumerate(ids) if token in self._marks), None)) is not None:
            pieces += [*super().push(ids[:place]), *self.flush(), Piece(self._marks[ids[place]], accepted=False)]
            ids = ids[place + 1 :]
        return [*pieces, *super().push(ids, num_accepted=num_accepted)]
