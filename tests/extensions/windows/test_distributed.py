"""A head that sees a window on two ranks, and on a rank of its own, writes the texts of one rank, resumed or not."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import run

pytestmark = [pytest.mark.distributed(2), pytest.mark.heavy]
SETTINGS = [
    "task=generate",
    "draft=tiny-eagle",
    "draft.window=8",
    "draft.sinks=2",
    "model.dtype=fp32",
    "max_new_tokens=40",
    "batch_size=2",
    "spare_rows=1",
]
PROMPTS = ["def f(x):", *(f"{'# one two three four five six ' * 4}\ndef f{number}(x):" for number in range(3))]


def texts(run_dir: Path) -> list[str]:
    lines = [json.loads(line) for line in (run_dir / "run.jsonl").read_text().splitlines()]
    return [line["text"] for line in sorted(lines, key=lambda line: int(line["index"]))]


def test_two_ranks_write_the_texts_of_one(tmp_path: Path) -> None:
    found, prompts = [], tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    for name, number, placement in (("one", 1, []), ("two", 2, []), ("apart", 2, ["placement=own_gpu"])):
        folder = tmp_path / name
        words = [*SETTINGS, f"prompts={prompts}", *placement, f"run_dir={folder}"]
        done = run(words, num_ranks=number)
        assert done.returncode == 0, done.stderr
        found.append(texts(folder))
        lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
        (folder / "run.jsonl").write_text("".join(lines[:2]))  # as if it had been stopped there
        done = run(words, num_ranks=number)
        assert done.returncode == 0, done.stderr
        found.append(texts(folder))
    assert found == [found[0]] * 6
    assert len(found[0]) == len(PROMPTS)
