"""A run on one machine listens on the loopback alone, from its start to its end, and one rank listens nowhere."""

import subprocess
import sys
import time
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from tests.helpers.commands import command
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of, is_loopback, listeners
from tests.helpers.starters import PROGRAM, environment

pytestmark = pytest.mark.distributed(4)

SHORT = ["task=generate", "device=cpu", "max_new_tokens=8", "num_samples=4", "prompt=def f(x):", "ignore_eos=true"]
COPIES = ["placement=replicas", "placement.num_replicas=2"]
LIBRARY = """
import llama_ssp
pair = llama_ssp.load("tiny", "tiny-draft")
print(pair.generate("def f(x):", max_new_tokens=8))
"""


def seen(words: list[str], *, without_starter: bool = False) -> set[IPv4Address | IPv6Address]:
    """The addresses that a command or one of its processes ever listens on; perhaps not those of the command itself."""
    found = set()
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            for pid in family_of(process.pid)[1:] if without_starter else [process.pid]:
                found |= {address for address, _ in listeners(pid)}
            time.sleep(0.05)
        process.kill()
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    return found


@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [heavy(1, []), heavy(2, COPIES), slow(2, []), slow(4, [])],
)
def test_a_run_listens_on_the_loopback_alone(num_ranks: int, more: list[str], tmp_path: Path) -> None:
    found = seen([*PROGRAM, "run", *SHORT, *more, f"ranks={num_ranks}", f"run_dir={tmp_path}/run"])
    assert bool(found) == (num_ranks > 1)
    assert all(map(is_loopback, found)), found


@pytest.mark.slow
def test_ranks_of_torchrun_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    found = seen(command([*SHORT, *COPIES, f"run_dir={tmp_path}/run"], num_ranks=2), without_starter=True)
    assert found
    assert all(map(is_loopback, found)), found


@pytest.mark.heavy
@pytest.mark.parametrize(
    "words", [[sys.executable, "-c", LIBRARY], [*PROGRAM, "plan", "model=7B"]], ids=["library", "plan"]
)
def test_the_library_and_a_plan_listen_nowhere(words: list[str]) -> None:
    assert seen(words) == set()
