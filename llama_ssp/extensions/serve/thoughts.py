"""Thoughts of an answer: what a model writes between two marks before its text, if its chat template knows the marks.

    Qwen 3, QwQ, DeepSeek R1    <think>...</think>
    Magistral                   [THINK]...[/THINK]

Some templates write the first mark themselves, at the end of the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ssp.extensions.serve.tools import num_begun, special_marks
from llama_ssp.text.detokenize import TextAfter

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_NUM_LAST = 16
"""Tokens at the end of a prompt that may be a mark and white space after it."""


class Thoughts(NamedTuple):
    """The form in which a model thinks.

    Attributes:
        mark, end: the marks that begin and end its thoughts.
        is_open: whether the prompt has begun them.
        marks: those of the two marks that are special tokens, which have no text.
    """

    mark: str
    end: str
    is_open: bool
    marks: Mapping[int, str]


def thoughts_of(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[Any, Any]] | None, prompt_ids: Sequence[int]
) -> Thoughts | None:
    """The thoughts that may begin the answer to a prompt; None if the chat template knows none."""
    source = tokenizer.get_chat_template(tools=tools)
    for mark, end in _MARKS:
        if mark in source or end in source:
            lead = TextAfter(tokenizer, (), names_special=True).decode(prompt_ids[-_NUM_LAST:])
            return Thoughts(mark, end, lead.rstrip().endswith(mark), special_marks((mark, end), tokenizer))
    return None


class ThoughtReader:
    """Divides the text of an answer, while it arrives, into the thoughts that it begins with, and the text after them.

    White space around thoughts is left out. Each character is looked at once as it arrives. Thoughts also end before
    `call`, if that is a mark: restricted calls begin wherever it stands.

    Attributes:
        num_chars: number of characters of the answer up to the end of its thoughts; 0 if it has none.
    """

    def __init__(self, thoughts: Thoughts, call: str = "") -> None:
        self._mark, self._ends = thoughts.mark, (thoughts.end, *([call] if call else []))
        self._is_before, self._is_within, self._is_after = not thoughts.is_open, thoughts.is_open, False
        # Text that has not been shown: white space, and what may begin a mark.
        self._spaces, self._rest = list[str](), ""
        self._has_begun, self._num_read, self.num_chars = False, 0, 0

    def push(self, text: str, *, is_over: bool = False) -> tuple[str, str]:
        """Take text; returns thoughts and text that are known now."""
        self._num_read += len(text)
        text, self._rest, thought = self._rest + text, "", ""
        if self._is_before:
            text = self._begin(text, is_over=is_over)
        if self._is_within:
            found = min(((place, end) for end in self._ends if (place := text.find(end)) >= 0), default=None)
            held = 0 if found or is_over else max(num_begun(text, end, 0) for end in self._ends)
            place, end = found or (len(text) - held, "")
            thought, self._rest = self._shown(text[:place]), text[place:] if not found else ""
            text = text[place + (len(end) if end == self._ends[0] else 0) :] if found else ""
            self._is_within, self._is_after = not found, bool(found)
            self.num_chars = self._num_read - len(text)
        if self._is_after:
            text = text.lstrip()
            self._is_after = not text
        return thought, text

    def _begin(self, text: str, *, is_over: bool) -> str:
        """Look for the first mark; returns what follows it, or the text of an answer without thoughts."""
        begun = text.lstrip()
        self._spaces.append(text[: len(text) - len(begun)])
        if not is_over and len(begun) < len(self._mark) and self._mark.startswith(begun):
            self._rest = begun
            return ""
        self._is_before, self._is_within = False, begun.startswith(self._mark)
        lead, self._spaces = "" if self._is_within else "".join(self._spaces), []
        return lead + begun.removeprefix(self._mark)

    def _shown(self, thought: str) -> str:
        """Thoughts without white space at their beginning, and at their end so far."""
        kept = thought.rstrip() if self._has_begun else thought.strip()
        if kept:
            lead, self._spaces, self._has_begun = "".join(self._spaces), [], True
            self._spaces.append(thought[len(thought.rstrip()) :])
            return lead + kept
        self._spaces += [thought] if self._has_begun else []
        return ""
