"""What follows a text piece by piece takes steps in proportion to the text: ten times longer, ten times as many."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp import Pair
from llama_ssp.extensions.serve import tools
from llama_ssp.extensions.serve.inbox import Part, ServedRequest
from llama_ssp.extensions.serve.protocol import Answer
from llama_ssp.extensions.serve.thoughts import ThoughtReader, Thoughts
from llama_ssp.extensions.serve.tools import CallReader
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.text.log_probs import TokenLogprob, TopLogprob
from tests.helpers.steps import Steps

CALL = '{"name": "weather", "arguments": {"city": "Rom"}}'
CALLS = {
    "ends": ("hermes", "", "</tool_call>"),
    "quoted ends": ("hermes", '<tool_call>{"a": "', "</tool_call>"),
    "marks": ("hermes", "", "<tool_call>"),
    "odd quotes": ("hermes", "", '<tool_call>{"\\"</tool_call>'),
    "calls": ("hermes", "", f"<tool_call>{CALL}</tool_call>"),
    "white space": ("hermes", "", " \n"),
    "brackets": ("hermes", "", "<tool_call>["),
    "backslashes": ("hermes", '<tool_call>"', "\\"),
    "a list of calls": ("mistral", "[TOOL_CALLS][", f"{CALL}, "),
    "marks of lists": ("mistral", "", "[TOOL_CALLS]"),
    "calls and text": ("mistral", "", f"[TOOL_CALLS]{CALL} so "),
    "objects": ("llama", "", "{"),
    "white space before objects": ("llama", "", " "),
    "tags": ("llama", "", "<|python_tag|>"),
    "calls with ;": ("llama", "", CALL.replace("arguments", "parameters") + "; "),
    "objects in a text": ("llama", "so ", '{"name": '),
    "wrong lists": ("mistral", "", "[TOOL_CALLS]so "),
    "texts that quote": ("llama", "so ", '{"name": "\\"'),
    "calls in a text": ("llama", "so ", f"{CALL} or "),
    "ends after a call": ("hermes", f"<tool_call>{CALL}</tool_call>", " </tool_call>"),
    "marks before an end": ("hermes", "", "<tool_call>so <tool_call>{</tool_call>"),
}
FORMS = {"hermes": tools._HERMES, "mistral": tools._MISTRAL, "llama": tools._LLAMA}


def check_linear(few: Steps, many: Steps) -> None:
    assert few.total > 100
    assert many.total < 15 * few.total


@pytest.mark.parametrize("kind", list(CALLS))
def test_calls_are_read_in_steps_that_grow_with_the_text(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name, begin, again = CALLS[kind]

    def steps_of(number: int) -> Steps:
        steps = Steps()
        compiled = lambda *given: steps.pattern(re.compile(*given))  # noqa: E731 - as `re` has it
        monkeypatch.setattr(tools, "re", SimpleNamespace(**{**vars(re), "compile": compiled}))
        monkeypatch.setattr(tools, "_QUOTED", steps.pattern(re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)))
        monkeypatch.setattr(tools, "_DECODER", steps)
        reader = CallReader(SimpleNamespace(form=FORMS[name], names={"weather"}, grammar=None))  # type: ignore[arg-type]
        text = begin + again * number
        with steps.counting():
            for place in range(0, len(text), 5):
                reader.push(steps.text(text[place : place + 5]))
            reader.push(steps.text(""), is_over=True)
        return steps

    check_linear(steps_of(20), steps_of(200))


@pytest.mark.parametrize("again", [" \n", "so ", "<think>", "</thin", "</think>", "<", "<tool_call>"])
@pytest.mark.parametrize("begin", ["", "<think>", "<think>so</think>"])
def test_thoughts_are_read_in_steps_that_grow_with_the_text(begin: str, again: str) -> None:
    def steps_of(number: int) -> Steps:
        steps = Steps()
        reader = ThoughtReader(Thoughts("<think>", "</think>", is_open=False, marks={}), "<tool_call>")
        text = begin + again * number
        with steps.counting():
            for place in range(0, len(text), 5):
                reader.push(steps.text(text[place : place + 5]))
            reader.push(steps.text(""), is_over=True)
        return steps

    check_linear(steps_of(40), steps_of(400))


@pytest.mark.parametrize("asked", ["text", "stops", "log-probabilities"])
@pytest.mark.parametrize("is_chat", [False, True])
def test_an_answer_is_written_in_steps_that_grow_with_its_tokens(pair: Pair, asked: str, is_chat: bool) -> None:
    """Detokenizing, stops, offsets and log-probabilities; tokens that are decoded count too."""
    tokenizer = pair.tokenizer
    ids = tokenizer("def f(x):\n    return x + 1\n", add_special_tokens=False).input_ids
    stops = StopStrings(tokenizer, ["never", "in this text"]) if asked == "stops" else None
    num_top = 1 if asked == "log-probabilities" else None

    def steps_of(number: int) -> Steps:
        steps, tokens = Steps(), ids * number
        request = ServedRequest(index=0, prompt_ids=(1, 80), max_new_tokens=len(tokens), stops=stops, num_top=num_top)
        scores = [TokenLogprob(token=one, logprob=-1.0, top=[TopLogprob(token=9, logprob=-0.5)]) for one in tokens]

        def decode(some: list[int], **how: Any) -> str:
            steps.num_chars += len(some)
            return str(plain(some, **how))

        plain = tokenizer.decode
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tokenizer, "decode", decode)
            answer = Answer(request, tokenizer, 0, is_chat=is_chat)
            with steps.counting():
                for token in tokens[:-1]:
                    answer.choice(answer.push(Part([token])))
                    steps.num_chars += len(answer._held)  # what stops are looked for in
                answer.push(Part(tokens[-1:], "length", logprobs=scores if num_top else None))
                answer.choice()
        return steps

    check_linear(steps_of(6), steps_of(60))
