"""Draws over shards of a vocabulary: the bits of one rank, the target's law, and the texts of one rank.

Shapes: B rows, K drafted tokens, T = K + 1, V vocabulary, P = 2 numbers of a draw.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.matrices import tokens_of_a_block, vocabulary_parts
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.engine.verifier import NOT_A_NUMBER, Verifier
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft, Law, Verdict
from llama_ssp.speculate.sampling.processors import draw, processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_block, verify_speculative
from llama_ssp.speculate.sampling.shards import Shard
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.decoders import complete, ids_of, make_decoder, parts_of, requests
from tests.helpers.exact_law import law_error
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import heavy, pairs
from tests.helpers.plugins import drafter_with_law
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.table_models import TableModel, random_table

WARM = SamplingConfig(temperature=0.7)
ELEMENTWISE = SamplingConfig(
    temperature=0.9, logit_bias={3: 1.5, 17: -4.0}, bad_ids=((5,), (2, 9)), repetition_penalty=1.2, presence_penalty=0.3
)


def over_shards(num_ranks: int, vocab_size: int, work: Callable[[Shard, slice], Any]) -> list[Any]:
    """What the ranks make of their parts of a vocabulary."""
    parts = vocabulary_parts(vocab_size, num_ranks)

    def one_rank(comm: ThreadComm) -> Any:
        own = parts[comm.rank]
        return work(Shard(comm, vocab_size), slice(own.start, own.stop))

    return on_ranks(thread_comms(num_ranks), one_rank)


def some_probs(*shape: int, seed: int) -> Tensor:
    """Probabilities in fp32, many of them tiny."""
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


@pairs(vocab_size=[29, 1000, 4133], num_ranks=[2, 3, 5])
def test_draws_and_verdicts_have_the_bits_of_one_rank(vocab_size: int, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    target_BTV, draft_BKV = some_probs(40, 4, vocab_size, seed=1), some_probs(40, 3, vocab_size, seed=2)
    draft_BKV = (0.5 * draft_BKV + 0.5 * target_BTV[:, :3]).contiguous()
    law_BTV = torch.cat([draft_BKV, torch.zeros_like(draft_BKV[:, :1])], dim=1)
    uniforms_BTP = torch.rand(40, 4, 2, generator=generator, dtype=torch.float64)
    draws = Draws(uniforms_BTP[:, 1:], uniforms_BTP[:, 1:, 0], uniforms_BTP[:, 0], uniforms_BTP)
    ids_BK = draw(draft_BKV.flatten(0, 1), draws.draft_BKP.flatten(0, 1)).view(40, 3)

    def verdicts(shard: Shard, own: slice) -> list[list[list[int]]]:
        found = [shard.draw(target_BTV[:, 0, own], draws.residual_BP)]
        for verify in (verify_speculative, verify_block):
            verdict = verify(Draft(ids_BK, law_BTV[..., own]), target_BTV[..., own].clone(), draws=draws, shard=shard)
            found += verdict[:2]
        return [part.tolist() for part in found]

    wanted = verdicts(Shard(), slice(None))
    assert over_shards(num_ranks, vocab_size, verdicts) == [wanted] * num_ranks
    assert all(0 < sum(map(sum, accepted)) < 120 for accepted in wanted[1::2]), "some are accepted"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_probabilities_are_those_of_one_rank_within_rounding(num_ranks: int) -> None:
    """Also where a rank has no possible token; one NaN anywhere makes all probabilities of its position NaN."""
    logits_BV = 30 * torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))
    logits_BV[0, :600], logits_BV[1, 600:], logits_BV[2, 7] = float("-inf"), float("-inf"), float("nan")
    parts = over_shards(num_ranks, 1000, lambda shard, own: shard.softmax(logits_BV[:, own], scale=1 / 0.7))
    found_BV, wanted_BV = torch.cat(parts, dim=1), processor(WARM)(logits_BV)
    torch.testing.assert_close(found_BV, wanted_BV, rtol=1e-6, atol=1e-37, equal_nan=True)
    assert found_BV.isnan().all(1).tolist() == [row == 2 for row in range(6)]


class Together(Rule):
    """A rule over shards, called as one of a whole vocabulary; the verdict is that of the last rank.

    With `has_whole_law` every rank has the law of the whole vocabulary, as of a plugin's draft.
    """

    def __init__(
        self, num_ranks: int, vocab_size: int, make: Callable[[Shard], Rule], *, has_whole_law: bool = False
    ) -> None:
        comms, self._has_whole_law = thread_comms(num_ranks), has_whole_law
        super().__init__(None, verify_speculative)
        self._comms, self._parts = comms, vocabulary_parts(vocab_size, num_ranks)
        self._rules = [make(Shard(comm, vocab_size)) for comm in comms]

    def _each(self, work: Callable[..., Any], *wholes: Tensor) -> list[Any]:
        def one_rank(comm: ThreadComm) -> Any:
            own = self._parts[comm.rank]
            return work(self._rules[comm.rank], *[whole[..., own.start : own.stop].clone() for whole in wholes])

        return on_ranks(self._comms, one_rank)

    def draw(
        self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None
    ) -> tuple[Tensor, Tensor | None]:
        found = self._each(lambda rule, own_BTV: rule.draw(own_BTV, uniforms_BTP, context), logits_BTV)
        return found[-1][0], torch.cat([probs_BTV for _, probs_BTV in found], dim=-1)

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        return torch.cat(self._each(lambda rule, own_BTV: rule.process(own_BTV, context), logits_BTV), dim=-1)

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        law = [] if draft.is_certain or self._has_whole_law else [draft.drawn_law]
        whole = draft.law if self._has_whole_law else POINT_MASS

        def verified(rule: Rule, target_BTV: Tensor, law: Law = whole) -> Verdict:
            return rule.verify(Draft(draft.ids_BK, law), target_BTV, draws=draws)

        verdict: Verdict = self._each(verified, target_BTV, *law)[-1]
        return verdict


def tables(vocab_size: int, max_length: int) -> Sequence[TableModel]:
    """A target and a draft whose middle block has one possible token: `exact_law` finds borders in the outer ones."""
    models = [random_table(seed=s, num_tables=2, max_length=max_length, vocab_size=vocab_size) for s in (31, 32)]
    block = tokens_of_a_block(vocab_size)
    for logits in (logits for model in models for logits in model.logits):
        logits[..., 0].clamp_min_(-3.0)
        logits[..., block + 1 : -1] = float("-inf")
    return models


def error_of(make: Callable[[Shard], Rule], *, num_ranks: int, vocab_size: int, law: str = "in parts") -> float:
    """The largest difference between the law of K + 1 tokens over shards and the target's."""
    num_drafted = 1 if vocab_size > 4 else 2
    target, draft = tables(vocab_size, num_drafted)
    how: dict[str, Any] = {"draft": draft, "num_draft_tokens": num_drafted, "is_point_mass": law == "certain"}
    together = Together(num_ranks, vocab_size, make, has_whole_law=law == "whole")
    return law_error(together, WARM, target=target, **how)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("rule", "ranks_of", "law"),
    [
        ("speculative", (2, 3), "in parts"),
        heavy("block", (3, 5), "in parts"),
        heavy("block", (2, 3), "certain"),
        heavy("speculative", (3, 5), "in parts"),
        heavy("speculative", (2, 4), "in parts"),
        heavy("block", (2, 4), "in parts"),
        heavy("speculative", (3, 5), "certain"),
        ("speculative", (2, 3), "whole"),
        ("block", (2, 3), "whole"),
        heavy("speculative", (2, 4), "whole"),
        heavy("block", (3, 5), "whole"),
    ],
)
def test_the_text_has_exactly_the_targets_law_over_shards(rule: str, ranks_of: tuple[int, int], law: str) -> None:
    num_ranks, vocab_size = ranks_of
    error = error_of(
        lambda shard: make_rule(WARM, VerificationConfig(rule=rule), shard=shard),
        num_ranks=num_ranks,
        vocab_size=vocab_size,
        law=law,
    )
    assert error < 1e-12


