"""A sweep on this machine: all points are checked before the first one starts."""

import gc
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_ssp.errors import CapacityError, InterruptedRun
from llama_ssp.reports.runs import read_run
from llama_ssp.run.commands import own_ranks
from llama_ssp.run.commands.points import points_of
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer
from llama_ssp.settings.compose import compose
from llama_ssp.settings.schema import RunConfig
from tests.helpers.in_process import launch
from tests.helpers.lanes import heavy
from tests.helpers.reports import without_reports
from tests.helpers.repository import ROOT

TOO_LARGE = ("-m", "hardware=g5_12xlarge", "model=tiny,65B", "draft=default")
Act = Callable[[Callable[[RunConfig, object], object]], None]


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> Act:
    """A function that says what is done with each point."""
    return lambda do: monkeypatch.setattr("llama_ssp.run.commands.run.task_code", lambda: do)


def as_step_of_srun(monkeypatch: pytest.MonkeyPatch, *, rank: int) -> None:
    """Make this process a rank of two that srun has started on two nodes."""
    step = {"STEP_ID": "0", "PROCID": str(rank), "LOCALID": "0", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_a_mistake_at_one_point_keeps_all_points_from_starting(tmp_path: Path) -> None:
    ended = launch("-m", "speculation.num_draft_tokens=4,0,2,-1", f"run_dir={tmp_path}/sweep")
    assert (ended.code, (tmp_path / "sweep").exists()) == (2, False)
    begun, *problems = ended.err.splitlines()
    assert begun.startswith("2 problems")
    assert [problem.split(" run_dir=")[0] for problem in problems] == [
        "  1. job 1 (speculation.num_draft_tokens=0",
        "  2. job 3 (speculation.num_draft_tokens=-1",
    ]


@pytest.mark.seconds
@pytest.mark.parametrize("rank", [None, heavy(0), heavy(1)])
def test_a_point_that_does_not_fit_keeps_all_points_from_starting(
    rank: int | None, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as every rank of srun finds it, of which rank 0 speaks."""
    if rank is not None:
        as_step_of_srun(monkeypatch, rank=rank)
    act(lambda *_: pytest.fail("a point has started"))
    monkeypatch.setattr("llama_ssp.run.commands.run.SILENCE_S", 0.1)
    ended = launch(*TOO_LARGE)
    assert (ended.code, ended.err.startswith("job 1 (")) == (3, rank != 1)
    assert ("rank 0 needs" in ended.err) == (rank != 1)


@pytest.mark.seconds
def test_a_sweep_is_checked_for_the_ranks_that_it_will_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["llama-ssp", "run"])
    words = ["ranks=2", "-m", "placement=own_gpu", "hardware=laptop_cpu", "seed=1,2", "dry_run=true"]
    assert own_ranks.main(words, num_ranks=None) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count("Memory per rank") == 2


def test_a_point_that_was_interrupted_names_the_folder_of_the_sweep(act: Act, tmp_path: Path) -> None:
    """With the folder of the point, the same command would begin another sweep inside it."""

    def interrupted(config: RunConfig, _clock: object) -> bool:
        raise InterruptedRun.in_folder(config.run_dir)

    act(interrupted)
    ended = launch("-m", "seed=1,2", f"run_dir={tmp_path}/my sweep")
    assert ended.code == 4
    assert f"'run_dir={tmp_path}/my sweep' with the same settings" in ended.err


@pytest.mark.seconds
def test_other_points_run_where_one_fails_and_the_next_call_repeats_it(act: Act, tmp_path: Path) -> None:
    begun: list[int] = []

    def run(config: RunConfig, _clock: object) -> bool:
        begun.append(config.seed)
        if config.seed == 2 and begun.count(2) == 1:
            raise CapacityError("too large")
        return False

    act(run)
    words = ("-m", "seed=1,2,3", f"run_dir={tmp_path}/sweep")
    ended = launch(*words)
    assert (ended.code, begun) == (3, [1, 2, 3])
    assert "job 1 (seed=2" in ended.err
    assert ended.err.count("too large") == 1
    assert "1 of 3 points failed, point 2 of 3; the same command" in ended.err
    assert launch(*words).code == 0


@pytest.mark.heavy
def test_identical_points_of_a_sweep_are_named(act: Act, tmp_path: Path) -> None:
    started = []
    act(lambda config, _: started.append(config.seed))
    ended = launch("-m", "seed=1,2,1", "draft=default,tiny-draft", f"run_dir={tmp_path}/sweep")
    assert (ended.code, started) == (0, [1, 1, 2, 2, 1, 1])
    assert ended.err.splitlines() == [
        "warning: points 1, 2, 5 and 6 of the sweep are one run, which is made 4 times",
        "warning: points 3 and 4 of the sweep are one run, which is made 2 times",
    ]


@pytest.mark.seconds
def test_a_sweep_says_where_it_is_and_ends_with_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folders by their names; what disturbed a run is still said when it is resumed."""
    for name, model in (("mine", "tiny"), ("theirs", "tiny-draft")):
        (tmp_path / name).symlink_to(ROOT / "llama_ssp" / "shipped" / model)
    without_reports(monkeypatch)
    seen = iter(["others ran"])
    monkeypatch.setattr("llama_ssp.run.results.disturbance", lambda *_: next(seen, None))
    words = [f"model={tmp_path}/mine", f"draft={tmp_path}/theirs", "prompt=import secret", "max_new_tokens=3"]
    words += ["quiet=true", f"run_dir={tmp_path}/sweep"]
    ended = launch("-m", "speculation.tree=2x1,3x1", *words).well()
    heads = [line.rstrip("═ ") for line in ended.out.splitlines() if line.startswith("point ")]
    assert heads == ["point 1 of 2: speculation.tree=2x1", "point 2 of 2: speculation.tree=3x1"]
    assert "mine with theirs, tree 3x1: 1 prompt" in ended.out
    assert "secret" not in ended.out
    assert re.search(r"All points(.|\n)*\n1 † +2x1 .*\n2 † +3x1 .*\n\n† disturbed", ended.out)
    found = [read_run(tmp_path / "sweep" / name, name=name).summary for name in "01"]
    assert [one.disturbed for one in found] == ["others ran"] * 2, "the second has plain completions of the first"
    assert found[1].point == "point 2 of 2: speculation.tree=3x1"
    log = (tmp_path / "sweep" / "1" / "run.log").read_text()
    assert "point 2 of 2: speculation.tree=3x1" in log
    assert "loaded draft theirs" in log
    assert "disturbed: others ran" in (tmp_path / "sweep" / "0" / "run.log").read_text()
    monkeypatch.setattr("llama_ssp.run.results.unusual_times", lambda *_: "another machine")
    ended = launch("-m", "speculation.tree=2x1", *words)
    assert (ended.code, "another machine" in ended.err) == (0, False), "nothing was decoded"
    resumed = read_run(tmp_path / "sweep" / "0", name="0").summary
    assert (resumed.disturbed, resumed.point) == ("others ran", "point 1 of 1")


@pytest.mark.heavy
def test_points_share_one_baseline_which_the_last_one_makes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coupled draws make another plain text, and so does another seed: they have a baseline of their own."""
    without_reports(monkeypatch)
    disturbed = iter(["others ran"])
    monkeypatch.setattr("llama_ssp.run.results.disturbance", lambda *_: next(disturbed, None))
    made: list[str] = []
    complete = Session.complete

    def counted(self: Session, requests: list[PromptRequest], mode: str, viewer: Viewer) -> None:
        made.extend(mode for one in requests if one.line_key(mode) not in self.finished)
        complete(self, requests, mode, viewer)

    monkeypatch.setattr(Session, "complete", counted)
    words = ["-m", "prompt=import os", "max_new_tokens=3", "quiet=true", f"run_dir={tmp_path}/sweep"]
    ended = launch(*words, "verification=speculative,block,coupled").well()
    assert (made.count("speculative"), made.count("plain")) == (3, 2)
    runs = [read_run(tmp_path / "sweep" / str(number), name=str(number)) for number in range(3)]
    folders = [run.summary.baseline and Path(run.summary.baseline.folder).name for run in runs]
    assert folders == [None, "0", None]
    assert [bool(run.summary.baseline and run.summary.baseline.ms_per_token) for run in runs] == [False, True, False]
    plain = [line.to_json() for run in runs for line in run.lines if line.mode == "plain"]
    assert plain[0] == plain[1] != plain[2]
    assert [bool(run.summary.disturbed) for run in runs] == [True, True, False]
    assert ended.err.count("plain decoding was measured once, in ") == 1
    # Of the second, every point reads other prompts.
    for setting, prompt in (("seed=0,1", "prompt=x"), ("speculation.num_draft_tokens=2,4", "prompts=-")):
        points = points_of(compose([setting, prompt], multirun=True))
        assert [point.place.baseline for point in points] == [None, None]


class Model:
    """Refers to itself, as decoders and their executors refer to each other."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.seconds
def test_a_point_begins_when_the_models_of_the_last_one_have_been_freed(act: Act, tmp_path: Path) -> None:
    made: list[weakref.ref[Model]] = []
    alive = []

    def make(_config: object, _clock: object) -> bool:
        alive.append([model() is not None for model in made])
        made.append(weakref.ref(Model()))
        return False

    act(make)
    gc.disable()
    try:
        assert launch("-m", "seed=1,2,3", f"run_dir={tmp_path}/sweep").code == 0
    finally:
        gc.enable()
    assert alive == [[], [False], [False, False]]


@pytest.mark.heavy
def test_a_rank_of_srun_does_not_end_alone_for_the_memory_of_its_own_node(
    act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would wait for it; every run checks its capacity again, together with them."""
    as_step_of_srun(monkeypatch, rank=0)
    started = []
    monkeypatch.setattr("llama_ssp.machines.machine.host_memory_bytes", lambda: 2**20)
    act(lambda config, _: started.append(config.seed))
    assert launch("-m", "device=cpu", "seed=1,2").code == 0
    assert started == [1, 2]


def test_prompts_that_cannot_be_read_keep_all_points_from_starting_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_ssp.machines.machine._gpu_names", lambda: ["Nobody's GPU"])
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "import os"}')
    bad.write_text("import os")
    ended = launch("-m", "task=generate", f"prompts={good},{bad}", f"run_dir={tmp_path}/sweep")
    assert (ended.code, (tmp_path / "sweep").exists()) == (2, False)
    assert ended.err.startswith("job 1 (")
    assert "bad.jsonl must be a JSON object" in ended.err
