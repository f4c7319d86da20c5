"""The catalogue of machines, what is said of a file that is wrong, and how the machine at hand is known."""

import os
import platform
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.machines import hardware, machine
from llama_ssp.machines.hardware import Speed
from llama_ssp.run import calibration, pipeline
from tests.helpers.in_process import launch
from tests.helpers.own_conf import OwnConf
from tests.helpers.planning import make_spec, times_of
from tests.helpers.worlds import ONE_CORE

WITHOUT_SOURCE = {"name", "device", "gpu", "num_gpus", "num_nodes", "sources", "link", "network", "capability"}


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody has calibrated this machine, and no run has measured it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [name for name in hardware.names() if name != machine.THIS_MACHINE]
    monkeypatch.setattr(hardware, "names", lambda: names)


def _figures(name: str = "p4d_24xlarge") -> dict[str, Any]:
    found = catalogue.option("hardware", name)
    assert found
    return found[0]


@pytest.mark.parametrize("name", [*hardware.names(), "4xh100", "8xa100_80gb", "1xl4"])
def test_every_figure_of_an_entry_has_a_source(name: str) -> None:
    figures, machine = _figures(name), hardware.load(name)
    wanted = {key for key, value in figures.items() if value is not None} - WITHOUT_SOURCE
    wanted |= {f"{link}.{key}" for link in ("link", "network") if link in figures for key in figures[link]}
    assert wanted - machine.sources.keys() == set()
    assert machine.name == name


def test_several_gpus_are_those_of_one_and_an_instance_changes_what_it_says() -> None:
    one, four, instance = map(hardware.load, ("h100", "4xh100", "p5_48xlarge"))
    assert four == replace(one, name="4xh100", num_gpus=4)
    assert (instance.num_gpus, instance.bandwidth_bytes_per_s) == (8, one.bandwidth_bytes_per_s)
    assert "EFA" in instance.sources["network.bandwidth_bytes_per_s"]
    assert instance.sources["kernel_s"] == one.sources["kernel_s"]


def test_a_machine_of_the_user_may_be_based_on_several_gpus(own_conf: OwnConf) -> None:
    own_conf("hardware/mine.yaml", "defaults: [4xh100, _self_]\nname: mine\ncontext_bytes: 7\n")
    mine = hardware.load("mine")
    assert (mine.name, mine.num_gpus, mine.context_bytes) == ("mine", 4, 7)
    own_conf("hardware/mine.yaml", "defaults: [4xmine, _self_]\nname: mine\n")
    with pytest.raises(ConfigError, match="defaults must name another entry"):
        hardware.load("mine")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("4xa100", "hardware=4xa100_40gb"),
        ("4xA10G", "hardware=4xa10g"),
        ("H100", "h100"),
        ("h10", "h100"),
        ("16xh100", "hardware=8xh100 hardware.num_nodes=2"),
        ("12xh100", "hardware=8xh100 hardware.num_gpus=12"),
        ("16xrtx4090", "hardware=8xrtx4090 hardware.num_gpus=16"),
        ("4xmi250", "hardware=mi250 hardware.num_gpus=4"),
        ("8xh10", "hardware=8xh100"),
        ("2xp5_48xlarge", ""),
        ("4xlaptop_cpu", ""),
        ("4x4xh100", ""),
    ],
)
def test_an_unknown_machine_is_answered_with_its_own_gpus_and_only_files_of_one_are_counted(
    name: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=rf"unknown hardware '{name}'.*{meant and rf'; did you mean {meant}[?]$'}"):
        hardware.load(name)


def test_all_problems_of_a_file_are_told_at_once() -> None:
    figures = _figures() | {
        "num_gpus": -8,
        "memory_bytes": 1.5,
        "kernel_s": -1,
        "link": {"latency_s": 0},
        "wheels": 4,
        "flops_per_s": {"fp16": 0, "fp8": 1e15},
        "device": "tpu",
        "num_nodes": 2,
        "network": None,
    }
    del figures["bandwidth_bytes_per_s"]
    assert sorted(hardware.problems_of(figures)) == [
        "hardware.bandwidth_bytes_per_s is missing",
        "hardware.device=tpu must be one of cuda, cpu",
        "hardware.flops_per_s.fp16=0 must be above 0",
        "hardware.kernel_s=-1 must be 0 or more",
        "hardware.link.bandwidth_bytes_per_s is missing",
        "hardware.memory_bytes=1.5 must be a whole number, above 0",
        "hardware.num_gpus=-8 must be above 0",
        "hardware.num_nodes=2 needs hardware.network (bandwidth_bytes_per_s, latency_s)",
        *sorted(hardware.problems_of(figures))[-2:],
    ]
    assert all(name in str(hardware.problems_of(figures)) for name in ("'wheels'", "'fp8'"))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("link", 5, "must be a mapping"),
        ("flops_per_s", {}, "at least one number format"),
        ("sources", "web", "where each figure is from"),
        ("sums", {"num_ranks": 1}, "hardware.sums must be a list"),
        ("sums", [{"num_ranks": 2}], "hardware.sums[0].num_bytes is missing"),
        ("sums", [{"num_ranks": 2.5, "num_bytes": 8, "s": 1}], "hardware.sums[0].num_ranks=2.5 must be a whole number"),
        ("sums", [{"num_ranks": 2, "num_bytes": 8, "s": "fast"}], "hardware.sums[0].s=fast must be a number, above 0"),
        ("memory_bytes", "40 GB", "must be a whole number"),
        ("memory_bytes", float("nan"), "must be a whole number"),
        ("gpu", 7, "must be text"),
        ("device", ["cuda"], "hardware.device=['cuda'] must be one of cuda, cpu"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object, complaint: str) -> None:
    assert complaint in "\n".join(hardware.problems_of(_figures() | {key: value}))


