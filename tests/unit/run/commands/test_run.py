"""The entry of every rank: exit codes, who speaks, and what reaches the task."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import llama_ssp.run
from llama_ssp.errors import CapacityError, CheckpointError, InterruptedRun
from llama_ssp.ranks.signals import STOP_SIGNALS
from llama_ssp.run.commands import run
from llama_ssp.run.commands.ranks import torchrun
from llama_ssp.run.startup import StartClock
from llama_ssp.settings import catalogue, compose, folders
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.slurm import KEY, SlurmConfig
from tests.helpers.lanes import heavy

pytestmark = pytest.mark.seconds

ENTRY = folders.conf_dir().parent / "launch" / "run.py"


@dataclass
class Ended:
    """How one in-process run ended, and the runs that reached their task."""

    code: int
    out: str
    err: str
    runs: list[RunConfig]


Launch = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The handlers of signals, which each run sets."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Return a function that runs the entry in an empty folder with a task that only notes its arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(torchrun, "SILENCE_S", 0.0)
    for variable in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(variable, raising=False)

    def launch_one(
        *arguments: str, fails: BaseException | None = None, stops: bool = False, **environment: str
    ) -> Ended:
        runs = []

        def note(config: RunConfig, _clock: StartClock) -> bool:
            runs.append(config)
            if fails is not None:
                raise fails
            return stops

        monkeypatch.setattr(llama_ssp.run, "pipeline", SimpleNamespace(run=note), raising=False)
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        code = run.main()
        said = capsys.readouterr()
        return Ended(code=code, out=said.out, err=said.err, runs=runs)

    return launch_one


def test_a_run_hands_its_config_to_the_task(launch: Launch) -> None:
    ended = launch("model=30B", "prompt=f(a, 'b')", "sampling.temperature=0.5")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    [config] = ended.runs
    assert (config.model.name, config.prompt, config.sampling.temperature) == ("30B", "f(a, 'b')", 0.5)
    assert config.draft.model == catalogue.load("7B")


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("model=nosuch", "unknown model 'nosuch'"),
        ("speculation.num_draft_tokens=0", "speculation.num_draft_tokens=0 must be at least 1"),
        heavy("sampling.temperature=-1", "sampling.temperature=-1.0 must be 0"),
        heavy("sampling.top_p=2", "sampling.top_p=2.0 must be above 0"),
        heavy("sampling.top_k=-3", "sampling.top_k=-3 must be at least 1"),
        heavy("prompts=missing.txt", "prompts=missing.txt must be a file"),
        heavy("draft=7B", "the draft must have the target's vocabulary"),
        ("nosuch=1", "unknown setting 'nosuch'"),
        ("seed=abc", "seed=abc: Value 'abc'"),
        ("stop_strings=self", "stop_strings=self: a list is written [a,b]"),
        heavy("stop_strings={a:1}", "stop_strings={a:1}: a list is written [a,b]"),
        ('stop_strings=["???"]', "stop_strings[0]=??? stands for a value that is still missing: give one"),
        heavy("prompt=???", "prompt=??? stands for a value that is still missing: give one"),
        heavy("model.dtype=fp8", "model.dtype=fp8: Invalid value 'fp8', expected one of [auto, fp32, bf16, fp16]"),
        ("run_dir=${nosuch}", "Interpolation key 'nosuch' not found"),
        ("--nosuch", "unrecognized arguments: --nosuch"),
    ],
)
def test_a_mistake_is_one_sentence_with_code_2(argument: str, sentence: str, launch: Launch) -> None:
    ended = launch(argument)
    assert ended.code == 2
    assert ended.err.startswith(sentence)
    assert ended.err.count("\n") == 1
    assert (ended.out, ended.runs) == ("", [])


def test_ranks_above_zero_end_alike_and_say_nothing(launch: Launch) -> None:
    for argument in ("model=nosuch", "sampling.top_p=2", "seed=abc"):
        ended = launch(argument, RANK="1", WORLD_SIZE="2")
        assert (ended.code, ended.out, ended.err) == (2, "", "")


def test_ranks_above_zero_let_rank_zero_speak_first(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "SILENCE_S", 0.3)
    start = time.monotonic()
    launch("model=nosuch", RANK="1", WORLD_SIZE="2")
    assert time.monotonic() - start >= 0.3


def test_the_number_of_ranks_is_checked_against_the_placement(launch: Launch) -> None:
    ended = launch("placement.draft.ranks=[2]", RANK="0", WORLD_SIZE="2")
    assert "must name different ranks between 0 and 1" in ended.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(CheckpointError("no file"), 2), heavy(CapacityError("no file"), 3), heavy(InterruptedRun("no file"), 4)],
)
def test_errors_of_a_task_keep_their_exit_code(error: Exception, code: int, launch: Launch) -> None:
    ended = launch(fails=error)
    assert (ended.code, ended.err) == (code, "no file\n")


def test_ctrl_c_ends_with_code_4_and_no_traceback(launch: Launch) -> None:
    ended = launch(fails=KeyboardInterrupt())
    assert (ended.code, ended.err) == (4, "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, heavy(signal.SIGUSR1), heavy(signal.SIGHUP)])
def test_a_stop_signal_while_nothing_is_decoded_ends_with_code_4_however_often_it_comes(
    number: signal.Signals, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(_config: RunConfig) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            ends.append("written")

    ends: list[str] = []
    monkeypatch.setattr(run, "_check", lambda composed, *_, **__: twice(composed))
    ended = launch()
    assert (ended.code, ended.err, ends) == (4, "interrupted\n", ["written"])


def test_a_hangup_that_is_ignored_on_purpose_stays_ignored(launch: Launch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert launch().code == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize(("rank", "content"), [("0", "3\n"), ("1", None)])
def test_rank_zero_leaves_its_exit_code_where_a_launcher_can_read_it(
    rank: str, content: str | None, launch: Launch, tmp_path: Path
) -> None:
    file = tmp_path / "code"
    ended = launch(fails=CapacityError("full"), RANK=rank, WORLD_SIZE="2", EXIT_CODE_FILE=str(file))
    assert ended.code == 3
    assert (file.read_text() if file.exists() else None) == content


@pytest.mark.parametrize(("rank", "content"), [("0", "some/run\n"), ("1", None)])
def test_rank_zero_leaves_its_run_folder_where_a_launcher_can_read_it(
    rank: str, content: str | None, launch: Launch, tmp_path: Path
) -> None:
    file = tmp_path / "folder"
    assert launch("run_dir=some/run", RANK=rank, WORLD_SIZE="2", RUN_DIR_FILE=str(file)).code == 0
    assert (file.read_text() if file.exists() else None) == content


def test_the_plan_of_a_dry_run_is_printed_by_rank_zero_alone(launch: Launch) -> None:
    for rank in ("0", "1"):
        ended = launch("dry_run=true", "hardware=laptop_cpu", RANK=rank, WORLD_SIZE="2")
        assert (ended.code, bool(ended.out), ended.runs) == (0, rank == "0", [])


@pytest.mark.heavy
def test_later_points_of_a_sweep_start_when_they_begin(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = []

    def begin(*, age_s: float) -> StartClock:
        ages.append(age_s)
        return StartClock(age_s=age_s)

    monkeypatch.setattr(run, "startup", SimpleNamespace(StartClock=begin, process_age_s=lambda: 7.0))
    assert launch("-m", "hardware=1xh200", "model=7B,13B,30B").code == 0
    assert ages == [7.0, 0.0, 0.0]


def test_a_fault_of_ours_is_not_hidden(launch: Launch) -> None:
    with pytest.raises(ZeroDivisionError):
        launch(fails=ZeroDivisionError())


@pytest.mark.heavy
def test_points_of_a_sweep_have_folders_of_their_own(launch: Launch) -> None:
    ended = launch("-m", "hardware=1xh200", "model=7B,13B", "run_dir=sweep")
    assert ended.code == 0
    assert [(config.model.name, config.run_dir) for config in ended.runs] == [("7B", "sweep/0"), ("13B", "sweep/1")]


def test_a_sweep_ends_with_its_first_failure(launch: Launch) -> None:
    ended = launch("-m", "seed=0,1", fails=CapacityError("rank 0 is full"))
    assert (ended.code, len(ended.runs), ended.err) == (3, 1, "rank 0 is full\n")


def test_what_only_some_points_of_a_sweep_read_is_a_warning_at_the_others(launch: Launch) -> None:
    ended = launch("-m", "task=evaluate", "suite=agreement,arithmetic", "num_prompts=5")
    assert (ended.code, len(ended.runs)) == (0, 2), ended.err
    assert ended.err == "warning: at point 0 of the sweep, task.num_prompts has no effect on suite=agreement\n"
    assert launch("task=evaluate", "suite=agreement", "num_prompts=5").code == 2


@pytest.mark.heavy
def test_a_sweep_ends_before_its_next_point_when_somebody_wished_to_stop_in_a_last_round(launch: Launch) -> None:
    ended = launch("-m", "hardware=1xh200", "model=7B,13B,30B", stops=True)
    assert (ended.code, [config.model.name for config in ended.runs]) == (4, ["7B"])
    assert ended.err.startswith("interrupted before point 1 of the sweep; the same command")
    assert launch("-m", "hardware=1xh200", "model=7B", stops=True).code == launch(stops=True).code == 0


@pytest.mark.parametrize("arguments", [heavy([]), ["-m", "seed=0,1"]], ids=["run", "sweep"])
def test_hydra_leaves_no_file(arguments: list[str], launch: Launch, tmp_path: Path) -> None:
    assert launch(*arguments).code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("sampling.top_p=2", "sampling.top_p=2.0 must be"),
        ("model=nosuch", "unknown model 'nosuch'"),
        ("--help", "llama-ssp: speculative sampling"),
        ("--nosuch", "unrecognized arguments: --nosuch"),
    ],
)
def test_help_and_mistakes_are_told_without_loading_torch(argument: str, told: str) -> None:
    program = f"import runpy, sys; sys.argv = ['run.py', {argument!r}]\ntry: runpy.run_path({str(ENTRY)!r}, "
    program += "run_name='__main__')\nfinally: print(*{'torch', 'numpy'} & {*sys.modules}, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=False)
    *lines, loaded = ended.stderr.splitlines()
    assert "\n".join([*lines, ended.stdout]).startswith(told)
    assert loaded == "", "a module that takes seconds was loaded"


def test_help_tells_every_setting_and_every_option() -> None:
    environment = {**os.environ, "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, str(ENTRY), "--help", "all"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    keys = {key for key in compose.keys_of(compose.compose([])[0].config) if not key.startswith("draft.model")}
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    leaves |= {"task.format", "task.num_warmup"}
    leaves |= {f"{KEY}.{field.name}" for field in fields(SlurmConfig)}
    assert {key for key in leaves if not re.search(rf"(?<![\w.]){re.escape(key)}\b", ended.stdout)} == set()
    for group, options in compose.groups_of().items():
        assert {option for option in options if option not in ended.stdout} == set(), group
    assert max(map(len, ended.stdout.splitlines())) <= 120


def test_help_and_completion_are_for_rank_zero_alone(launch: Launch) -> None:
    ended = launch("--help", RANK="1", WORLD_SIZE="2")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
