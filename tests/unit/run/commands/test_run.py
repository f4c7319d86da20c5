"""The entry of every rank: exit codes, who speaks, what reaches the task, and what signals do."""

import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf.errors import OmegaConfBaseException

from llama_ssp import catalogue
from llama_ssp.errors import CapacityError, CheckpointError, ConfigError, InterruptedRun, LostRankError
from llama_ssp.run.commands import run
from llama_ssp.run.commands.help import settings_of_launchers
from llama_ssp.run.startup import StartClock
from llama_ssp.settings import compose
from llama_ssp.settings.schema import RunConfig
from tests.helpers import in_process
from tests.helpers.in_process import Ended
from tests.helpers.lanes import heavy


@dataclass(frozen=True, kw_only=True)
class Noted(Ended):
    """How a run ended, and the configs that reached their task."""

    runs: list[RunConfig]


Launch = Callable[..., Noted]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """Return a function that runs the entry in an empty folder with a task that only notes its arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "SILENCE_S", 0.0)

    def launch_one(
        *arguments: str, fails: BaseException | None = None, stops: bool = False, **environment: str
    ) -> Noted:
        runs = []

        def note(config: RunConfig, _clock: StartClock) -> bool:
            runs.append(config)
            if fails is not None:
                raise fails
            return stops

        monkeypatch.setattr(run, "task_code", lambda: note)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        return Noted(**vars(in_process.launch(*arguments)), runs=runs)

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
        ('stop_strings=["???"]', "stop_strings[0]=??? stands for a value that is still missing: give one"),
        ("run_dir=${nosuch}", "Interpolation key 'nosuch' not found"),
    ],
)
def test_a_mistake_is_one_sentence_with_code_2(argument: str, sentence: str, launch: Launch) -> None:
    ended = launch(argument)
    ended.check_refusal(sentence)
    assert ended.err.startswith(sentence)
    assert (ended.out, ended.runs) == ("", [])


def test_ranks_above_zero_let_rank_zero_speak_first_and_end_alike(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SILENCE_S", 0.3)
    for words, code, least_s in (
        (["sampling.top_p=2"], 2, 0.3),
        (["--help"], 0, 0.0),
        (["dry_run=true", "hardware=laptop_cpu"], 0, 0.0),
    ):
        start = time.monotonic()
        ended = launch(*words, RANK="1", WORLD_SIZE="2")
        assert (ended.code, ended.out, ended.err) == (code, "", "")
        assert time.monotonic() - start >= least_s


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("error", "code", "num_runs"),
    [
        (CheckpointError("no file"), 2, 2),
        heavy(CapacityError("no file"), 3, 2),
        heavy(InterruptedRun("no file"), 4, 1),
        heavy(LostRankError("no file"), 1, 1),
    ],
)
def test_a_sweep_goes_on_after_a_failure_but_for_an_interrupt_and_ends_with_its_exit_code(
    error: Exception, code: int, num_runs: int, launch: Launch, tmp_path: Path
) -> None:
    ended = launch("-m", "seed=0,1", fails=error)
    assert (ended.code, len(ended.runs)) == (code, num_runs)
    assert ended.err.count("no file") == num_runs
    assert list(tmp_path.iterdir()) == [], "Hydra leaves no file"


@pytest.mark.parametrize("number", [signal.SIGTERM, heavy(signal.SIGUSR1), heavy(signal.SIGHUP)])
def test_a_stop_signal_while_nothing_is_decoded_ends_with_code_4_however_often_it_comes(
    number: signal.Signals, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    def twice(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            ends.append("written")

    monkeypatch.setattr(run, "_check", twice)
    ended = launch()
    assert (ended.code, ended.err, ends) == (4, "interrupted\n", ["written"])


@pytest.mark.parametrize(
    "error", [UnboundLocalError("f"), OmegaConfBaseException("flags"), ConfigError("no file"), None]
)
def test_an_interrupt_that_a_library_replaces_or_loses_ends_the_run_alike(
    error: Exception | None, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the settings of a run are read; libraries clean up what they have not made yet, and fail."""

    def deaf(root: str) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if error:
            raise error
        register(root)

    register = compose.register
    monkeypatch.setattr(compose, "register", deaf)
    ended = launch()
    assert (ended.code, ended.err, ended.runs) == (4, "interrupted\n", [])


@pytest.mark.parametrize(("words", "code"), [(["modle=7B"], 2), (["sampling.top_p=2"], 2), ([], 4)])
def test_a_rank_that_is_ended_for_the_mistake_of_all_ranks_ends_with_the_code_of_the_mistake(
    words: list[str], code: int, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its code 4, the larger one, would be that of the step, and its batch job would queue itself again."""
    register = compose.register

    def ended(root: str) -> None:
        signal.raise_signal(signal.SIGTERM)
        register(root)

    monkeypatch.setattr(compose, "register", ended)
    found = launch(*words, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert (found.code, found.err, found.runs) == (code, "", [])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_zero_leaves_the_name_of_its_run_folder_where_a_batch_script_can_read_it(
    rank: str, launch: Launch, tmp_path: Path
) -> None:
    file = tmp_path / "folder"
    named = {"RANK": rank, "WORLD_SIZE": "2", "RUN_DIR_FILE": str(file)}
    assert launch("run_dir=some/run", fails=CapacityError("full"), **named).code == 3
    assert [named.read_text() for named in tmp_path.glob("folder")] == ["some/run\n"] * (rank == "0")


@pytest.mark.seconds
def test_what_only_some_points_of_a_sweep_read_is_a_warning_at_the_others(launch: Launch) -> None:
    words = ("task=generate", "prompt=import", "speculation.num_draft_tokens=5")
    ended = launch("-m", *words, "draft=none,tiny-draft")
    assert (ended.code, len(ended.runs)) == (0, 2), ended.err
    without = "without a draft: give one with draft=NAME"
    assert ended.err == f"warning: at point 1 of 2, speculation.num_draft_tokens has no effect {without}\n"
    assert launch(*words, "draft=none").code == 2


@pytest.mark.heavy
def test_a_sweep_ends_before_its_next_point_when_somebody_wished_to_stop_in_a_last_round(launch: Launch) -> None:
    ended = launch("-m", "seed=1,2,3", stops=True)
    assert (ended.code, [config.seed for config in ended.runs]) == (4, [1])
    assert ended.err.startswith("interrupted before point 2 of 3; the same command")
    assert launch("-m", "seed=1", stops=True).code == 0


@pytest.mark.seconds
def test_help_tells_every_setting_and_every_option(launch: Launch) -> None:
    shown = launch("--help", "all").out
    keys = {key for key in compose.keys_of(compose.compose([])[0].config) if not key.startswith("draft.model")}
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    leaves |= {"task.format", "task.in_order"} | {one.key for one in settings_of_launchers()}
    assert {key for key in leaves if not re.search(rf"(?<![\w.]){re.escape(key)}\b", shown)} == set()
    for group, options in compose.groups_of().items():
        assert {option for option in options if option not in shown} == set(), group
    assert max(map(len, shown.splitlines())) <= 120
