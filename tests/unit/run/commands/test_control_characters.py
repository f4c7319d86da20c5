"""No control character of a prompt, a value or a text of a model reaches the terminal; records keep them all."""

import json
import unicodedata
from pathlib import Path

import pytest

from llama_ssp.run.commands import plan
from tests.helpers.in_process import Ended, call, launch
from tests.helpers.lanes import heavy

CONTROLS = "".join(map(chr, [*range(1, 9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F)]))
HOSTILE = f"\x1b[2J\x1b]0;title\x07\x9b31m{CONTROLS}"
SMALL = ("model=tiny-draft", "draft=none", "max_new_tokens=2", "device=cpu", f"prompt={HOSTILE}")


def assert_harmless(ended: Ended) -> None:
    text = ended.out + ended.err
    assert text
    assert [char for char in text if char not in "\n\t" and unicodedata.category(char) in {"Cc", "Cs"}] == []
    assert not set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@pytest.mark.seconds
@pytest.mark.parametrize("settings", [("task=generate",), heavy(("task=generate", "batch_size=2"))])
def test_a_run_prints_none(settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of the model is half of an escape sequence."""
    halves = iter(["a\x1b", "[2J", "\x1b]", "0;t\x07", "\x9b", "31m"] * 100)
    monkeypatch.setattr("llama_ssp.text.detokenize.TextAfter.decode", lambda _self, _ids: next(halves))
    ended = launch(*SMALL, *settings, f"run_dir={tmp_path}/\x1b[2Jrun").well()
    assert_harmless(ended)
    if settings == ("task=generate",):
        assert "\\x1b[2J" in ended.out


def test_json_lines_hold_none_and_are_exact_and_so_are_records(tmp_path: Path) -> None:
    ended = launch(*SMALL, "task=generate", "task.format=jsonl", f"run_dir={tmp_path}").well()
    assert_harmless(ended)
    assert json.loads(ended.out) == (recorded := json.loads((tmp_path / "run.jsonl").read_bytes()))
    assert recorded["prompt"] == HOSTILE


@pytest.mark.parametrize(
    "settings",
    [
        ["--cfg", "job", "prompt=\u202e"],
        [f"--{HOSTILE}"],
        heavy([f"model={HOSTILE}"]),
        heavy([f"prompts={HOSTILE}"]),
        heavy([f"model.path={HOSTILE}", "task=generate"]),
        [f"seed='{HOSTILE}'"],
        heavy([f"stop_strings=['{HOSTILE}']", "max_new_tokens=0"]),
        heavy([f"hardware={HOSTILE}"]),
    ],
)
def test_what_hydra_prints_and_errors_hold_none(settings: list[str], tmp_path: Path) -> None:
    ended = launch(*settings, f"run_dir={tmp_path}/run")
    assert ended.code in {0, 2}, ended.err
    assert_harmless(ended)


def test_a_plan_prints_none_and_a_name_in_it_is_no_markup() -> None:
    name = f"'[bold]:smile:{HOSTILE}'"
    settings = [f"hardware.name={name}", f"hardware.gpu={name}"]
    said = call(plan.main, ["model=7B", "draft=none", "hardware=g5_12xlarge", *settings]).well()
    assert_harmless(said)
    assert "[bold]:smile:" in said.out
