"""The table of peers has whoever is here; whoever is absent, fails or hangs is a line with its reason."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.gpu_peers import __main__ as command
from benchmarks.gpu_peers.__main__ import Peer, measure, start, turns_of, warm
from benchmarks.measured import Row

PROGRAM = """
import os, sys, time
from benchmarks.peer_process import serve

def complete(mode, prompts, max_new_tokens, temperature, seed):
    print("what libraries print")
    {body}
    return 4 if mode == "speculative" and max_new_tokens > 1 else None

serve(lambda: ("1.0", complete))
"""
TURNS, LONG_S = 2, 60.0


def peer(name: str, body: str, *modes: str, absent: str | None = None) -> Peer:
    return Peer(name, modes, [sys.executable, "-c", PROGRAM.format(body=body)], absent)


def compared(
    peers: Sequence[Peer], folder: Path, patch: pytest.MonkeyPatch, *, warm_s: float = LONG_S, limit_s: float = LONG_S
) -> Row:
    """Their row, as `compare` makes it."""
    patch.setattr(command, "LOGS", folder)
    arguments = Namespace(temperatures=[0.0, 0.8], max_new_tokens=9, turns=TURNS)
    *turns, almost, last = turns_of(arguments, range(50), num_tokens=3)
    lost: dict[str, str] = {}
    with ExitStack() as kept:
        running = start(peers, kept=kept, lost=lost)
        found = warm(running, [almost, last], limit_s=warm_s, lost=lost)
        cells = measure(running, turns, limit_s=limit_s, lost=lost)
    return {"peers": found, "cells": [cell | {"prompt_tokens": 3} for cell in cells], "lost": lost}


def test_whoever_is_here_is_measured_and_the_others_are_lines_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = compared(
        [
            peer("quick", "", "plain", "speculative"),
            peer("absent", "", "plain", absent="no checkout"),
            peer("broken", "raise MemoryError('none is left\\nat all')", "plain"),
            peer("half", "if mode != 'plain': raise ValueError('no draft')", "plain", "speculative"),
            peer("ends", "print('Killed', file=sys.stderr, flush=True); os._exit(3)", "plain"),
        ],
        tmp_path,
        monkeypatch,
    )
    assert row["peers"] == dict.fromkeys(["quick", "broken", "half", "ends"], "1.0")
    assert row["lost"] == {
        "absent, plain": "not here: no checkout",
        "broken, plain": "failed: MemoryError: none is left",
        "half, speculative": "failed: ValueError: no draft",
        "ends, plain": "failed: ended with code 3: Killed",
    }
    cells = {(cell["line"], cell["temperature"]): cell for cell in row["cells"]}
    assert [*cells] == [(name, t) for name in ("quick, plain", "quick, speculative", "half, plain") for t in (0.0, 0.8)]
    assert all(len(cell["s"]) == len(cell["first_s"]) == TURNS for cell in cells.values())
    assert {name: cell["rounds"] for (name, _), cell in cells.items()} == {
        "quick, plain": [8] * TURNS,
        "quick, speculative": [4] * TURNS,
        "half, plain": [8] * TURNS,
    }


@pytest.mark.parametrize(
    ("body", "limits"), [("time.sleep(60)", {"warm_s": 0.1}), ("time.sleep(60 * (seed < 2))", {"limit_s": 0.1})]
)
def test_whoever_hangs_is_ended_and_is_a_line(
    body: str, limits: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = compared([peer("slow", body, "plain")], tmp_path, monkeypatch, **limits)
    assert (row["cells"], row["lost"]) == ([], {"slow, plain": "failed: no answer within 0.1 s"})


def test_no_prompt_is_read_twice_in_a_turn_or_in_the_next_one() -> None:
    """Ours and others keep what they have read; a prompt that they know costs less."""
    turns = turns_of(Namespace(temperatures=[0.0, 0.8], max_new_tokens=9, turns=3), range(50), num_tokens=4)
    firsts = [request["prompts"][0][0] for turn in turns for request in turn]
    assert len({*firsts}) == len(firsts) == 20
