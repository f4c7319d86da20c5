"""Ranks that this process starts, and a pair on them: `load(..., ranks=4)`.

They are the ranks of `llama-ssp run ranks=4 --script rank.py`. This process is none of them: it holds a connection to
each, which also tells if a rank is lost. A rank ends when its connection closes. The socket is in a folder of this user
alone. Messages are lines of JSON:

    call, arguments                  -> every rank, which acts as soon as it has answered the last call
    stop                             -> every rank, if Ctrl-C comes before all have answered
    result, or error and is_over     -> of every rank; a pair that is over takes no further call
    heard: a warning, or new ids     -> of rank 0, before its answer
"""

import json
import os
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from queue import Empty, Queue
from signal import SIGKILL
from socket import AF_UNIX, SHUT_RDWR, socket
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any, NoReturn

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llama_ssp.api.arguments import known_arguments
from llama_ssp.api.pair import CLOSED, Completion, CompletionTimes, NewWeights, OneCall, Pair, as_list
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import CapacityError, ConfigError, InterruptedRun, LostRankError, SspError
from llama_ssp.ranks.failures import from_message
from llama_ssp.ranks.process import launcher_of, read_ranks
from llama_ssp.reports.reading import restore
from llama_ssp.run.checkpoints import read_tokenizer
from llama_ssp.settings.schema import TimeoutConfig
from llama_ssp.speculate.engine.completion import StopRequest
from llama_ssp.text.log_probs import CompletionLogProbs
from llama_ssp.text.messages import in_library_words
from llama_ssp.types import Parsed
from llama_ssp.weights.in_memory import check_tensors, weights_of

CALLER = "LLAMA_SSP_CALLER"
"""Environment variable of the ranks: the socket of this process."""
_LOOK_EVERY_S = 0.2
_NOTICE_S = 15.0
"""Time that ranks have to notice that another is lost, or that they are to stop or to end."""
_Hear = Callable[[Mapping[str, Any]], None]


