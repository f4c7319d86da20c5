"""Runs the entry with code from outside the package."""

import os
import subprocess
import sys
from pathlib import Path

from llama_ssp.registry import PLUGINS
from tests.helpers.repository import ROOT


def launch(folder: Path, *arguments: str, plugins: str) -> subprocess.CompletedProcess[str]:
    """Run `launch/run.py` to its end.

    Args:
        folder: holds the modules, and in `conf` their options; becomes the parent of the run folder.
        arguments: of the command line.
        plugins: modules to import.
    """
    environment = {**os.environ, PLUGINS: plugins, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    words = ["--config-dir", str(folder / "conf"), f"run_dir={folder / 'run'}", *arguments]
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / "run.py"), *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
