"""Commands in the shell of `srun --pty bash`: each is a run of its own, and says which ranks it lacks."""

import shlex
from pathlib import Path

import pytest

from tests.helpers.slurm import Cluster
from tests.helpers.starters import PROGRAM, environment
from tests.helpers.terminals import OnTerminal

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RUN = shlex.join([*PROGRAM, "run", "task=generate", "max_new_tokens=4", "device=cpu", "prompt=import os"])


def shell(cluster: Cluster, *, num_tasks: int) -> OnTerminal:
    words = ["srun", f"--ntasks={num_tasks}", "--pty", "bash", "--norc"]
    return OnTerminal(words, more=environment({**cluster.environment, "TERM": "dumb"}))


def test_each_command_is_a_run_with_a_folder_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    with shell(cluster, num_tasks=1) as made:
        made.enter(f"cd {tmp_path}; {RUN}; echo ended-$?; {RUN} seed=1; echo ended-$?\n")
        made.wait_for(lambda: made.shown.count("ended-0") == 2, at_most_s=150)
    assert len([*(tmp_path / "outputs").iterdir()]) == 2


def test_a_shell_of_several_tasks_is_told_what_starts_the_other_ranks(cluster: Cluster, tmp_path: Path) -> None:
    starts_all = "srun --overlap --ntasks=2"
    with shell(cluster, num_tasks=2) as made:
        made.enter(f"cd {tmp_path}; {RUN}\n")
        awaited = (
            "waiting for rank 1 until timeouts.load_s=1800: each of the 2 tasks of this SLURM step has to run this"
        )
        made.wait_for(lambda: awaited in " ".join(made.shown.split()), at_most_s=90)
        made.wait_for(lambda: f"{starts_all} before it starts all" in " ".join(made.shown.split()), at_most_s=5)
        made.enter("\x03")
        made.wait_for(lambda: "interrupted" in made.shown, at_most_s=30)
        made.enter(f"{starts_all} {RUN}; echo ended-$?\n")
        made.wait_for(lambda: "ended-0" in made.shown, at_most_s=150)
