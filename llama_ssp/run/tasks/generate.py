"""`task=generate`: prints completions only, as text or as JSON lines."""

import json
import textwrap
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from llama_ssp.reports.records import CompletionLine, LineKey
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer
from llama_ssp.run.tasks.records import GenerateConfig, OutputFormat
from llama_ssp.speculate.engine.text import Piece


class Texts(Viewer):
    """Prints completions as text: streamed if there is one row at a time, else each as a whole when it has ended.

    `head` prints the head of a completion, from the index, the sample and the text of its prompt, and its mode.
    """

    def __init__(self, session: Session, head: Callable[[int, int, str, str], None]) -> None:
        self._terminal, self._streams, self._head = session.terminal, session.streams, head

    def begin(self, request: PromptRequest, mode: str) -> None:
        """Print its head."""
        self._head(request.index, request.sample, request.prompt, mode)

    def show(self, pieces: list[Piece]) -> None:
        """Print new text."""
        self._terminal.stream(pieces)

    def end(self, line: CompletionLine) -> None:
        """Print the whole text if it was not streamed, and end it."""
        if not self._streams:
            self._head(line.index, line.sample, line.prompt, line.mode)
            self._terminal.stream([Piece(line.text, accepted=False)])
        self._terminal.end_of_text()


class _Lines(Viewer):
    """Prints completions as JSON lines, each with the fields of its prompt's record."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def end(self, line: CompletionLine) -> None:
        self._write(json.dumps(line.fields | asdict(line)))


class _InOrder(Viewer):
    """Holds completions back until all before them have ended."""

    def __init__(
        self, viewer: Viewer, requests: Sequence[PromptRequest], finished: Container[LineKey], mode: str
    ) -> None:
        self._viewer = viewer
        self._missing = deque(key for request in requests if (key := request.line_key(mode)) not in finished)
        self._waiting: dict[LineKey, CompletionLine] = {}

    def end(self, line: CompletionLine) -> None:
        self._waiting[line.key] = line
        while self._missing and self._missing[0] in self._waiting:
            self._viewer.end(self._waiting.pop(self._missing.popleft()))

    def release(self) -> None:
        """Show held-back texts of a run that was stopped."""
        for key in sorted(self._waiting):
            self._viewer.end(self._waiting.pop(key))


def generate(session: Session, requests: list[PromptRequest]) -> None:
    """Complete all requests, speculatively if there is a draft."""
    task, mode, terminal = session.config.task, session.best_mode, session.terminal
    assert isinstance(task, GenerateConfig)
    has_names = len(requests) > 1

    def name(index: int, sample: int, prompt: str, _mode: str) -> None:
        if has_names:
            excerpt = textwrap.shorten(prompt, 60, placeholder="...") or "no text"
            session.heading(excerpt, prompt=index, sample=sample)

    shows_texts = task.format is OutputFormat.text
    viewer: Viewer = Texts(session, name) if shows_texts else _Lines(terminal.line)
    if not shows_texts and session.config.scores_texts:
        viewer = Viewer()  # their lines follow with the log-probabilities
    with ExitStack() as stack:
        if task.in_order and not session.streams:
            viewer = in_order = _InOrder(viewer, requests, session.finished, mode)
            stack.callback(in_order.release)
        stack.enter_context(session.showing_progress(requests, [mode], shows_texts=shows_texts))
        session.complete(requests, mode, viewer)
