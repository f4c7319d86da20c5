"""Every extension is in the manifest, and who asks for one that was taken out reads its name."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import manifest
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.registry import Registry
from llama_ssp.run.commands.help import settings_of
from llama_ssp.run.prompts import read_prompts
from llama_ssp.settings.combinations import Ability
from llama_ssp.settings.commands import COMMANDS
from llama_ssp.settings.extensions import MORE
from llama_ssp.settings.tasks import REQUEST_FILES, TASKS
from tests.extensions.without import halves
from tests.helpers import extensions
from tests.helpers.composed import compose_run

ASKED = [
    (extension, words)
    for extension, asked in manifest.EXTENSIONS.items()
    for words in asked
    if extension in manifest.present()
]


def test_the_manifest_names_the_extensions_that_there_are() -> None:
    """In order; some may be taken out."""
    assert [*manifest.EXTENSIONS] == sorted({*manifest.EXTENSIONS, *manifest.present()})


def test_what_asks_for_an_extension_is_a_record_of_that_extension() -> None:
    registries: dict[str, Any] = {"task": TASKS, "command": COMMANDS, "field": REQUEST_FILES}
    for extension, words in ASKED:
        kind, _, name = words.partition("=")
        if kind == "setting":  # of a group of the core
            added = [
                more.config
                for more in MORE.all().values()
                if more.config.__module__ == f"llama_ssp.extensions.{extension}.records"
            ]
            assert name.rpartition(".")[2] in {
                one.key.rpartition(".")[2] for config in added for one in settings_of(config)
            }
        elif kind in registries:
            found = (
                registries[kind].of(name).run or f"llama_ssp.extensions.{extension}"
            )  # a command may be short for a task
            assert found.startswith(f"llama_ssp.extensions.{extension}"), words


@pytest.mark.parametrize(("extension", "asked"), ASKED)
def test_an_extension_that_was_taken_out_is_named(extension: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, name = asked.partition("=")
    assert f"{extension} extension" not in unknown_name(kind, name, ["compare"])
    monkeypatch.setattr(manifest, "present", lambda: ())
    needed = manifest.NEEDS.get(extension, extension)
    assert f"{asked} needs the {needed} extension, which was removed" in unknown_name(kind, name, ["compare"])


@pytest.mark.parametrize("key", [None, "draft.model.quantization", "draft.quantization"])
def test_whatever_the_door_calls_a_setting_its_extension_is_named(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library says quantization=, and a draft's format is that of a model."""
    monkeypatch.setattr(manifest, "present", lambda: ())
    problem = Registry[Ability](setting="model.quantization").problem_of("nf4", key=key)
    assert (problem or "").startswith("model.quantization=nf4 needs the bitsandbytes extension")


def test_an_extension_goes_with_the_extension_that_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("accelerate", "serve"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(manifest, "FOLDER", tmp_path)
    monkeypatch.setattr(manifest, "present", manifest.present.__wrapped__)
    assert manifest.present() == ("serve",)
    sentence = manifest.absent("placement", "accelerate") or ""
    assert "placement=accelerate needs the modules extension," in sentence


def test_prompts_with_a_field_of_a_missing_extension_are_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "present", lambda: ())
    (tmp_path / "batch.jsonl").write_text('{"custom_id": "1", "body": {}}')
    with pytest.raises(ConfigError, match=r"^line 1 of prompts=.*: field=custom_id needs the serve extension"):
        read_prompts(compose_run("task=compare", f"prompts={tmp_path / 'batch.jsonl'}")[0])


IMPORTED = """
{}:29: in <module>
    from llama_ssp.extensions.serve.batch import complete_batch
E   ModuleNotFoundError: No module named 'llama_ssp.extensions.serve'
"""
ASKED_FOR = (
    "ConfigError: task=serve needs the serve extension, which was removed from this installation: reinstall llama-ssp"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (IMPORTED.format("tests/unit/test_x.py"), "llama_ssp/extensions/serve"),
        (IMPORTED.format("tests/unit/test_x.py:3: \nbenchmarks/x.py"), "llama_ssp/extensions/serve"),
        (IMPORTED.format("tests/unit/test_x.py:3: \nllama_ssp/run/session.py"), None),
        (ASKED_FOR, "llama_ssp/extensions/serve"),
        ("AssertionError", None),
    ],
)
def test_a_test_is_skipped_for_a_missing_extension_that_it_imports_or_asks_for(
    text: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package imports no extension, missing or not."""
    monkeypatch.setattr(extensions, "PRESENT", ("slurm",))
    assert extensions.missing_in(text) == found
    monkeypatch.setattr(extensions, "PRESENT", ("serve",))
    assert extensions.missing_in(text) is None


def test_halves_of_the_extensions_part_every_two_of_them() -> None:
    parts = [*map(set, halves([*manifest.EXTENSIONS]))]
    for gone, kept in permutations(manifest.EXTENSIONS, 2):
        assert any(gone in part and kept not in part for part in parts)