class StartedRanks:
    """Ranks in processes of their own; raises SspError if they do not start."""

    def __init__(self, num_ranks: int, *, timeout_s: float) -> None:
        self._connections: dict[int, socket] = {}
        self._pids: list[int] = []
        self._messages: Queue[tuple[int, dict[str, Any] | None]] = Queue()
        self._over: SspError | None = None
        self._calls = OneCall()
        self._said = deque[str](maxlen=20)
        script = Path(__file__).with_name("rank.py")
        # Its name has at most 107 bytes, which $TMPDIR alone may have.
        with TemporaryDirectory(dir="/tmp") as folder, socket(AF_UNIX) as server:
            server.bind(address := f"{folder}/caller")
            server.listen()
            self._agent = Popen(
                [sys.executable, "-m", "llama_ssp", "run", f"ranks={num_ranks}", "--script", str(script)],
                env=os.environ | {CALLER: address},
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._reader = Thread(target=self._read, args=(self._agent.stdout,), daemon=True, name="ranks")
            self._reader.start()
            try:
                self._meet(server, num_ranks, timeout_s)
            except BaseException:
                self.close()
                raise

    def _read(self, output: IO[str]) -> None:
        with output:
            self._said.extend(output)

    def _meet(self, server: socket, num_ranks: int, timeout_s: float) -> None:
        server.settimeout(_LOOK_EVERY_S)
        deadline = time.monotonic() + timeout_s
        while len(self._connections) < max(num_ranks, 1):  # the agent says what is wrong with a number below
            if self._agent.poll() is not None or time.monotonic() > deadline:
                raise self._end_of_agent(f"{num_ranks} ranks did not start within {timeout_s:g} s")
            with suppress(TimeoutError, ValueError):  # a rank may end before it has said who it is
                connection, _ = server.accept()
                lines = connection.makefile(encoding="utf-8")
                hello = json.loads(lines.readline())
                self._connections[hello["rank"]] = connection
                self._pids.append(hello["pid"])
                Thread(target=self._listen, args=(hello["rank"], lines), daemon=True, name="rank").start()

    def _listen(self, rank: int, lines: IO[str]) -> None:
        with suppress(OSError, ValueError):  # the rank has ended
            for line in lines:
                self._messages.put((rank, json.loads(line)))
        self._messages.put((rank, None))

    def call(self, name: str, arguments: Mapping[str, Any], hear: _Hear) -> Parsed:
        """Let all ranks make a call; returns the result of rank 0, or raises their error.

        `hear` takes what rank 0 says meanwhile. Its errors, and Ctrl-C, stop the ranks after their round.
        """
        try:
            message = json.dumps({"call": name, "arguments": arguments}, default=_plain)
        except TypeError as error:
            raise ConfigError(f"with ranks=, arguments go to other processes: {error}") from error
        with self._calls:
            if self._over:
                raise self._over
            doing = "loading" if name != "generate" else "decoding" if self._messages.empty() else "waiting"
            self._send(message)
            try:
                answers = self._answers(hear)
            except BaseException:
                self._stop()
                raise
            return self._result(answers, doing)

    def _send(self, message: str) -> None:
        for connection in self._connections.values():
            with suppress(OSError):  # it is lost
                connection.sendall(f"{message}\n".encode())

    def _answers(self, hear: _Hear, patience_s: float | None = None) -> dict[int, Any]:
        """Return the ranks' answers: None of lost ranks, and no entry for ranks that do not answer after a loss."""
        answers = dict[int, Any]()
        with suppress(Empty):
            while len(answers) < len(self._connections):
                rank, message = self._messages.get(timeout=patience_s)
                if message and "heard" in message:
                    hear(message["heard"])
                    continue
                answers.setdefault(rank, message)
                if message is None or message.get("is_over"):
                    patience_s = _NOTICE_S
        return answers

    def _stop(self) -> None:
        with suppress(KeyboardInterrupt):
            self._send(json.dumps("stop"))
            answers = self._answers(lambda _: None, _NOTICE_S)
            if self._all_go_on(answers):
                return
        self._end(InterruptedRun("interrupted, and the ranks had not stopped in time: load the pair again"))

    def _all_go_on(self, answers: Mapping[int, Any]) -> bool:
        """Whether all ranks have answered and can take another call."""
        is_whole = len(answers) == len(self._connections)
        return is_whole and not any(answer is None or answer.get("is_over") for answer in answers.values())

    def _result(self, answers: Mapping[int, Any], doing: str) -> Any:  # noqa: ANN401 - see `call`
        errors = [from_message(of["error"]) for _, of in sorted(answers.items()) if of and "error" in of]
        if self._all_go_on(answers):
            if errors:
                raise errors[0]
            return answers[0]["result"]
        gone = next((rank for rank, answer in answers.items() if answer is None), "of the pair")
        missing = LostRankError(f"rank {gone} is missing while {doing} (connection closed); load the pair again")
        # A rank that only says that it was interrupted knows less.
        errors = [error for error in errors if not isinstance(error, InterruptedRun)] or [missing, *errors]
        errors.sort(key=lambda error: not isinstance(error, LostRankError))
        self._end(errors[0])
        raise errors[0]

    def _end(self, error: SspError) -> None:
        self._over = error
        self.close()

    def _end_of_agent(self, sentence: str) -> SspError:
        """Return the error for ranks that did not connect, in the words of the process that starts them."""
        if self._agent.poll() is not None:
            self._reader.join(_LOOK_EVERY_S)
        said = [line.strip() for line in self._said if not line.startswith("starting ")]
        kind = {2: ConfigError, 3: CapacityError}.get(self._agent.poll() or 0, LostRankError)
        return kind(said[-1] if said else sentence)

    def close(self) -> None:
        """End the ranks, and wait until they have ended; do nothing in a process that has forked."""
        if not self._calls.is_here:
            return
        self._over = self._over or ConfigError(CLOSED)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)
            connection.close()
        if not self._connections:
            self._agent.terminate()
        try:
            self._agent.wait(_NOTICE_S)
        except TimeoutExpired:
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
            self._agent.kill()
            self._agent.wait()


def _plain(value: Any) -> object:  # noqa: ANN401 - of numpy or torch
    if isinstance(value, Mapping):
        return {**value}
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} cannot be sent")


