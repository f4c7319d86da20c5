"""The same text on every number of ranks, and ranks that fail together."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llama_ssp.planning.spec import make_job
from llama_ssp.planning.timing import round_messages
from llama_ssp.weights import hub
from tests.distributed.cells import (
    CELLS,
    MOST_DEFAULT_RANKS,
    MOST_HEAVY_RANKS,
    PAIRS,
    SIZES,
    Cell,
    lane_of,
    on_one_rank,
)
from tests.distributed.ranks import CELL_TOKENS, NUM_NEW_TOKENS, SYNTHETIC, cell_config, pair_of, prompts_of
from tests.helpers.models import library_attention
from tests.helpers.texts import few_part, library_greedy, part_at_a_near_tie

Seen = list[dict[str, Any]]
LANES = {"default": [], "heavy": [pytest.mark.heavy], "slow": [pytest.mark.slow]}


def marks(num_ranks: int, cell: Cell | None = None) -> list[pytest.MarkDecorator]:
    """What starts the ranks of a test, and its lane."""
    heavy = num_ranks > MOST_DEFAULT_RANKS or (cell is not None and cell.heavy)
    slow = num_ranks > MOST_HEAVY_RANKS or (cell is not None and cell.slow)
    lane = [pytest.mark.slow] if slow else [pytest.mark.heavy] * heavy
    return [pytest.mark.distributed(num_ranks), *lane]


sizes = pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=marks(n)) for n in SIZES])
pairs_and_sizes = pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, n, marks=[pytest.mark.distributed(n), *LANES[lane_of(name, n)]])
        for n in SIZES
        for name in PAIRS
    ],
)


def cells(*, adapts: tuple[bool, ...] = (False, True)) -> pytest.MarkDecorator:
    """All cells, or those that adapt or do not."""
    cases = [
        pytest.param(cell, num_ranks, marks=marks(num_ranks, cell), id=str(cell))
        for num_ranks, row in CELLS.items()
        for cell in row
        if cell.adapts in adapts
    ]
    return pytest.mark.parametrize(("cell", "num_ranks"), cases)


def library(name: str, folder: Path) -> tuple[PreTrainedModel, list[list[int]]]:
    """The library's own model of a pair's target, and its prompts as ids."""
    path = hub.resolve(pair_of(name, folder)[0])
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(prompt).input_ids or [tokenizer.bos_token_id] for prompt in prompts_of(name)]
    attention = library_attention(AutoConfig.from_pretrained(path))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="float32", **attention)
    return model, prompts


@cache
def library_texts(name: str, folder: Path) -> list[list[int]]:
    """What the library's own model makes of a pair's prompts, for all numbers of ranks."""
    model, prompts = library(name, folder)
    return [library_greedy(model, prompt_ids, num_tokens=NUM_NEW_TOKENS) for prompt_ids in prompts]


@pairs_and_sizes
def test_greedy_text_is_the_librarys_on_every_number_of_ranks(
    name: str, num_ranks: int, pairs: Path, launched: Callable[[int], Seen]
) -> None:
    model, prompts = library(name, pairs)
    num_near_ties = 0
    texts = launched(num_ranks)[0][f"{name} at 0.0"]
    for prompt_ids, wanted, ids in zip(prompts, library_texts(name, pairs), texts, strict=True):
        num_near_ties += part_at_a_near_tie(model, prompt_ids, wanted, ids)
    assert num_near_ties <= max(1, len(prompts) / 50)


@sizes
def test_synthetic_weights_have_the_shipped_models_text_on_every_number_of_ranks(
    num_ranks: int, launched: Callable[[int], Seen], pairs: Path
) -> None:
    model, _ = library("tiny", pairs)
    tokenizer: Any = AutoTokenizer.from_pretrained(hub.resolve(pair_of("tiny", pairs)[0]))
    prompts = [tokenizer(prompt).input_ids for prompt in prompts_of(SYNTHETIC)]
    texts = launched(num_ranks)[0][SYNTHETIC]
    wanted = [library_greedy(model, prompt_ids, num_tokens=NUM_NEW_TOKENS) for prompt_ids in prompts]
    parted = [part_at_a_near_tie(model, *row) for row in zip(prompts, wanted, texts, strict=True)]
    assert sum(parted) <= 1


@pairs_and_sizes
def test_sampled_text_is_the_same_on_every_number_of_ranks(
    name: str, num_ranks: int, launched: Callable[[int], Seen]
) -> None:
    alone, joint = (launched(n)[0][f"{name} at 0.8"] for n in (1, num_ranks))
    assert few_part(alone, joint)


@cells()
def test_greedy_text_is_that_of_one_rank_wherever_target_and_draft_sit(
    cell: Cell, num_ranks: int, pairs: Path, launched: Callable[[int], Seen]
) -> None:
    model, prompts = library(cell.pair, pairs)
    alone, placed = texts_of(cell, num_ranks, 0.0, launched)
    triples = zip(prompts, alone, placed, strict=True)
    num_near_ties = sum(part_at_a_near_tie(model, prompt_ids, wanted, ids) for prompt_ids, wanted, ids in triples)
    assert num_near_ties <= max(1, len(prompts) / 50)


@cells()
def test_sampled_text_is_that_of_one_rank_wherever_target_and_draft_sit(
    cell: Cell, num_ranks: int, launched: Callable[[int], Seen]
) -> None:
    assert few_part(*texts_of(cell, num_ranks, 0.8, launched))


def texts_of(
    cell: Cell, num_ranks: int, temperature: float, launched: Callable[[int], Seen]
) -> tuple[list[list[int]], list[list[int]]]:
    """What one rank makes of a pair, as far as the cells go, and what a cell makes of it."""
    alone = launched(1)[0]
    if cell.rule == "speculative" and not cell.tree:
        wanted = [ids[:CELL_TOKENS] for ids in alone[f"{cell.pair} at {temperature}"]]
    else:
        wanted = alone[f"{on_one_rank(cell)} at {temperature}"]["texts"]
    return wanted, launched(num_ranks)[0][f"{cell} at {temperature}"]["texts"]


@cells(adapts=(False,))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_as_many_bytes_arrive_in_a_round_as_the_planner_says(
    cell: Cell, temperature: float, num_ranks: int, pairs: Path, launched: Callable[[int], Seen]
) -> None:
    arriving = [seen[f"{cell} at {temperature}"]["round_bytes"] for seen in launched(num_ranks)]
    assert all(len(sizes) == 1 for sizes in arriving), "every round of a cell has the same messages"
    job = make_job(cell_config(cell, pairs, temperature), world_size=num_ranks, prompt_tokens=8, device="cpu")
    messages = round_messages(job, job.num_draft_tokens).values()
    assert sum(size for (size,) in arriving) == sum(message.received_bytes for message in messages)


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=marks(n)) for n in CELLS])
def test_every_rank_has_the_same_text(num_ranks: int, launched: Callable[[int], Seen]) -> None:
    def texts(seen: dict[str, Any]) -> dict[str, Any]:
        return {key: value["texts"] if isinstance(value, dict) else value for key, value in seen.items() if " " in key}

    first, *others = map(texts, launched(num_ranks))
    assert first
    assert all(other == first for other in others)


@sizes
def test_an_error_of_one_rank_is_raised_on_all_of_them(num_ranks: int, launched: Callable[[int], Seen]) -> None:
    where = f" (rank {num_ranks - 1})" if num_ranks > 1 else ""
    for seen in launched(num_ranks):
        assert seen["error"] == f"CheckpointError: the last shard is missing{where}"


@sizes
def test_texts_of_different_lengths_reach_every_rank(num_ranks: int, launched: Callable[[int], Seen]) -> None:
    for seen in launched(num_ranks):
        assert seen["gathered"] == ["é" * rank for rank in range(num_ranks)]
        assert seen["broadcast"] == f"from {num_ranks - 1}"
