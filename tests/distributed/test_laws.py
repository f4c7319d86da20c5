"""A plugin's drafter with a law on two ranks: texts of one rank, wherever ranks draw over parts of the vocabulary."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.registry import PLUGINS
from tests.helpers.commands import on_forks
from tests.helpers.disturbed import lines
from tests.helpers.lanes import heavy
from tests.helpers.plugins import LAW, launch, with_law

pytestmark = pytest.mark.distributed(2)
SETTINGS = ("task=generate", "draft=near", "max_new_tokens=8", "model.dtype=fp32")
OVER_PARTS, GATHERED = 64, 48
"""Rows whose logits at K + 1 places have more than 4 MiB, and fewer."""
PROMPTS = [f"x = {number}" for number in range(OVER_PARTS)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 0.5}
"""With a penalty, so that ranks do not just exchange their best tokens."""


def texts(folder: Path, num_ranks: int, *words: str) -> list[list[int]]:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    where = (f"prompts={folder}/prompts.txt", f"run_dir={folder}/on {num_ranks}")
    ended = launch(folder, *SETTINGS, *words, *where, plugins=LAW, num_ranks=num_ranks)
    assert ended.returncode == 0, ended.stderr
    found = sorted(lines(folder / f"on {num_ranks}"), key=lambda line: int(line["index"]))
    assert "verification=greedy" in words or max(sum(line["accepted_lengths"]) for line in found) > 0
    return [line["token_ids"] for line in found]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("rule", "num_rows"),
    [
        ("speculative", OVER_PARTS),
        heavy("block", OVER_PARTS),
        heavy("coupled", OVER_PARTS),
        heavy("greedy", OVER_PARTS),
        heavy("speculative", GATHERED),
        heavy("block", GATHERED),
    ],
)
def test_a_draft_with_a_law_writes_the_texts_of_one_rank(rule: str, num_rows: int, tmp_path: Path) -> None:
    greedy = [f"sampling.{name}={value}" for name, value in GREEDY.items()] if rule == "greedy" else []
    words, folder = (f"verification={rule}", f"batch_size={num_rows}", *greedy), with_law(tmp_path)
    assert texts(folder, 2, *words) == texts(folder, 1, *words)


def from_python(folder: Path, rank: int) -> dict[str, list[tuple[int, ...]]]:
    """The texts of each rule."""
    sys.path[:0], os.environ[PLUGINS] = [str(folder)], LAW
    with load("tiny", "near", dtype="fp32") as pair:
        return {
            rule: [
                tuple(done.token_ids)
                for done in pair.generate(
                    PROMPTS,
                    batch_size=OVER_PARTS,
                    max_new_tokens=6,
                    verification=rule,
                    **(GREEDY if rule == "greedy" else {}),
                )
            ]
            for rule in ("speculative", "block", "coupled", "greedy")
        }


@pytest.mark.heavy
def test_the_library_writes_the_texts_of_one_rank_with_a_plugins_law(tmp_path: Path) -> None:
    act = partial(from_python, with_law(tmp_path))
    [wanted] = on_forks(1, act)
    assert on_forks(2, act) == [wanted] * 2
