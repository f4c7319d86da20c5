"""What this machine is: `python -m benchmarks.first_hour.facts`. Packages are named with versions, never sources."""

import os
import shutil
import subprocess
from importlib.metadata import distributions

import torch

from benchmarks.first_hour.runner import allowed
from benchmarks.first_hour.step import Check, Where, main, say
from llama_ssp.reports.provenance import git_commit, processor, versions

COMMANDS = (
    "nvidia-smi -q",
    "nvidia-smi topo -m",
    "nvidia-smi nvlink --status",
    "rocm-smi",
    "nvcc --version",
    "cc --version",
    "uname -srm",
    "lscpu",
    "free -g",
)


def facts(where: Where) -> list[str]:
    """Say everything; a command that is missing is one of the facts."""
    say(versions=versions(), git_commit=git_commit(), processor=processor())
    say(cuda=torch.version.cuda, hip=torch.version.hip, nccl=torch.cuda.nccl.version() if where.is_gpu else None)
    say(gpus=[str(torch.cuda.get_device_properties(number)) for number in range(torch.cuda.device_count())])
    say(environment=allowed(os.environ))
    say(packages=sorted(f"{each.metadata['Name']}=={each.version}" for each in distributions()))
    for command in map(str.split, COMMANDS):
        print("$", *command, flush=True)
        if shutil.which(command[0]):
            subprocess.run(command, timeout=30, check=False)
    return []


def installer(where: Where) -> list[str]:  # noqa: ARG001 - of the machine
    """What the installer says of this machine."""
    code = subprocess.run(["bash", "machine-install.sh", "--check"], timeout=100, check=False).returncode
    return [f"machine-install.sh --check ended with {code}"] if code else []


CHECKS: dict[str, Check] = {"machine": facts, "installer": installer}

if __name__ == "__main__":
    main(CHECKS)
