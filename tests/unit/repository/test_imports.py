"""Imports run one way: the contracts in pyproject.toml hold, and each is seen to fail on the fault it is for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT, modules

pytestmark = pytest.mark.seconds

LINTER = Path(sys.executable).parent / "lint-imports"


def lint(folder: Path) -> str:
    """Run import-linter over the packages in `folder`; an empty string when every contract is kept."""
    result = subprocess.run([LINTER, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


NO_TORCH = "planning, reports, machines, terminal, architectures, settings and errors"
BACKENDS = "bitsandbytes, deepspeed, accelerate, llvmlite and lm_eval"


def test_the_import_contracts_hold() -> None:
    assert lint(ROOT) == ""


@pytest.mark.parametrize(
    ("module", "fault", "contract"),
    [
        ("llama_ssp/models/loading.py", "import llama_ssp.run.tasks", "Imports run one way"),
        ("llama_ssp/speculate/sampling/processors.py", "import llama_ssp.models", "Imports run one way"),
        ("llama_ssp/machines/hardware.py", "import llama_ssp.settings.schema", "Imports run one way"),
        ("llama_ssp/run/commands/run.py", "import llama_ssp.run.commands.program", "commands have no circle"),
        ("llama_ssp/cpu/emit.py", "import llama_ssp.kernels", "Imports run one way"),
        ("llama_ssp/weights/int4_rows.py", "import llama_ssp.cpu.kinds", "CPUs have one room"),
        ("llama_ssp/architectures/matrices.py", "import torch", NO_TORCH),
        ("llama_ssp/settings/checks.py", "import transformers", NO_TORCH),
        ("llama_ssp/evaluation/statistics.py", "import torch", NO_TORCH),
        ("llama_ssp/terminal/terminal.py", "from llama_ssp.speculate.engine import stream", "Imports run one way"),
        ("llama_ssp/settings/checks.py", "import omegaconf", "hydra and omegaconf are known to"),
        ("llama_ssp/models/huggingface/runner.py", "import bitsandbytes", BACKENDS),
        ("llama_ssp/kernels/linear.py", "import llvmlite", BACKENDS),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, fault: str, contract: str) -> None:
    for path in [Path("pyproject.toml"), *modules("llama_ssp", "launch")]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{fault}\n")
    assert contract in lint(tmp_path).partition("Broken contracts")[2]
