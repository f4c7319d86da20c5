"""What compares number formats with other libraries, without those libraries."""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks import peers
from benchmarks.by_format import checkpoints, gguf_files, lean_loop, lines, turns
from benchmarks.by_format.lines import LLAMA_CPP, OPENVINO, OURS, PLAIN, SPECULATIVE, Figures
from benchmarks.by_format.process import LibraryProcess
from llama_ssp.errors import ConfigError
from llama_ssp.models.linear import half_scale

PYTHON = Path(sys.executable)
FAKE = "tests.helpers.counting_library"
TARGET = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1], [0.0, 0.5, 0.5, 0.0]])
DRAFT = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.7, 0.1, 0.1], [0.25, 0.25, 0.1, 0.4], [0.5, 0.0, 0.0, 0.5]])


class Table:
    """A model of four tokens, whose next token depends on the last one; it refuses to run on a cache with holes."""

    def __init__(self, probabilities: "np.ndarray[tuple[int, int], np.dtype[np.float64]]", seed: int) -> None:
        self._rows = probabilities.astype(np.float32)
        self._draws = np.random.default_rng(seed)
        self.cache: list[int] = []
        self.last: list[int] = []

    def decode(self, tokens: Sequence[int], *, first: int, all_scored: bool = False) -> None:
        assert first == len(self.cache)
        self.cache += tokens
        self.last = list(tokens) if all_scored else list(tokens[-1:])

    def draw(self) -> int:
        return lean_loop.drawn(self.probabilities(), self._draws)

    def probabilities(self, place: int = -1) -> lean_loop.Probabilities:
        row: lean_loop.Probabilities = self._rows[self.last[place]]
        return row

    def forget(self, *, first: int) -> None:
        del self.cache[first:]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
def test_a_draft_leaves_the_distribution_of_the_target(num_draft_tokens: int) -> None:
    """A transition's share is off by more than 5 standard deviations less than once in 10^5 runs (the seed is fixed).

    A rule that kept every drafted token would be off by 100.
    """
    draws, counts = np.random.default_rng(5), np.zeros((4, 4))
    target, draft = Table(TARGET, 1), Table(DRAFT, 2)
    tokens, num_rounds = lean_loop.speculative(
        target, draft, [3, 1], num_new_tokens=20_000, num_draft_tokens=num_draft_tokens, draws=draws
    )
    for before, after in pairwise(tokens):
        counts[before, after] += 1
    totals = counts.sum(1, keepdims=True)
    deviations = np.sqrt(TARGET * (1 - TARGET) / totals) + 1e-9
    assert np.all(np.abs(counts / totals - TARGET) < 5 * deviations)
    assert len(tokens) == 20_000
    assert num_rounds < 19_999
    assert target.cache == [3, 1, *tokens[:-1]]
    assert draft.cache == target.cache[: len(draft.cache)]


def test_a_draft_that_equals_the_target_is_kept_whole() -> None:
    found, num_rounds = lean_loop.speculative(
        Table(TARGET, 1), Table(TARGET, 2), [0], num_new_tokens=16, num_draft_tokens=4, draws=np.random.default_rng(1)
    )
    assert (len(found), num_rounds) == (16, 3)
    assert lean_loop.plain(Table(TARGET, 1), [0], num_new_tokens=16)[1] == 15


def test_llama_cpp_turns_neighbours_as_transformers_turns_halves() -> None:
    num_heads, head_dim, angles = 2, 8, np.linspace(0.3, 1.1, 4)
    x = np.random.default_rng(1).normal(size=(num_heads * head_dim, 1))
    first, second = np.split(x.reshape(num_heads, head_dim), 2, axis=1)
    by_halves = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=1
    ).reshape(x.shape)
    pairs = gguf_files.pairs_as_neighbours(x, num_heads).reshape(num_heads, -1, 2)
    left, right = pairs[..., 0], pairs[..., 1]
    by_neighbours = np.stack(
        [left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)], axis=2
    ).reshape(x.shape)
    np.testing.assert_allclose(gguf_files.pairs_as_neighbours(by_halves, num_heads), by_neighbours)


def test_every_tensor_of_the_pair_has_a_name_in_llama_cpp(tmp_path: Path) -> None:
    names = load_file(checkpoints.stored("tiny", below=tmp_path).fp32 / "model.safetensors")
    found = {gguf_files.gguf_name(name) for name in names}
    assert len(found) == len(names)
    assert {"blk.9.attn_q.weight", "token_embd.weight", "output_norm.weight", "output.weight"} <= found


def test_a_widened_checkpoint_holds_the_same_numbers(tmp_path: Path) -> None:
    model = checkpoints.stored("tiny-draft", below=tmp_path)
    stored, widened = (load_file(folder / "model.safetensors") for folder in (model.halves, model.fp32))
    assert stored.keys() == widened.keys()
    assert all(torch.equal(widened[name], tensor.float()) for name, tensor in stored.items())
    assert {tensor.dtype for tensor in widened.values()} == {torch.float32}
    assert json.loads((model.fp32 / "config.json").read_text())["dtype"] == "float32"
    assert checkpoints.stored("tiny-draft", below=tmp_path) == model


