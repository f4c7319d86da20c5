"""`llama-ssp run ranks=2` starts its ranks, one Ctrl-C ends them, and none outlives a starter that is killed."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.ranks.process import signals_kept
from llama_ssp.registry import PLUGINS
from llama_ssp.reports.records import LogProbLine
from llama_ssp.run.commands import program
from llama_ssp.weights import hub
from tests.helpers.commands import Popen, started
from tests.helpers.disturbed import is_alive, lines, pid_of_rank, wait_for
from tests.helpers.in_process import call, launch
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of, is_loopback
from tests.helpers.starters import PROGRAM, command_of, environment, observe, run_program

pytestmark = pytest.mark.distributed(2)

LONG = ["task=generate", "format=jsonl", "max_new_tokens=32", "num_samples=60", "prompt=def f(x):", "ranks=2"]
PRICE = "it costs $5, $$ and ${more}"


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Popen]]:
    """A run on two ranks that has recorded its first completions and has many to go; a parameter begins its command."""
    words = [*getattr(request, "param", []), *PROGRAM, "run", *LONG, f"run_dir={tmp_path}/run"]
    with started(words, env=environment()) as process:
        wait_for(lambda: len(lines(tmp_path / "run")) > 1 or process.poll() is not None, at_most_s=90)
        yield tmp_path / "run", process


@pytest.mark.heavy
def test_its_ranks_share_the_work_and_leave_what_one_leaves_and_listen_on_the_loopback(tmp_path: Path) -> None:
    settings = ["task=generate", "format=jsonl", "max_new_tokens=8", "logprobs=2", f"prompt={PRICE}"]
    ended = observe([*PROGRAM, "run", *settings, f"run_dir={tmp_path}/run", "ranks=2"])
    assert ended.err.splitlines()[0] == "starting 2 ranks…"
    assert ended.addresses
    assert all(map(is_loopback, ended.addresses)), ended.addresses
    [line] = [json.loads(text) for text in ended.out.splitlines()]
    assert line["prompt"] == PRICE, "the agent's own ${...} must not reach a prompt"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], len(summary["memory"])) == (2, 2)
    alone = launch(*settings, f"run_dir={tmp_path}/alone")
    assert [one["token_ids"] for one in alone.lines] == [line["token_ids"]]
    found, wanted = (
        LogProbLine.from_json((tmp_path / name / "logprobs.jsonl").read_bytes()) for name in ("run", "alone")
    )
    assert found.drawn_logprobs
    assert wanted.drawn_logprobs
    assert [one.logprob for one in found.drawn_logprobs] == pytest.approx(
        [one.logprob for one in wanted.drawn_logprobs], abs=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["torchrun", "ranks=4"])
def test_copies_listen_on_the_loopback_alone(starter: str, tmp_path: Path) -> None:
    words = [*LONG[:-1], "placement=replicas", "placement.num_replicas=2", f"run_dir={tmp_path}/run"]
    found = observe(command_of(starter, words), without_starter=starter == "torchrun").addresses
    assert found
    assert all(map(is_loopback, found)), found


ENDS_RANK_0 = """
import os, signal
from llama_ssp.reports.formats import ReportFormat, register

def write(runs, missing):
    os.kill(os.getpid(), signal.SIGKILL)

