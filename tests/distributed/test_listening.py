"""A run on one machine listens on the loopback alone, from its start to its end, and one rank listens nowhere."""

import sys
from pathlib import Path

import pytest

from tests.helpers.commands import command
from tests.helpers.lanes import heavy, slow
from tests.helpers.sockets import is_loopback
from tests.helpers.starters import PROGRAM, observe

pytestmark = pytest.mark.distributed(4)

SHORT = ["task=generate", "device=cpu", "max_new_tokens=8", "num_samples=4", "prompt=def f(x):", "ignore_eos=true"]
COPIES = ["placement=replicas", "placement.num_replicas=2"]
LIBRARY = """
import llama_ssp
pair = llama_ssp.load("tiny", "tiny-draft")
print(pair.generate("def f(x):", max_new_tokens=8))
"""


@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [heavy(1, []), slow(2, COPIES), slow(2, []), slow(4, [])],
)
def test_a_run_listens_on_the_loopback_alone(num_ranks: int, more: list[str], tmp_path: Path) -> None:
    """test_own_ranks.py observes two ranks."""
    found = observe([*PROGRAM, "run", *SHORT, *more, f"ranks={num_ranks}", f"run_dir={tmp_path}/run"]).addresses
    assert bool(found) == (num_ranks > 1)
    assert all(map(is_loopback, found)), found


@pytest.mark.slow
def test_ranks_of_torchrun_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    words = command([*SHORT, *COPIES, f"run_dir={tmp_path}/run"], num_ranks=2)
    found = observe(words, without_starter=True).addresses
    assert found
    assert all(map(is_loopback, found)), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[sys.executable, "-c", LIBRARY], [*PROGRAM, "plan", "model=7B"]], ids=["library", "plan"]
)
def test_the_library_and_a_plan_listen_nowhere(words: list[str]) -> None:
    assert observe(words).addresses == set()
