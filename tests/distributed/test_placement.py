"""The same text on every number of ranks, and ranks that fail together."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llama_ssp.planning.collectives import round_messages
from llama_ssp.planning.spec import make_spec
from llama_ssp.settings.layout import lay_out
from llama_ssp.storage.formats import formats
from llama_ssp.weights import hub
from tests.distributed.cells import ALONE, CELLS, each_of
from tests.distributed.ranks import SYNTHETIC, Cell, FromPython, Quantized, Seen, Together, pair_of
from tests.helpers.lanes import heavy
from tests.helpers.models import library_attention
from tests.helpers.texts import few_part, library_greedy, part_at_a_near_tie
from tests.helpers.worlds import ONE_CORE


@cache
def library(pair: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """The library's own model of a pair's target, and its tokenizer."""
    path = hub.resolve(pair_of("tiny" if pair == SYNTHETIC else pair, folder)[0])
    attention = library_attention(AutoConfig.from_pretrained(path))
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32", **attention), AutoTokenizer.from_pretrained(path)


def check_texts(case: Cell, folder: Path, wanted: list[list[int]], texts: list[list[int]]) -> None:
    """Sampled texts are the same; greedy ones until the target has a near tie, which few texts have."""
    if case.temperature:
        assert few_part(wanted, texts)
        return
    model, tokenizer = library(case.pair, folder)
    prompts = [tokenizer(prompt).input_ids or [tokenizer.bos_token_id] for prompt in case.prompts]
    num_near_ties = sum(part_at_a_near_tie(model, *row) for row in zip(prompts, wanted, texts, strict=True))
    assert num_near_ties <= max(1, len(prompts) / 50)


def check_text_of_one_rank(case: Cell, pairs: Path, seen: Seen) -> None:
    """All ranks have one text, that of one rank alone."""
    (texts, *_), *others = seen(case)
    assert all(other.texts == texts for other in others)
    check_texts(case, pairs, seen(case.alone)[0].texts, texts)


def check_bytes(case: Cell, pairs: Path, seen: Seen) -> None:
    """As many bytes arrive in a round of all rows as the planner says, and in one of fewer rows their share."""
    arriving = [dict(placed.round_bytes) for placed in seen(case)]
    assert all(len(sizes) == len(placed.round_bytes) for sizes, placed in zip(arriving, seen(case), strict=True))
    job = make_spec(case.config(pairs), world_size=case.num_ranks, prompt_tokens=8, device="cpu")
    messages = round_messages(job, job.num_draft_tokens).values()
    planned = sum(message.received_bytes for message in messages)
    assert {rows: sum(sizes[rows] for sizes in arriving) for rows in arriving[0]} == {
        rows: rows * planned / job.batch_size for rows in arriving[0]
    }


def check_hops(case: Cell, seen: Seen) -> None:
    """Each rank of all stages but the first gets a message for each group of rows, or one where there are no groups."""
    layout = lay_out(case.config(Path()).placement, world_size=case.num_ranks, has_draft=bool(case.draft))
    later, number = {rank for ranks in layout.stages[1:] for rank in ranks}, case.groups or 1
    for rank, placed in enumerate(seen(case)):
        assert placed.hops == {(rows, min(number, rows) * (rank in later)) for rows, _ in placed.hops}


@pytest.mark.seconds
@each_of(ALONE)
def test_greedy_text_is_the_librarys(case: Cell, pairs: Path, seen: Seen) -> None:
    model, tokenizer = library(case.pair, pairs)
    [(texts, *_)] = seen(case)
    prompts = [tokenizer(prompt).input_ids or [tokenizer.bos_token_id] for prompt in case.prompts]
    wanted = [library_greedy(model, ids, num_tokens=len(text)) for ids, text in zip(prompts, texts, strict=True)]
    check_texts(case, pairs, wanted, texts)


@pytest.mark.seconds
@each_of(CELLS)
def test_text_is_that_of_one_rank_wherever_target_and_draft_sit(case: Cell, pairs: Path, seen: Seen) -> None:
    """On one rank it is the library's, if it is greedy."""
    check_text_of_one_rank(case, pairs, seen)


@each_of([cell for cell in CELLS if not (cell.adapts or cell.overlaps)])
def test_as_many_bytes_arrive_in_a_round_as_the_planner_says(case: Cell, pairs: Path, seen: Seen) -> None:
    check_bytes(case, pairs, seen)
    if case.stages > 1:
        check_hops(case, seen)


@pytest.mark.distributed(2)
@pytest.mark.parametrize("case", [Together(2), heavy(Together(3))], ids=str)
def test_texts_of_different_lengths_and_the_error_of_one_rank_reach_all(case: Together, seen: Seen) -> None:
    last = case.num_ranks - 1
    gathered = ["é" * rank for rank in range(case.num_ranks)]
    heard = f"CheckpointError: the last shard is missing (rank {last})"
    assert seen(case) == [(gathered, "from 0", heard)] * case.num_ranks


@pytest.mark.seconds
@pytest.mark.distributed(2)
@pytest.mark.parametrize(
    "case", [FromPython("sharded"), *map(heavy, (FromPython("own_gpu"), FromPython("stages")))], ids=str
)
def test_a_script_gets_the_texts_of_one_rank_on_all_and_refuses_what_differs(case: FromPython, seen: Seen) -> None:
    texts, log_probs, (refused,) = FromPython("one_rank", num_ranks=1).see(ONE_CORE, Path())
    for found, found_log_probs, sentences in seen(case):
        assert found == texts
        assert found_log_probs == pytest.approx(log_probs, abs=1e-4)
        assert [sentence.partition(":")[0] for sentence in sentences] == [
            "the ranks were given different arguments, and a call is the same on all of them",
            refused,
        ]


# One family for the lean decoder, in all forms, and one for the library's modules.
QUANTIZED = [
    *(Quantized("llama", name) for name, form in formats().items() if not form.is_stored_alone),
    *(Quantized("gpt_neox", form) for form in ("int8", "int4_weight_only", "nf4")),
]


@pytest.mark.seconds
@pytest.mark.distributed(2)
@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_quantized_logits_come_within_the_error_of_the_same_precision_on_one_process(
    case: Quantized, pairs: Path, seen: Seen
) -> None:
    on_ranks = seen(case)
    exact, quantized = (case.on_one_rank(pairs, form) for form in ("none", case.form))
    error = float((quantized - exact).square().mean().sqrt()) if case.form != "none" else 1e-5
    for logits in on_ranks:
        assert float((quantized.new_tensor(logits) - quantized).square().mean().sqrt()) <= error