register(ReportFormat(name="killed", write="killed:write", file="a.txt", purpose="nothing"))
"""


@pytest.mark.heavy
def test_a_run_whose_rank_0_is_killed_while_it_ends_has_failed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(ENDS_RANK_0)
    env = environment() | {PLUGINS: "killed", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [*PROGRAM, "run", "task=generate", "max_new_tokens=4", "prompt=x", "ranks=2", f"run_dir={tmp_path}/run"]
    with started(words, env=env) as process:
        wait_for(lambda: process.poll() is not None, at_most_s=200)
    assert process.returncode == 1
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "status").read_text().startswith("1: rank 0 is missing while ending (")


@pytest.mark.slow
def test_an_error_that_only_the_ranks_can_find_has_its_code_and_its_sentence(tmp_path: Path) -> None:
    shutil.copytree(hub.resolve(catalogue.load("tiny")), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    ended = run_program("run", f"model.path={tmp_path}/model", f"run_dir={tmp_path}/run", "ranks=2")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"starting 2 ranks…\n{tmp_path}/model holds no weights")
    assert len(ended.stderr.splitlines()) == 2
    assert (tmp_path / "run" / "status").read_text().startswith("2: ")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["model=local", "model.path={}", "draft=tiny-draft"],
            "this mamba model has layers of kind linear_attention, whose",
        ),
        (["draft=local", "draft.model.path={}"], "this mamba model has layers of kind linear_attention, whose"),
        (["model.path={}/nothing"], "{}/nothing does not exist: a folder with config.json and safetensors"),
    ],
)
def test_what_cannot_run_is_refused_before_ranks_start(
    words: list[str], sentence: str, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 64}')
    own = ["prompt=x", f"run_dir={tmp_path}/run", f"ranks={ranks}"]
    with signals_kept():
        ended = call(program.main, ["run", *(word.format(tmp_path) for word in words), *own])
    assert ended.code == 2
    [said] = ended.err.splitlines()
    assert said.startswith(sentence.format(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_in_a_sentence(rank: int, running: tuple[Path, Popen]) -> None:
    run_dir, process = running
    os.kill(pid_of_rank(run_dir, rank), signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1, stderr
    assert sum(line.startswith(f"rank {rank} is missing while decoding") for line in stderr.splitlines()) == 1
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_program_is_one_to_its_ranks(number: signal.Signals, running: tuple[Path, Popen]) -> None:
    run_dir, process = running
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 4, stderr
    assert sum(line.startswith("interrupted") for line in stderr.splitlines()) == 1
    assert (run_dir / "status").read_text() == "interrupted\n"
    before = lines(run_dir)
    assert 0 < len(before) < 60
    done = run_program("run", *LONG, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert lines(run_dir)[: len(before)] == before


@pytest.mark.slow
@pytest.mark.parametrize("running", [["env", "--ignore-signal=HUP"]], indirect=True, ids=["as by nohup"])
def test_a_run_that_ignores_hangups_goes_on(running: tuple[Path, Popen]) -> None:
    run_dir, process = running
    before = len(lines(run_dir))
    for pid in (process.pid, *(pid_of_rank(run_dir, rank) for rank in (0, 1))):
        os.kill(pid, signal.SIGHUP)
    wait_for(lambda: len(lines(run_dir)) > before + 2 or process.poll() is not None, at_most_s=60)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 4, stderr


LONG_KILLED_STARTERS = ["task=generate", "device=cpu", "max_new_tokens=32", "num_samples=500", "prompt=def f(x):"]
AT_MOST_S = 15


@pytest.mark.parametrize(
    ("starter", "delay_s"),
    [
        slow("torchrun", 0.0),
        heavy("ranks=2", 0.1),
        slow("torchrun", 0.1),
        slow("torchrun", 0.2),
        slow("torchrun", 1.0),
        slow("torchrun", 3.0),
        slow("ranks=2", 0.0),
        slow("ranks=2", 1.0),
        slow("ranks=2", 3.0),
    ],
)
def test_no_rank_outlives_a_starter_that_is_killed_so_long_after_their_start(
    starter: str, delay_s: float, tmp_path: Path
) -> None:
    words = command_of(starter, [*LONG_KILLED_STARTERS, f"run_dir={tmp_path}/run"])
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        ranks: list[int] = []
        try:
            wait_for(lambda: len(family_of(process.pid)) == 1 + 2, at_most_s=120)
            time.sleep(delay_s)
            ranks = family_of(process.pid)[1:]
            assert len(ranks) == 2
            process.kill()
            wait_for(lambda: not any(map(is_alive, ranks)), at_most_s=AT_MOST_S)
        finally:
            process.kill()
            for pid in filter(is_alive, ranks):
                os.kill(pid, signal.SIGKILL)
