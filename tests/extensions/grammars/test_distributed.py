"""Structured texts on several ranks are those of one, wherever target and draft are."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.extensions.grammars.schemas import SCHEMAS
from tests.helpers.commands import run
from tests.helpers.lanes import slow

pytestmark = [pytest.mark.distributed(2), pytest.mark.heavy]
SETTINGS = [
    "task=generate",
    "num_samples=4",
    "prompt=x = ",
    "max_new_tokens=24",
    "model.dtype=fp32",
    "draft.model.dtype=fp32",
    "sampling.regex=[0-9a-z]{4,30}(a|b)+c",
    "batch_size=4",
]
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


@pytest.mark.parametrize("every", [25, slow(1)])
def test_documents_of_two_ranks_in_a_batch_are_those_of_one_alone(every: int, tmp_path: Path) -> None:
    """Greedy documents of the schemas, as a batch file; finished ones validate."""
    schemas, file = SCHEMAS[::every], tmp_path / "batch.jsonl"
    asked: dict[str, Any] = {"prompt": "data = ", "max_tokens": 64, "temperature": 0}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": asked | {"guided_json": schema | {"x-guidance": {"whitespace_flexible": False}}},
        }
        for number, schema in enumerate(schemas)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    settings = ["task=generate", f"prompts={file}", "model.dtype=fp32", "draft.model.dtype=fp32"]

    def documents(*how: str, num_ranks: int) -> dict[str, tuple[str, str]]:
        folder = tmp_path / f"run_{num_ranks}"
        done = run([*settings, *how, f"run_dir={folder}"], num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in (folder / "batch_output.jsonl").read_text().splitlines()]
        choices = {answer["custom_id"]: answer["response"]["body"]["choices"][0] for answer in answers}
        return {number: (choice["text"], choice["finish_reason"]) for number, choice in choices.items()}

    alone = documents("batch_size=1", num_ranks=1)
    assert documents("batch_size=8", num_ranks=2) == alone
    assert len(alone) == len(schemas)
    ended = {number: text for number, (text, reason) in alone.items() if reason == "stop"}
    assert len(ended) >= 0.7 * len(schemas)
    for number, text in ended.items():
        jsonschema.validate(json.loads(text), schemas[int(number)])
