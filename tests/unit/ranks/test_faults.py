"""Every way in which a run can break is one sentence, and the same one on all ranks that are left."""

import errno
import logging
import signal
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_ssp.errors import CapacityError, ConfigError, InterruptedRun, LostRankError, SspError
from llama_ssp.ranks import failures
from llama_ssp.ranks.failures import ControlChannel, Phase, from_message, guard, unify_failure
from llama_ssp.ranks.memory import exhaustion
from llama_ssp.ranks.process import STOP_SIGNALS
from llama_ssp.ranks.rendezvous import hold_store

pytestmark = pytest.mark.usefixtures("_signal_handlers")
PHASE = Phase(doing="decoding", limit="timeouts.decode_s=5")
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]")
LATE = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/buf.cc:81] Timed out waiting 5000ms for recv")
RESUME = "run the same command with the same run_dir to resume"


@dataclass(kw_only=True)
class Others:
    """The other ranks' answers, in place of a ControlChannel."""

    size: int = 3
    rank: int = 1
    gone: tuple[int, ...] = ()
    is_orphan: bool = False
    has_failed: bool = False
    verdict: str | None = None
    agreed: list[str] = field(default_factory=list)

    def missing(self) -> tuple[int, ...]:
        return self.gone

    def agree_on(self, words: str, *, without: tuple[int, ...] = ()) -> str:
        assert without == self.gone
        self.agreed.append(words)
        return words

    def is_error_reporter(self, *, without: tuple[int, ...] = ()) -> bool:
        return self.verdict is None and 0 in without


def test_who_starts_the_heartbeat_once_more_leaves_what_says_whether_this_rank_is_busy() -> None:
    channel = ControlChannel.alone()
    channel.be_alert(is_busy=lambda: True)
    channel.be_alert()
    assert channel.is_busy()


