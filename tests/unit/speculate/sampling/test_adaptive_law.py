"""K chosen for each round: the law of two rounds, enumerated, when the second K depends on what the first accepted.

The choice may depend on whatever earlier rounds accepted. A choice that looks at the drafted token itself is a fault,
which these tests find.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from tests.helpers.exact_law import draw_law, processed, round_law
from tests.helpers.lanes import grid
from tests.helpers.table_models import TableModel, joint_law, random_table

VOCAB, LENGTH = 4, 5
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k and top-p": SamplingConfig(temperature=1.0, top_k=3, top_p=0.7),
    "min-p": SamplingConfig(temperature=1.3, min_p=0.25),
}
CHOICES: dict[str, Callable[[int], int]] = {
    "more after more": lambda accepted: min(accepted, 1),
    "less after more": lambda accepted: 2 - accepted,
    "none after any": lambda accepted: 0 if accepted else 2,
}


def after(model: TableModel, length: int) -> TableModel:
    """The tables after each prefix of a length, as tables of their own: G V^length of them, prefix by prefix."""
    tables = (logits.unflatten(1, (VOCAB**length, -1)).flatten(0, 1) for logits in model.logits[length:])
    return TableModel(tuple(tables))


def extended(rule: Rule, target: TableModel, law_GC: Tensor, *, length: int, wanted: int) -> Tensor:
    """The law of texts of `wanted` tokens, whose last ones are drawn one by one."""
    for known in range(length, wanted):
        law_GC = (law_GC[..., None] * draw_law(rule, target.logits[known])).flatten(1)
    return law_GC


def law_of_rounds(
    rule: Rule,
    target: TableModel,
    draft: TableModel,
    *,
    first: int,
    wanted: int,
    choose: Callable[[int], int] | None = None,
) -> Tensor:
    """The law (G, V^wanted) of a text that begins with a round of `first` drafted tokens, then `choose`, then draws."""
    law_GC = target.logits[0].new_zeros(target.num_tables, VOCAB**wanted)
    if first == 0:
        return extended(rule, target, target.logits[0].new_ones(target.num_tables, 1), length=0, wanted=wanted)
    for num_accepted, text_law_GC in enumerate(round_law(rule, target, draft, first)):
        length = num_accepted + 1
        if choose is None:
            law_GC += extended(rule, target, text_law_GC, length=length, wanted=wanted)
            continue
        rest_GR = law_of_rounds(
            rule, after(target, length), after(draft, length), first=choose(num_accepted), wanted=wanted - length
        )
        law_GC += (text_law_GC[..., None] * rest_GR.unflatten(0, (target.num_tables, -1))).flatten(1)
    return law_GC


def pair() -> tuple[TableModel, TableModel]:
    target = random_table(seed=31, num_tables=1, max_length=LENGTH)
    return target, random_table(seed=32, num_tables=1, max_length=LENGTH)


def expected(sampling: SamplingConfig, target: TableModel, length: int) -> Tensor:
    return joint_law(processed(target, sampling)[:length])


@grid(rule_name=["speculative", "block"], name=[*SAMPLINGS], choice=[*CHOICES])
def test_two_rounds_keep_the_targets_law_when_k_follows_from_what_was_accepted(
    rule_name: str, name: str, choice: str
) -> None:
    rule = make_rule(SAMPLINGS[name], VerificationConfig(rule=rule_name))
    target, draft = pair()
    law = law_of_rounds(rule, target, draft, first=2, choose=CHOICES[choice], wanted=LENGTH)
    assert float((law - expected(SAMPLINGS[name], target, LENGTH)).abs().max()) < 1e-12


def test_a_k_that_depends_on_the_drafted_token_is_found() -> None:
    """A draft of an odd token is dropped, and the token drawn plainly instead."""
    sampling = SAMPLINGS["temperature"]
    rule = make_rule(sampling, VerificationConfig())
    target, draft = pair()
    is_odd = torch.arange(VOCAB) % 2 == 1
    nothing = target.logits[0].new_ones(target.num_tables, 1)
    share_of_odd_G1 = draw_law(rule, draft.logits[0])[:, 0, is_odd].sum(-1, keepdim=True)
    law = share_of_odd_G1 * extended(rule, target, nothing, length=0, wanted=2)
    for num_accepted, text_law_GC in enumerate(round_law(rule, target, draft, 1, keeps_N=~is_odd)):
        law += extended(rule, target, text_law_GC, length=num_accepted + 1, wanted=2)
    assert float((law - expected(sampling, target, 2)).abs().max()) > 1e-3
