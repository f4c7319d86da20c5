"""A machine for machine-install.sh: a copy of the script, and no other programs than those that a test puts on PATH.

The folder has a space in its name. `python3.11` records what pip would install; stand-ins play what a machine may have.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.repository import ROOT

SYSTEM_TOOLS = "awk bash cat cksum cp df dirname grep mkdir mv sed sh timeout tr wc"
PYTHON = f"""case "$*" in
-) exit 1 ;;
*urllib*) exit ${{INDEX_IS_AWAY:-0}} ;;
*sysconfig*) exit 0 ;;
*sys.version_info*"[:2]"*) echo 3.11 ;;
*check_gpus.py*) echo "computed: $*" >>computed.log ;;
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip"*) echo "${{*#-m pip }}" >>pip.log ;;
*'version("torch")'*) echo 2.13.0+test ;;
*'import torch'*) echo "torch 2.13.0+test" ;;
*) exec "{sys.executable}" "$@" ;;
esac"""
WHEELS = "https://download.pytorch.org/whl"
CPU_INDEX = f"{WHEELS}/cpu"


def nvidia_smi(driver: str = "580.82.07", *capabilities: str) -> str:
    """A driver with a GPU of each compute capability, by default two H200s."""
    gpus = capabilities or ("9.0", "9.0")
    answers = {"name": ["NVIDIA H200"] * len(gpus), "driver_version": [driver] * len(gpus), "compute_cap": gpus}
    lines = {field: "\n".join(answer) for field, answer in answers.items()}
    cases = [f"*--query-gpu={field}*) echo '{text}' ;;" for field, text in lines.items()]
    topology = "*topo*) printf 'GPU0  X   NV18\\nGPU1 NV18  X\\n' ;;"
    return "\n".join(['case "$*" in', *cases, topology, "esac"])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A folder with the script in it and a folder with all programs that the script can find."""

    folder: Path
    programs: Path

    def install(self, name: str, body: str) -> None:
        """Put a shell script on PATH; a link in its place goes first, for writing through it would hit the system."""
        (self.programs / name).unlink(missing_ok=True)
        (self.programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.programs / name).chmod(0o755)

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run machine-install.sh from another folder."""
        return subprocess.run(
            [self.folder / "machine-install.sh", *arguments],
            cwd=self.programs,
            env={"PATH": str(self.programs), **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def pip_log(self) -> list[str]:
        """What pip was asked to do so far, without the options about its output."""
        log = self.folder / "pip.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.removesuffix(" --disable-pip-version-check --quiet") for line in lines]


def make_machine(folder: Path) -> Machine:
    """Python 3.11, a C compiler, much free disk, no GPU."""
    machine = Machine(folder=folder / "llama ssp", programs=folder / "programs")
    machine.folder.mkdir()
    machine.programs.mkdir()
    for name in ["machine-install.sh", "pyproject.toml", "constraints.txt"]:
        shutil.copy(ROOT / name, machine.folder / name)
    for name in SYSTEM_TOOLS.split():
        (machine.programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    machine.install("python3.11", PYTHON)
    machine.install("gcc", "exit 0")
    machine.install("id", "echo 1000")
    (machine.programs / "df").unlink()
    machine.install("df", "echo Filesystem; echo disk 1 1 50000000 1 /")
    return machine
