"""The ways to start a run: the program with one rank or two of its own, torchrun, and the file of the checkout."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

from tests.helpers.commands import command, started
from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of, listeners

PROGRAM = [sys.executable, "-m", "llama_ssp"]
STARTERS = ("ranks=1", "ranks=2", "torchrun", "launch/run.py")
Completed = subprocess.CompletedProcess[str]


def command_of(starter: str, words: Sequence[str]) -> list[str]:
    if starter == "torchrun":
        return command(words, num_ranks=2)
    if starter == "launch/run.py":
        return command(words)
    return [*PROGRAM, "run", *words, starter]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with the repository's package importable from every folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def run_program(*words: str, cwd: Path = ROOT, more: Mapping[str, str] | None = None) -> Completed:
    """Run `llama-ssp` to its end; the exit code is not checked."""
    return subprocess.run(
        [*PROGRAM, *words],
        cwd=cwd,
        env=environment(more),
        input="",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run_file(name: str, *words: str, before: str = "", without: Sequence[str] = (), cwd: Path = ROOT) -> Completed:
    """Run a file of launch/ in a process of its own, after some Python, which cannot import some packages."""
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({[*without]!r})); {before}\n"
        f"sys.argv = {[name, *words]!r}; runpy.run_path({str(ROOT / 'launch' / name)!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=cwd)


class Observed(NamedTuple):
    """What a command printed, and the addresses that it or one of its processes ever listened on."""

    out: str
    err: str
    addresses: set[IPv4Address | IPv6Address]


def observe(words: Sequence[str], *, without_starter: bool = False) -> Observed:
    """Run a command that ends well; perhaps without the addresses of the command itself."""
    addresses = set()
    with started(words, env=environment()) as process:
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            for pid in family_of(process.pid)[1:] if without_starter else [process.pid]:
                addresses |= {address for address, _ in listeners(pid)}
            time.sleep(0.05)
        process.kill()
        out, err = process.communicate()
    assert process.returncode == 0, err
    return Observed(out, err, addresses)
