"""A wait for a GPU ends when it has passed the event, or as a collective on CPUs does: late, or without a rank."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from llama_ssp.errors import LostRankError
from llama_ssp.ranks import gpu
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import ControlChannel, Phase, unify_failure
from llama_ssp.ranks.gpu import DeviceWait, ends_run
from tests.unit.ranks.test_faults import Others

NEVER: Any = SimpleNamespace(query=lambda: False, synchronize=lambda: pytest.fail("it waits without a limit"))
"""An event that the GPU does not pass."""


@pytest.mark.parametrize(
    ("alarmed", "cause"), [(True, "connection closed"), (False, "no answer within timeouts.decode_s=0.2")]
)
@pytest.mark.usefixtures("_signal_handlers")
def test_a_stuck_gpu_ends_a_run_in_the_sentence_of_a_cpu(
    alarmed: bool, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_GRACE_S", 0.05)
    watch = Others(rank=0, size=2, gone=(1,), has_failed=alarmed)
    comm = Comm(rank=0, size=2, device_wait=DeviceWait(lambda: watch.has_failed))
    assert comm.device_wait
    comm.device_wait.timeout_s = 0.2
    sentence = f"rank 1 is missing while decoding ({cause}); run the same command with the same run_dir to resume"
    with pytest.raises(LostRankError) as caught:  # noqa: SIM117 - the inner block is what is tested
        with unify_failure(cast("ControlChannel", watch), Phase(doing="decoding", limit="timeouts.decode_s=0.2")):
            comm.alone().wait(NEVER)
    assert str(caught.value) == sentence


class Clock:
    """A clock that goes by naps and by whatever else moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(gpu, "_NAP_S", 0.5)
        monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.move))

    def move(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("work_s", "passes", "ended_s"),
    [(200.0, True, 201.0), (500.0, True, 501.0), (0.0, False, 60.0), (100.0, False, 120.0), (10**6, False, 600.0)],
)
def test_a_peer_that_compiles_for_longer_than_the_timeout_is_waited_for_and_later_or_after_too_long_given_up(
    work_s: float, passes: bool, ended_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    waits = DeviceWait(lambda: False, has_busy_peer=lambda: clock.now_s < work_s)
    waits.timeout_s = 60.0
    event: Any = SimpleNamespace(query=lambda: passes and clock.now_s >= work_s + 1)
    with nullcontext() if passes else pytest.raises(dist.DistBackendError, match="timed out after 60 s"):
        waits.until(event)
    assert ended_s <= clock.now_s <= ended_s + (0 if passes else 2.5)
    assert not waits.is_waiting


class CodedError(RuntimeError):
    """An error of torch's with CUDA's code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (CodedError(700), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (CodedError(209), False),  # no kernel image: another kernel may have one
        (CodedError(900), False),  # not permitted while a graph is captured
        (RuntimeError("out of resource: shared memory, Required: 200000, Hardware limit: 101376"), False),
    ],
)
def test_only_a_full_or_lost_device_ends_a_run(error: Exception, *, wanted: bool) -> None:
    assert ends_run(error) is wanted
    behind = CodedError(901)  # a capture that runs out of memory also fails to end, and that is what is raised
    behind.__context__ = error
    assert ends_run(behind) is wanted
