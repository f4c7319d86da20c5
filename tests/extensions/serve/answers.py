"""Answers of models that think, and what is to be read of them: four kinds of models, six texts of each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_ssp.extensions.serve.thoughts import ThoughtReader, Thoughts
from llama_ssp.extensions.serve.tools import CallReader, Tools, tools_of

CALL = '{"name": "weather", "arguments": {"city": "Rom"}}'
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Kind(NamedTuple):
    """Models of a kind.

    Attributes:
        teaching: the words of their chat templates.
        begins, ends: thoughts; `begins` is empty if the prompt does it.
        called: a call.
        mark: of calls, in thoughts.
    """

    teaching: str
    begins: str
    ends: str
    called: str
    mark: str

    @property
    def template(self) -> str:
        """A chat template of such a model."""
        opens = "" if self.begins else "{{ '<think>\\n' }}"
        return "{# " + self.teaching + " #}{% for m in messages %}{{ m.content }}{% endfor %}" + opens


_HERMES = '</think> <tool_call>{"name": N, "arguments": A}</tool_call>'
_LLAMA_CALL = CALL.replace("arguments", "parameters")
KINDS = {
    "Qwen 3": Kind(_HERMES, "<think>\n", "\n</think>\n\n", f"<tool_call>\n{CALL}\n</tool_call>", "<tool_call>"),
    "QwQ": Kind(_HERMES, "", "\n</think>\n\n", f"<tool_call>\n{CALL}\n</tool_call>", "<tool_call>"),
    "Llama 3": Kind('</think> ipython {"name": N, "parameters": A}', "<think>", "</think>", _LLAMA_CALL, "{"),
    "Magistral": Kind("[THINK] [TOOL_CALLS][A]", "[THINK]", "[/THINK]", f"[TOOL_CALLS][{CALL}]", "[TOOL_CALLS]"),
}
Read = tuple[str, str, int]
"""The thoughts, the text, and the number of calls."""


def texts_of(kind: Kind) -> dict[str, tuple[str, Read]]:
    """Texts of answers, and what is to be read of each."""
    begins, ends, called, mark = kind.begins, kind.ends, kind.called, kind.mark
    whole = ends.strip()
    return {
        "an answer": (f"{begins}So. \n So{ends}It  rains.", ("So. \n So", "It  rains.", 0)),
        "a call": (f"{begins}I ask.{ends}{called}", ("I ask.", "", 1)),
        "a call that was thought of": (f"{begins}May I {called}? No.{ends}No.", (f"May I {called}? No.", "No.", 0)),
        "two calls, one thought of": (f"{begins}A {mark} or {called}{ends}{called}", (f"A {mark} or {called}", "", 1)),
        "cut thoughts": (f"{begins}So {called} {whole[:-1]}", (f"So {called} {whole[:-1]}", "", 0)),
        "no thoughts": (f"{begins}{ends}A <think> {whole} tag", ("", f"A <think> {whole} tag", 0)),
    }


CASES = {f"{name}, {case}": (kind, *texts_of(kind)[case]) for name, kind in KINDS.items() for case in texts_of(kind)}


def read(pieces: Sequence[str], thoughts: Thoughts, tools: Tools) -> Read:
    """What an answer that comes in pieces says."""
    thinker, caller, found = ThoughtReader(thoughts), CallReader(tools), ("", "", 0)
    for number, piece in enumerate(pieces, start=1):
        is_over = number == len(pieces)
        thought, rest = thinker.push(piece, is_over=is_over)
        text, calls = caller.push(rest, is_over=is_over)
        found = (found[0] + thought, found[1] + text, found[2] + len(calls))
    return found


def is_read_at_every_cut(text: str, wanted: Read, thoughts: Thoughts, tools: Tools) -> bool:
    """Whether a text is read alike whole, by characters, and in two pieces, wherever it is cut."""
    cut = [[text[:place], text[place:]] for place in range(len(text) + 1)]
    return all(read(pieces, thoughts, tools) == wanted for pieces in ([text], [*text], *cut))


def offered(tokenizer: Any) -> Tools:
    """The tools of a request that offers the weather."""
    tools = tools_of({"tools": [WEATHER]}, tokenizer)
    assert tools
    return tools
