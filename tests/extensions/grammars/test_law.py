"""A structured text has exactly the target's law restricted to its grammar, at every place; a wrong mask would show.

The law is enumerated for four tokens. Masks come from the extension, the expected ones from all texts of the language.

Shapes: G tables, B rows, T places, K drafted tokens, V = 4 tokens, X words of a mask.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.grammars.records import GrammarSampling
from llama_ssp.extensions.grammars.text import prepare
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.drafter import draw_allowed, with_forced, with_forced_child
from llama_ssp.speculate.engine.masks import forbidden
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import Draft, Topology, Verdict
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.trees import Tree, draw_children, verify_tree
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.extensions.grammars.toy import EOS, LANGUAGES, TOKENS, VOCABULARY, allowed_after, allowed_at
from tests.helpers.decoders import tree_of
from tests.helpers.exact_law import codes_of, race_law, round_law
from tests.helpers.lanes import grid
from tests.helpers.table_models import TableModel, joint_law, random_table
from tests.helpers.tree_law import tree_law

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k and top-p": SamplingConfig(temperature=1.2, top_k=2, top_p=0.8),
}
Fault = Callable[[Tensor], Tensor]


@cache
def masks(regex: str, text: tuple[int, ...], ids: tuple[int, ...], parents: tuple[int, ...] | None = None) -> Tensor:
    """The masks (T, X) of the extension after a text and each node of its draft; all ones after an impossible text."""
    found = torch.full((len(ids) + 1, 1), -1, dtype=torch.int32)
    possible = all(allowed_after(regex, text[:place])[token] for place, token in enumerate(text))
    if EOS in text or not possible:
        return found
    constraint = prepare(GrammarSampling(regex=regex), VOCABULARY)()
    for token in text:
        constraint.extend(token)
    constraint.fill(found, ids, parents or range(len(ids)))
    return found


class Constrained(Rule):
    """A rule that drafts as another one, and verifies under the masks of a grammar; `fault` changes the masks."""

    def __init__(self, rule: Rule, regex: str, fault: Fault) -> None:
        self.__dict__.update(vars(rule))
        self._inner, self._regex, self._fault = rule, regex, fault

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> Any:
        return self._inner.draw(logits_BTV, uniforms_BTP, context)

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        assert context
        bits = []
        for tokens_S, last_T in zip(map(tuple, context.tokens_BS.tolist()), context.last_BT.tolist(), strict=True):
            bits.append(masks(self._regex, tokens_S[: last_T[0] + 1], tokens_S[last_T[0] + 1 : last_T[-1] + 1]))
        is_forbidden_BTV = forbidden(self._fault(torch.stack(bits)), range(logits_BTV.shape[-1]))
        return self._inner.process_allowed(logits_BTV, context, is_forbidden_BTV)[0]


def full_table(**how: int) -> TableModel:
    """A random table in which no token is impossible, so that every grammar leaves some."""
    return TableModel(tuple(logits.nan_to_num(neginf=-2.0) for logits in random_table(**how).logits))


def restricted(target: TableModel, regex: str) -> TableModel:
    """The target without what the language forbids after each prefix."""
    return TableModel(
        tuple(
            logits.masked_fill(~allowed_at(regex, length), float("-inf")) for length, logits in enumerate(target.logits)
        )
    )


def error(
    regex: str,
    sampling: SamplingConfig,
    rule_name: str,
    number: int,
    *,
    fault: Fault = lambda bits: bits,
    wrap: Callable[[Rule, str, Fault], Rule] = Constrained,
    knows: Sequence[int] = range(4),
    **how: Any,
) -> float:
    """The largest difference between the law of a text and the restricted target's; a draft `knows` some tokens."""
    rule = wrap(make_rule(sampling, VerificationConfig(rule=rule_name)), regex, fault)
    target = full_table(seed=3 + number, num_tables=2, max_length=number)
    draft = random_table(seed=50 + number, num_tables=2, max_length=number)
    if len(knows) < VOCABULARY.size:
        of_known_V = torch.full((VOCABULARY.size,), float("-inf"), dtype=torch.float64)
        of_known_V[[*knows]] = 0.0
        draft = TableModel(tuple(torch.zeros_like(logits) + of_known_V for logits in draft.logits))
    laws = [processor(sampling)(logits) for logits in restricted(target, regex).logits]
    texts = round_law(rule, target, draft, number, **how)
    law = texts[0]
    for length, text_law in enumerate(texts[1:], start=1):
        law = text_law + (law[..., None] * laws[length]).flatten(1)
    return float((law - joint_law(tuple(laws))).abs().max())


@pytest.mark.seconds
@grid(regex=list(LANGUAGES), name=list(SAMPLINGS), rule_name=["speculative", "block"], number=[1, 2, 3])
def test_a_chain_has_the_law_of_the_restricted_target(regex: str, name: str, rule_name: str, number: int) -> None:
    assert error(regex, SAMPLINGS[name], rule_name, number) < 1e-12


