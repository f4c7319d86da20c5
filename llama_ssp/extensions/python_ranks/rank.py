"""A rank that `load(..., ranks=N)` has started: loads the pair, and makes the calls of the process that started it.

`pair` has the messages. The connection's end, a signal, and an error after which ranks cannot go on end the rank.
"""

import json
import os
import signal
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from socket import AF_UNIX, socket
from threading import Thread
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from llama_ssp.api.loading import load
from llama_ssp.api.pair import Pair
from llama_ssp.errors import InterruptedRun, LostRankError, SspError
from llama_ssp.extensions.python_ranks.pair import CALLER
from llama_ssp.ranks.failures import to_message
from llama_ssp.ranks.process import read_ranks
from llama_ssp.speculate.engine.completion import StopRequest
from llama_ssp.text.messages import in_library_words


class Caller(BaseStreamer):
    """The connection to the process that calls; for rank 0 also the streamer of new tokens."""

    def __init__(self, rank: int) -> None:
        self.rank, self.is_busy, self.was_asked = rank, False, False
        self.calls: SimpleQueue[tuple[dict[str, Any], StopRequest] | None] = SimpleQueue()
        connection = socket(AF_UNIX)
        connection.connect(os.environ.pop(CALLER))
        self._lines = connection.makefile("rw", encoding="utf-8")
        self.say(rank=rank, pid=os.getpid())
        Thread(target=self._listen, daemon=True, name="caller").start()

    def say(self, **message: object) -> None:
        """Send a message, which is lost once the caller has ended."""
        with suppress(OSError):
            self._lines.write(f"{json.dumps(message)}\n")
            self._lines.flush()

    def put(self, value: Tensor) -> None:
        """Show new ids."""
        self.hear(ids=value.tolist())

    def end(self) -> None:
        """End the text."""
        self.hear(end=True)

    def hear(self, **heard: object) -> None:
        """Say something before the answer, on rank 0."""
        if self.rank == 0:
            self.say(heard=heard)

    def _listen(self) -> None:
        stop = StopRequest()
        with suppress(OSError):
            for line in self._lines:
                if (message := json.loads(line)) == "stop":
                    self.was_asked = stop.ask()
                else:
                    stop, self.was_asked = StopRequest(), False
                    self.calls.put((message, stop))
        stop.ask()
        self.calls.put(None)
        if self.is_busy:  # it may be loading
            os.kill(os.getpid(), signal.SIGTERM)


def serve(caller: Caller) -> None:
    """Make calls until the caller ends; raises errors that end the ranks."""
    pair: Pair | None = None
    while call := caller.calls.get():
        caller.is_busy, (message, stop) = True, call
        try:
            if message["call"] == "load":
                lists = {name: one for name, one in message["arguments"].items() if isinstance(one, list)}
                pair = load(**message["arguments"] | {name: tuple(one) for name, one in lists.items()})
                folder = pair.models.tokenizer.name_or_path
                result: object = {"repr": repr(pair), "device": str(pair.device), "tokenizer": folder}
            else:
                assert pair, "a pair is loaded first"
                result = _called(pair, message["call"], message["arguments"], caller, stop)
            caller.say(result=result)
        except (Exception, KeyboardInterrupt) as error:
            failure: SspError = LostRankError(f"rank {caller.rank} failed: {type(error).__name__}: {error}")
            is_over = True
            if isinstance(error, SspError):
                failure, is_over = error, pair is None or error.speaks is not None
            elif isinstance(error, KeyboardInterrupt):
                failure, is_over = InterruptedRun("the ranks were interrupted"), not caller.was_asked
            caller.say(error=to_message(failure), is_over=is_over)
            if is_over:
                raise
        caller.is_busy = False


def _called(pair: Pair, name: str, given: Mapping[str, Any], caller: Caller, stop: StopRequest) -> object:
    """Make a call of `pair.PairOnRanks`; returns its caller's result."""
    if name == "update":
        files = {what: load_file(new["tensors"]) for what, new in given.items() if isinstance(new, dict)}
        pair.update(**{**given, **files})
        return None
    read = {**given["read"], "streamer": caller if given["read"]["streamer"] else None}
    read["logit_bias"] = {int(token): bias for token, bias in read["logit_bias"].items()}
    if given["template"]:
        pair.tokenizer.chat_template = given["template"]
    with in_library_words():
        found = pair._complete(read, stop)
    return [asdict(one) for one in found] if caller.rank == 0 else None


def main() -> None:
    """Serve the process that started this rank."""
    caller = Caller(read_ranks(os.environ).rank)
    warnings.showwarning = lambda message, *_, **__: caller.hear(warning=str(message))
    serve(caller)


if __name__ == "__main__":
    main()
