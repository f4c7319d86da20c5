"""Regular expressions that files bring along, matched in a time that is linear in a name.

Such an expression may be hostile, and Python's own matcher tries all ways that it could match. Here the states that it
can be in are followed together (Thompson 1968). The syntax is what the tools that write such files use: characters,
`.`, classes, groups, `|`, `^`, `$` and repetitions. Everything else is refused.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from llama_ssp.errors import CheckpointError

_TOKEN = re.compile(
    r"(?P<atom>\\[dDwWsS]|\\[^a-zA-Z0-9]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()\[\]{}*+?|^$])"
    r"|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)|(?P<edge>[\^$])"
    r"|(?P<repeat>[*+?]|\{(?P<least>\d{1,3})(?P<comma>,(?P<most>\d{1,3})?)?\})\??"
)
_MOST_CHARACTERS, _MOST_STEPS, _MOST_DEPTH = 1000, 4000, 32


class _Step(NamedTuple):
    """A state: a character that it `takes`, an edge of the name, or else the steps, from here, that may come next."""

    takes: Callable[[str], object] | None = None
    edge: str = ""
    next: tuple[int, ...] = (1,)


class Pattern:
    """An expression; CheckpointError for one that is too long, or has other syntax, with `where` before it."""

    def __init__(self, text: str, *, where: str) -> None:
        self._place, self._transitions = 0, dict[tuple[frozenset[int], str], frozenset[int]]()
        try:
            self._steps = self._parsed(text)
        except (ValueError, IndexError, re.error) as error:
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            raise CheckpointError(
                f"{where} {shown!r} is no pattern of the kind that is read: at most {_MOST_CHARACTERS} characters, "
                "with groups, |, classes and repetitions"
            ) from error
        self._start = self._reached({0}, "^")

    def match(self, name: str) -> bool:
        """Whether the name begins with a match, as `re.match` finds it."""
        states = self._start
        for character in name:
            if len(self._steps) in states:
                return True
            key = states, character
            if key not in self._transitions:
                taken = {state + 1 for state in states if (takes := self._steps[state].takes) and takes(character)}
                self._transitions[key] = self._reached(taken, "")
            states = self._transitions[key]
        return len(self._steps) in self._reached(set(states), "^$" if not name else "$")

    def _reached(self, states: set[int], edges: str) -> frozenset[int]:
        """Return the given states and all that follow from them without taking a character.

        `edges` has those of `^` and `$` that match at this point of the name.
        """
        found, left = set(states), list(states)
        while left:
            if (state := left.pop()) == len(self._steps):
                continue
            step = self._steps[state]
            if step.takes or (step.edge and step.edge not in edges):
                continue
            more = {state + offset for offset in step.next} - found
            found |= more
            left += more
        return frozenset(found)

    def _parsed(self, text: str) -> list[_Step]:
        self._tokens = [*_TOKEN.finditer(text[:_MOST_CHARACTERS])]
        steps = self._any_of(0)
        if "".join(token[0] for token in self._tokens) != text or self._place < len(self._tokens):
            raise ValueError
        return steps

    def _any_of(self, depth: int) -> list[_Step]:
        steps = self._row(depth)
        while self._next("bar"):
            other = self._row(depth)
            steps = [_Step(next=(1, len(steps) + 2)), *steps, _Step(next=(len(other) + 1,)), *other]
        return steps

    def _row(self, depth: int) -> list[_Step]:
        steps: list[_Step] = []
        while self._place < len(self._tokens):
            if token := self._next("atom"):
                found = [_Step(takes=re.compile(token["atom"]).fullmatch)]
            elif token := self._next("edge"):
                found = [_Step(edge=token["edge"])]
            elif self._next("open"):
                if depth == _MOST_DEPTH:
                    raise ValueError
                found = self._any_of(depth + 1)
                if not self._next("close"):
                    raise ValueError
            else:
                break
            steps += self._repeated(found)
        if len(steps) > _MOST_STEPS or (self._place < len(self._tokens) and self._tokens[self._place]["repeat"]):
            raise ValueError
        return steps

    def _repeated(self, steps: list[_Step]) -> list[_Step]:
        if not (token := self._next("repeat")):
            return steps
        sign, least, most = token["repeat"], 0, None
        if sign[0] == "{":
            least = int(token["least"])
            most = int(token["most"]) if token["most"] else None if token["comma"] else least
        else:
            least, most = int(sign == "+"), 1 if sign == "?" else None
        maybe = [_Step(next=(1, len(steps) + 1)), *steps]
        again = [_Step(next=(1, len(steps) + 2)), *steps, _Step(next=(-len(steps) - 1,))]
        if (most is not None and most < least) or len(maybe) * (most or least + 1) > _MOST_STEPS:
            raise ValueError
        return steps * least + (again if most is None else maybe * (most - least))

    def _next(self, kind: str) -> re.Match[str] | None:
        """The next token if it is of this kind, which is taken."""
        token = self._tokens[self._place] if self._place < len(self._tokens) else None
        if token is None or token[kind] is None:
            return None
        self._place += 1
        return token
