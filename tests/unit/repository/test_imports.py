"""Imports run one way: the contracts in pyproject.toml hold, and each is seen to fail on faults it is for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.repository import ROOT, modules

LINTER = Path(sys.executable).parent / "lint-imports"


def lint(folder: Path) -> str:
    """Run import-linter over the packages in `folder`; an empty string when every contract is kept."""
    wide = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run([LINTER, "--no-cache"], cwd=folder, env=wide, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


NO_TORCH = "planning, reports, machines, terminal, architectures, settings and errors"
BACKENDS = "bitsandbytes, deepspeed, accelerate, llvmlite and lm_eval"


def test_the_import_contracts_hold() -> None:
    assert lint(ROOT) == ""


FAULTS = [
    ("llama_ssp/models/loading.py", "llama_ssp.run.tasks", "Imports run one way"),
    ("llama_ssp/speculate/sampling/processors.py", "llama_ssp.models", "Imports run one way"),
    ("llama_ssp/machines/hardware.py", "llama_ssp.settings.schema", "Imports run one way"),
    ("llama_ssp/run/commands/run.py", "llama_ssp.run.commands.program", "commands have no circle"),
    ("llama_ssp/cpu/emit.py", "llama_ssp.kernels", "Imports run one way"),
    ("llama_ssp/weights/int4_rows.py", "llama_ssp.cpu.kinds", "CPUs have one room"),
    ("llama_ssp/architectures/matrices.py", "torch", NO_TORCH),
    ("llama_ssp/settings/checks.py", "transformers", NO_TORCH),
    ("llama_ssp/evaluation/statistics.py", "torch", NO_TORCH),
    ("llama_ssp/terminal/terminal.py", "llama_ssp.speculate.engine", "Imports run one way"),
    ("llama_ssp/settings/checks.py", "omegaconf", "hydra and omegaconf are known to"),
    ("llama_ssp/models/huggingface/runner.py", "bitsandbytes", BACKENDS),
    ("llama_ssp/kernels/linear.py", "llvmlite", BACKENDS),
    ("llama_ssp/kernels/attention_gpu.py", "llama_ssp.kernels.attention_by_length", "kernels of GPUs import nothing"),
]


def test_every_forbidden_import_is_found(tmp_path: Path) -> None:
    for path in [Path("pyproject.toml"), *modules("llama_ssp", "launch")]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for module, imported, _ in FAULTS:
        with (tmp_path / module).open("a") as file:
            file.write(f"\nimport {imported}\n")
    broken = re.split(r"\n(?=\S.*\n-+\n)", lint(tmp_path).partition("Broken contracts")[2])
    for module, imported, contract in FAULTS:
        said = [section for section in broken if section.lstrip().startswith(contract)]
        name = module.removesuffix(".py").replace("/", ".")
        assert [section for section in said if f"{name} -> {imported}" in section], (module, imported)
