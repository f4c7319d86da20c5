"""`task=latency`: milliseconds per token over a fixed list of prompts, after a warm-up."""

from llama_ssp.config.tasks.latency import LatencyConfig
from llama_ssp.session.jobs import PromptTask
from llama_ssp.session.session import Session, Viewer


class _Silent(Viewer):
    """Shows no text: a table comes at the end."""


def latency(session: Session, jobs: list[PromptTask]) -> None:
    """Complete all jobs, speculatively if there is a draft."""
    task, modes = session.config.task, [session.best_mode]
    assert isinstance(task, LatencyConfig)
    session.warm_up(jobs, modes, num_jobs=task.num_warmup)
    with session.showing_progress(jobs, modes, shows_texts=False):
        session.complete(jobs, session.best_mode, _Silent())
