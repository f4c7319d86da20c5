"""The start of a run: its log, the time until its first token; and the signals that end it while it decodes."""

import contextlib
import gc
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.errors import InterruptedRun
from llama_ssp.manifest import present
from llama_ssp.ranks.process import signals_kept
from llama_ssp.run import opening
from llama_ssp.run.interruption import interruptible, stopping_on_signals
from llama_ssp.run.startup import importing_torch
from llama_ssp.speculate.engine.completion import StopRequest
from tests.helpers.repository import ROOT

# What a run does not need before it looks at checkpoints; the first five take seconds.
BEFORE_CHECKPOINTS = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "sympy",
    "accelerate",
    "llama_ssp.models.loading",
    "llama_ssp.models.llama.decoder",
)
# What the report at the end needs, after everything else has been shown.
AFTER_RESULTS = ("matplotlib", "llama_ssp.extensions.reports.html") if "reports" in present() else ()
# What completions of a Llama-like pair do not need at all; the first two take seconds.
NEVER = (
    "transformers.modeling_utils",
    "scipy",
    "bitsandbytes",
    "deepspeed",
    "matplotlib.pyplot",
    "datasets",
    "pandas",
    "sklearn",
    "tensorboard",
    "llama_ssp.run.calibration",
    *(
        f"llama_ssp.extensions.{extension}.{name}"
        for extension in present()
        for name in ("task", "benchmark", "latency", "source", "expansion")
    ),
)


@pytest.mark.heavy
def test_slow_packages_are_imported_only_where_they_are_used(tmp_path: Path) -> None:
    settings = ["task=generate", "prompt=import", "max_new_tokens=2", f"run_dir={tmp_path}/run"]
    program = (
        "import json, sys; from llama_ssp.run.commands import run; from llama_ssp.run import pipeline as task; "
        "from llama_ssp.terminal import terminal; "
        "first = [*sys.modules]; results = terminal.Terminal.results; shown = []; "
        "terminal.Terminal.results = lambda *a, **k: (results(*a, **k), shown.extend(sys.modules)); "
        f"sys.argv = ['run.py', *{settings!r}]; code = run.main(); "
        "print(json.dumps([code, first, shown, [*sys.modules]]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    code, first, shown, last = json.loads(ended.stdout.splitlines()[-1])
    assert code == 0
    assert {"torch", "transformers"} <= set(first)
    assert {*BEFORE_CHECKPOINTS, *AFTER_RESULTS, *NEVER} & set(first) == set()
    assert set(AFTER_RESULTS) & set(shown) == set()
    assert set(AFTER_RESULTS) <= set(last)
    assert set(NEVER) & set(last) == set()
    assert set(BEFORE_CHECKPOINTS) <= set(last)


@pytest.mark.seconds
def test_garbage_is_not_collected_while_torch_is_first_imported_and_then_not_looked_for_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with importing_torch():
        assert gc.isenabled(), "torch is imported already: what was made since could be garbage"
    num_spared = gc.get_freeze_count()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with importing_torch():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= num_spared + len(made)


def test_a_step_has_the_time_since_its_process_began_when_it_was_first_reached() -> None:
    """The age of a process counts its interpreter and its imports."""
    program = (
        "import time; time.sleep(0.2); from llama_ssp.run.startup import StartClock, process_age_s; "
        "clock = StartClock(age_s=process_age_s()); clock.reach('joined_s'); first = clock.times; time.sleep(0.01); "
        "clock.reach('joined_s'); print(first.began_unix_s, first.joined_s, clock.times == first, first.loaded_s)"
    )
    began_unix_s, began_s = time.time(), time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    unix_s, joined_s, is_kept, loaded_s = ended.stdout.split()
    assert 0.2 < float(joined_s) < time.monotonic() - began_s + 0.05
    assert abs(float(unix_s) - began_unix_s) < 1.0
    assert (is_kept, loaded_s) == ("True", "None")


def test_a_rank_whose_node_does_not_share_the_run_folder_keeps_its_log_in_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    opening._open_logs(tmp_path / "runs" / "first", rank=1)
    logging.getLogger("llama_ssp.run").info("here")
    opening._close_logs()
    assert "here" in (tmp_path / "runs" / "first" / "ranks" / "001.log").read_text()


NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with signals_kept():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        yield


def ranks(*others: str, agreeing: Callable[[], None] = lambda: None) -> Any:
    """This rank and others, which say whether they are to stop."""

    def gather_text(mine: str) -> list[str]:
        agreeing()
        return [mine, *others]

    watch = SimpleNamespace(ask_to_stop=lambda: None)
    return SimpleNamespace(watch=watch, comm=SimpleNamespace(gather_text=gather_text))


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_does_not_disturb_what_is_written_and_the_first_ends_a_wait_for_input(
    number: signal.Signals,
) -> None:
    stop_request = StopRequest()
    with contextlib.suppress(InterruptedRun), stopping_on_signals(stop_request, ranks()):
        heeding = handlers()
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
        assert (handlers(), stop_request.requested) == (heeding, False)
        signal.raise_signal(number)
        signal.raise_signal(number)
        raise InterruptedRun("after the round")
    assert stop_request.requested
    signal.raise_signal(number)


@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_a_wish_that_came_in_the_last_round_is_known_to_all_afterwards(here: bool) -> None:
    stop_request = StopRequest()
    with stopping_on_signals(stop_request, ranks("" if here else "stop")):
        if here:
            signal.raise_signal(signal.SIGTERM)
    assert stop_request.requested
    signal.raise_signal(signal.SIGTERM)


def test_a_wish_that_comes_behind_the_agreement_ends_what_follows_by_the_old_handlers() -> None:
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler)
    late = ranks(agreeing=lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(KeyboardInterrupt), stopping_on_signals(StopRequest(), late):
        pass
    assert handlers() == [signal.default_int_handler] * 4


def test_a_hangup_that_is_ignored_on_purpose_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_request = StopRequest()
    with stopping_on_signals(stop_request, ranks()):
        signal.raise_signal(signal.SIGHUP)
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    assert not stop_request.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
