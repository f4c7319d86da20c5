"""`llama-ssp run`: as a rank that exists already, in this process alone, or on ranks that it starts itself.

All mistakes of the command line, and models that the engine does not run, are found before a rank is started: in one
sentence, with the true exit code, without torch.
"""

import os
import signal
import sys
from collections.abc import Sequence

from llama_ssp.commands import run
from llama_ssp.commands.ranks.number import Start, read_start
from llama_ssp.commands.ranks.relay import SignalRelay
from llama_ssp.config.schema import RunConfig
from llama_ssp.console.unread import complain
from llama_ssp.distributed.environment import Ranks, read_ranks
from llama_ssp.distributed.signals import STOP_SIGNALS
from llama_ssp.errors import ConfigError
from llama_ssp.session.startup import StartClock
from llama_ssp.tasks.dry_run import check_models


def main(words: Sequence[str], *, num_ranks: int | None) -> int:
    """Run the command line; returns the exit code.

    Args:
        words: settings, options, and perhaps `ranks=`.
        num_ranks: how many ranks without that word; None means one for each GPU, else one.
    """
    try:
        start = read_start(words, os.environ, default=num_ranks)
    except ConfigError as error:
        return run.fail(str(error), error.exit_code, read_ranks(os.environ))
    if start.num_ranks is None:
        return run.main(start.words)
    if start.num_ranks > 1:
        return _start_ranks(start, start.num_ranks)
    sentences = [start.sentence] if start.sentence else []

    def announce_and_do(config: RunConfig, clock: StartClock) -> bool:
        check_models(config)
        if sentences:
            complain(sentences.pop())
        return run.task_code()(config, clock)

    return run.main(start.words, act=announce_and_do)


def _start_ranks(start: Start, num_ranks: int) -> int:
    """Check and plan as rank 0 would; then start the ranks, each with the command line of this process."""
    points: list[RunConfig] = []

    def note(config: RunConfig, _clock: StartClock) -> bool:
        check_models(config)
        points.append(config)
        return False

    all_here = Ranks(rank=0, size=num_ranks, local_rank=0, local_size=num_ranks)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    exit_code = run.main(start.words, ranks=all_here, act=note, warns=False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if exit_code or not points:
        return exit_code
    if start.sentence:
        complain(start.sentence)
    relay = SignalRelay()
    from llama_ssp.commands.ranks import agent  # noqa: PLC0415 - torch takes seconds to import

    return agent.run_ranks([sys.executable, *sys.orig_argv[1:]], num_ranks=num_ranks, relay=relay)
