"""What a plan counts for prompt look-up."""

from dataclasses import replace

import pytest

from llama_ssp.extensions.copies.records import NgramConfig
from llama_ssp.machines import hardware
from llama_ssp.planning.acceptance import tree_tokens
from llama_ssp.planning.collectives import round_messages
from llama_ssp.planning.timing import CostModel
from llama_ssp.settings.trees import tree_shape
from tests.helpers.extensions import module_of
from tests.helpers.lengths import FINDER
from tests.helpers.planning import make_spec, times_of

A100 = hardware.load("8xa100_80gb")


def test_a_tree_by_look_up_costs_its_verification_and_the_kernels_of_a_search() -> None:
    plain, tree = make_spec("13B", num_ranks=2, num_draft_tokens=9), tree_shape("3x1x1")
    spec = replace(plain, free_draft="ngram", tree=tree, free_settings=NgramConfig(kind="ngram"))
    timed, clock = times_of(spec, A100), CostModel(spec, A100)
    searched_s = spec.free_terms.num_kernels * A100.kernel_s
    assert timed.round_s == pytest.approx(clock.forward(clock.target, 10).total_s + clock.verdict_s(9) + searched_s)
    beside = replace(make_spec("13B", "7B"), free_settings=spec.free_settings, chooser=FINDER)
    own_s = times_of(replace(beside, free_settings=None), A100).round_s
    assert times_of(beside, A100).round_s - own_s == pytest.approx(beside.free_terms.num_kernels * A100.kernel_s)
    assert replace(beside, chooser=None).free_terms.num_kernels == 0, "a fallback is for a K that is chosen"
    assert timed.tokens_per_round == pytest.approx(tree_tokens((0.8,) * 3, tree), rel=0.01)
    assert round_messages(spec, 0) == round_messages(plain, 0)


def test_a_search_names_it_with_its_settings() -> None:
    search = module_of("advice.search").search
    machine = replace(hardware.load("g5_12xlarge"), num_gpus=1)
    found = next(
        one
        for one in search(make_spec("7B", free_draft="ngram"), machine)
        if (one["draft"], one["quantization"]) == ("ngram", "fp16")
    )
    assert found["settings"] == ("model=7B", "draft=ngram", f"speculation.num_draft_tokens={found['num_draft_tokens']}")
