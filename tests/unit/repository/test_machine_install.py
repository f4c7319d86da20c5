"""machine-install.sh chooses the torch that a driver runs and that knows the GPUs; `.ci/run` installs with it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

pytestmark = pytest.mark.skipif(Path("/dev/kfd").exists(), reason="an AMD driver is loaded, which cannot be hidden")

SYSTEM_TOOLS = "awk bash cat cksum cp dirname grep mkdir mv sed sh timeout tr wc"
PROGRAMS = {
    "python3.11": f"""case "$*" in
-) exit 1 ;;
*urllib* | *sysconfig*) exit 0 ;;
*sys.version_info*"[:2]"*) echo 3.11 ;;
*) exec "{sys.executable}" "$@" ;;
esac""",
    "gcc": "exit 0",
    "id": "echo 1000",
    "df": "echo Filesystem; echo disk 1 1 50000000 1 /",
}
"""Python 3.11, a C compiler, much free disk."""
WHEELS = "https://download.pytorch.org/whl"


def nvidia_smi(driver: str, capabilities: list[str]) -> str:
    """A driver with a GPU of each compute capability."""
    number = len(capabilities)
    answers = {"name": ["NVIDIA H200"] * number, "driver_version": [driver] * number, "compute_cap": capabilities}
    cases = [f"*--query-gpu={field}*) echo '{chr(10).join(answer)}' ;;" for field, answer in answers.items()]
    return "\n".join(['case "$*" in', *cases, "*topo*) printf 'GPU0  X   NV18\\nGPU1 NV18  X\\n' ;;", "esac"])


def checked(tmp_path: Path, programs: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    """`machine-install.sh --check` with no other programs on PATH, in a folder with a space in its name."""
    folder, path = tmp_path / "llama ssp", tmp_path / "programs"
    folder.mkdir()
    path.mkdir()
    for name in ["machine-install.sh", "pyproject.toml", "constraints.txt"]:
        shutil.copy(ROOT / name, folder / name)
    for name in SYSTEM_TOOLS.split():
        (path / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    for name, body in (PROGRAMS | programs).items():
        (path / name).write_text(f"#!/bin/sh\n{body}\n")
        (path / name).chmod(0o755)
    done = subprocess.run(
        [folder / "machine-install.sh", "--check"],
        cwd=path,
        env={"PATH": str(path), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {found.name for found in folder.iterdir()} == {"machine-install.sh", "pyproject.toml", "constraints.txt"}
    return done


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
    driver: str, capabilities: list[str], wanted: str, tmp_path: Path
) -> None:
    done = checked(tmp_path, {"nvidia-smi": nvidia_smi(driver, capabilities)})
    assert f"torch    {wanted.format(WHEELS)}\n" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(("is_reachable", "needed"), [(True, 3), (False, 6)])
def test_an_index_with_builds_for_gpus_alone_needs_more_disk(is_reachable: bool, needed: int, tmp_path: Path) -> None:
    python = PROGRAMS["python3.11"]
    if not is_reachable:
        python = python.replace("*urllib* |", "*urllib*) exit 1 ;;\n")
    assert f"50 GB free, {needed} GB needed" in checked(tmp_path, {"python3.11": python}).stdout


def test_a_python_that_is_none_is_named(tmp_path: Path) -> None:
    done = checked(tmp_path, {}, PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "is needed, and PYTHON=/nowhere/python is none; install it" in done.stderr
