"""Calibration writes a file that the planner reads, and takes off what it should."""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from llama_ssp.calibration import model_pairs, operators, profiles, rounds
from llama_ssp.calibration.model_pairs import PairTime
from llama_ssp.calibration.random_llama import HEAD_DIM, RandomLlama
from llama_ssp.config import hardware
from llama_ssp.config.hardware import CompositionPoint, LinearPoint, Profile
from llama_ssp.config.options import folders
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.environment import Ranks
from llama_ssp.distributed.world import World
from llama_ssp.errors import ConfigError, SspError
from llama_ssp.planning.timing import timing
from llama_ssp.tasks import calibrate as task
from llama_ssp.tasks.calibrate import calibrate, refresh
from tests.helpers.planning import make_job

pytestmark = pytest.mark.seconds

WORLD = World(
    cores=frozenset({0}),
    comm=Comm.single(),
    ranks=Ranks(rank=0, size=1, local_rank=0, local_size=1),
    device=torch.device("cpu"),
    note=None,
)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes and no patience: what is measured is of no account."""
    monkeypatch.setattr(operators, "ELEMENTS", (4096, 65536))
    monkeypatch.setattr(operators, "ROWS", (1, 5, 64))
    monkeypatch.setattr(operators, "WORKING_SETS", (2**20, 2**22))
    monkeypatch.setattr(operators, "beyond_caches", lambda: 2**23)
    monkeypatch.setattr(rounds, "VOCABULARIES", (64, 256))
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    monkeypatch.setattr(model_pairs, "TARGETS", (RandomLlama(128, 3, 64), RandomLlama(256, 3, 64)))
    monkeypatch.setattr(model_pairs, "DRAFT", RandomLlama(64, 1, 64))
    monkeypatch.setattr(model_pairs, "VOCAB_SIZE", 64)
    monkeypatch.setattr(model_pairs, "TURN_S", 0.0)


class Shown:
    """A progress display that remembers the last step of each label."""

    def __init__(self) -> None:
        self.turns: dict[str, tuple[int, int]] = {}

    def __call__(self, label: str, done: int, total: int) -> None:
        """Remember."""
        self.turns[label] = (done, total)


@pytest.mark.heavy
@pytest.mark.usefixtures("hasty")
def test_the_file_is_a_sound_description_from_which_a_run_can_be_planned(tmp_path: Path) -> None:
    file, shown = tmp_path / "machine.yaml", Shown()
    assert calibrate(WORLD, file, shown) == f"wrote {file}"
    assert [*shown.turns] == ["1 rank, all cores: parts", "1 rank, all cores: whole forwards"]
    assert all(done == total for done, total in shown.turns.values())
    figures = yaml.safe_load(file.read_text())
    assert hardware.problems_of(figures) == []
    machine = hardware.build(figures)
    (profile,) = machine.profiles
    assert profile.num_ranks == 1
    sizes = [4 * (layers * 15 * width**2 + 64 * width) for width, layers in ((64, 1), (128, 3), (256, 3))]
    wholes = [(point.working_set_bytes, point.rows) for point in profile.composition]
    assert wholes == [(sizes[0], 1), *[(size, rows) for size in sizes[1:] for rows in (1, 2, 5, 32)]]
    assert [point.size for point in profile.first_draft] == sizes[1:]
    assert machine.device == "cpu"
    timed = timing(make_job("tiny", "tiny-draft", cuda_graphs=False), machine)
    assert timed.speculative_s
    assert 1e-5 < timed.plain_s < 10
    assert 1e-5 < timed.speculative_s < 10


def machine_file(folder: Path, *, num_ranks: int = 1, **others: object) -> Path:
    """A calibrated machine whose whole forwards take twice the sum of their parts."""
    size = {"size": 64, "s": 1e-6}
    linear = LinearPoint(dtype="fp32", rows=1, elements=4096, working_set_bytes=2**20, s=1e-5)
    parts = {
        "linear": [asdict(linear)], "tied_head": [],
        "layer": [{"rows": 1, "width": 64, "s": 1e-5}], "frame": [{"rows": 1, "width": 64, "s": 1e-5}],
        "attention": [size], "draw": [size], "verify": [size],
    }  # fmt: skip
    wholes = [{"rows": 1, "working_set_bytes": size_bytes, "ratio": 2.0} for size_bytes in (77824, 2965504)]
    figures = yaml.safe_load((folders.conf_dir() / "hardware" / "laptop_cpu.yaml").read_text())
    figures |= {"profiles": [{"num_ranks": num_ranks, "composition": wholes, **parts}], **others}
    file = folder / "machine.yaml"
    file.write_text(yaml.safe_dump(figures))
    return file


@pytest.mark.usefixtures("hasty")
def test_a_refresh_measures_whole_forwards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linear_points", "operator_points", "attention_points", "copy_bytes_per_s"):
        monkeypatch.setattr(operators, name, None)
    file, shown = machine_file(tmp_path), Shown()
    before = yaml.safe_load(file.read_text())
    message = refresh(WORLD, file, shown)
    assert shown.turns == {"1 rank, all cores: whole forwards": (9, 9)}
    after = yaml.safe_load(file.read_text())
    assert hardware.problems_of(after) == []
    (old,), (new,) = ([Profile(**each) for each in figures.pop("profiles")] for figures in (before, after))
    assert replace(new, composition=[], first_draft=[]) == replace(old, composition=[])
    assert len(new.composition) == 9
    assert len(new.first_draft) == 2
    assert "whole forwards measured again on 20" in after["sources"].pop("profiles")
    assert after == before
    assert message is not None
    assert re.fullmatch(rf"wrote {re.escape(str(file))}: forwards now take [0-9.]+ times as long on one rank", message)


def test_the_change_is_the_median_over_sizes_that_both_have() -> None:
    def profile(**ratios: float) -> Any:  # noqa: ANN401 - stands for a Profile
        points = [CompositionPoint(rows=1, working_set_bytes=ord(size), ratio=ratio) for size, ratio in ratios.items()]
        return SimpleNamespace(composition=points)

    assert task._change(profile(a=2.0, b=1.0, c=4.0), profile(a=1.0, b=0.6, c=0.4, d=0.7)) == pytest.approx(0.55)


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
        refresh(replace(WORLD, device=torch.device(device)), make(tmp_path), Shown())


@pytest.mark.parametrize(("name", "reason"), [("missing/machine.yaml", "no .*/missing"), ("", "it is a folder")])
def test_a_file_that_cannot_be_written_is_one_sentence_before_anything_is_measured(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "linear_points", None)
    with pytest.raises(SspError, match=rf"cannot be written \({reason}\): .* task\.output=FILE"):
        calibrate(WORLD, tmp_path / name, Shown())


def test_a_call_is_timed_in_seconds() -> None:
    assert operators.seconds_per_call(lambda: time.sleep(0.002), budget_s=0.02) == pytest.approx(0.002, rel=0.5)


def test_what_comes_between_two_calls_is_done_each_time_and_not_timed() -> None:
    done: list[str] = []

    def between() -> None:
        done.append("between")
        time.sleep(0.005)

    seconds = operators.seconds_per_call(lambda: done.append("call"), budget_s=1e-9, between=between)
    assert done == ["call", "between", "call", "between", "call", "between", "call"]
    assert seconds < 0.002


def test_rates_are_bytes_operations_and_calls_over_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "seconds_per_call", lambda _call, **_options: 0.5)
    device = torch.device("cpu")
    assert operators.copy_bytes_per_s(device, num_bytes=4096) == 2 * 4096 / 0.5, "read once and written once"
    assert operators.flops_per_s(torch.float32, device) == 2 * 1024**3 / 0.5, "a product and a sum"
    assert operators.operator_s(device, captured=False) == 0.5 / 200
    monkeypatch.setattr(operators, "ELEMENTS", (4096,))
    points = operators.linear_points(torch.float32, "fp32", working_sets=[2**17])
    assert [(point.rows, point.s) for point in points] == [(rows, 0.25) for rows in operators.ROWS], "two in a call"


def test_attention_costs_by_the_bytes_of_keys_and_values_that_are_read_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_attend_s", lambda rows, num_slots, num_heads: 7.0 + rows * num_slots * num_heads)
    slot_bytes = 2 * HEAD_DIM * 4
    points = operators.attention_points()
    assert [point.size for point in points] == list(operators.OPERATOR_ROWS)
    assert [point.s for point in points] == pytest.approx([rows / slot_bytes for rows in operators.OPERATOR_ROWS])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_attention_is_timed_by_the_operator_that_forwards_use(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, num_slots, num_heads, calls = 5, 128, 4, list[tuple[Tensor, ...]]()

    def attention(*arguments: Tensor) -> None:
        calls.append(arguments)

    monkeypatch.setattr(operators, "find_attention", lambda *_: attention if is_compiled else None)
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    assert operators._attend_s(rows, num_slots, num_heads) > 0
    assert bool(calls) == is_compiled
    for qkv, turns, positions, slots, cache, *others in calls:
        assert qkv.shape == (rows, 3 * num_heads * HEAD_DIM)
        assert turns.shape == (num_slots, 1, HEAD_DIM // 2)
        assert cache.shape == (2 * num_heads, num_slots, HEAD_DIM)
        assert positions[0].tolist() == slots.tolist() == [123, 124, 125, 126, 127]
        assert others == [num_heads, 1.0, 0]
    assert len({call[4].data_ptr() for call in calls}) == min(len(calls), operators.NUM_CACHES), "layers take turns"


def test_whole_pairs_decode_in_turns_after_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def parts(num_ranks: int, name: str) -> Any:  # noqa: ANN401 - stands for a Profile
        log.append(f"{num_ranks}: {name}")

    class Pairs:
        def __init__(self, _comm: Comm) -> None:
            log.append("load")

        def turn(self) -> None:
            log.append("turn")

        def times(self) -> list[PairTime]:
            return []

    monkeypatch.setattr(profiles, "Pairs", Pairs)
    profiles.measure(WORLD, parts, Shown())
    assert log == ["1: 1 rank, all cores", "load", *["turn"] * 9]


def test_each_part_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, found in (
        (operators, "linear_points", []), (operators, "operator_points", ([], [])), (operators, "attention_points", []),
        (rounds, "rule_points", ([], [])), (rounds, "round_s", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, found=found, **_options: found)
    steps: list[tuple[str, int, int]] = []
    profiles.all_parts(1, "one", reduces=[], show=lambda *step: steps.append(step))
    assert steps == [("one: parts", done, profiles.NUM_PARTS) for done in range(profiles.NUM_PARTS + 1)]


def test_a_message_that_a_neighbour_delays_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, num_calls = 0.0, 0

    def all_reduce(values: Tensor) -> Tensor:
        nonlocal now_s, num_calls
        num_calls += 1
        now_s += 1.0 if num_calls % 40 == 0 else 1e-5
        return values

    monkeypatch.setattr(rounds, "MESSAGE_BYTES", (8,))
    monkeypatch.setattr(rounds, "seconds_per_call", lambda _call: 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    comm = Comm.single()
    object.__setattr__(comm, "all_reduce", all_reduce)  # the class is frozen
    (point,) = rounds.all_reduce_points(comm, torch.device("cpu"))
    assert num_calls > 40
    assert point.s == pytest.approx(1e-5)


def test_a_gpu_is_waited_for_once_after_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    on_cpu = {name: getattr(torch, name) for name in ("randn", "zeros")}
    for name, make in on_cpu.items():
        monkeypatch.setattr(torch, name, lambda *sizes, make=make, **_device: make(*sizes))
    monkeypatch.setattr(rounds, "MESSAGE_BYTES", (8, 2**16))
    monkeypatch.setattr(rounds, "seconds_per_call", lambda _call: 0.0)
    comm = Comm.single()
    object.__setattr__(comm, "all_reduce", lambda _values: events.append("message"))  # the class is frozen
    object.__setattr__(comm, "finish", lambda: events.append("wait"))
    rounds.all_reduce_points(comm, torch.device("cuda"))
    assert events == [*["message"] * 320, "wait", *["message"] * 80, "wait"]


def test_matrices_are_taken_off_a_layers_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 0.003, operators.MANY_LAYERS: 0.003 + 0.001 * (operators.MANY_LAYERS - 1)}
    monkeypatch.setattr(operators, "_stack", lambda _width, num_layers: num_layers)
    monkeypatch.setattr(operators, "_forward_s", lambda stack, _rows, _between: seconds[stack])
    linear = [LinearPoint(dtype="fp32", rows=1, elements=4096, working_set_bytes=2**22, s=1e-5)]
    layers, frames = operators.operator_points(linear, lambda: None)
    assert {point.width for point in layers} == set(operators.WIDTHS)
    assert [point.s for point in layers] == pytest.approx([0.001 - 4e-5] * len(layers))
    assert [point.s for point in frames] == pytest.approx([0.002 - 1e-5] * len(frames))