def race_error(regex: str, sampling: SamplingConfig, number: int, *, fault: Fault = lambda bits: bits) -> float:
    """The same under `coupled`, whose text no draft changes."""
    rule = Constrained(make_rule(sampling, VerificationConfig(rule="coupled")), regex, fault)
    target = full_table(seed=3 + number, num_tables=2, max_length=number)
    law, spread = race_law(rule, target, number)
    wanted = joint_law(tuple(map(processor(sampling), restricted(target, regex).logits)))
    return max(spread, float((law - wanted).abs().max()))


@pytest.mark.seconds
@grid(regex=list(LANGUAGES), name=list(SAMPLINGS), number=[1, 2])
def test_races_have_the_law_of_the_restricted_target(regex: str, name: str, number: int) -> None:
    assert race_error(regex, SAMPLINGS[name], number) < 1e-12


@grid(regex=list(LANGUAGES), rule_name=["speculative", "block"], number=[1, 2])
def test_certain_tokens_keep_the_law_of_the_restricted_target(regex: str, rule_name: str, number: int) -> None:
    assert error(regex, SAMPLINGS["temperature"], rule_name, number, is_point_mass=True) < 1e-12


@pytest.mark.seconds
@pytest.mark.parametrize("rule_name", ["speculative", "block", "coupled"])
@pytest.mark.parametrize(
    "fault",
    [
        lambda bits_BTX: torch.cat([bits_BTX[:, :1], bits_BTX[:, :-1]], dim=1),
        lambda bits_BTX: bits_BTX[:, -1:].expand_as(bits_BTX),
    ],
    ids=["one place late", "of the whole draft"],
)
def test_a_mask_of_another_place_changes_the_law(fault: Fault, rule_name: str) -> None:
    of_rule = partial(error, rule_name=rule_name) if rule_name != "coupled" else race_error
    assert of_rule("(ab|b){1,2}", SAMPLINGS["temperature"], number=2, fault=fault) > 1e-3


