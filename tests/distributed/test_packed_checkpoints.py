"""The command on the shipped pair, whose target is quantized by a tool."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.weights import hub
from tests.helpers.commands import run
from tests.helpers.disturbed import lines
from tests.helpers.packed_checkpoints import pack_checkpoint

PROMPT = "prompt=def f(x):"
GREEDY = ["task=generate", "sampling=greedy", "model.dtype=fp32", "max_new_tokens=24", PROMPT]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The shipped target in a layout, and the numbers that it stands for."""

    @cache
    def make(layout: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("packed")
        pack_checkpoint(hub.resolve(catalogue.load("tiny")), folder / "packed", folder / "numbers", layout)
        return folder / "packed", folder / "numbers"

    return make


def text(model: Path, run_dir: Path, *overrides: str, num_ranks: int = 1) -> str:
    done = run([*GREEDY, "model=local", f"model.path={model}", f"run_dir={run_dir}", *overrides], num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    (line,) = lines(run_dir)
    return str(line["text"])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layout", ["awq, small", "gptq, sorted", "fp8"])
@pytest.mark.distributed(2)
def test_a_packed_checkpoint_writes_the_text_of_its_numbers(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path, layout: str, num_ranks: int
) -> None:
    packed, numbers = made(layout)
    wanted = text(numbers, tmp_path / "numbers")
    assert text(packed, tmp_path / "plain", num_ranks=num_ranks) == wanted
    assert text(packed, tmp_path / "drafted", "draft=tiny-draft", num_ranks=num_ranks) == wanted
