"""Launchers of sweeps: records that get the checked points of `-m` and their own settings."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.commands.own_ranks import read_start
from llama_ssp.run.commands.points import Point
from llama_ssp.settings.launchers import LAUNCHERS, Launcher
from tests.helpers.in_process import launch
from tests.helpers.own_conf import OwnConf

OPTION = "# @package hydra.launcher\ndefaults:\n  - /schema/toy@_here_\n  - _self_\n"
submitted: list[tuple[list[int], int]] = []


@dataclass(kw_only=True)
class ToyConfig:
    """Resources of a job."""

    size: int = 1


def submit(points: Sequence[Point], settings: ToyConfig) -> None:
    submitted.append(([point.run.seed for point in points], settings.size))


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, own_conf: OwnConf) -> None:
    toy = Launcher(name="toy", config=ToyConfig, run=f"{__name__}:submit", ranks_setting="size")
    monkeypatch.setitem(LAUNCHERS.records, "toy", toy)
    own_conf("hydra/launcher/toy.yaml", OPTION)
    submitted.clear()


def test_a_launcher_gets_all_points_and_its_settings() -> None:
    launch("-m", "hydra/launcher=toy", "hydra.launcher.size=3", "seed=1,2", "task=generate", "prompt=x").well()
    assert submitted == [([1, 2], 3)]


def test_a_setting_of_it_says_the_ranks_of_a_job() -> None:
    with pytest.raises(ConfigError, match=r"ranks=8 has no effect on jobs: hydra\.launcher\.size=8 sets theirs"):
        read_start(["-m", "hydra/launcher=toy", "ranks=8"], {}, default=None)


@pytest.mark.parametrize(("launcher", "known"), [("bus", False), ("basic", True)])
def test_ranks_are_refused_for_launchers_of_jobs_alone(launcher: str, known: bool) -> None:
    start = read_start(["-m", f"hydra/launcher={launcher}", "ranks=2"], {}, default=None)
    assert start.num_ranks == 2
    ended = launch("-m", f"hydra/launcher={launcher}", "seed=1", "task=generate", "prompt=x", "dry_run=true")
    assert ("unknown hydra/launcher" in ended.err) == (not known)
