"""The same text on every number of ranks, and ranks that fail together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llama_ssp.models import hub
from tests.distributed.ranks import NUM_NEW_TOKENS, PAIRS, SYNTHETIC, pair_of, prompts_of
from tests.helpers.texts import few_part, library_greedy, part_at_a_near_tie

Seen = list[dict[str, Any]]
sizes = pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.distributed(n)) for n in (1, 2, 3, 4)])


def library(name: str, folder: Path) -> tuple[PreTrainedModel, list[list[int]]]:
    """The library's own model of a pair's target, and its prompts as ids."""
    path = hub.resolve(pair_of(name, folder)[0])
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(prompt).input_ids or [tokenizer.bos_token_id] for prompt in prompts_of(name)]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    return model, prompts


@sizes
@pytest.mark.parametrize("name", PAIRS)
def test_greedy_text_is_the_librarys_on_every_number_of_ranks(
    name: str, num_ranks: int, pairs: Path, launched: Callable[[int], Seen]
) -> None:
    model, prompts = library(name, pairs)
    num_near_ties = 0
    texts = launched(num_ranks)[0][f"{name} at 0.0"]
    for prompt_ids, ids in zip(prompts, texts, strict=True):
        wanted = library_greedy(model, prompt_ids, num_tokens=NUM_NEW_TOKENS)
        num_near_ties += part_at_a_near_tie(model, prompt_ids, wanted, ids)
    assert num_near_ties <= len(prompts) / 50


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


@sizes
@pytest.mark.parametrize("name", PAIRS)
def test_sampled_text_is_the_same_on_every_number_of_ranks(
    name: str, num_ranks: int, launched: Callable[[int], Seen]
) -> None:
    alone, together = (launched(n)[0][f"{name} at 0.8"] for n in (1, num_ranks))
    assert few_part(alone, together)


@sizes
def test_text_does_not_depend_on_where_the_draft_sits(num_ranks: int, launched: Callable[[int], Seen]) -> None:
    seen = launched(num_ranks)[0]
    assert few_part(seen["draft on the last rank"], seen["tiny at 0.8"])


@sizes
def test_every_rank_has_the_same_text(num_ranks: int, launched: Callable[[int], Seen]) -> None:
    first, *others = launched(num_ranks)
    for other in others:
        assert {key: other[key] for key in other if " " in key} == {key: first[key] for key in first if " " in key}


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
