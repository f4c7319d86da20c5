"""`task=generate`: prints completions only, as text or as JSON lines."""

import json
from collections.abc import Callable
from dataclasses import asdict

from llama_ssp.config.tasks.generate import GenerateConfig, OutputFormat
from llama_ssp.console.terminal import Terminal
from llama_ssp.engine.stream import Piece
from llama_ssp.reports.lines import CompletionLine
from llama_ssp.session.jobs import PromptTask
from llama_ssp.session.session import Session, Viewer


class _Text(Viewer):
    """Prints completions as text, streamed if the batch size is one, else whole."""

    def __init__(self, terminal: Terminal, *, streams: bool) -> None:
        self._terminal = terminal
        self._streams = streams

    def show(self, pieces: list[Piece]) -> None:
        self._terminal.stream(pieces)

    def end(self, line: CompletionLine) -> None:
        if not self._streams:
            self._terminal.stream([Piece(line.text, accepted=False)])
        self._terminal.end_of_text()


class _Lines(Viewer):
    """Prints completions as JSON lines."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def end(self, line: CompletionLine) -> None:
        self._write(json.dumps(asdict(line)))


def generate(session: Session, jobs: list[PromptTask]) -> None:
    """Complete all jobs, speculatively if there is a draft."""
    terminal, task = session.terminal, session.config.task
    assert isinstance(task, GenerateConfig)
    shows_texts = task.format is OutputFormat.text
    viewer = _Text(terminal, streams=session.streams) if shows_texts else _Lines(terminal.line)
    with session.showing_progress(jobs, [session.best_mode], shows_texts=shows_texts):
        session.complete(jobs, session.best_mode, viewer)
