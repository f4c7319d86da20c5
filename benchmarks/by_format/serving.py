"""A library in a process of its own, kept alive, which completes prompts when it is asked to: the library's side.

Requests and answers are lines of JSON over standard input and output. Threads spin for some milliseconds after their
work, so an answer waits for a moment, and the process reports the processor time that it took while nobody asked.

This file and the adapters run in the interpreters of the libraries: they import nothing of this project but each other.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What a library has done with one prompt.

    Attributes:
        num_tokens: new tokens.
        num_rounds: passes of the target after the prompt's own.
    """

    num_tokens: int
    num_rounds: int


class Library(Protocol):
    """What an adapter does."""

    def load(self, *, form: str, folders: Sequence[str], converted: str, num_threads: int) -> str:
        """Load a form of the models in fp32 in some folders, a target or a target and a draft; returns the version.

        Files that the library needs are written below `converted`, unless they are there.
        """

    def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        form: str,
        num_new_tokens: int,
        num_draft_tokens: int | None,
        temperature: float,
        seed: int,
    ) -> Completed:
        """Complete a prompt, plainly without `num_draft_tokens`; there is no end of the text but its length."""


def _answer(library: Library, request: dict[str, Any]) -> object:
    if request.pop("call") == "load":
        return library.load(**request)
    prompts: list[list[int]] = request.pop("prompts")
    started = time.perf_counter()
    done = [library.complete(ids, **request) for ids in prompts]
    return {"seconds": time.perf_counter() - started, "completed": [asdict(each) for each in done]}


def serve(library: Library) -> None:
    """Answer requests until standard input ends."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answered, answered_cpu = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle = {"idle_s": time.perf_counter() - answered, "idle_cpu_s": time.process_time() - answered_cpu}
        try:
            answer = {"result": _answer(library, json.loads(line)), **idle}
        except Exception as error:  # noqa: BLE001 - whatever it is, the process that asked reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        time.sleep(PAUSE_S)
        answered, answered_cpu = time.perf_counter(), time.process_time()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
