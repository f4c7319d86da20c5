"""What a fault is said to move each sum by, against rounds with the fault planted.

A round is drafted and verified with independent probabilities after each node, so that thousands of rounds take a
second. Along their texts each sum minus what the fault adds on average has expectation 0, exactly. Its standard error
is measured, because a fault changes the variance too.

Shapes: B rounds, T nodes with the root, K drafted nodes, V vocabulary, P = 2 uniforms per draw, F scores.
"""

import math
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.extensions.evaluate import law
from llama_ssp.extensions.evaluate.martingales import FAULTS, SCORES, Role, Rounds, TextSums
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.draft import Draft, Topology
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.trees import Tree, verify_tree
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.extensions.evaluate.law_faults import plant
from tests.helpers.decoders import tree_of
from tests.helpers.lanes import slow

VOCAB_SIZE, NUM_SYMBOLS, NUM_ROUNDS, NUM_DRAFTED, TREE = 64, 8, 512, 2, "2x1"
PAIRS = {"sharp": (4.0, 3.0, 1.0), "flat": (1.0, 0.6, 0.5)}
"""Spread of the target's logits, how much of them the draft has, and the spread of what it has of its own."""
PLANTED = {
    "wrong residual": "a residual drawn from the target",
    "weightless residual": "a residual that forgets the block's weight",
    "shared uniforms": "a residual that shares the draft's uniforms",
    "shared race": "a residual that shares the draft's race",
    "u x 0.95": "acceptance uniforms x 0.95",
    "u x 1.05": "acceptance uniforms x 1.05",
    "drafts in bf16": "drafts drawn in bf16",
    "kept sibling": "a rejected sibling kept in the draft's law",
    "forgetful penalty": "penalties that forget drafted tokens",
    "bonus of the draft": "a bonus token drawn from the draft",
}
CASES = [
    *(
        (rule, fault)
        for rule in ("speculative", "block")
        for fault in ("wrong residual", "shared uniforms", "shared race", "forgetful penalty", "bonus of the draft")
    ),
    ("block", "weightless residual"),
    *(("speculative", fault) for fault in ("u x 0.95", "u x 1.05", "drafts in bf16", "kept sibling")),
]


def drafted(rule: Rule, law_BTV: Tensor, uniforms_BKP: Tensor, *, tree: Tree | None, in_bf16: bool) -> Draft:
    """A draft with a law for each node."""
    if tree:
        levels = iter(law_BTV[:, : tree.num_parents].split([1, *map(len, tree.levels[:-1])], dim=1))
        return tree.draft(lambda _: next(levels), uniforms_BKP, takes_best=False)
    drawn_BTV = law_BTV.bfloat16().float() if in_bf16 else law_BTV
    law_BTV = torch.cat([law_BTV[:, :-1], torch.zeros_like(law_BTV[:, :1])], dim=1)
    return Draft(rule.choose(drawn_BTV[:, :-1], uniforms_BKP), law_BTV)


def sums_of_rounds(
    rule_name: str, fault: str, *, pair: str = "flat", temperature: float = 1.0, seed: int = 0, num_known: int = 9
) -> list[TextSums]:
    """The sums of the new tokens of rounds with a fault."""
    generator, tree = torch.Generator().manual_seed(seed), tree_of(TREE if fault == "kept sibling" else None)
    num_drafted, depth = (tree.num_drafted, tree.depth) if tree else (NUM_DRAFTED, NUM_DRAFTED)
    forgets, in_bf16 = fault == "forgetful penalty", fault == "drafts in bf16"
    spread, shared, own = PAIRS[pair]

    def random() -> Tensor:
        return torch.randn(NUM_ROUNDS, num_drafted + 1, VOCAB_SIZE, generator=generator)

    def uniforms(*sizes: int) -> Tensor:
        return torch.rand(NUM_ROUNDS, *sizes, dtype=torch.float64, generator=generator)

    with pytest.MonkeyPatch.context() as patch:
        if not (forgets or in_bf16):
            plant(fault, patch)
        rule = make_rule(
            SamplingConfig(temperature=temperature),
            VerificationConfig(rule=rule_name),
            of_trees=partial(verify_tree, tree) if tree else None,
        )
        logits_BTV = spread * random()
        target_BTV, law_BTV = rule.process(logits_BTV), rule.process(shared * logits_BTV + own * random())
        verified_BTV = target_BTV
        if forgets:  # all but the root
            verified_BTV = torch.cat([target_BTV[:, :1], rule.process(logits_BTV + random() / 2)[:, 1:]], dim=1)
        draws = Draws(uniforms(num_drafted, 2), uniforms(num_drafted), uniforms(2), uniforms(1, 2))
        draft = drafted(rule, law_BTV, draws.draft_BKP, tree=tree, in_bf16=in_bf16)
        verdict = rule.verify(draft, verified_BTV.clone(), draws=draws)

    num_accepted_B1, nodes_BT = verdict.node_B1, torch.arange(num_drafted + 1).expand(NUM_ROUNDS, -1)
    if isinstance(draft.nodes, Topology):
        num_accepted_B1, path_BD = draft.nodes.path_to(verdict.node_B1)
        nodes_BT = pad(path_BD, (1, 0))
    sums = law.LawSums(
        NUM_ROUNDS,
        torch.device("cpu"),
        Rounds(
            rule=rule_name,
            widths=tree.shape.widths if tree else (),
            sees_rejections=not tree,
            penalizes=forgets,
            num_known=num_known,
        ),
    )
    most = depth - (fault == "bonus of the draft")
    for place in range(most + 1):
        at_B1V = nodes_BT[:, place, None, None].expand(-1, 1, VOCAB_SIZE)
        target_BV, draft_BV, verified_BV = (
            of_all.gather(1, at_B1V)[:, 0] for of_all in (target_BTV, law_BTV, verified_BTV)
        )
        ids_B1 = draft.ids_BK.gather(1, (nodes_BT[:, min(place + 1, depth), None] - 1).clamp_min(0))
        roles_B1 = torch.where(num_accepted_B1 == place, Role.bonus if place == most else Role.resampled, Role.unused)
        sums.add(
            torch.where(num_accepted_B1 > place, ids_B1, verdict.next_ids_B1),
            target_BV,
            draft_BV,
            newest_BN=ids_B1,
            roles_B=torch.where(num_accepted_B1 > place, Role.accepted, roles_B1)[:, 0],
            forgetful_BV=verified_BV if forgets else None,
        )
    return sums.of_texts()


