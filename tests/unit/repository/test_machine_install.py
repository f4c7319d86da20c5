"""machine-install.sh finds what the machine has, chooses the right torch, and changes nothing twice."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.installer import CPU_INDEX, PIP, ROCMINFO, WHEELS, Machine, nvidia_smi, set_free_gigabytes
from tests.helpers.repository import ROOT

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(Path("/dev/kfd").exists(), reason="an AMD driver is loaded, which cannot be hidden"),
]


def test_no_gpu_takes_the_cpu_wheels_where_their_index_is_in_reach(machine: Machine) -> None:
    output = machine.run("--check").stdout
    assert "GPU      none found" in output
    assert f"torch    torch==2.13.0 from {CPU_INDEX}" in output


def test_no_gpu_and_no_cpu_index_takes_the_exact_pin_from_the_index_that_pip_is_set_to(machine: Machine) -> None:
    output = machine.run("--check", environment={"INDEX_IS_AWAY": "1"}).stdout
    assert f"torch    torch==2.13.0 from {PIP}" in output


def test_a_driver_that_does_not_answer_is_said_and_counts_as_no_gpu(machine: Machine) -> None:
    machine.install("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    output = machine.run("--check").stdout
    assert "nvidia-smi is here but reaches no GPU" in output
    assert CPU_INDEX in output


def test_an_amd_gpu_takes_the_rocm_wheels(machine: Machine) -> None:
    machine.install("rocminfo", ROCMINFO)
    output = machine.run("--check").stdout
    assert "GPU      1 x AMD Instinct MI300X (AMD)" in output
    assert re.search(r"torch==2\.13\.0 from https://download\.pytorch\.org/whl/rocm\S+", output)


def test_torch_index_url_wins(machine: Machine) -> None:
    output = machine.run("--check", environment={"TORCH_INDEX_URL": "https://example.org/wheels"}).stdout
    assert "torch    torch==2.13.0 from https://example.org/wheels" in output


def test_check_changes_nothing(machine: Machine) -> None:
    before = sorted(machine.folder.iterdir())
    assert machine.run("--check").returncode == 0
    assert sorted(machine.folder.iterdir()) == before


def test_torch_is_installed_first_and_then_the_project_with_that_very_build(machine: Machine) -> None:
    assert machine.run().returncode == 0
    assert machine.pip_log() == [
        f"install torch==2.13.0 --index-url {CPU_INDEX}",
        "install --editable . --constraint .venv/constraints.txt",
    ]
    pins = (machine.folder / ".venv/constraints.txt").read_text().splitlines()
    assert [line for line in pins if line.startswith("torch==")] == ["torch==2.13.0+test"]


def test_a_second_run_changes_nothing_and_dev_only_adds(machine: Machine) -> None:
    machine.run()
    first = machine.pip_log()
    assert "everything is in place" in machine.run(environment={"INDEX_IS_AWAY": "1"}).stdout
    assert machine.pip_log() == first
    machine.run("--dev")
    assert machine.pip_log()[len(first) :] == ["install --editable .[dev] --constraint .venv/constraints.txt"]
    assert "everything is in place" in machine.run().stdout


def test_deepspeed_is_built_behind_torch_and_without_isolation(machine: Machine) -> None:
    machine.run()
    first = machine.pip_log()
    machine.run("--deepspeed")
    assert machine.pip_log()[len(first) :] == [
        "install setuptools wheel",
        "install deepspeed==0.19.8 --no-build-isolation --constraint .venv/constraints.txt",
    ]
    again = machine.pip_log()
    machine.run("--deepspeed")
    assert machine.pip_log() == again


def test_a_gpu_that_came_later_brings_another_torch(machine: Machine) -> None:
    machine.run()
    first = machine.pip_log()
    machine.install("nvidia-smi", nvidia_smi())
    machine.run()
    assert machine.pip_log()[len(first) :] == [
        "uninstall --yes torch", f"install torch==2.13.0 --index-url {WHEELS}/cu130",
        "install --editable .[bitsandbytes] --constraint .venv/constraints.txt",
    ]  # fmt: skip


def test_a_moved_folder_gets_a_new_environment(machine: Machine) -> None:
    machine.run()
    moved = Machine(folder=machine.folder.rename(machine.folder.with_name("moved")), programs=machine.programs)
    first = moved.pip_log()
    assert moved.run().returncode == 0
    assert moved.pip_log()[len(first) :] != []


def test_a_missing_python_is_one_sentence_with_the_command_that_helps(machine: Machine) -> None:
    (machine.programs / "python3.11").unlink()
    result = machine.run()
    assert result.returncode == 1
    assert result.stderr.startswith("machine-install: Python 3.11 or newer with its venv module is needed")
    assert "sudo apt-get install python3-venv" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_old_python_named_by_hand_is_refused_by_name(machine: Machine) -> None:
    machine.install("python3.9", "exit 1")
    result = machine.run(environment={"PYTHON": "python3.9"})
    assert result.returncode == 1
    assert "python3.9 was found" in result.stderr


def test_root_gets_the_missing_python_from_the_package_manager(machine: Machine) -> None:
    python = machine.programs / "python3.11"
    python.rename(machine.folder / "hidden")
    machine.install("id", "echo 0")
    machine.install("apt-get", f'case "$*" in *python3-venv) cp "{machine.folder}/hidden" "{python}" ;; esac')
    result = machine.run()
    assert "installing the system package python3-venv" in result.stdout
    assert result.returncode == 0


def test_a_full_disk_is_one_sentence_with_both_sizes(machine: Machine) -> None:
    set_free_gigabytes(machine, 2)
    result = machine.run()
    assert result.returncode == 1
    assert "has 2 GB free, but 3 GB are needed" in result.stderr
    assert not (machine.folder / ".venv").exists()


def test_nvlink_without_a_fabric_manager_prints_the_two_commands(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi())
    machine.install("systemctl", "echo inactive; exit 3")
    output = machine.run("--check").stdout
    assert "Error 802: system not yet initialized" in output
    assert "sudo apt-get install nvidia-fabricmanager-580\n" in output
    assert "sudo systemctl enable --now nvidia-fabricmanager\n" in output


def test_a_container_does_not_say_that_the_fabric_manager_of_its_host_does_not_run(machine: Machine) -> None:
    machine.install("nvidia-smi", nvidia_smi())
    machine.install("systemctl", "echo 'System has not been booted with systemd as init system' >&2; exit 1")
    output = machine.run("--check").stdout
    assert "does not run" not in output
    assert "sudo systemctl" not in output
    assert "NVLink   systemd does not answer here" in output


@pytest.mark.parametrize("running", ["systemctl", "pgrep"])
def test_a_fabric_manager_that_runs_is_left_alone(machine: Machine, running: str) -> None:
    machine.install("nvidia-smi", nvidia_smi())
    machine.install(running, "echo active")
    output = machine.run("--check").stdout
    assert "NVLink   the fabric manager runs" in output
    assert "802" not in output


def test_an_unknown_option_is_named_with_those_that_exist(machine: Machine) -> None:
    result = machine.run("--develop")
    assert result.returncode == 1
    assert "unknown option --develop; there are --dev, --deepspeed, --check and --help" in result.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_shell_scripts_pass_shellcheck() -> None:
    scripts = [ROOT / "machine-install.sh", ROOT / ".ci/run", ROOT / "launch" / "slurm.sbatch"]
    report = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert report.stdout == ""
