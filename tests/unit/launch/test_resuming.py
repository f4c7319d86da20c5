"""A run folder is resumed with the prompts that it was begun with, and never answers one with another's text."""

import io
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.in_process import Ended, launch

SMALL = ("task=generate", "model=tiny-draft", "draft=none", "max_new_tokens=2", "batch_size=4")


def complete(folder: Path, *prompts: str) -> Ended:
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return launch(*SMALL, f"prompts={folder}/p.jsonl", f"run_dir={folder}/run")


def recorded(folder: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (folder / "run" / "run.jsonl").read_text().splitlines()]
    return {line["index"]: line["prompt"] for line in lines}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (("import", "def", "class"), "prompt 2 of prompts={folder}/p.jsonl was 'from' when .*, and is now 'def'"),
        (("import",), "was 'from' when .*, and is now gone, 1 are left"),
        (("import", "from" + 50 * " a"), "was 'from' when .*, and is now 'from a a a"),
    ],
)
def test_other_prompts_are_refused_by_the_first_that_differs(
    changed: tuple[str, ...], difference: str, tmp_path: Path
) -> None:
    assert complete(tmp_path, "import", "from", "class").code == 0
    ended = complete(tmp_path, *changed)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    with pytest.raises(ValueError, match=difference.format(folder=tmp_path)):
        raise ValueError(ended.err)
    assert "name another run_dir" in ended.err
    assert recorded(tmp_path) == {0: "import", 1: "from", 2: "class"}


def test_what_differs_far_behind_is_shown(tmp_path: Path) -> None:
    assert complete(tmp_path, 60 * "x " + "one").code == 0
    assert "x one' when" in complete(tmp_path, 60 * "x " + "two").err


def test_prompts_that_follow_the_old_ones_are_completed(tmp_path: Path) -> None:
    assert complete(tmp_path, "import", "一\x1b").code == 0
    ended = complete(tmp_path, "import", "一\x1b", "class")
    assert (ended.code, recorded(tmp_path)) == (0, {0: "import", 1: "一\x1b", 2: "class"})


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    ended = complete(tmp_path, "import", "\ud800")
    assert (ended.code, ended.err) == (
        2, "prompt '\\ud800' holds '\\ud800', which is half a character: write it in UTF-8\n",
    )  # fmt: skip


class Typed(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


def test_typed_prompts_are_counted_on_from_those_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for typed in ("import\nfrom\n", "class\n"):
        monkeypatch.setattr(sys, "stdin", Typed(typed))
        ended = launch(*SMALL, "prompts=-", f"run_dir={tmp_path}/run")
        assert ended.code == 0, ended.err
    assert recorded(tmp_path) == {0: "import", 1: "from", 2: "class"}
