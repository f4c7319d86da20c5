"""`pip install .` for tests: a folder with what the wheel holds, and its program."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.helpers.repository import ROOT


def install(folder: Path) -> None:
    """Fill a folder with what pyproject.toml puts into the wheel, and the script; libraries are those of the tests."""
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


def llama_ssp(folder: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed script; a repository on the path would hide what the wheel lacks."""
    code = "import runpy, sys; sys.path[:] = [each for each in sys.path if each != sys.argv[1]]; "
    code += "sys.argv[:] = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = folder / "bin" / "llama-ssp"
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(script), *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
