"""What extensions add to settings of the core: fields of a group, and files whose lines are requests."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.tasks.dry_run import figures_of
from llama_ssp.settings.extensions import MORE, MoreSettings, whole
from llama_ssp.settings.fields import setting
from llama_ssp.settings.tasks import REQUEST_FILES, NoEffect, RequestFile
from tests.helpers.in_process import launch


@dataclass(kw_only=True)
class Waits:
    """A group of the core."""

    load_s: float = setting(1.0, "loading.")


@dataclass(kw_only=True)
class Pauses(Waits):
    """Of an extension."""

    pause_s: float = setting(2.0, "pausing.")


@dataclass(kw_only=True)
class Naps(Waits):
    """Of another extension."""

    nap_s: float = setting(3.0, "napping.")


@dataclass(kw_only=True)
class Rests(Waits):
    """Another group of the core."""

    rest_s: float = setting(4.0, "resting.")


def test_two_extensions_add_settings_to_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    MORE.all()
    for config in (Pauses, Naps):
        monkeypatch.setitem(MORE.records, config.__name__, MoreSettings(name=config.__name__, config=config))
    both = whole(Waits)()
    assert vars(both) == {"load_s": 1.0, "pause_s": 2.0, "nap_s": 3.0}
    assert isinstance(both, Pauses)
    assert isinstance(both, Naps)
    assert both == whole(Waits)()
    assert vars(whole(Rests)()) == {"load_s": 1.0, "rest_s": 4.0}, "another group of the core, derived from it"


@dataclass(kw_only=True)
class Group:
    """A group of the core with two settings, one of them required."""

    first: int
    last: int = 4


@dataclass(kw_only=True)
class Derived(Group):
    """A group of the core that derives from it, and has a default."""

    first: int = 1
    own: int = 5


@dataclass(kw_only=True)
class More(Group):
    """Of an extension."""

    middle: int = 3


@dataclass(kw_only=True)
class MoreDerived(Derived, More):
    """Of the same extension, for the derived group."""


def test_settings_of_an_extension_stand_where_it_says_and_leave_the_defaults_of_a_derived_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    MORE.all()
    for config in (More, MoreDerived):
        monkeypatch.setitem(MORE.records, config.__name__, MoreSettings(name="m", config=config, after="first"))
    assert [entry.name for entry in fields(whole(Group))] == ["first", "middle", "last"]
    made = whole(Derived)()
    assert vars(made) == {"first": 1, "middle": 3, "last": 4, "own": 5}
    assert [entry.name for entry in fields(made)] == ["first", "middle", "last", "own"]
    assert isinstance(made, More)


def test_a_setting_of_an_extension_draws_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    MORE.all()
    toy = MoreSettings(name="toy", config=Pauses, paths=("sketch",), draw="toys:draw")
    monkeypatch.setattr(MORE, "records", {"toy": toy})
    plan: Any = SimpleNamespace(sketch=None)
    assert figures_of(plan) == {}
    plan.sketch = f"{tmp_path}/a.txt"
    assert figures_of(plan) == {f"sketch={tmp_path}/a.txt": (tmp_path / "a.txt", "toys:draw")}
    plan.sketch = "/no/a.txt"
    with pytest.raises(ConfigError, match=r"sketch=/no/a\.txt: create the folder /no first"):
        figures_of(plan)


@pytest.mark.seconds
def test_a_file_of_requests_is_checked_and_answered_by_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(session: Any, requests: list[object]) -> None:
        session.folder.write_kept("toys.txt", f"{len(requests)}")

    code = ModuleType("toys")
    code.answer = answer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toys", code)
    toys = RequestFile(
        name="toy",
        purpose="for task=generate a list of toys",
        output="toys.txt",
        is_one=lambda config: (config.prompts or "").endswith(".toys"),
        problems=lambda _, explicit: [NoEffect(key, "with toys") for key in explicit & {"seed"}],
        run="toys:answer",
    )
    REQUEST_FILES.all()
    monkeypatch.setitem(REQUEST_FILES.records, "toy", toys)
    (tmp_path / "a.toys").write_text("a top\n")
    words = [f"prompts={tmp_path / 'a.toys'}", f"run_dir={tmp_path / 'run'}"]
    assert "or for task=generate a list of toys" in " ".join(launch("--help", "prompts").out.split())
    launch("task=generate", "seed=1", *words).check_refusal("seed has no effect with toys")
    assert launch("task=generate", *words).code == 0
    assert (tmp_path / "run" / "toys.txt").read_text() == "0"
    (tmp_path / "run" / "models.json").write_text("{}")
    launch("task=generate", *words).check_refusal("models.json is damaged")  # the answers may be those of other models
