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
    asked = _recorded(session)
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
        whole = [*asked, Prompt(text=prompt)]
        try:
            jobs = make_prompt_tasks(
                whole, session.config, tokenizer=tokenizer, context=context, vocab_size=vocab_size,
                first_index=index - len(asked),
            )  # fmt: skip
        except ConfigError as error:
            session.terminal.say(str(error))
            continue
        asked = whole
        complete(session, [job for job in jobs if job.request.index == index])
        index += 1


def _recorded(session: Session) -> list[Prompt]:
    """The prompts of the folder, the same on every rank, since equal ones are counted."""
    by_index = {line.index: line.prompt for line in session.folder.lines} if session.folder else {}
    texts = [by_index[index] for index in sorted(by_index)]
    return [Prompt(text=text) for text in json.loads(session.world.comm.broadcast_text(json.dumps(texts), src=0))]
