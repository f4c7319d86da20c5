"""`task=compare`: completes each prompt plainly and speculatively, streams both, and prints a table at the end."""

from itertools import product
from pathlib import Path

from llama_ssp.config.tasks import CompareConfig
from llama_ssp.console.terminal import Terminal
from llama_ssp.engine.stream import Piece
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.session.jobs import PromptTask
from llama_ssp.session.session import Session, Viewer


class _Streamed(Viewer):
    """Streams a heading, the prompt and its completion, for a batch of one."""

    def __init__(self, terminal: Terminal, num_prompts: int | None) -> None:
        self._terminal = terminal
        self._num_prompts = num_prompts

    def begin(self, job: PromptTask, mode: str) -> None:
        self._terminal.heading(mode, number=job.request.index + 1, total=self._num_prompts)
        self._terminal.prompt(job.prompt)

    def show(self, pieces: list[Piece]) -> None:
        self._terminal.stream(pieces)

    def end(self, line: CompletionLine) -> None:  # noqa: ARG002 - its text has been streamed
        self._terminal.end_of_text()


class _Whole(_Streamed):
    """Prints whole completions in the order in which they end, since the rows of a batch cannot share a screen."""

    def end(self, line: CompletionLine) -> None:
        self._terminal.heading(line.mode, number=line.index + 1, total=self._num_prompts)
        self._terminal.prompt(line.prompt)
        self._terminal.stream([Piece(line.text, accepted=False)])
        super().end(line)


def compare(session: Session, jobs: list[PromptTask]) -> None:
    """Complete all jobs in both modes, one mode after the other: for each prompt if streaming, else for all jobs."""
    viewer = (_Streamed if session.streams else _Whole)(session.terminal, session.num_prompts)
    groups = [[job] for job in jobs] if session.streams else [jobs]
    modes = (PLAIN, SPECULATIVE)
    session.warm_up(jobs, modes, num_jobs=1)
    with session.showing_progress(jobs, modes, shows_texts=True):
        for group, mode in product(groups, modes):
            session.complete(group, mode, viewer)


def draw(session: Session) -> None:
    """Save a picture of the terminal's output, if the task asks for one."""
    task, num_ranks = session.config.task, session.world.comm.size
    assert isinstance(task, CompareConfig)
    if task.picture:
        start = f"torchrun --nproc-per-node {num_ranks}" if num_ranks > 1 else "python"
        session.terminal.save_svg(Path(task.picture), title=f"{start} launch/run.py")
