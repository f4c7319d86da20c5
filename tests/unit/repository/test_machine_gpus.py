"""machine-install.sh asks the driver, chooses the wheel that it runs, computes on each GPU, says what Triton lacks."""

from pathlib import Path

import pytest

from tests.helpers.installer import CPU_INDEX, PIP, WHEELS, Machine, nvidia_smi

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(Path("/dev/kfd").exists(), reason="an AMD driver is loaded, which cannot be hidden"),
]


def test_nvidia_gpus_are_counted_and_their_driver_is_named(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi())
    output = machine.run("--check").stdout
    assert "GPU      2 x NVIDIA H200 (NVIDIA)" in output
    assert "Driver   580.82.07 runs CUDA 13; torch for CUDA 13.0 serves it" in output
    assert "10 GB needed" in output


@pytest.mark.parametrize(
    ("driver", "capabilities", "wanted"),
    [
        ("470.256.02", ["8.0"], "torch==2.13.0 from {}/cpu"),
        ("525.147.05", ["8.0"], "torch==2.13.0 from {}/cu126"),
        ("535.230.02", ["7.0"], "torch==2.13.0 from {}/cu126"),
        ("550.163.01", ["9.0", "9.0"], "torch==2.13.0 from {}/cu126"),
        ("560.35.05", ["8.9"], "torch==2.13.0 from {}/cu126"),
        ("570.86.15", ["9.0"], "torch==2.13.0 from {}/cu126"),
        ("570.86.15", ["9.0", "10.0"], "torch>=2.11,<3 from {}/cu128"),
        ("575.57.08", ["12.0"], "torch>=2.11,<3 from {}/cu128"),
        ("580.82.07", ["9.0"], "torch==2.13.0 from {}/cu130"),
        ("580.82.07", ["12.0", "7.5"], "torch==2.13.0 from {}/cu130"),
        ("580.82.07", ["9.0", "7.0"], "torch==2.13.0 from {}/cu126"),
        ("590.44.01", ["10.3"], "torch==2.13.0 from {}/cu130"),
        ("550.163.01", ["[N/A]"], "torch==2.13.0 from {}/cu126"),
    ],
)
def test_the_wheel_is_one_that_the_driver_runs_and_that_knows_the_gpus(
    machine: Machine, driver: str, capabilities: list[str], wanted: str
) -> None:
    machine.install("nvidia-smi", nvidia_smi(driver, *capabilities))
    done = machine.run("--check")
    assert f"torch    {wanted.format(WHEELS)}\n" in done.stdout
    assert done.stderr == ""


def test_a_driver_that_is_too_old_is_said_with_those_that_would_do(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi("470.256.02"))
    output = machine.run("--check").stdout
    assert "Driver   470.256.02 is too old for this torch, which needs 525 or newer for CUDA 12, 580" in output
    assert "Everything runs on the CPU: update the" in output


@pytest.mark.parametrize(("driver", "extra"), [("580.82.07", "[bitsandbytes]"), ("470.256.02", "")])
def test_bitsandbytes_comes_with_gpus_that_torch_can_use(machine: Machine, driver: str, extra: str) -> None:
    machine.install("nvidia-smi", nvidia_smi(driver))
    done = machine.run()
    assert f"install --editable .{extra} --constraint .venv/constraints.txt" in machine.pip_log()
    assert "next     .venv/bin/torchrun" in done.stdout
    assert "everything is in place" in machine.run().stdout


def test_an_updated_driver_brings_another_torch(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi("570.86.15"))
    machine.run()
    first = machine.pip_log()
    assert first[0] == f"install torch==2.13.0 --index-url {WHEELS}/cu126"
    machine.install("nvidia-smi", nvidia_smi("580.82.07"))
    machine.run()
    assert machine.pip_log()[len(first) :] == [
        "uninstall --yes torch", f"install torch==2.13.0 --index-url {WHEELS}/cu130",
    ]  # fmt: skip


def test_the_last_torch_for_cuda_12_8_is_asked_for_by_its_range(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi("570.86.15", "12.0"))
    assert machine.run().returncode == 0
    assert machine.pip_log()[0] == f"install torch>=2.11,<3 --index-url {WHEELS}/cu128"


@pytest.mark.parametrize(("cuda", "index"), [("12", "cu126"), ("13", "cu130")])
def test_without_nvidia_smi_the_driver_s_library_is_asked(machine: Machine, cuda: str, index: str) -> None:
    output = machine.run("--check", environment={"LIBCUDA": f"{cuda}\\n9.0 NVIDIA H200\\n9.0 NVIDIA H200\\n"}).stdout
    assert "GPU      2 x NVIDIA H200 (NVIDIA)" in output
    assert f"torch    torch==2.13.0 from {WHEELS}/{index}" in output


def test_the_driver_s_library_without_a_gpu_is_no_gpu(machine: Machine) -> None:
    assert CPU_INDEX in machine.run("--check", environment={"LIBCUDA": "12\\n"}).stdout


def test_an_index_out_of_reach_is_said_where_another_may_have_the_wrong_wheels(machine: Machine) -> None:
    away = {"INDEX_IS_AWAY": "1"}
    machine.install("nvidia-smi", nvidia_smi("550.163.01"))
    output = machine.run("--check", environment=away).stdout
    assert f"torch    torch==2.13.0 from {PIP}" in output
    assert f"{WHEELS}/cu126 is out of reach" in output
    assert "TORCH_INDEX_URL=URL" in output
    machine.install("nvidia-smi", nvidia_smi("580.82.07"))
    assert "out of reach" not in machine.run("--check", environment=away).stdout


def test_every_gpu_computes_once_after_an_installation(machine: Machine) -> None:
    computed = machine.folder / "computed.log"
    machine.run()
    assert not computed.exists()
    machine.install("nvidia-smi", nvidia_smi())
    machine.run()
    machine.run()
    assert computed.read_text() == "computed: launch/check_gpus.py 2\n"


def test_gpus_that_do_not_compute_end_the_installation_and_are_tried_again(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi())
    broken = machine.run(environment={"FAULTY_GPUS": "2"})
    assert broken.returncode == 1
    assert broken.stderr == (
        "machine-install: torch was installed, but does not compute on every GPU: the lines above say why\n"
    )
    assert machine.run(environment={"FAULTY_GPUS": "2"}).returncode == 1
    assert machine.run().returncode == 0


@pytest.mark.parametrize(
    ("without", "packages"),
    [({"gcc"}, "gcc"), ({"Python.h"}, "python3.11-dev"), ({"gcc", "Python.h"}, "gcc python3.11-dev")],
)
def test_what_triton_lacks_is_named_with_its_package(machine: Machine, without: set[str], packages: str) -> None:
    environment = {"PYTHON_H_IS_AWAY": "1"} if "Python.h" in without else {}
    if "gcc" in without:
        (machine.programs / "gcc").unlink()
    assert "Triton" not in machine.run("--check", environment=environment).stdout
    machine.install("nvidia-smi", nvidia_smi())
    output = machine.run("--check", environment=environment).stdout
    assert "Triton   lacks a C compiler or Python.h" in output
    assert f"    sudo apt-get install {packages}\n" in output
    machine.install("dnf", "exit 0")
    output = machine.run("--check", environment=environment).stdout
    assert f"    sudo dnf install {packages.replace('-dev', '-devel')}\n" in output
    for name in ("clang", "my cc"):
        machine.install(name, "exit 0")
    assert ("Triton" in machine.run("--check", environment=environment).stdout) == ("Python.h" in without)
    assert "Triton" not in machine.run("--check", environment={"CC": "my cc"}).stdout
