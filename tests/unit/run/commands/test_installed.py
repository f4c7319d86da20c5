"""`pip install .` without the repository: the program runs and plans from another folder, with what the wheel holds."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pyproject.toml puts into the wheel, and the script; its libraries are the tests'."""
    folder = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, folder / package)
    for source, target in wheel["force-include"].items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / target)
        else:
            shutil.copy(ROOT / source, folder / target)
    module, _, function = project["project"]["scripts"]["llama-ssp"].partition(":")
    (folder / "bin").mkdir()
    (folder / "bin" / "llama-ssp").write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return folder


def llama_ssp(folder: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed script; a repository on the path would hide what the wheel lacks."""
    code = "import runpy, sys; sys.path[:] = [each for each in sys.path if each != sys.argv[1]]; "
    code += "sys.argv[:] = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = folder / "bin" / "llama-ssp"
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(script), *words], cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


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


def test_it_holds_what_a_sweep_on_a_cluster_starts(installed: Path, tmp_path: Path) -> None:
    package = installed / "llama_ssp"
    assert (package / "launch" / "run.py").is_file()
    words = ["-m", "hydra/launcher=slurm", "hardware=8xh100", "model=7B", "draft=none", "task=generate", "prompt=x"]
    ended = llama_ssp(installed, "run", *words, "dry_run=true", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"{package / 'launch' / 'slurm.sbatch'} --root {package} " in ended.stdout
    started = [sys.executable, str(package / "launch" / "run.py"), "model=nosuch"]
    run = subprocess.run(
        started, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr.partition(":")[0]) == (2, "unknown model 'nosuch'")
