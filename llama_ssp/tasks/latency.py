"""`task=latency`: milliseconds per token over a fixed list of prompts, after a warm-up."""

from llama_ssp.config.tasks.latency import LatencyConfig
from llama_ssp.engine.stream import Piece
from llama_ssp.reports.lines import CompletionLine
from llama_ssp.session.session import PromptTask, Session


class _Silent:
    """Shows no text."""

    def begin(self, job: PromptTask, mode: str) -> None:
        """No text is shown."""

    def show(self, pieces: list[Piece]) -> None:
        """No text is shown."""

    def end(self, line: CompletionLine) -> None:
        """A table comes at the end."""


def latency(session: Session, jobs: list[PromptTask]) -> None:
    """Complete all jobs, speculatively when there is a draft.

    Args:
        session: of the run.
        jobs: what is measured.
    """
    task, modes = session.config.task, [session.best_mode]
    assert isinstance(task, LatencyConfig)
    session.warm_up(jobs, modes, num_jobs=task.num_warmup)
    with session.showing_progress(jobs, modes, shows_texts=False):
        session.complete(jobs, session.best_mode, _Silent())
