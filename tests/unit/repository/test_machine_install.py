"""machine-install.sh finds what the machine has, chooses the right torch, and changes nothing twice."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.installer import (
    CPU_INDEX,
    PIP,
    ROCMINFO,
    WHEELS,
    Machine,
    make_machine,
    nvidia_smi,
    set_free_gigabytes,
)
from tests.helpers.repository import ROOT

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(Path("/dev/kfd").exists(), reason="an AMD driver is loaded, which cannot be hidden"),
]

TORCH, AWAY = "torch    torch==2.13.0 from", {"INDEX_IS_AWAY": "1"}
H200S = "GPU      2 x NVIDIA H200 (NVIDIA)"
LIBRARY = {"LIBCUDA": "12\\n9.0 NVIDIA H200\\n9.0 NVIDIA H200\\n"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Python 3.11, a C compiler, much free disk, no GPU."""
    return make_machine(tmp_path)


@pytest.mark.parametrize(
    ("programs", "environment", "wanted", "unwanted"),
    [
        ({}, {}, ["GPU      none found", f"{TORCH} {CPU_INDEX}"], ["Triton"]),
        ({}, AWAY, [f"{TORCH} {PIP}"], []),
        (
            {"nvidia-smi": "echo NVIDIA-SMI has failed; exit 9"},
            {},
            ["nvidia-smi is here but reaches no GPU", CPU_INDEX],
            [],
        ),
        (
            {"rocminfo": ROCMINFO},
            {},
            ["GPU      1 x AMD Instinct MI300X (AMD)", f"{TORCH} https://download.pytorch.org/whl/rocm"],
            [],
        ),
        ({}, {"TORCH_INDEX_URL": "https://example.org/wheels"}, [f"{TORCH} https://example.org/wheels"], []),
        (
            {"nvidia-smi": nvidia_smi()},
            {},
            [H200S, "Driver   580.82.07 runs CUDA 13; torch for CUDA 13.0 serves it", "10 GB needed"],
            ["Triton"],
        ),
        (
            {"nvidia-smi": nvidia_smi("470.256.02")},
            {},
            [
                "Driver   470.256.02 is too old for this torch, which needs 525 or newer for CUDA 12, 580",
                "Everything runs on the CPU: update the",
            ],
            [],
        ),
        ({}, LIBRARY, [H200S, f"{TORCH} {WHEELS}/cu126"], []),
        ({}, LIBRARY | {"LIBCUDA": "13" + LIBRARY["LIBCUDA"][2:]}, [H200S, f"{TORCH} {WHEELS}/cu130"], []),
        ({}, {"LIBCUDA": "12\\n"}, [CPU_INDEX], []),
        (
            {"nvidia-smi": nvidia_smi("550.163.01")},
            AWAY,
            [f"{TORCH} {PIP}", f"{WHEELS}/cu126 is out of reach", "TORCH_INDEX_URL=URL"],
            [],
        ),
        ({"nvidia-smi": nvidia_smi("580.82.07")}, AWAY, [], ["out of reach"]),
        (
            {"nvidia-smi": nvidia_smi(), "systemctl": "echo inactive; exit 3"},
            {},
            [
                "Error 802: system not yet initialized", "sudo apt-get install nvidia-fabricmanager-580\n",
                "sudo systemctl enable --now nvidia-fabricmanager\n",
            ],
            [],
        ),
        (
            {"nvidia-smi": nvidia_smi(), "systemctl": "echo 'System has not been booted with systemd' >&2; exit 1"},
            {},
            ["NVLink   systemd does not answer here"],
            ["does not run", "sudo systemctl"],
        ),
        *(
            ({"nvidia-smi": nvidia_smi(), running: "echo active"}, {}, ["NVLink   the fabric manager runs"], ["802"])
            for running in ("systemctl", "pgrep")
        ),
    ],
    ids=[
        "no GPU", "no GPU, no index", "a silent driver", "AMD", "TORCH_INDEX_URL", "NVIDIA", "an old driver",
        "the library of CUDA 12", "of CUDA 13", "the library without a GPU", "no index for a driver", "the default one",
        "no fabric manager", "a container", "systemctl", "pgrep",
    ],
)  # fmt: skip
def test_check_says_what_the_machine_has_and_which_torch_serves_it(
    programs: dict[str, str], environment: dict[str, str], wanted: list[str], unwanted: list[str], machine: Machine
) -> None:
    for name, body in programs.items():
        machine.install(name, body)
    output = machine.run("--check", environment=environment).stdout
    assert [text for text in wanted if text not in output] == []
    assert [text for text in unwanted if text in output] == []


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


