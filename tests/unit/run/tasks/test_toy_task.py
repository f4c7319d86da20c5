"""A task from outside the package: one Python file and one YAML file, and nothing else."""

import re
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings.registry import PLUGINS, load_plugins
from tests.helpers.plugins import launch
from tests.helpers.repository import ROOT

REGISTRATION = 'register(TaskSpec(config=WordsConfig, run="words:count"))'
PROBLEMS = """

def problems(config, explicit):
    if config.max_new_tokens < 7:
        yield f"max_new_tokens={config.max_new_tokens} must be at least 7"


register(TaskSpec(config=WordsConfig, run="words:count", problems=problems))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the task of docs/extending.md, which here has problems of its own."""
    page = (ROOT / "docs" / "extending.md").read_text().partition("## A task")[2]
    module, option = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for kind in ("py", "yml"))
    (tmp_path / "words.py").write_text(module[0].replace(REGISTRATION, PROBLEMS))
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "words.yaml").write_text(option[0])
    return tmp_path


@pytest.mark.heavy
def test_the_task_of_the_page_runs(folder: Path) -> None:
    ended = launch(folder, "task=words", plugins="words")
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr
    assert "name: words\n" in (folder / "run" / "config.yaml").read_text()
    assert (folder / "run" / "status").read_text().strip() == "done"


def test_a_task_from_outside_is_planned_and_checked(folder: Path) -> None:
    planned = launch(folder, "task=words", "dry_run=true", plugins="words")
    assert planned.returncode == 0, planned.stderr
    assert "fits" in planned.stdout
    assert not (folder / "run").exists()
    refused = launch(folder, "task=words", "max_new_tokens=6", plugins="words")
    assert (refused.returncode, refused.stderr) == (2, "max_new_tokens=6 must be at least 7\n")
    unknown = launch(folder, "task=words", plugins="")
    assert (unknown.returncode, unknown.stderr.partition(":")[0]) == (2, "unknown task 'words'")


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