class PairOnRanks(Pair):
    """A pair on ranks that this process has started, for notebooks and scripts without a launcher."""

    def __init__(self, num_ranks: int, given: Mapping[str, Any]) -> None:
        if launcher := launcher_of(os.environ):
            size = read_ranks(os.environ).size
            raise ConfigError(f"ranks={num_ranks}: {launcher} has started {size} already, so leave ranks= out")
        arguments = {name: _sent(name, value) for name, value in given.items()}
        self._ranks = StartedRanks(num_ranks, timeout_s=TimeoutConfig().load_s)
        self._end = weakref.finalize(self, self._ranks.close)
        self._about = self._ranks.call("load", arguments, _warn)

    def close(self) -> None:
        """End the ranks; the pair takes no further call. The end of the process and of the object do the same."""
        self._end()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, in this process; a change of its chat template holds on the ranks too."""
        return read_tokenizer(Path(self._about["tokenizer"]))

    @property
    def device(self) -> torch.device:
        """The device of rank 0."""
        return torch.device(self._about["device"])

    @property
    def rank(self) -> int:
        """Always 0, since this process gets all results."""
        return 0

    def __repr__(self) -> str:
        return str(self._about["repr"])

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a pair with ranks= has no {name} in this process: its ranks hold the models")

    @known_arguments
    def update(self, model: NewWeights | None = None, draft: NewWeights | None = None) -> None:
        """Replace weights as `Pair.update` does; models and tensors of this process go to the ranks in files."""
        with in_library_words(), TemporaryDirectory() as folder:
            given = {"model": model, "draft": draft}
            sent = {what: _saved(what, new, Path(folder) / what) for what, new in given.items()}
            self._ranks.call("update", sent, _warn)

    def _complete(self, read: Mapping[str, Any], stop: StopRequest) -> list[Completion]:
        del stop  # the ranks' own counts
        streamer = read["streamer"]

        def hear(heard: Mapping[str, Any]) -> None:
            if "ids" in heard:
                streamer.put(torch.tensor(heard["ids"]))
            elif "end" in heard:
                streamer.end()
            else:
                _warn(heard)

        sent = {name: value for name, value in read.items() if name != "self"}
        sent |= {"prompts": as_list(read["prompts"]), "streamer": streamer is not None}
        template = self.tokenizer.chat_template if "tokenizer" in vars(self) else None
        found = self._ranks.call("generate", {"read": sent, "template": template}, hear)
        return [_completion(content) for content in found]


def _warn(heard: Mapping[str, Any]) -> None:
    warnings.warn(heard["warning"], stacklevel=2)


def _completion(content: Mapping[str, Any]) -> Completion:
    scores = restore(CompletionLogProbs, {one.name: content[one.name] for one in fields(CompletionLogProbs)})
    return Completion(**{**content, "times": CompletionTimes(**content["times"]), **vars(scores)})


def _saved(what: str, new: Any, folder: Path) -> object:  # noqa: ANN401 - an argument of `update`
    """Return an argument of `update` in a form for JSON: a name, a folder, or a file of tensors."""
    if isinstance(new, PreTrainedModel):
        weights_of(new, what=what)  # or its error
        new.save_pretrained(folder)
        return str(folder)
    if not isinstance(new, Mapping):
        return _sent(what, new)
    check_tensors(new, what=what)
    save_file({name: values.detach().to("cpu", copy=True).contiguous() for name, values in new.items()}, folder)
    return {"tensors": str(folder)}


def _sent(name: str, value: Any) -> object:  # noqa: ANN401 - an argument of `load`
    """Return an argument of `load` in a form for JSON; ConfigError for objects in the memory of this process."""
    if isinstance(value, tuple):
        return [_sent(name, part) for part in value]
    if isinstance(value, Mapping):
        return {key: part if isinstance(part, list) else _sent(name, part) for key, part in value.items()}
    if name == "dtype" and value is not None and (found := Dtype.find(value)):
        return found.name
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str | Path | torch.device):
        return str(value)
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which the processes of ranks= do not have: give its name, or a folder "
        "such as save_pretrained writes"
    )
