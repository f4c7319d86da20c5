"""Structured texts on several ranks are those of one, wherever target and draft are."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import run

pytestmark = [pytest.mark.distributed(2), pytest.mark.heavy]
SETTINGS = [
    "task=generate", "num_samples=4", "prompt=x = ", "max_new_tokens=24", "model.dtype=fp32", "draft.model.dtype=fp32",
    "sampling.regex=[0-9a-z]{4,30}(a|b)+c", "batch_size=4",
]  # fmt: skip
PLACEMENTS: dict[str, list[str]] = {
    "tensor": [],
    "sharded": ["placement=sharded"],
    "replicated": ["placement=replicated"],
    "own_gpu": ["placement=own_gpu"],
    "replicas": ["placement=replicas", "batch_size=2"],
    "over shards": ["placement=sharded", "num_samples=64", "batch_size=64"],
}
"""The last has rows enough for draws over parts of the vocabulary (`planning.spec.draws_over_shards`)."""


def texts(run_dir: Path) -> list[str]:
    lines = [json.loads(line) for line in (run_dir / "run.jsonl").read_text().splitlines()]
    return [line["text"] for line in sorted(lines, key=lambda line: int(line["sample"]))]


@pytest.fixture(scope="module", params=["speculative", "coupled"])
def alone(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    rule = f"verification={request.param}"
    done = run([*SETTINGS, rule, f"run_dir={folder}"])
    assert done.returncode == 0, done.stderr
    return rule, texts(folder)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_two_ranks_write_the_texts_of_one(placement: str, alone: tuple[str, list[str]], tmp_path: Path) -> None:
    rule, wanted = alone
    done = run([*SETTINGS, rule, *PLACEMENTS[placement], f"run_dir={tmp_path}/run"], num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "run")[: len(wanted)] == wanted
