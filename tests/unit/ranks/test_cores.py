"""Time that other programs take from the cores of a run, and how its threads wait next to them."""

import os
import subprocess
import sys
import time

import pytest

from llama_ssp.ranks import cores as of_cores
from llama_ssp.ranks.cores import CoreTimes, Load, sleeps, used_by_others, wait_by_load


def test_the_time_of_other_programs_is_counted_and_that_of_the_run_is_not() -> None:
    cores = os.sched_getaffinity(0)
    busy = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: 0"]
    began = CoreTimes.read(cores)
    with subprocess.Popen(busy) as other:
        while other.poll() is None:
            time.sleep(0.01)
        ended = CoreTimes.read(cores)  # an ended child is one of this process's own
    assert 0.35 <= ended.own_s - began.own_s < 2.0
    took_s = ended.clock_s - began.clock_s
    without = used_by_others(began, ended, ranks_s=0.0)
    assert without is not None
    assert without >= 0.3 / took_s
    used = used_by_others(began, ended, ranks_s=ended.own_s - began.own_s)
    assert used == pytest.approx(without - (ended.own_s - began.own_s) / took_s, abs=0.05)
    assert used_by_others(began, began, ranks_s=0.0) is None, "too short"
    assert used_by_others(began._replace(all_s=None), ended, ranks_s=0.0) is None


class Seen(Load):
    """Two cores, of which other programs use some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: float) -> None:
        times = (CoreTimes(clock_s, clock_s, (1 + others) * clock_s) for clock_s in (0.0, 1.0, 1.01, 1.02))
        monkeypatch.setattr(CoreTimes, "read", lambda _: next(times))
        super().__init__({0, 1})


@pytest.mark.parametrize(
    ("others", "given", "policy"),
    [
        (0.4, {}, None),
        (0.6, {}, "passive"),
        (2.0, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (2.0, {"GOMP_SPINCOUNT": "9"}, None),
    ],
)
def test_threads_sleep_while_they_wait_next_to_a_busy_core_unless_the_user_says_how(
    monkeypatch: pytest.MonkeyPatch, others: float, given: dict[str, str], policy: str | None
) -> None:
    environ = dict(given)
    monkeypatch.delitem(sys.modules, "torch")
    wait_by_load(Seen(monkeypatch, others), environ)
    assert environ.get("OMP_WAIT_POLICY") == policy
    assert sleeps(environ) == (policy == "passive")


def test_a_policy_that_torch_would_not_read_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setitem(sys.modules, "torch", of_cores)
    wait_by_load(Seen(monkeypatch, 2.0), environ)
    assert environ == {}


@pytest.mark.parametrize(
    ("others", "num_threads", "num_free"), [(0.0, 2, 2), (0.4, 2, 2), (1.0, 2, 1), (1.0, 1, 1), (7.0, 2, 1)]
)
def test_the_threads_of_a_start_are_those_that_have_a_core_of_their_own(
    monkeypatch: pytest.MonkeyPatch, others: float, num_threads: int, num_free: int
) -> None:
    load = Seen(monkeypatch, others)
    assert [load.num_free(num_threads), load.num_free(num_threads)] == [num_free, num_free], "the second look is early"
