"""Which signals a process heeds, and how a rank notices the end of the agent that started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_ssp.ranks.process import STOP_SIGNALS, Agent, find_agent, heeded_signals, ignore_signals, signals_kept
from tests.helpers.disturbed import wait_for
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds

RANK = """
import pathlib, signal, sys, time
from llama_ssp.ranks.process import find_agent
file = pathlib.Path(sys.argv[1])
def note(*_):
    file.write_text("asked to stop")
    sys.exit()
signal.signal(signal.SIGTERM, note)
if agent := find_agent():
    agent.heed_end()
file.write_text("heeds" if agent else "goes on")
time.sleep(20 if agent else 3)
"""
FORKED = """
import os, sys
from llama_ssp.ranks.process import at_exit
at_exit(lambda: print("at exit of", sys.argv[1], flush=True))
sys.argv[1:] = ["the child"]
if child := os.fork():
    os.waitpid(child, 0)
    sys.argv[1:] = ["the parent"]
"""
ADOPTED = """
import os, subprocess, sys
code = "import sys, time; time.sleep(0.5); exec(sys.argv.pop(1))"
subprocess.Popen([sys.executable, "-c", code, *sys.argv[1:]], start_new_session=True)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    find_agent.cache_clear()
    with signals_kept():
        yield
    find_agent.cache_clear()


def test_every_stop_signal_is_heeded_but_a_hangup_that_is_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert heeded_signals() == STOP_SIGNALS
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert set(STOP_SIGNALS) - set(heeded_signals()) == {signal.SIGHUP}


def test_ignored_signals_do_nothing_and_one_that_has_just_come_is_no_error_of_python() -> None:
    ignore_signals()
    for number in STOP_SIGNALS:
        signal.raise_signal(number)
    assert signal.SIG_IGN not in {signal.getsignal(number) for number in heeded_signals()}


def test_only_torchrun_is_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert find_agent() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    find_agent.cache_clear()
    assert find_agent() == Agent(pid=os.getppid(), holds_store=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    find_agent.cache_clear()
    agent = find_agent()
    assert agent
    assert agent.holds_store
    assert not agent.is_gone


@pytest.mark.parametrize("name", ["an agent gives its id", "torchrun gives none"])
def test_a_rank_whose_agent_has_ended_before_it_could_look_stops_at_once(name: str, tmp_path: Path) -> None:
    code = RANK if name == "torchrun gives none" else f"import os; os.environ['LLAMA_SSP_AGENT'] = '1000000000'\n{RANK}"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    file = tmp_path / "seen"
    subprocess.run([sys.executable, "-c", ADOPTED, code, str(file)], cwd=ROOT, env=environment, check=True, timeout=30)
    wait_for(lambda: file.exists() and file.read_text() == "asked to stop", at_most_s=20)


@pytest.mark.parametrize("starts_session", [True, False], ids=["torchrun itself", "a script of torchrun's"])
def test_a_rank_goes_on_under_an_agent_or_a_script_between(*, starts_session: bool, tmp_path: Path) -> None:
    (library := tmp_path / "libtorch.so").write_bytes(bytes(4096))
    file, environment = tmp_path / "seen", {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    parent = f"""
import mmap, subprocess, sys
with open({str(library)!r}, "rb") as library:
    held = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) if {starts_session} else None
child = subprocess.Popen(sys.argv[1:], start_new_session={starts_session})
print(child.pid, flush=True)
child.wait()
"""
    command = [sys.executable, "-c", parent, sys.executable, "-c", RANK, str(file)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout
        child = int(agent.stdout.readline())
        try:
            wait_for(file.exists, at_most_s=30)
            time.sleep(1.0)
            assert file.read_text() == "heeds"
            agent.kill()
            wait_for(lambda: file.read_text() == "asked to stop", at_most_s=10)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_plain_process_goes_on_without_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    command = [sys.executable, "-c", ADOPTED, RANK, str(file)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=30)
    wait_for(file.exists, at_most_s=30)
    time.sleep(0.5)
    assert file.read_text() == "goes on"


def test_what_a_process_does_at_its_end_no_fork_of_it_does() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "at exit of the parent\n"
