"""machine-install.sh finds what the machine has, chooses the right torch, and changes nothing twice."""

from pathlib import Path

import pytest

from tests.helpers.installer import (
    CPU_INDEX,
    WHEELS,
    Machine,
    make_machine,
    nvidia_smi,
)

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(Path("/dev/kfd").exists(), reason="an AMD driver is loaded, which cannot be hidden"),
]

AWAY = {"INDEX_IS_AWAY": "1"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Python 3.11, a C compiler, much free disk, no GPU."""
    return make_machine(tmp_path)


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


def new_pip_log(machine: Machine, *options: str) -> list[str]:
    """What pip is asked to do by another installation."""
    before = len(machine.pip_log())
    assert machine.run(*options).returncode == 0
    return machine.pip_log()[before:]


def test_torch_is_installed_first_then_the_project_with_that_very_build_and_nothing_twice(machine: Machine) -> None:
    assert new_pip_log(machine) == [
        f"install torch==2.13.0 --index-url {CPU_INDEX}",
        "install --editable .[cpu] --constraint .venv/constraints.txt",
    ]
    pins = (machine.folder / ".venv/constraints.txt").read_text().splitlines()
    assert [line for line in pins if line.startswith("torch==")] == ["torch==2.13.0+test"]
    assert "everything is in place" in machine.run(environment=AWAY).stdout
    assert new_pip_log(machine, "--dev") == ["install --editable .[dev] --constraint .venv/constraints.txt"]
    assert "everything is in place" in machine.run().stdout
    assert new_pip_log(machine, "--deepspeed") == [
        "install setuptools wheel",
        "install deepspeed==0.19.8 --no-build-isolation --constraint .venv/constraints.txt",
    ]
    assert new_pip_log(machine, "--deepspeed") == []
