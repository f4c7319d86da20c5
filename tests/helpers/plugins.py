"""Code from outside the package: the examples of docs/extending.md, and runs with it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.registry import PLUGINS
from llama_ssp.settings.drafters import DRAFTERS
from tests.helpers.commands import run
from tests.helpers.repository import ROOT

LAW = "my_law_records"
"""The plugin whose draft, `near`, has a law."""


def launch(folder: Path, *arguments: str, plugins: str, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `launch/run.py` to its end.

    Args:
        folder: holds the modules, and in `conf` their options; becomes the parent of the run folder.
        arguments: of the command line.
        plugins: modules to import.
        num_ranks: of the run.
    """
    words = ["--config-dir", str(folder / "conf"), f"run_dir={folder / 'run'}", *arguments]
    more = {PLUGINS: plugins, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return run(words, num_ranks=num_ranks, cwd=folder, more=more)


def examples(section: str) -> list[str]:
    """The code of a section of docs/extending.md, block after block."""
    page = (ROOT / "docs" / "extending.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)


def with_law(folder: Path) -> Path:
    """A folder with the drafter with a law of the page."""
    drafter, record, option = examples("A drafter with a law")
    (folder / "my_laws.py").write_text(drafter)
    (folder / f"{LAW}.py").write_text(record)
    (folder / "conf" / "draft").mkdir(parents=True)
    (folder / "conf" / "draft" / "near.yaml").write_text(option)
    return folder


def drafter_with_law() -> Any:
    """The class of that drafter."""
    names: dict[str, Any] = {}
    exec(examples("A drafter with a law")[0], names)
    return names["NearDrafter"]


def in_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the drafter with a law of a folder be known as long as the test runs."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(DRAFTERS, "records", DRAFTERS.all())
    for name in ("my_laws", LAW):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(LAW)