def test_a_sound_file_has_no_problems_and_something_else_than_a_mapping_has_one() -> None:
    assert hardware.problems_of(_figures()) == []
    assert isinstance(hardware.build(_figures() | {"memory_bytes": 4e10}).memory_bytes, int)
    assert hardware.problems_of(["p4d"]) == ["hardware must be a mapping of figures, not ['p4d']"]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("driver_name", "num_gpus", "entry"),
    [
        ("NVIDIA A100-SXM4-40GB", 4, "4xa100_40gb"),
        ("NVIDIA A100-SXM4-80GB", 8, "8xa100_80gb"),
        ("NVIDIA A100-SXM4-80GB", 1, "a100_80gb"),
        ("NVIDIA H100 80GB HBM3", 1, "h100"),
        ("NVIDIA H100 80GB HBM3", 8, "8xh100"),
        ("NVIDIA H100 PCIe", 1, "h100_pcie"),
        ("NVIDIA H100 NVL", 2, "2xh100_nvl"),
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA GH200 480GB", 1, "gh200"),
        ("NVIDIA L40S", 4, "4xl40s"),
        ("NVIDIA A10G", 1, "a10g"),
        ("NVIDIA A10", 1, "a10"),
        ("NVIDIA L4", 1, "l4"),
        ("NVIDIA B200", 8, "8xb200"),
        ("NVIDIA B300 SXM6 AC", 8, "8xb300"),
        ("NVIDIA GB200", 4, "4xgb200"),
        ("NVIDIA GeForce RTX 3090", 1, "rtx3090"),
        ("NVIDIA GeForce RTX 4090", 2, "2xrtx4090"),
        ("NVIDIA GeForce RTX 5090", 1, "rtx5090"),
        ("Tesla T4", 1, "t4"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1, "rtx_pro_6000"),
        *(
            (name, 1, None)
            for name in (
                "NVIDIA A100 80GB PCIe",
                "NVIDIA GeForce RTX 3080",
                "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
                "NVIDIA GeForce RTX 3090 Ti",
                "NVIDIA GeForce RTX 4090 D",
                "NVIDIA GeForce RTX 4090 Laptop GPU",
                "NVIDIA GH200 144G HBM3e",
            )
        ),
    ],
)
def test_gpus_are_recognised_by_the_name_that_the_driver_gives_them(
    driver_name: str, num_gpus: int, entry: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_gpu_names", lambda: [driver_name] * num_gpus)
    if entry:
        found = machine.detect_hardware()
        assert (found.name, found.device, found.num_gpus) == (entry, "cuda", num_gpus)
    else:
        sentence = f"no entry of conf/hardware describes 1 x {driver_name}: run task=calibrate once"
        with pytest.raises(ConfigError, match=sentence):
            machine.detect_hardware()


def test_what_calibrate_measured_here_comes_before_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = replace(hardware.load("laptop_cpu"), name=machine.THIS_MACHINE)
    monkeypatch.setattr(hardware, "names", lambda: [machine.THIS_MACHINE])
    monkeypatch.setattr(hardware, "load", lambda _name: measured)
    assert machine.detect_hardware(on_cpu=True) is measured
    on_gpu = replace(measured, device="cuda")
    monkeypatch.setattr(hardware, "load", lambda name: on_gpu if name == machine.THIS_MACHINE else measured)
    for names in (["NVIDIA A10G"], []):  # AMD's driver has another program
        monkeypatch.setattr(machine, "_gpu_names", lambda names=names: names)
        assert machine.detect_hardware() is on_gpu
        assert machine.detect_hardware(on_cpu=True).device == "cpu"


NEGATIVE = '{"%s": {"fp32": {"bytes_per_s": -1.0, "flops_per_s": 1.0}}}'


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"%s": "ab"}', '{"%s": [1.0, 1.0]}', NEGATIVE])
def test_a_damaged_file_of_speeds_is_as_none(text: str, tmp_path: Path) -> None:
    speeds = {"fp32": Speed(bytes_per_s=1e10, flops_per_s=2e11)}
    machine.keep_speeds(speeds)
    assert machine.known_speeds() == speeds
    (file,) = tmp_path.glob("*/*.json")
    file.write_text(text.replace("%s", platform.node()))
    assert machine.known_speeds() == {}


