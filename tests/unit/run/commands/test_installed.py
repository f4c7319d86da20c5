"""`pip install .` without the repository: the program runs and plans from another folder, with what the wheel holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.installed import install, llama_ssp

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install(folder)
    return folder


def test_it_plans_and_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    planned = llama_ssp(installed, "plan", "model=30B", "draft=7B", "hardware=8xh100", "format=json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)
    settings = ["task=generate", "format=jsonl", "prompt=import os", "max_new_tokens=4", "run_dir=run", "ranks=1"]
    ended = llama_ssp(installed, "run", *settings, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("starting 1 rank…\n")
    assert json.loads(ended.stdout)["num_new_tokens"] == 4
    assert (tmp_path / "run" / "status").read_text() == "done\n"


def test_it_holds_what_a_batch_job_starts(installed: Path) -> None:
    package = installed / "llama_ssp"
    assert (package / "launch" / "slurm.sbatch").is_file()
    started = [sys.executable, str(package / "launch" / "run.py"), "model=nosuch"]
    run = subprocess.run(
        started, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr.partition(":")[0]) == (2, "unknown model 'nosuch'")
