"""A target that drafts for itself on two ranks writes the texts of one, and a run scores the copy that drafted."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

pytestmark = [pytest.mark.distributed(2), pytest.mark.heavy]
SETTINGS = [
    "task=generate",
    "num_samples=3",
    "prompt=def f(x):",
    "max_new_tokens=24",
    "model.dtype=fp32",
    "batch_size=64",
    "draft=self",
]
DRAFTS = {
    "window": ["draft.window=8", "draft.sinks=2"],
    "layers, rows enough for draws over shards": ["draft.layers=8", "num_samples=64"],
    # Each rank rounds its own slices, so that drafts differ.
    "a copy": ["draft.quantization=int8_weight_only", "draft.layers=9", "verification=coupled"],
    "both, greedy": ["draft.window=8", "draft.layers=[0,1,2,3,4,5,6,8,9]", "sampling=greedy", "num_samples=1"],
}


def texts(run_dir: Path) -> list[str]:
    lines = [json.loads(line) for line in (run_dir / "run.jsonl").read_text().splitlines()]
    return [line["text"] for line in sorted(lines, key=lambda line: int(line["sample"]))]


@pytest.mark.parametrize("draft", list(DRAFTS))
def test_two_ranks_write_the_texts_of_one(draft: str, tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        folder = tmp_path / f"run{number}"
        done = run([*SETTINGS, *DRAFTS[draft], f"run_dir={folder}"], num_ranks=number)
        assert done.returncode == 0, done.stderr
        found.append(texts(folder))
    assert found[0] == found[1]


def test_the_distribution_suite_scores_the_copy_that_drafted(tmp_path: Path) -> None:
    """Of the target's own layers no probability differs from the target's, and the suite does not compare them."""
    words = ["task=evaluate", "suite=distribution", "num_samples=20", "max_new_tokens=4", "prompt=def f(x):"]
    done = run([*words, "draft=self", "draft.quantization=int4_weight_only", f"run_dir={tmp_path}/run"])
    assert done.returncode == 0, done.stderr
    evaluation = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    assert evaluation["passed"]
    assert "standard errors, log target minus log draft" in {measure["name"] for measure in evaluation["measures"]}


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "glm4_moe"])
def test_a_copy_of_layers_on_library_modules_writes_the_greedy_text_of_plain_decoding(
    kind: str, tmp_path: Path
) -> None:
    """On one rank and on two, where each copies its own slices."""
    build_checkpoint(tmp_path / "model", kind, num_hidden_layers=4)
    save_tokenizer(tmp_path / "model", VOCAB_SIZE)
    words = [
        "task=generate",
        "model=local",
        f"model.path={tmp_path}/model",
        "model.dtype=fp32",
        "sampling=greedy",
        "prompt=t5 t9 t3 t14",
        "max_new_tokens=24",
        "ignore_eos=true",
    ]
    found = []
    for draft in (["draft=none"], ["draft=self", "draft.quantization=int8_weight_only"]):
        for number in (1, 2):
            folder = tmp_path / f"{draft[0]}{number}"
            done = run([*words, *draft, f"run_dir={folder}"], num_ranks=number)
            assert done.returncode == 0, done.stderr
            [line] = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
            found.append(line)
    assert len({tuple(line["token_ids"]) for line in found}) == 1
    assert len(found[0]["token_ids"]) == 24
    assert all(sum(line["accepted_lengths"]) > 12 for line in found[2:])