def test_check_changes_nothing(machine: Machine) -> None:
    before = sorted(machine.folder.iterdir())
    assert machine.run("--check").returncode == 0
    assert sorted(machine.folder.iterdir()) == before


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


def test_gpus_and_drivers_that_came_later_bring_another_torch(machine: Machine) -> None:
    machine.run()
    machine.install("nvidia-smi", nvidia_smi())
    assert new_pip_log(machine) == [
        "uninstall --yes torch", f"install torch==2.13.0 --index-url {WHEELS}/cu130",
        "install --editable .[bitsandbytes] --constraint .venv/constraints.txt",
    ]  # fmt: skip
    machine.install("nvidia-smi", nvidia_smi("570.86.15", "12.0"))
    assert new_pip_log(machine)[:2] == [
        "uninstall --yes torch", f"install torch>=2.11,<3 --index-url {WHEELS}/cu128",
    ]  # fmt: skip


def test_bitsandbytes_does_not_come_with_gpus_that_torch_cannot_use(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi("470.256.02"))
    assert "next     .venv/bin/torchrun" in machine.run().stdout
    assert "install --editable .[cpu] --constraint .venv/constraints.txt" in machine.pip_log()


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


def test_a_moved_folder_gets_a_new_environment(machine: Machine) -> None:
    machine.run()
    moved = Machine(folder=machine.folder.rename(machine.folder.with_name("moved")), programs=machine.programs)
    assert new_pip_log(moved) != []


def test_a_missing_python_is_one_sentence_with_the_command_that_helps(machine: Machine) -> None:
    machine.install("python3.9", "exit 1")
    result = machine.run(environment={"PYTHON": "python3.9"})
    assert (result.returncode, "python3.9 was found" in result.stderr) == (1, True)
    (machine.programs / "python3.11").rename(machine.folder / "hidden")
    result = machine.run()
    assert result.returncode == 1
    assert result.stderr.startswith("machine-install: Python 3.11 or newer with its venv module is needed")
    assert "sudo apt-get install python3-venv" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    machine.install("id", "echo 0")  # root gets it from the package manager
    machine.install(
        "apt-get",
        f'case "$*" in *python3-venv) cp "{machine.folder}/hidden" "{machine.programs / "python3.11"}" ;; esac',
    )
    result = machine.run()
    assert "installing the system package python3-venv" in result.stdout
    assert result.returncode == 0


def test_a_full_disk_is_one_sentence_with_both_sizes(machine: Machine) -> None:
    set_free_gigabytes(machine, 2)
    result = machine.run()
    assert result.returncode == 1
    assert "has 2 GB free, but 3 GB are needed" in result.stderr
    assert not (machine.folder / ".venv").exists()


def test_an_unknown_option_is_named_with_those_that_exist(machine: Machine) -> None:
    result = machine.run("--develop")
    assert result.returncode == 1
    assert "unknown option --develop; there are --dev, --deepspeed, --check and --help" in result.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_shell_scripts_pass_shellcheck() -> None:
    scripts = [ROOT / "machine-install.sh", ROOT / ".ci/run", ROOT / "launch" / "slurm.sbatch"]
    report = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert report.stdout == ""
