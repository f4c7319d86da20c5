"""The machine at hand is known by what its driver says, or by what was measured on it."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.machines import hardware, machine
from llama_ssp.machines.hardware import Speed
from tests.helpers.in_process import launch


@pytest.mark.parametrize(
    ("driver_name", "num_gpus", "entry"),
    [
        ("NVIDIA A100-SXM4-40GB", 4, "4xa100_40gb"), ("NVIDIA A100-SXM4-80GB", 8, "8xa100_80gb"),
        ("NVIDIA A100-SXM4-80GB", 1, "a100_80gb"), ("NVIDIA H100 80GB HBM3", 1, "h100"),
        ("NVIDIA H100 80GB HBM3", 8, "8xh100"), ("NVIDIA H100 PCIe", 1, "h100_pcie"),
        ("NVIDIA H100 NVL", 2, "2xh100_nvl"), ("NVIDIA H200", 1, "h200"), ("NVIDIA GH200 480GB", 1, "gh200"),
        ("NVIDIA L40S", 4, "4xl40s"), ("NVIDIA A10G", 1, "a10g"), ("NVIDIA A10", 1, "a10"), ("NVIDIA L4", 1, "l4"),
        ("NVIDIA B200", 8, "8xb200"), ("NVIDIA B300 SXM6 AC", 8, "8xb300"), ("NVIDIA GB200", 4, "4xgb200"),
        ("NVIDIA GeForce RTX 3090", 1, "rtx3090"), ("NVIDIA GeForce RTX 4090", 2, "2xrtx4090"),
        ("NVIDIA GeForce RTX 5090", 1, "rtx5090"), ("Tesla T4", 1, "t4"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1, "rtx_pro_6000"),
        *((name, 1, None) for name in (
            "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 3080", "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GH200 144G HBM3e",
        )),
    ],
)  # fmt: skip
def test_gpus_are_recognised_by_the_name_that_the_driver_gives_them(
    driver_name: str, num_gpus: int, entry: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in hardware.names() if name != machine.THIS_MACHINE]
    monkeypatch.setattr(hardware, "names", lambda: names)
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"%s": "ab"}',
        '{"%s": [1.0, 1.0]}',
        '{"%s": {"fp32": {"bytes_per_s": -1.0, "flops_per_s": 1.0}}}',
    ],
)
def test_a_damaged_file_of_speeds_is_as_none(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speeds = {"fp32": Speed(bytes_per_s=1e10, flops_per_s=2e11)}
    machine.keep_speeds(speeds)
    assert machine.known_speeds() == speeds
    (file,) = tmp_path.glob("*/*.json")
    file.write_text(text.replace("%s", platform.node()))
    assert machine.known_speeds() == {}


@pytest.mark.seconds
def test_a_run_keeps_the_speed_that_later_plans_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [name for name in hardware.names() if name != machine.THIS_MACHINE]
    monkeypatch.setattr(hardware, "names", lambda: names)
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


def test_the_ranks_of_a_cpu_share_its_memory_and_its_cores_once() -> None:
    products = {"int8": Speed(bytes_per_s=6e10, flops_per_s=4e11)}
    laptop = replace(hardware.load("laptop_cpu"), copy_bytes_per_s=4e10, products=products)
    two = machine.machine_of_run(machine.machine_of_run(laptop, 2), 2)
    assert (two.num_gpus, two.copy_bytes_per_s, two.bandwidth_bytes_per_s) == (2, 2e10, 3.84e10)
    assert two.flops_per_s["fp32"] == laptop.flops_per_s["fp32"] / 2
    assert two.products == {"int8": Speed(bytes_per_s=3e10, flops_per_s=2e11)}
    assert machine.machine_of_run(two, 1) == laptop


def test_a_machine_without_gpus_is_a_cpu_with_its_own_memory_and_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no run has measured it
    laptop = hardware.load("laptop_cpu")
    monkeypatch.setattr(hardware, "names", lambda: ["laptop_cpu"])
    monkeypatch.setattr(machine, "_gpu_names", list)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = machine.detect_hardware()
    assert found.device == "cpu"
    assert found.memory_bytes != laptop.memory_bytes
    assert found.flops_per_s["fp32"] == laptop.flops_per_s["fp32"] / 4