def test_weights_for_our_fp32_are_held_by_no_16_bits(tmp_path: Path) -> None:
    model = checkpoints.stored("tiny-draft", below=tmp_path)
    weights = load_file(model.all_bits / "model.safetensors")
    assert all(half_scale(weight) is None for weight in weights.values() if weight.ndim > 1)
    near = load_file(model.fp32 / "model.safetensors")
    assert all(torch.allclose(weights[name], weight, rtol=1e-3, atol=0) for name, weight in near.items())


@pytest.mark.seconds
def test_a_process_answers_whatever_its_library_prints() -> None:
    with LibraryProcess(PYTHON, FAKE, num_threads=1) as process:
        assert process.load(form="fp32", folders=["a"], converted="b", num_threads=1) == "counting 1.0"
        asked = {"form": "fp32", "num_new_tokens": 9, "temperature": 0.8, "seed": 1}
        for num_draft_tokens, rounds in ((None, 8), (4, 4)):
            seconds, completed = process.complete([[1, 2], [3]], num_draft_tokens=num_draft_tokens, **asked)
            assert [each.num_rounds for each in completed] == [rounds] * 2
            assert seconds > 0
        assert process.idle_s > 0


@pytest.mark.seconds
def test_a_library_that_fails_or_ends_is_named_with_its_words() -> None:
    with LibraryProcess(PYTHON, FAKE, num_threads=1) as process:
        with pytest.raises(RuntimeError, match=r"counting_library.*ValueError: no such form"):
            process.load(form="fails", folders=[], converted="", num_threads=1)
        with pytest.raises(RuntimeError, match=r"counting_library.*no memory left"):
            process.load(form="ends", folders=[], converted="", num_threads=1)


@pytest.mark.slow
def test_all_libraries_are_measured_in_one_run_of_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.by_format.turns.ADAPTERS", dict.fromkeys(lines.ADAPTERS, FAKE))
    monkeypatch.setattr("benchmarks.by_format.turns.stored", lambda name: checkpoints.stored(name, below=tmp_path))
    setting = turns.Setting(
        models=["tiny", "tiny-draft"], prompts=["import os"], num_new_tokens=5, num_draft_tokens=2, temperature=0.8
    )
    row = turns.measure(setting, dict.fromkeys(lines.ADAPTERS, PYTHON), num_repetitions=1)
    figures = lines.figures_of(row)
    assert [each.label for each in figures] == [line.label for line in lines.LINES]
    assert all(set(each.ms) == {PLAIN, SPECULATIVE} for each in figures)
    assert {each.tokens_per_round for each in figures if each.library != OURS} == {2.0}
    assert all(1 <= (each.tokens_per_round or 0) <= 3 for each in figures)
    assert row["libraries"] == dict.fromkeys([LLAMA_CPP, OPENVINO], "counting 1.0")
    lines.show(row, Console(quiet=True))


def figures(library: str, label: str, *ms: float) -> Figures:
    return Figures(column="8 bits", library=library, label=label, ms={PLAIN: ms}, tokens_per_round=None)


def test_the_goal_holds_our_best_line_against_the_best_of_the_others() -> None:
    found = lines.goals(
        [
            figures(OURS, "slow", 4.0, 4.0, 9.0), figures(OURS, "fast", 1.0, 2.0, 8.0),
            figures(LLAMA_CPP, "best", 2.0, 2.0, 4.0), figures(OPENVINO, "worst", 9.0, 1.0, 9.0),
        ]
    )  # fmt: skip
    assert [(goal.name, goal.measured, goal.holds) for goal in found] == [("8 bits, plain: fast / best", 1.0, False)]
    assert lines.goals([figures(OURS, "alone", 1.0)]) == []


def test_a_library_needs_a_known_name_and_an_interpreter(tmp_path: Path) -> None:
    assert peers.pythons([f"{OPENVINO}={PYTHON}"]) == {OPENVINO: PYTHON}
    for wrong in (f"vllm={PYTHON}", OPENVINO, f"{OPENVINO}={tmp_path}"):
        with pytest.raises(ConfigError, match=r"llama\.cpp=PYTHON or openvino=PYTHON is required"):
            peers.pythons([wrong])


def test_a_page_says_every_figure_of_the_newest_row_of_each_target() -> None:
    made_by = {
        "versions": {"torch": "2"}, "processor": "abacus", "libraries": {OPENVINO: "openvino 3"}, "num_prompts": 1,
        "num_new_tokens": 8, "num_draft_tokens": 4, "temperature": 0.8, "num_threads": 2, "num_repetitions": 1,
    }  # fmt: skip

    def row(model: str, ms: float, *drafts: str) -> dict[str, object]:
        line = {"column": "fp32", "library": OURS, "label": "ours", "ms": {PLAIN: [ms]}, "tokens_per_round": None}
        return {**made_by, "models": [model, *drafts], "lines": [line, line | {"library": OPENVINO, "label": "theirs"}]}

    text = lines.page([row("old", 1.25), row("new", 3.0), row("old", 2.5, "draft")])
    assert "| fp32 | ours | 2.50 |" in text
    assert "| fp32 | ours | 3.00 |" in text
    assert "1.25" not in text
    assert "openvino 3" in text
    assert "fp32, plain: ours / theirs 1.00" in text
