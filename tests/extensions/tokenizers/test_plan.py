"""What a plan counts for a draft with another tokenizer: slots, the first step of a round, logits."""

from dataclasses import replace

import pytest

from llama_ssp.extensions.tokenizers.records import MOST_PIECES, OWN
from llama_ssp.machines import hardware
from llama_ssp.models.prefill import Buckets
from llama_ssp.planning.memory import memory
from llama_ssp.planning.timing import CostModel
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.rules import make_rule
from tests.extensions.tokenizers.own_vocabulary import intersection_drafter
from tests.helpers.planning import make_spec, times_of
from tests.helpers.prefix_runner import PrefixRunner

A100 = hardware.load("8xa100_80gb")


def test_the_draft_has_two_slots_for_each_of_the_targets_as_far_as_its_context_goes() -> None:
    spec = make_spec("gpt_neox_20B", "gpt_neo_1.3B", prompt_tokens=500)
    own = replace(spec, vocabulary=OWN)
    (before,), (after,) = memory(spec, A100), memory(own, A100)
    assert after.draft_cache_bytes == 2 * before.draft_cache_bytes
    assert after.target_cache_bytes == before.target_cache_bytes
    assert after.logits_bytes >= before.logits_bytes
    assert replace(own, prompt_tokens=1900).draft_slots == 2048
    tight = replace(own, prompt_tokens=1984)
    assert tight.draft_slots == tight.num_slots > 2048


def test_the_engine_allocates_what_is_planned() -> None:
    spec = replace(make_spec("gpt_neox_20B", "gpt_neo_1.3B", prompt_tokens=100), vocabulary=OWN)
    runner = PrefixRunner(9)
    drafter = intersection_drafter(runner, make_rule(SamplingConfig(), VerificationConfig()))
    drafter.allocate(batch_size=1, num_slots=spec.num_slots)
    assert runner.slots.cache.shape[1] == spec.draft_slots
    buckets = Buckets(step=64, num_slots=spec.num_slots)
    assert drafter.own_bucket(buckets.covering(100)) == 256
    assert drafter.own_bucket(spec.num_slots) == spec.draft_slots


def test_the_first_forward_of_a_round_reads_all_pieces_of_a_token() -> None:
    own = replace(make_spec("gpt_neox_20B", "gpt_neo_1.3B"), vocabulary=OWN)
    costs = CostModel(own, A100)
    drafting_s = costs.draft_step_s(MOST_PIECES + 1) + 3 * costs.draft_step_s(1)
    assert times_of(own, A100).round_s == pytest.approx(drafting_s + costs.verify_s(4))