class Forced(Constrained):
    """Drafts a token of its own choice after every second text, as certain."""

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> Any:
        ids_B1, probs_B1V = self._inner.draw(logits_BTV, uniforms_BTP, context)
        assert context
        sums_B1 = context.tokens_BS.cumsum(1).gather(1, context.last_BT.clamp_min(0))
        forced_B1 = torch.where(sums_B1 % 2 == 0, (sums_B1 // 2) % len(TOKENS), -1)
        return with_forced(forced_B1, ids_B1, probs_B1V, range(len(TOKENS)))


@grid(regex=list(LANGUAGES), rule_name=["speculative", "block"], number=[1, 2])
def test_forced_tokens_among_drawn_ones_keep_the_law(regex: str, rule_name: str, number: int) -> None:
    assert error(regex, SAMPLINGS["temperature"], rule_name, number, wrap=Forced) < 1e-12


class Led(Constrained):
    """Draws drafts from what the masks leave; these leave some places nothing that the draft knows."""

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> Any:
        assert context
        pairs = zip(map(tuple, context.tokens_BS.tolist()), context.last_BT[:, 0].tolist(), strict=True)
        bits_B1X = torch.stack([masks(self._regex, tokens_S[: last + 1], ()) for tokens_S, last in pairs])
        is_forbidden_B1V = forbidden(self._fault(bits_B1X), range(logits_BTV.shape[-1]))
        first_V = torch.eye(1, logits_BTV.shape[-1], dtype=logits_BTV.dtype)[0]
        return draw_allowed(self._inner, logits_BTV, uniforms_BTP, context, is_forbidden_B1V, first_V)


@pytest.mark.seconds
@grid(regex=list(LANGUAGES), name=list(SAMPLINGS), rule_name=["speculative", "block"], number=[1, 2])
def test_drafts_that_are_drawn_from_the_masks_keep_the_law(regex: str, name: str, rule_name: str, number: int) -> None:
    assert error(regex, SAMPLINGS[name], rule_name, number, wrap=Led) < 1e-12


class LawOfAll(Led):
    """Says the law of all tokens."""

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> Any:
        return super().draw(logits_BTV, uniforms_BTP, context)[0], self._inner.process(logits_BTV, context)


class NoToken(Led):
    """Says no law where nothing is left."""

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> Any:
        ids_B1, probs_B1V = super().draw(logits_BTV, uniforms_BTP, context)
        return ids_B1, probs_B1V.masked_fill(probs_B1V[..., :1] == 1.0, 0.0)


@pytest.mark.parametrize(("wrap", "knows"), [(LawOfAll, range(4)), (NoToken, [EOS])])
def test_drafts_from_the_masks_that_say_another_law_change_the_text(wrap: type[Led], knows: Sequence[int]) -> None:
    assert error("(ab|b){1,2}", SAMPLINGS["temperature"], "speculative", 2, wrap=wrap, knows=knows) > 1e-3


class WrongLaw(Forced):
    """Says the drafted law of a forced token."""

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> Any:
        _, probs_B1V = self._inner.draw(logits_BTV, uniforms_BTP, context)
        return super().draw(logits_BTV, uniforms_BTP, context)[0], probs_B1V


def test_a_forced_token_with_the_drafters_law_changes_the_text() -> None:
    assert error("(ab|b){1,2}", SAMPLINGS["temperature"], "speculative", 2, wrap=WrongLaw) > 1e-3


class Twice(Constrained):
    """Divides by the probability of the allowed tokens twice."""

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        probs_BTV = super().process(logits_BTV, context)
        free_BTV = self._inner.process(logits_BTV, context)
        return probs_BTV / (free_BTV * (probs_BTV > 0)).sum(-1, keepdim=True)


def test_a_law_that_is_renormalized_twice_is_another() -> None:
    assert error("(ab|b){1,2}", SAMPLINGS["temperature"], "speculative", 2, wrap=Twice) > 1e-3


@pytest.mark.seconds
@grid(regex=list(LANGUAGES), shape=["2x1", "1x1x1"])
def test_a_tree_has_the_law_of_the_restricted_target(regex: str, shape: str) -> None:
    assert tree_error(regex, shape) < 1e-12


@pytest.mark.seconds
@grid(regex=list(LANGUAGES), shape=["2x1", "1x1x1"])
def test_a_forced_child_of_a_tree_keeps_the_law(regex: str, shape: str) -> None:
    assert tree_error(regex, shape, forced=(1, 0)) < 1e-12
    assert tree_error(regex, shape, forced=(2,)) < 1e-12


def test_a_forced_child_with_the_drafters_law_changes_the_text() -> None:
    def draw(probs_BMV: Tensor, uniforms_BXP: Tensor) -> Tensor:
        forced_B1 = torch.ones(len(probs_BMV), 1, dtype=torch.long)
        return draw_children(with_forced_child(forced_B1, probs_BMV, takes_best=False), uniforms_BXP)

    assert tree_error("(ab|b){1,2}", "2x1", draw=draw) > 1e-3


@pytest.mark.seconds
def test_masks_of_the_nodes_before_change_the_law_of_a_tree() -> None:
    def of_a_chain(nodes: Topology, row: int) -> range:
        return range(nodes.parents_BN[row].shape[0])

    assert tree_error("(ab|b){1,2}", "2x1", parents_of=of_a_chain) > 1e-3


def tree_error(
    regex: str,
    shape: str,
    parents_of: Callable[[Topology, int], Any] = lambda nodes, row: nodes.parents_BN[row].tolist(),
    forced: tuple[int, ...] = (),
    draw: Callable[[Tensor, Tensor], Tensor] = draw_children,
) -> float:
    """The same of trees; the rule's target is masked by the nodes' own masks, and the draft begins as forced."""
    tree = tree_of(shape)
    assert tree
    process = processor(SAMPLINGS["temperature"])
    free = full_table(seed=8, num_tables=1, max_length=tree.depth)
    target, draft = restricted(free, regex), random_table(seed=9, num_tables=1, max_length=tree.depth)

    def verify(tree: Tree, draft: Draft, _: Tensor, *, draws: Draws) -> Verdict:
        nodes = tree.nodes(len(draft.ids_BK))
        bits = []
        paths = [nodes.paths_BTD[0, node, : nodes.depths_BT[0, node]] - 1 for node in range(tree.num_drafted + 1)]
        for row, ids in enumerate(draft.ids_BK.tolist()):
            bits.append(masks(regex, (), (*ids,), (*parents_of(nodes, row),)))
        logits = [free.logits[len(path_D)][0][codes_of(draft.ids_BK[:, path_D], free.vocab_size)] for path_D in paths]
        is_forbidden_BTV = forbidden(torch.stack(bits), range(free.vocab_size))
        target_BTV = process(torch.stack(logits, dim=1).masked_fill(is_forbidden_BTV, float("-inf")))
        return verify_tree(tree, draft, target_BTV, draws=draws)

    code = 0
    for depth, token in enumerate(forced):  # after the first children alone
        scores_1V = draft.logits[depth][0, code : code + 1]
        probs_11V = with_forced_child(torch.tensor([[token]]), process(scores_1V)[None], takes_best=False)
        draft.logits[depth][0, code : code + 1] = probs_11V[0].log()
        code = code * free.vocab_size + token
    law = tree_law(tree, process, target=target, draft=draft, verify=verify, draw=draw)
    return float((law - joint_law(tuple(process(logits) for logits in target.logits))[0]).abs().max())