def worst(fault: str, texts: list[TextSums]) -> float:
    """By how many standard errors a sum of the fault's own scores differs from what it is said to be, at most."""
    number, found = [*FAULTS].index(PLANTED[fault]), []
    for place, name in enumerate(SCORES):
        apart = [text.values[place] - text.shifts[number][place] for text in texts]
        if name.endswith(PLANTED[fault]) and any(apart):
            found.append(abs(sum(apart)) / math.hypot(*apart))
    assert found
    return max(found)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "sample",
    [("flat", 1.6, 4), *(slow((pair, temperature, 10)) for pair in PAIRS for temperature in (0.5, 1.0, 1.6))],
    ids=str,
)
@pytest.mark.parametrize(("rule_name", "fault"), CASES)
def test_a_fault_moves_its_sums_as_far_as_they_say(
    rule_name: str, fault: str, sample: tuple[str, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few symbols, nearly all tokens are added up in the last.

    Each seed is judged, and all together. A false alarm has a probability of 0.007 for the cases that run always, and
    of 0.1 for all; the seeds are fixed.
    """
    monkeypatch.setattr(law, "_NUM_SYMBOLS", NUM_SYMBOLS)
    pair, temperature, num_seeds = sample
    of_seeds = [
        sums_of_rounds(rule_name, fault, pair=pair, temperature=temperature, seed=seed) for seed in range(num_seeds)
    ]
    found = [worst(fault, texts) for texts in [*of_seeds, [*chain.from_iterable(of_seeds)]]]
    assert max(found) < 4, found


def test_rows_can_be_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sums_of_rounds("block", "u x 0.95")
    monkeypatch.setattr(law, "_MOST_AT_ONCE", 100 * VOCAB_SIZE)
    assert sums_of_rounds("block", "u x 0.95") == whole


@pytest.mark.seconds
def test_no_fault_is_expected_of_tokens_whose_law_is_not_known() -> None:
    """Of a head the first token of a round is, with a fallback none."""
    known = [sums_of_rounds("speculative", "u x 0.95", num_known=num) for num in (9, 1, 0)]
    place, number = SCORES.index(PLANTED["u x 0.95"]), [*FAULTS].index(PLANTED["u x 0.95"])
    every, first, none = (sum(text.shifts[number][place] for text in texts) for texts in known)
    assert every > first > none == 0


@pytest.mark.parametrize("role", [Role.other, Role.bonus])
def test_a_score_of_a_fault_counts_the_tokens_that_can_have_it(role: Role) -> None:
    """A round that the length limit cuts says nothing of acceptance, and rounds that overlap have no other scores."""
    probs_BV, next_B1 = torch.rand(2, VOCAB_SIZE).softmax(-1), torch.tensor([[3]])
    for rounds, counts in ((Rounds(), False), (Rounds(num_known=0), True)):
        sums = law.LawSums(1, torch.device("cpu"), rounds)
        sums.add(next_B1, probs_BV[:1], probs_BV[1:], newest_BN=next_B1, roles_B=torch.tensor([role]))
        [text] = sums.of_texts()
        assert (text.variances[SCORES.index(PLANTED["u x 0.95"])] > 0) is counts
        assert text.variances[SCORES.index("log draft")] > 0


def test_no_fault_moves_a_score_farther_than_it_reaches_after_an_improbable_block() -> None:
    logits_BV = 3 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    target_BV, draft_BV = logits_BV.softmax(-1), logits_BV.neg().softmax(-1)
    sums, next_B1 = law.LawSums(1, torch.device("cpu"), Rounds(rule="block")), draft_BV.argmax(-1, keepdim=True)
    for role in (Role.accepted, Role.resampled):
        sums.add(next_B1, target_BV, draft_BV, newest_BN=next_B1, roles_B=torch.tensor([role]))
    [text] = sums.of_texts()
    assert max(abs(shift) for of_fault in text.shifts for shift in of_fault) < 100
