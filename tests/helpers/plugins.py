"""Runs the entry with code from outside the package."""

import os
import subprocess
from pathlib import Path

from llama_ssp.registry import PLUGINS
from tests.helpers.commands import run
from tests.helpers.repository import ROOT


def launch(folder: Path, *arguments: str, plugins: str) -> subprocess.CompletedProcess[str]:
    """Run `launch/run.py` to its end.

    Args:
        folder: holds the modules, and in `conf` their options; becomes the parent of the run folder.
        arguments: of the command line.
        plugins: modules to import.
    """
    words = ["--config-dir", str(folder / "conf"), f"run_dir={folder / 'run'}", *arguments]
    return run(words, cwd=folder, more={PLUGINS: plugins, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"})