class OwnDenominators(Shard):
    """Probabilities of each part sum to 1."""

    def softmax(self, logits: Tensor, *, scale: float) -> Tensor:
        return (logits * scale).softmax(-1)


class OwnTokens(Shard):
    """A token of another rank has the number of the nearest own one."""

    def at(self, ids_BK: Tensor, *numbers: Tensor) -> list[Tensor]:
        own_BK1 = (ids_BK[..., None] - self._own.start).clamp(0, len(self._own) - 1)
        return [of_own.gather(-1, own_BK1) for of_own in numbers]


class OwnTotals(Shard):
    """Residuals of a block are summed over the own tokens alone."""

    def total(self, weights: Tensor) -> Tensor:
        return weights.sum(-1)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("rule", "faulty"), [("speculative", OwnDenominators), heavy("speculative", OwnTokens), heavy("block", OwnTotals)]
)
def test_the_harness_catches_what_a_rank_keeps_to_itself(rule: str, faulty: type[Shard]) -> None:
    def planted(shard: Shard) -> Rule:
        return make_rule(WARM, VerificationConfig(rule=rule), shard=faulty(shard._comm, 4))

    assert error_of(planted, num_ranks=2, vocab_size=4) > 1e-3


VOCAB_SIZE = 29


def texts(
    comm: ThreadComm | None, *, sampling: SamplingConfig, rule: str, drafts: str, replay: bool
) -> list[list[int]]:
    """What a rank writes with two models whose logits have the same bits on every rank."""
    models = [PrefixRunner(VOCAB_SIZE, seed=seed, sharpness=1.5) for seed in (0, 1)]
    if comm:
        for model in models:
            model.comm = comm
    decoder = make_decoder(
        models[0],
        models[1] if drafts == "model" else None,
        sampling=sampling,
        rule_name=rule,
        ngram=drafts == "ngram",
        comm=comm,
        batch_size=3,
        replay=replay,
        shard=Shard(comm, VOCAB_SIZE) if comm else Shard(),
        make_drafter=partial(near, sampling=sampling, rule_name=rule) if drafts == "law" else None,
    )
    return ids_of(complete(decoder, requests(24)))


