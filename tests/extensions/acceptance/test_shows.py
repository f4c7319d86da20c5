"""What 200 prompts of 64 tokens show: the rounds of 12 cells are those expected, and intervals hold fresh prompts."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llama_ssp import errors
from llama_ssp.extensions.acceptance.trace import Trace
from tests.extensions.acceptance.test_task import rounds_and_forecast
from tests.helpers.in_process import launch
from tests.helpers.other_tokenizer import TEXT, save_pair

pytestmark = pytest.mark.slow
READ = ("task=acceptance", "quiet=true", "device=cpu", "batch_size=40", "max_new_tokens=64")
OWN = ("model={folder}/target", "draft={folder}/draft", "draft.tokenizer=own", "ignore_eos=true")
CELLS = [
    ("tiny-draft", "speculative", 4, 0.8),
    ("tiny-draft", "speculative", 1, 1.0),
    ("tiny-draft", "block", 8, 0.5),
    ("tiny-draft", "block", 4, 1.0),
    ("tiny-draft", "coupled", 2, 0.8),
    ("tiny-draft", "coupled", 8, 0.5),
    ("tiny-eagle", "speculative", 2, 0.5),
    ("tiny-eagle", "block", 8, 0.8),
    ("tiny-eagle", "coupled", 4, 1.0),
    ("own", "speculative", 4, 1.0),
    ("own", "block", 2, 0.8),
    ("ngram", "speculative", 4, 0.8),
    ("tiny-draft", "tree=2x2x1", 3, 0.8),
    ("tiny-draft", "tree=4x2x2x1", 4, 0.5),
    ("tiny-eagle", "tree=3x2x1", 3, 1.0),
]


def prompts_file(file: Path, num_prompts: int, *, seed: int = 1) -> str:
    """Pieces of the package, of 120 characters."""
    generator = np.random.default_rng(seed)
    texts = [one.read_text() for one in sorted(Path(errors.__file__).parent.rglob("*.py"))]
    texts = [text for text in texts if len(text) > 600]
    chosen = [texts[int(number)] for number in generator.integers(len(texts), size=num_prompts)]
    pieces = [text[start : start + 120] for text in chosen for start in [int(generator.integers(len(text) - 400))]]
    file.write_text("".join(json.dumps({"prompt": piece}) + "\n" for piece in pieces))
    return f"prompts={file}"


def z_of(folder: Path, draft: str, rule: str, number: int, temperature: float) -> float:
    """By how many standard deviations the rounds of a run differ from those that its trace expects."""
    name = {"own": "local"}.get(draft, draft)
    words = [f"draft={draft}", prompts_file(folder / "prompts.jsonl", 200)]
    if draft == "own":
        save_pair(folder)
        pieces = [TEXT[place : place + 12] for place in range(0, 400, 2)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": piece}) + "\n" for piece in pieces))
        words = [word.format(folder=folder) for word in OWN] + words[1:]
    words += ["draft.history=0"] if draft == "ngram" else []
    rounds = [f"verification={rule}", f"speculation.num_draft_tokens={number}"]
    words += [f"speculation.{rule}"] if rule.startswith("tree=") else rounds
    words += [f"sampling.temperature={temperature}"]
    ended = launch(*READ, *words, f"run_dir={folder}/run").well()
    trace = Trace.read(folder / "run", asked="trace")
    measured, mean, deviation = rounds_and_forecast(ended, trace, name, rule, number)
    return (measured - mean) / max(deviation, 1e-6 * mean)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_the_rounds_of_a_cell_are_those_that_its_trace_expects(
    cell: tuple[str, str, int, float], tmp_path: Path
) -> None:
    """A false alarm is 1 in 16,000."""
    assert abs(z_of(tmp_path, *cell)) < 4


def intervals_of(folder: Path, *, num_prompts: int, size: int) -> tuple[float, float]:
    """How many of 200 intervals of 95 % hold the figure of all prompts, and the largest difference of two halves.

    The 200 cells are 20 sets of prompts by ten drafts, rules and K.
    """
    words = (*READ, "task.drafts=[tiny-draft,tiny-eagle,ngram]", prompts_file(folder / "prompts.jsonl", num_prompts))
    launch(*words, f"run_dir={folder}/run").well()
    trace, held, apart = Trace.read(folder / "run", asked="trace"), [], []
    settings = [("tiny-draft", "speculative", number) for number in (1, 2, 4, 8)]
    settings += [("tiny-draft", "block", 4), ("tiny-draft", "block", 8), ("tiny-draft", "coupled", 2)]
    settings += [("tiny-eagle", "speculative", 4), ("tiny-eagle", "block", 8), ("ngram", "speculative", 4)]
    for draft, rule, number in settings:
        replay = trace.replay(draft, 0, rule, 8)
        find = partial(replay.tokens_per_round, number)
        whole, _, _ = find()
        halves = [find(of_texts=replay.prompts_B % 2 == half)[0] for half in (0, 1)]
        apart.append(abs(halves[0] / halves[1] - 1))
        for first in range(0, 20 * size, size):
            _, low, high = find(of_texts=(replay.prompts_B >= first) & (replay.prompts_B < first + size))
            held.append(low <= whole <= high)
    return float(np.mean(held)), max(apart)


def test_intervals_hold_what_fresh_prompts_of_a_file_do(tmp_path: Path) -> None:
    """Halves of 400 prompts differ by less than 6 %; 90 to 99 % of 200 intervals hold the figure of all prompts."""
    share, apart = intervals_of(tmp_path, num_prompts=800, size=40)
    assert apart < 0.06
    assert 0.9 <= share <= 0.99
