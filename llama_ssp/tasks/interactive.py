"""Prompts that a user types one by one: rank 0 asks, all ranks complete."""

import json
from collections.abc import Callable, Iterator

from llama_ssp.errors import ConfigError
from llama_ssp.session.session import PromptTask, Session, make_prompt_tasks
from llama_ssp.session.stopping import interruptible

_PATIENCE_S = 24 * 3600.0


def converse(session: Session, complete: Callable[[Session, list[PromptTask]], None]) -> None:
    """Ask for a prompt and `complete` it until Ctrl-D or Ctrl-C; a resumed folder continues its numbering."""
    comm, index = session.world.comm, session.next_index
    typed = session.terminal.ask() if comm.rank == 0 else iter(())
    while True:
        comm.set_timeout(_PATIENCE_S)
        prompt = json.loads(comm.broadcast_text(json.dumps(_next(typed)), src=0))
        comm.set_timeout(session.config.timeouts.decode_s)
        if prompt is None:
            return
        try:
            jobs = make_prompt_tasks(
                [prompt],
                session.config,
                tokenizer=session.models.tokenizer,
                context=session.models.context,
                vocab_size=session.models.target.vocab_size,
                first_index=index,
            )
        except ConfigError as error:
            session.terminal.say(str(error))
            continue
        complete(session, jobs)
        index += 1


def _next(typed: Iterator[str]) -> str | None:
    with interruptible():
        try:
            return next(typed, None)
        except KeyboardInterrupt:
            return None