def near(_rule: Rule, *, sampling: SamplingConfig, rule_name: str) -> Drafter:
    """The drafter with a law of docs/extending.md, which every rank has whole."""
    rule = make_rule(sampling, VerificationConfig(rule=rule_name))
    drafter: Drafter = drafter_with_law()(parts_of(rule=rule, vocab_size=VOCAB_SIZE))
    return drafter


@pytest.mark.seconds
@pairs(
    rule=["speculative", "block", "coupled", "greedy"],
    drafts=["model", "ngram", "law"],
    sampling=[WARM, ELEMENTWISE],
    num_ranks=[2, 3],
    replay=[True, False],
)
def test_texts_are_those_of_one_rank(
    rule: str, drafts: str, sampling: SamplingConfig, num_ranks: int, replay: bool
) -> None:
    if rule == "greedy":
        sampling = SamplingConfig(temperature=0.0, presence_penalty=0.4, bad_ids=((5,), (2, 9)))
    how: dict[str, Any] = {"sampling": sampling, "rule": rule, "drafts": drafts, "replay": replay}
    wanted = texts(None, **how)
    assert on_ranks(thread_comms(num_ranks), lambda comm: texts(comm, **how)) == [wanted] * num_ranks


@pytest.mark.parametrize("rule", ["speculative", "block", "coupled", "greedy"])
def test_a_number_that_is_none_on_any_rank_is_flagged_on_all(rule: str) -> None:
    """In the first draw of a text, and in a round whose draft is certain."""
    logits_BTV = torch.randn(3, 2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits_BTV[0, 0, 3] = logits_BTV[1, 0, VOCAB_SIZE - 1] = float("nan")
    sampling = SamplingConfig(temperature=0.0, bad_ids=((5,),), presence_penalty=0.4) if rule == "greedy" else WARM
    uniforms_BTP = torch.full((3, 2, 2), 0.5, dtype=torch.float64)
    draws = Draws(uniforms_BTP[:, 1:], uniforms_BTP[:, 1:, 0], uniforms_BTP[:, 0], uniforms_BTP)
    zeros_B, last_BT = torch.zeros(3, dtype=torch.long), torch.tensor([[0, 1]] * 3)
    context = Context(torch.zeros(3, 4, dtype=torch.long), zeros_B, zeros_B, last_BT)

    def flags(shard: Shard, own: slice) -> list[list[int]]:
        made = make_rule(sampling, VerificationConfig(rule=rule), shard=shard)
        verifier = Verifier(made, comm=Comm.single(), verify_rank=0, device=torch.device("cpu"))
        draft, begun = Draft(torch.full((3, 1), 40)), context._replace(last_BT=context.last_BT[:, :1])
        first = verifier.verify(draft.first(0), logits_BTV[:, :1, own], begun, draws=draws)
        found = verifier.verify(draft, logits_BTV[..., own], context, draws=draws)
        return [decision.flags_B1[:, 0].tolist() for decision in (first, found)]

    assert over_shards(2, VOCAB_SIZE, flags) == [[[NOT_A_NUMBER, NOT_A_NUMBER, 0]] * 2] * 2