@pytest.mark.usefixtures("unmeasured")
def test_the_speed_of_attention_says_nothing_of_memory_and_products() -> None:
    measured = {"attention": Speed(bytes_per_s=9e10, flops_per_s=9e11)}
    machine.keep_speeds(measured)
    assert machine.detect_hardware(on_cpu=True).copy_bytes_per_s is None
    machine.keep_speeds(measured | {"fp32": Speed(bytes_per_s=2e10, flops_per_s=3e11)})
    found = machine.detect_hardware(on_cpu=True)
    assert (found.copy_bytes_per_s, found.flops_per_s["fp16"]) == (2e10, 3e11)
    assert found.products.keys() == {"attention", "fp32"}


@pytest.mark.heavy
@pytest.mark.usefixtures("unmeasured")
def test_a_run_keeps_the_speed_that_later_plans_have(tmp_path: Path) -> None:
    assert machine.detect_hardware(on_cpu=True).copy_bytes_per_s is None
    assert launch("task=generate", "prompt=x", "max_new_tokens=2", f"run_dir={tmp_path / 'run'}").code == 0
    shutil.rmtree(tmp_path / "run")
    found = machine.detect_hardware(on_cpu=True)
    assert found.copy_bytes_per_s
    assert 1e9 < found.copy_bytes_per_s < 1e12
    assert 1e10 < found.flops_per_s["fp32"] < 1e14
    assert found.products == machine.known_speeds()
    assert {"fp32", "fp16"} <= found.products.keys()
    machine.keep_speeds({"fp32": Speed(bytes_per_s=2e10, flops_per_s=3e11)})
    assert launch("task=generate", "prompt=x", "max_new_tokens=2", f"run_dir={tmp_path / 'run'}").code == 0
    assert machine.detect_hardware(on_cpu=True).copy_bytes_per_s == 2e10, "measured once"
    assert machine.detect_hardware(on_cpu=True).flops_per_s["bf16"] == 3e11


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("others", "is_due"), [(2.0, True), (0.0, False), (None, False)])
def test_speeds_that_other_programs_disturbed_are_measured_again_after_an_hour(
    others: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_due: bool
) -> None:
    monkeypatch.setattr(calibration, "cpu_speeds", lambda: {"fp32": Speed(bytes_per_s=2e10, flops_per_s=3e11)})
    monkeypatch.setattr(pipeline, "used_by_others", lambda *_times, **_ranks: others)
    assert machine.speeds_are_due()
    pipeline._measure_once(ONE_CORE)
    assert not machine.speeds_are_due(), "a run after the next has a forecast too"
    (file,) = tmp_path.glob("*/*.json")
    os.utime(file, (time.time() - 4000,) * 2)
    assert machine.speeds_are_due() is is_due


def test_the_ranks_of_a_cpu_share_its_memory_and_its_cores_once() -> None:
    products = {"int8": Speed(bytes_per_s=6e10, flops_per_s=4e11)}
    laptop = replace(hardware.load("laptop_cpu"), copy_bytes_per_s=4e10, products=products)
    two = machine.machine_of_run(machine.machine_of_run(laptop, 2), 2)
    assert (two.num_gpus, two.copy_bytes_per_s, two.bandwidth_bytes_per_s) == (2, 2e10, 3.84e10)
    assert two.flops_per_s["fp32"] == laptop.flops_per_s["fp32"] / 2
    assert two.products == {"int8": Speed(bytes_per_s=3e10, flops_per_s=2e11)}
    assert machine.machine_of_run(two, 1) == laptop


@pytest.mark.usefixtures("unmeasured")
def test_a_machine_without_gpus_is_a_cpu_with_its_own_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = hardware.load("laptop_cpu")
    monkeypatch.setattr(machine, "_gpu_names", list)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = machine.detect_hardware()
    assert found.device == "cpu"
    assert found.memory_bytes != laptop.memory_bytes
    assert found.flops_per_s["fp32"] == laptop.flops_per_s["fp32"] / 4


def test_plans_on_h100_h200_and_b200_are_apart_by_bandwidth_where_weights_take_the_time() -> None:
    machines = [replace(hardware.load(name), memory_bytes=10**12) for name in ("h100", "h200", "b200")]
    timed = [times_of(make_spec("llama3_8B", prompt_tokens=8), machine) for machine in machines]
    steps = [one.plain_s for one in timed]
    assert steps == sorted(steps, reverse=True)
    for place in (1, 2):
        wanted = machines[place].bandwidth_bytes_per_s / machines[0].bandwidth_bytes_per_s
        weights = timed[0].target_forward.matrices_s / timed[place].target_forward.matrices_s
        assert weights == pytest.approx(wanted, rel=0.03)
        assert 1 < steps[0] / steps[place] <= wanted
