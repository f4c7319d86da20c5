"""Rounds that draft trees: plain text, whole paths where the draft is right, in any batch and by any executor."""

from collections.abc import Sequence

import pytest
import torch

from llama_ssp import catalogue
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.executors import Recorder
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, ids_of, make_decoder, requests_of
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import first, heavy, pairs
from tests.helpers.prefix_runner import PrefixRunner

PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 1, 2), (3, 3), (9, 1))
SHAPES = ("1", "1x1x1", "3", "2x2x1", "3x2", "2x1x3")
DYNAMIC = "dynamic-7x3x3"
NUM_NEW = 17


def decoded(
    target: Runner,
    draft: Runner | None,
    shape: str | None,
    *,
    temperature: float,
    batch_size: int = 1,
    replay: Recorder | bool = True,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    num_new: int = NUM_NEW,
    ngram: bool = False,
) -> list[RowCompletion]:
    """Completions of prompts, in their order; without a shape of chains of three tokens."""
    decoder = make_decoder(
        target, draft, temperature=temperature, batch_size=batch_size, replay=replay, tree=shape, ngram=ngram
    )
    return complete(decoder, requests_of(prompts, num_new))


@pytest.mark.parametrize("batch_size", [heavy(1), 3])
@pytest.mark.parametrize(
    ("shape", "ngram"), [(DYNAMIC, False), *((shape, ngram) for shape in SHAPES for ngram in (False, True))]
)
def test_greedy_text_is_that_of_plain_decoding(shape: str, ngram: bool, batch_size: int) -> None:
    target, draft = PrefixRunner(), None if ngram else PrefixRunner(seed=1)
    found = decoded(target, draft, shape, temperature=0.0, batch_size=batch_size, ngram=ngram)
    assert ids_of(found) == target.texts(requests_of(PROMPTS, NUM_NEW))
    assert not ngram or any(sum(each.accepted_lengths) for each in found)


@pairs(shape=[*SHAPES], temperature=[0.0, 0.9])
def test_of_a_draft_that_is_the_target_whole_paths_are_accepted(shape: str, temperature: float) -> None:
    found = decoded(PrefixRunner(), PrefixRunner(), shape, temperature=temperature, batch_size=2)
    depth = len(shape.split("x"))
    for each in found:
        *full, _ = each.accepted_lengths  # the last round ends at the limit
        assert set(full) <= {depth}
        assert len(each.token_ids) == NUM_NEW


@pytest.mark.seconds
@pytest.mark.parametrize("shape", first(["2x2x1", "3x2", DYNAMIC]))
def test_sampled_text_depends_neither_on_the_batch_nor_on_the_executor(shape: str) -> None:
    """Nor do traces depend on the bucket of the cache, which grows here."""

    def texts(*, batch_size: int, replay: bool) -> list[tuple[list[int], list[int]]]:
        target, draft = PrefixRunner(sharpness=1.0), PrefixRunner(seed=1, sharpness=1.0)
        found = decoded(target, draft, shape, temperature=0.9, batch_size=batch_size, replay=replay, num_new=90)
        return [(each.token_ids, each.accepted_lengths) for each in found]

    wanted = texts(batch_size=1, replay=False)
    assert any(sum(accepted) for _, accepted in wanted)
    assert texts(batch_size=3, replay=False) == wanted
    assert texts(batch_size=5, replay=True) == wanted


@pytest.mark.seconds
def test_sampled_text_by_look_up_depends_neither_on_the_batch_nor_on_the_executor() -> None:
    """Nor do traces depend on the number of slots, which the second text makes larger."""
    texts = []
    for batch_size, replay in ((1, False), (1, True), (5, True)):
        decoder = make_decoder(
            PrefixRunner(sharpness=1.0),
            None,
            temperature=0.9,
            batch_size=batch_size,
            replay=replay,
            ngram=True,
            tree="3x2x1",
        )
        for num_new in (30, 90):
            done = complete(decoder, requests_of(PROMPTS, num_new))
            texts.append([(each.token_ids, each.accepted_lengths) for each in done])
    assert texts[:2] == texts[2:4] == texts[4:]
    assert any(sum(accepted) for _, accepted in texts[1])


@pytest.mark.seconds
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_of_trees_are_traced_on_several_ranks(temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that does not decide records them with a path that is not there."""
    requests = requests_of(PROMPTS, NUM_NEW)

    def one_rank(comm: ThreadComm) -> list[list[int]]:
        decoder = make_decoder(
            PrefixRunner(), PrefixRunner(seed=1), comm=comm, temperature=temperature, batch_size=2, tree="2x2x1"
        )
        return ids_of(complete(decoder, requests))

    wanted = one_rank(thread_comms(1)[0])
    assert on_ranks(thread_comms(2), one_rank) == [wanted] * 2
    assert not caplog.records


def test_a_chain_written_as_a_tree_has_the_text_of_a_chain_that_is_verified_as_a_block() -> None:
    target, draft = PrefixRunner(sharpness=1.0), PrefixRunner(seed=1, sharpness=1.0)
    requests = requests_of(PROMPTS, NUM_NEW)
    as_chain = complete(make_decoder(target, draft, temperature=0.9, rule_name="block"), requests)
    as_tree = decoded(target, draft, "1x1x1", temperature=0.9)
    assert ids_of(as_tree) == ids_of(as_chain)


@pytest.mark.seconds
def test_a_dynamic_tree_accepts_more_than_a_static_one_of_as_many_nodes() -> None:
    """The drafts are certain in both, and of a draft that is nearly right."""
    means = []
    for shape in ("2x1x1x1", "dynamic-8x4x2"):
        found = decoded(_shipped("tiny"), _shipped("tiny-draft"), shape, temperature=0.0, prompts=((31, 77, 90),))
        means.append(sum(found[0].accepted_lengths) / len(found[0].accepted_lengths))
    assert means[1] >= means[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_lean_decoder_reads_trees_as_it_reads_texts(temperature: float) -> None:
    """A shipped model that drafts for itself is right on every path; its text is the plain one."""
    target, draft = (_shipped("tiny-draft") for _ in range(2))
    prompts = (tuple(range(30, 60)), (77, 78, 90))
    found = decoded(target, draft, "2x2x1", temperature=temperature, batch_size=2, prompts=prompts)
    for each in found:
        *full, _ = each.accepted_lengths
        assert set(full) == {3}
    if temperature == 0:
        dynamic = decoded(target, draft, DYNAMIC, temperature=0.0, batch_size=2, prompts=prompts)
        assert ids_of(dynamic) == ids_of(found)
        plain = decoded(target, None, None, temperature=0.0, prompts=prompts)
        assert ids_of(plain) == ids_of(found)


def _shipped(name: str) -> LeanRunner:
    found = load_model(Loading(inspect(hub.resolve(catalogue.load(name))), dtype=torch.float32))
    assert isinstance(found, LeanRunner)
    return found
