"""A task from outside the package: one Python file and one YAML file, and nothing else."""

import re
import subprocess
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings.registry import PLUGINS, load_plugins
from tests.helpers.plugins import launch as launch_with_plugins
from tests.helpers.repository import ROOT

MODULE = '''
"""Counts prompts."""

from dataclasses import dataclass, field

from llama_ssp.settings.schema import TaskConfig
from llama_ssp.settings.tasks import TaskSpec, register


@dataclass(kw_only=True)
class CountConfig(TaskConfig):
    name: str = "count"
    default_prompts: list[str] = field(default_factory=list)
    noun: str = "things"
    least: int = 0


def problems(config, explicit):
    if config.task.least < 0:
        yield f"task.least={config.task.least} must be at least 0"


def count(session, jobs):
    session.terminal.line(f"{len(jobs)} {session.config.task.noun}, {session.best_mode}")


register(TaskSpec(config=CountConfig, run="toy_count:count", problems=problems))
'''
OPTIONS = """
defaults:
  - /schema/count@_here_
  - _self_
noun: prompts
default_prompts: [a, b, c]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the task."""
    (tmp_path / "toy_count.py").write_text(MODULE)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "count.yaml").write_text(OPTIONS)
    return tmp_path


def launch(
    folder: Path, *arguments: str, task: str = "count", plugins: str = "toy_count"
) -> subprocess.CompletedProcess[str]:
    """Run a task to its end."""
    return launch_with_plugins(folder, f"task={task}", *arguments, plugins=plugins)


@pytest.mark.heavy
def test_a_task_from_outside_runs(folder: Path) -> None:
    ended = launch(folder, "task.noun=lines")
    assert (ended.returncode, ended.stdout) == (0, "3 lines, speculative\n"), ended.stderr
    assert "name: count\n" in (folder / "run" / "config.yaml").read_text()
    assert (folder / "run" / "status").read_text().strip() == "done"


@pytest.mark.slow
def test_the_task_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text().partition("## A task")[2]
    module, option = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for kind in ("py", "yml"))
    (tmp_path / "words.py").write_text(module[0])
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "words.yaml").write_text(option[0])
    ended = launch(tmp_path, task="words", plugins="words")
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


def test_a_task_from_outside_is_planned_and_checked(folder: Path) -> None:
    planned = launch(folder, "dry_run=true")
    assert planned.returncode == 0, planned.stderr
    assert "fits" in planned.stdout
    assert not (folder / "run").exists()
    refused = launch(folder, "task.least=-1")
    assert (refused.returncode, refused.stderr) == (2, "task.least=-1 must be at least 0\n")


def test_without_its_plugin_there_is_no_such_task(folder: Path) -> None:
    ended = launch(folder, plugins="")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "unknown task 'count': there are benchmark, calibrate, compare, evaluate, generate, latency"
    )


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "ModuleNotFoundError: No module named 'toy_faulty'"), ("1 / 0", "ZeroDivisionError: ")]
)
def test_a_plugin_that_cannot_be_imported_is_one_sentence(
    text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text:
        (tmp_path / "toy_faulty.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(PLUGINS, "json, toy_faulty")
    with pytest.raises(ConfigError, match=f"LLAMA_SSP_PLUGINS names toy_faulty, .*{reason}") as caught:
        load_plugins()
    assert "\n" not in str(caught.value)
