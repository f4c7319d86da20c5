"""Calibration times operators and messages as runs use them, and writes a file that the planner reads."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError, SspError
from llama_ssp.extensions.calibrate import measures, task
from llama_ssp.extensions.calibrate.records import CalibrateConfig
from llama_ssp.extensions.calibrate.task import calibrate
from llama_ssp.kernels.parts import KeptRows
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import Link, MeasuredSum
from llama_ssp.planning.timing import timing
from llama_ssp.ranks.comms import Comm
from llama_ssp.registry import operators
from llama_ssp.run import calibration
from llama_ssp.settings import checks
from llama_ssp.storage.formats import formats
from llama_ssp.terminal.terminal import Terminal
from tests.helpers.composed import compose_run
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.planning import make_spec
from tests.helpers.worlds import ONE_CORE


class Shown(dict[str, tuple[int, int]]):
    """A progress display that remembers the last step of each label."""

    def __call__(self, label: str, done: int, total: int) -> None:
        self[label] = (done, total)


@pytest.mark.heavy
def test_the_file_is_a_sound_description_from_which_a_run_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    file, shown = tmp_path / "machine.yaml", Shown()
    assert calibrate(ONE_CORE, file, shown) == f"wrote {file}"
    assert [*shown.values()] == [(2, 2)]
    figures = yaml.safe_load(file.read_text())
    assert hardware.problems_of(figures) == []
    machine = hardware.build(figures)
    assert (machine.device, machine.is_measured, machine.sums, machine.num_gpus) == ("cpu", True, [], 1)
    assert {"fp32", "fp16"} <= machine.products.keys()
    assert machine.flops_share == 0.75, "its rates are those of a product, and not of a data sheet"
    timed = timing(make_spec("tiny", "tiny-draft", cuda_graphs=False), machine)
    assert 1e-5 < timed.plain_s < 10
    assert 1e-5 < (timed.speculative_s or 0) < 10


@pytest.mark.seconds
@pytest.mark.parametrize("num_local", [1, 2])
def test_ranks_measure_the_sums_in_their_node_or_one_between_two(
    num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "_NUM_BUNCHES", 3)

    def one_rank(comm: ThreadComm) -> tuple[list[MeasuredSum], Link | None]:
        cpu = torch.device("cpu")
        return measures.sums(comm, cpu, num_local=num_local), measures.network(comm, cpu, num_local=num_local)

    for sums, network in on_ranks(thread_comms(2), one_rank):
        assert [(found.num_ranks, found.num_bytes) for found in sums] == [
            (2, size) for size in (measures.MESSAGE_BYTES if num_local == 2 else ())
        ]
        assert (network is None) == (num_local == 2)
        assert network is None or min(network.latency_s, network.bandwidth_bytes_per_s) > 0


def test_a_calibration_makes_the_folder_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, done = tmp_path / "hardware" / "this_machine.yaml", list[Path]()
    monkeypatch.setattr(task, "calibrate", lambda _world, file, _show: done.append(file))
    monkeypatch.setattr(catalogue, "new_file", lambda *_: file)
    config: Any = SimpleNamespace(task=CalibrateConfig())
    task.run(config, ONE_CORE, Terminal.of_rank(0))
    assert done == [file]
    assert file.parent.is_dir()


@pytest.mark.parametrize(("name", "reason"), [("missing/machine.yaml", "no .*/missing"), ("", "it is a folder")])
def test_a_file_that_cannot_be_written_is_one_sentence_before_anything_is_measured(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "cpu_speeds", None)
    with pytest.raises(SspError, match=rf"cannot be written \({reason}\): .* task\.output=FILE"):
        calibrate(ONE_CORE, tmp_path / name, Shown())


def test_rates_are_bytes_operations_and_calls_over_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calibration, measures):
        monkeypatch.setattr(module, "seconds_per_call", lambda *_: 0.5)
    device = torch.device("cpu")
    assert calibration.copy_bytes_per_s(device, num_bytes=4096) == 2 * 4096 / 0.5, "read once and written once"
    assert measures.flops_per_s(torch.float32, device) == 2 * 1024**3 / 0.5, "a product and a sum"
    assert measures.launch_s(device) == measures.kernel_s(device) == 0.5 / 200


def test_every_format_that_has_a_kernel_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the floats of 4 bits too, to which no weight is quantized; and so has attention, with its operator."""
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    monkeypatch.setattr(calibration, "_SPEED_SIDE", 128)
    found = calibration.cpu_speeds(num_bytes=2**16)
    compiled = [record for record in formats().values() if operators.made("packed_block", "cpu", record)]
    attention = operators.made("attention", "cpu", torch.float32, 128, KeptRows(torch.float32))
    assert found.keys() - {"attention"} == {"fp32", "fp16", *(record.name for record in compiled)}
    assert ("attention" in found) == (attention is not None)
    assert found.get("mxfp4") == found.get("int4_weight_only")


def test_a_message_that_a_neighbour_delays_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the work around it."""
    now_s, num_calls, work_s = 0.0, 0, 2e-6

    def all_reduce(values: Tensor) -> Tensor:
        nonlocal now_s, num_calls
        num_calls += 1
        now_s += work_s + (1.0 if num_calls % 40 == 0 else 1e-5)
        return values

    monkeypatch.setattr(measures, "seconds_per_call", lambda _call: work_s)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    comm = Comm.single()
    object.__setattr__(comm, "all_reduce", all_reduce)  # the class is frozen
    found = measures._summed_s(comm, torch.zeros(2))
    assert num_calls > 40
    assert found == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("speculation.num_draft_tokens=2", "num_draft_tokens has no effect on task=calibrate, which"),
        ("device=cpu cuda_graphs=false", "cuda_graphs has no effect on task=calibrate, which"),
        ("model=7B", "model has no effect on task=calibrate, which reads no model"),
        ("dry_run=true", "dry_run has no effect on task=calibrate, which"),
        ("run_dir=a", "run_dir has no effect on task=calibrate, which"),
    ],
)
def test_what_it_does_not_read_is_refused(words: str, sentence: str) -> None:
    config, explicit = compose_run("task=calibrate", *words.split())
    with pytest.raises(ConfigError, match=sentence):
        checks.check(config, explicit, world_size=1)


def test_a_plan_that_is_none_is_refused_in_a_sweep_too() -> None:
    config, explicit = compose_run("task=calibrate", "dry_run=true")
    with pytest.raises(ConfigError, match="dry_run has no effect on task=calibrate"):
        checks.check(config, explicit, world_size=1, of_sweep=True)
