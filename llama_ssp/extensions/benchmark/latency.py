"""`task=latency`: milliseconds per token over a fixed list of prompts."""

from llama_ssp.extensions.benchmark.records import LatencyConfig
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer


def latency(session: Session, requests: list[PromptRequest]) -> None:
    """Complete all requests, speculatively if there is a draft."""
    task, modes = session.config.task, [session.best_mode]
    assert isinstance(task, LatencyConfig)
    session.warm_up(requests, modes, num_requests=task.num_warmup)
    with session.showing_progress(requests, modes, shows_texts=False):
        session.complete(requests, session.best_mode, Viewer())