def test_a_rank_whose_own_answer_is_late_misses_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its thread may be where a machine is busy."""
    monkeypatch.setattr(failures, "ANSWER_S", 0.1)
    store, is_over = hold_store("127.0.0.1", 0, size=2, timeout_s=5), Event()
    channel = ControlChannel(store, rank=0, size=2, is_first_here=True)
    channel.is_busy = lambda: is_over.wait(5)
    try:
        assert channel.missing() == (1,)
    finally:
        is_over.set()
        channel.leave()


def ended(error: BaseException, watch: Any) -> BaseException:
    with pytest.raises((Exception, KeyboardInterrupt)) as caught, unify_failure(watch, PHASE):
        raise error
    return caught.value


def signalled_while(error: BaseException) -> KeyboardInterrupt:
    """A signal that comes while an error ends what it is in."""
    signalled = KeyboardInterrupt()
    signalled.__context__ = error
    return signalled


@pytest.mark.parametrize(
    ("error", "watch", "kind", "sentence"),
    [
        (CLOSED, Others(gone=(2,)), LostRankError, f"rank 2 is missing while decoding (connection closed); {RESUME}"),
        (
            LATE,
            Others(gone=(0, 2)),
            LostRankError,
            f"ranks 0, 2 are missing while decoding (no answer within timeouts.decode_s=5); {RESUME}",
        ),
        (
            dist.DistBackendError("a rank did not come in time: timed out"),
            Others(),
            LostRankError,
            "ranks lost each other while decoding (no answer within timeouts.decode_s=5), though all are alive; ",
        ),
        (
            CLOSED,
            Others(),
            LostRankError,
            f"ranks lost each other while decoding (connection closed), though all are alive; {RESUME}",
        ),
        (
            KeyboardInterrupt(),
            Others(gone=(2,)),
            LostRankError,
            f"rank 2 is missing while decoding (no answer); {RESUME}",
        ),
        (  # by the alarm of a killed rank
            KeyboardInterrupt(),
            Others(gone=(2,), has_failed=True),
            LostRankError,
            f"rank 2 is missing while decoding (connection closed); {RESUME}",
        ),
        (  # a signal of torchrun, which has seen the loss too
            signalled_while(CLOSED),
            Others(gone=(2,)),
            LostRankError,
            f"rank 2 is missing while decoding (connection closed); {RESUME}",
        ),
        (KeyboardInterrupt(), Others(), InterruptedRun, "interrupted"),
        *((end, Others(is_orphan=True), InterruptedRun, "interrupted") for end in (KeyboardInterrupt(), CLOSED, LATE)),
        (CLOSED, Others(is_orphan=True, gone=(2,)), LostRankError, "rank 2 is missing"),
        (ConfigError("no"), Others(), ConfigError, "no"),
        (MemoryError(), Others(), CapacityError, "rank 1 failed while decoding: out of memory: end other programs"),
    ],
)
def test_an_end_is_a_sentence_that_names_ranks_phase_and_cause(
    error: BaseException, watch: Others, kind: type[SspError], sentence: str
) -> None:
    found = ended(error, watch)
    assert type(found) is kind
    assert str(found).startswith(sentence)
    assert isinstance(found, SspError)
    assert found.speaks is (0 in watch.gone)
    assert "\n" not in str(found)
    for number in STOP_SIGNALS:
        signal.raise_signal(number)  # is ignored
    assert type(from_message(watch.agreed[0])) is kind


def test_what_another_rank_has_met_first_is_the_end_here_too() -> None:
    found = ended(CLOSED, Others(verdict="CapacityError\nrank 0 needs more", gone=(2,)))
    assert (type(found), str(found)) == (CapacityError, "rank 0 needs more")
    assert isinstance(found, SspError)
    assert found.speaks is False


def test_what_nobody_has_foreseen_keeps_its_traceback_and_is_named_to_the_others() -> None:
    watch, error = Others(gone=()), KeyError("row")
    assert ended(error, watch) is error
    assert watch.agreed == ["LostRankError\nrank 1 failed while decoding: KeyError: 'row'"]


def test_a_rank_alone_keeps_its_errors_but_for_memory_and_disk() -> None:
    for error in (KeyboardInterrupt(), ConfigError("no"), CLOSED, PermissionError(errno.EACCES, "Permission denied")):
        assert ended(error, ControlChannel.alone()) is error
    full = ended(OSError(errno.ENOSPC, "No space left on device", "a.log"), ControlChannel.alone())
    assert str(full).startswith("cannot write a.log: no space left on device; free some space")
    assert type(full) is SspError


def test_the_allocator_of_the_cpu_runs_out_of_memory_in_a_sentence() -> None:
    with pytest.raises(CapacityError, match="out of memory"), unify_failure(ControlChannel.alone(), PHASE):
        torch.empty(1 << 58)


# What NCCL says last, the usual remedy, and no time-out.
FIRST = "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO), NCCL version 2.28.9\n"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Error while creating shared memory segment /dev/shm/nccl-8G, error: No space left", "--shm-size"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME=NAME"),
        ("socketPollConnect: connect returned timed out, exceeded error retry count", "NCCL_SOCKET_IFNAME=NAME"),
        ("Message truncated : received 512 bytes instead of 256", "the same torch and NCCL"),
        ("Mismatched NCCL version detected : rank 0 has 2.28.9, rank 1 2.30.1", "the same torch and NCCL"),
        ("Cuda failure 2 'out of memory'", "end other programs on the GPU"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "one rank for each GPU"),
    ],
)
def test_the_last_line_and_the_remedy_of_its_kind_are_the_sentence(said: str, remedy: str) -> None:
    error = dist.DistBackendError(f"{FIRST}ncclSystemError: System call failed. \nLast error:\n{said}\n")
    assert exhaustion(error) is None, "its own words would be lost"
    found = ended(error, Others())
    assert isinstance(found, LostRankError)
    assert str(found).startswith(f"rank 1 failed while decoding: NCCL: {said}; ")
    assert remedy in str(found)
    assert str(found).endswith("; NCCL_DEBUG=INFO in the environment shows more")


def test_a_rank_that_nccl_has_lost_is_named_instead() -> None:
    error = dist.DistBackendError(f"{FIRST}ncclRemoteError: A call failed possibly due to a network error")
    assert str(ended(error, Others(gone=(2,)))).startswith("rank 2 is missing while decoding (connection closed)")


def test_a_rank_that_a_library_keeps_ends_in_one_sentence_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launch into a full queue, for instance, while the GPU waits for a rank that was stopped."""
    codes, said, has_ended, watch = list[int](), list[SspError](), Event(), Others(gone=(2,))

    def end(code: int) -> None:
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr(failures, "_first_loss", lambda *_: dist.DistBackendError("timed out"))
    monkeypatch.setattr("os._exit", end)
    with caplog.at_level(logging.INFO), guard(watch, None, PHASE, report=said.append):  # type: ignore[arg-type]
        assert has_ended.wait(60)
    (sentence,) = map(str, said)
    assert sentence.startswith("rank 2 is missing while decoding")
    assert codes == [1]
    (record,) = caplog.records
    assert sentence in record.getMessage()
    assert record.levelno < logging.WARNING, "the log alone has it, since warnings are shown"
