"""Prompts that a user types one by one: rank 0 asks, all ranks complete."""

import json
from contextlib import suppress

from llama_ssp.errors import ConfigError
from llama_ssp.session.jobs import make_prompt_tasks
from llama_ssp.session.prompt_records import Prompt
from llama_ssp.session.session import Session
from llama_ssp.session.stopping import interruptible
from llama_ssp.tasks.dispatch import Task

_PATIENCE_S = 24 * 3600.0


def converse(session: Session, complete: Task) -> None:
    """Ask for a prompt and `complete` it until Ctrl-D or Ctrl-C; a resumed folder continues its numbering."""
    comm, models = session.world.comm, session.models
    index = 1 + max((index for index, _, _ in session.finished), default=-1)
    tokenizer, context, vocab_size = models.tokenizer, models.context, models.target.vocab_size
    typed = session.terminal.ask() if comm.rank == 0 else iter(())
    while True:
        comm.set_timeout(_PATIENCE_S)
        text = None
        with interruptible(), suppress(KeyboardInterrupt):
            text = next(typed, None)
        prompt = json.loads(comm.broadcast_text(json.dumps(text), src=0))
        comm.set_timeout(session.config.timeouts.decode_s)
        if prompt is None:
            return
        try:
            jobs = make_prompt_tasks(
                [Prompt(text=prompt)],
                session.config,
                tokenizer=tokenizer,
                context=context,
                vocab_size=vocab_size,
                first_index=index,
            )
        except ConfigError as error:
            session.terminal.say(str(error))
            continue
        complete(session, jobs)
        index += 1
