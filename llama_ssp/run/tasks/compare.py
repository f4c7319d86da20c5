"""`task=compare`: completes each prompt plainly and speculatively, streams both, and prints a table at the end."""

from itertools import product
from pathlib import Path

from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session
from llama_ssp.run.tasks.generate import Texts
from llama_ssp.run.tasks.records import CompareConfig


def compare(session: Session, requests: list[PromptRequest]) -> None:
    """Complete all requests in both modes: mode by mode, or if streaming, each prompt in both modes before the next."""
    terminal = session.terminal

    def head(index: int, sample: int, prompt: str, mode: str) -> None:
        is_forced = mode == SPECULATIVE and session.config.speculation.forced_lengths
        session.heading(f"{mode}, not lossless" if is_forced else mode, prompt=index, sample=sample)
        terminal.prompt(prompt)

    viewer = Texts(session, head)
    groups = [[request] for request in requests] if session.streams else [requests]
    place, done = session.config.place, session.finished
    modes = [mode for mode in (PLAIN, SPECULATIVE) if any(request.line_key(mode) not in done for request in requests)]
    session.warm_up(requests, modes, num_requests=1)
    with session.showing_progress(requests, modes, shows_texts=True):
        for group, mode in product(groups, modes):
            session.complete(group, mode, viewer)
    if place and place.repeats:
        session.measure_again(requests)


def draw(session: Session) -> None:
    """Save a picture of the terminal's output, if the task asks for one."""
    task, num_ranks = session.config.task, session.world.comm.size
    assert isinstance(task, CompareConfig)
    if task.picture:
        session.terminal.save_svg(Path(task.picture), title=f"llama-ssp run{f' ranks={num_ranks}' * (num_ranks > 1)}")
