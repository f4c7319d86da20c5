"""Calibration writes a file that the planner reads, and a refresh writes it again."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.machines import hardware
from llama_ssp.machines.profile import LinearPoint
from llama_ssp.planning.timing import timing
from llama_ssp.run.calibration import model_pairs, operators, profiles
from llama_ssp.run.calibration.model_pairs import RandomLlama
from llama_ssp.run.tasks import calibrate as task
from llama_ssp.run.tasks.calibrate import calibrate, refresh
from llama_ssp.settings import catalogue
from llama_ssp.settings.tasks import CalibrateConfig
from llama_ssp.terminal.terminal import Terminal
from tests.helpers.planning import make_job
from tests.helpers.worlds import ONE_CORE

pytestmark = pytest.mark.seconds


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes and no patience: what is measured is of no account."""
    monkeypatch.setattr(operators, "ELEMENTS", (4096, 65536))
    monkeypatch.setattr(operators, "ROWS", (1, 5, 64))
    monkeypatch.setattr(operators, "WORKING_SETS", (2**20, 2**22))
    monkeypatch.setattr(operators, "beyond_caches", lambda: 2**23)
    monkeypatch.setattr(operators, "VOCABULARIES", (64, 256))
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    monkeypatch.setattr(model_pairs, "TARGETS", {RandomLlama(128, 3, 64): 1, RandomLlama(256, 3, 64): 1})
    monkeypatch.setattr(model_pairs, "DRAFT", RandomLlama(64, 1, 64))
    monkeypatch.setattr(model_pairs, "VOCAB_SIZE", 64)


class Shown(dict[str, tuple[int, int]]):
    """A progress display that remembers the last step of each label."""

    def __call__(self, label: str, done: int, total: int) -> None:
        self[label] = (done, total)


@pytest.mark.heavy
@pytest.mark.usefixtures("hasty")
def test_the_file_is_a_sound_description_from_which_a_run_can_be_planned(tmp_path: Path) -> None:
    file, shown = tmp_path / "machine.yaml", Shown()
    assert calibrate(ONE_CORE, file, shown) == f"wrote {file}"
    assert [*shown] == ["1 rank, all cores: parts", "whole forwards"]
    assert all(done == total for done, total in shown.values())
    assert re.search(r"\n  linear: \|\n +dtype +rows +elements ", file.read_text())
    figures = yaml.safe_load(file.read_text())
    assert hardware.problems_of(figures) == []
    machine = hardware.build(figures)
    (profile,) = machine.profiles
    assert (profile.num_ranks, machine.device) == (1, "cpu")
    tables = {name: value for name, value in figures["profiles"][0].items() if not isinstance(value, int | float)}
    assert {name for name, value in tables.items() if value and not isinstance(value, str)} == set()
    assert profile.forward_ratio == profile.forward_ratio_apart != 1.0
    assert profile.first_draft_s >= 0
    assert machine.flops_share == 0.75, "its rates are those of a product, and not of a data sheet"
    timed = timing(make_job("tiny", "tiny-draft", cuda_graphs=False), machine)
    assert 1e-5 < timed.plain_s < 10
    assert 1e-5 < (timed.speculative_s or 0) < 10


def machine_file(folder: Path, *, num_ranks: int = 1, **others: object) -> Path:
    """A calibrated machine whose whole forwards take twice the sum of their parts."""
    size = {"size": 64, "s": 1e-6}
    linear = LinearPoint(dtype="fp32", rows=1, elements=4096, working_set_bytes=2**20, s=1e-5)
    parts = {
        "linear": [asdict(linear)], "tied_head": [],
        "layer": [{"rows": 1, "width": 64, "s": 1e-5}], "frame": [{"rows": 1, "width": 64, "s": 1e-5}],
        "attention": [size], "draw": [size], "verify": [size],
    }  # fmt: skip
    figures = yaml.safe_load((catalogue.conf_dir() / "hardware" / "laptop_cpu.yaml").read_text())
    figures |= {"profiles": [{"num_ranks": num_ranks, "forward_ratio": 2.0, **parts}], **others}
    file = folder / "machine.yaml"
    file.write_text(yaml.safe_dump(figures))
    return file


@pytest.mark.usefixtures("hasty")
def test_a_refresh_measures_whole_forwards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linear_points", "operator_points", "attention_points", "copy_bytes_per_s"):
        monkeypatch.setattr(operators, name, None)
    file, shown = machine_file(tmp_path), Shown()
    before = yaml.safe_load(file.read_text())
    message = refresh(ONE_CORE, file, shown)
    assert shown == {"whole forwards": (9, 9)}
    after = yaml.safe_load(file.read_text())
    assert hardware.problems_of(after) == []
    (old,), (new,) = (hardware.build(figures).profiles for figures in (before, after))
    kept: dict[str, Any] = {"forward_ratio": 1.0, "forward_ratio_apart": 1.0, "first_draft_s": 0.0, "round_s": 0.0}
    assert replace(new, **kept) == replace(old, **kept)
    assert new.forward_ratio != old.forward_ratio
    assert "whole forwards measured again on 20" in after["sources"].pop("profiles")
    assert {**after, "profiles": []} == {**before, "profiles": []}
    assert message is not None
    assert re.fullmatch(rf"wrote {re.escape(str(file))}: forwards now take [0-9.]+ times as long on one rank", message)


@pytest.mark.parametrize(
    ("make", "device", "message"),
    [
        (lambda folder: folder / "machine.yaml", "cpu", "there is no calibration .*: start task=calibrate without"),
        (lambda folder: machine_file(folder, num_ranks=4), "cpu", "profiles of these numbers of ranks: 4; for 1,"),
        (lambda folder: machine_file(folder, kernel_s=-1), "cpu", "machine.yaml: hardware.kernel_s=-1 must be"),
        (machine_file, "cuda", "which calibrated GPUs do not have: leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_refreshed_is_one_sentence(
    make: Callable[[Path], Path], device: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "Pairs", None)
    with pytest.raises(ConfigError, match=message):
        refresh(replace(ONE_CORE, device=torch.device(device)), make(tmp_path), Shown())


@pytest.mark.parametrize("refreshes", [False, True])
def test_only_a_calibration_makes_the_folder_of_its_file(
    refreshes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, done = tmp_path / "hardware" / "this_machine.yaml", list[Path]()
    for name in ("calibrate", "refresh"):
        monkeypatch.setattr(task, name, lambda _world, file, _show: done.append(file))
    monkeypatch.setattr(catalogue, "new_file", lambda *_: file)
    config: Any = SimpleNamespace(task=CalibrateConfig(refresh=refreshes))
    task.run(config, ONE_CORE, Terminal.of_rank(0))
    assert done == [file]
    assert file.parent.is_dir() != refreshes


@pytest.mark.parametrize(("name", "reason"), [("missing/machine.yaml", "no .*/missing"), ("", "it is a folder")])
def test_a_file_that_cannot_be_written_is_one_sentence_before_anything_is_measured(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "linear_points", None)
    with pytest.raises(SspError, match=rf"cannot be written \({reason}\): .* task\.output=FILE"):
        calibrate(ONE_CORE, tmp_path / name, Shown())
