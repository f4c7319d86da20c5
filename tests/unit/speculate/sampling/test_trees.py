"""Trees of drafted tokens keep the target's law exactly, and a chain is what it always was."""

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.speculate.engine.executors import tensors_of
from llama_ssp.speculate.sampling import trees
from llama_ssp.speculate.sampling.draft import Chain, Draft, Topology, Verdict, find_topology
from llama_ssp.speculate.sampling.processors import draw, processor
from llama_ssp.speculate.sampling.rules import Rule, draw_next, make_rule, verify_block
from llama_ssp.speculate.sampling.trees import Level, NodeLaws, Tree, draw_children, verify_tree
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable
from tests.helpers.draws import draws_of
from tests.helpers.exact_law import codes_of
from tests.helpers.lanes import first, heavy
from tests.helpers.table_models import joint_law, random_table
from tests.helpers.tree_law import DrawChildren, VerifyTree, tree_law

CPU = torch.device("cpu")
Drafted = tuple[Tree, Draft, Tensor, Draws]
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k": SamplingConfig(temperature=1.3, top_k=2),
    "top-p": SamplingConfig(temperature=0.8, top_p=0.9),
}
GREEDY, NO_DRAWS = make_rule(SamplingConfig(temperature=0.0), VerificationConfig()), Draws(*[torch.empty(0)] * 4)


def verify_tree_greedy(tree: Tree, draft: Draft, target_logits_BTV: Tensor) -> Verdict:
    """At temperature 0 the target chooses its best tokens."""
    return GREEDY.verify(draft._replace(nodes=tree.nodes(len(draft.ids_BK))), target_logits_BTV, draws=NO_DRAWS)


def law_error(
    shape: str,
    sampling: SamplingConfig,
    *,
    seed: int = 20,
    vocab_size: int = 3,
    verify: VerifyTree = verify_tree,
    draw: DrawChildren = draw_children,
) -> float:
    """The largest difference between the law of D + 1 tokens and the target's."""
    tree, process = Tree(tree_shape(shape), CPU), processor(sampling)
    target, draft = (
        random_table(seed=seed + model, num_tables=1, max_length=tree.depth, vocab_size=vocab_size) for model in (1, 2)
    )
    measured = tree_law(tree, process, target=target, draft=draft, verify=verify, draw=draw)
    expected = joint_law(tuple(process(logits) for logits in target.logits))[0]
    return float((measured - expected).abs().max())


@pytest.mark.parametrize("name", first(SAMPLINGS))
@pytest.mark.parametrize(
    ("vocab_size", "shape", "seed"),
    [
        *[(3, shape, 20) for shape in ("1", "2", "3", "1x1", "2x1", "1x2", "2x2", "1x3", "1x1x1", "1x2x1", "1x1x2")],
        *[(4, shape, 20) for shape in ("2", "3", "2x1", "1x2")],
        *[(3, shape, 10) for shape in ("2", "3", "1x2")],  # the first residual has one token
        *[heavy(3, shape, 20) for shape in ("3x1", "2x1x1", "2x1x2")],
        *[heavy(4, shape, 20) for shape in ("2x2", "1x2x1", "1x3")],
    ],
)
def test_the_text_has_exactly_the_targets_law(vocab_size: int, shape: str, seed: int, name: str) -> None:
    """Some nodes have fewer possible tokens than children: top-k leaves two, and some logits are minus infinity."""
    assert law_error(shape, SAMPLINGS[name], vocab_size=vocab_size, seed=seed) < 1e-12


def parents_of(level: Level) -> Tensor:
    assert level.parents_BM is not None, "a tree's"
    return level.parents_BM


EQUAL = ("2x1", "3x1", "2x2")
CERTAIN = ("1", "2", "3", "2x1", "1x2", "2x2", "1x1x1", "2x1x1", "dynamic-3x2x2", "dynamic-4x3x2", "dynamic-5x2x3")


def certain_law_error(
    text: str,
    *,
    vocab_size: int = 3,
    ids: Callable[[Tensor], Tensor] = lambda ids_BN: ids_BN,
    verify: Callable[..., Verdict] = Topology.accept,
) -> float:
    """The largest difference between the law of D + 1 tokens and the target's, over all choices at all nodes.

    What the target chooses after a node is drawn from its row there, independently of all else.
    """
    tree, process = Tree(tree_shape(text), CPU), processor(SAMPLINGS["temperature"])
    target, draft = (
        random_table(seed=30 + model, num_tables=1, max_length=tree.depth, vocab_size=vocab_size) for model in (1, 2)
    )
    target_probs, draft_probs = ([process(logits[0]) for logits in model.logits] for model in (target, draft))

    known = torch.zeros(1, 1, dtype=torch.int64)

    def codes(level: Level | None) -> Tensor:
        """The text (1, M) from the root to each node, as a number."""
        nonlocal known
        if level is None:
            known = torch.zeros(1, 1, dtype=torch.int64)
        else:
            known = known.gather(1, parents_of(level)) * vocab_size + level.ids_BM
        return known

    uniforms_BKP = torch.full((1, tree.num_drafted, 2), 0.5, dtype=torch.float64)

    def read(level: Level | None) -> Tensor:
        return draft_probs[level.depth if level else 0][codes(level)]

    drafted = tree.draft(read, uniforms_BKP, takes_best=not tree.shape.is_dynamic)
    drafted = drafted._replace(ids_BK=ids(drafted.ids_BK))
    shape = cast("Topology", drafted.nodes)
    texts: list[list[int]] = [[]]
    for node in range(1, tree.num_drafted + 1):
        texts.append([*texts[int(shape.parents_BN[0, node - 1])], int(drafted.ids_BK[0, node - 1])])
    rows = torch.stack(
        [target_probs[len(each)][codes_of(torch.tensor([each]), vocab_size)[0] if each else 0] for each in texts]
    )
    chosen_CT = torch.tensor(list(product(range(vocab_size), repeat=len(texts))))
    law_C = torch.stack([rows[node][chosen_CT[:, node]] for node in range(len(texts))]).prod(0)
    num_cases = law_C.shape[0]
    wide = Topology(*(each.expand(num_cases, *each.shape[1:]) for each in shape))
    verdict = verify(wide, drafted.ids_BK.expand(num_cases, -1), chosen_CT, chosen_CT.double())
    num_accepted_C1, path_CD = wide.path_to(verdict.node_B1)
    path_ids_CD = drafted.ids_BK.expand(num_cases, -1).gather(1, (path_CD - 1).clamp_max(tree.num_drafted - 1))
    law = torch.zeros(1, dtype=torch.float64)
    for length in range(tree.depth + 1):
        is_here_C = num_accepted_C1[:, 0] == length
        new = torch.zeros(vocab_size ** (length + 1), dtype=torch.float64)
        said_CL = torch.cat([path_ids_CD[:, :length], verdict.next_ids_B1], dim=1)[is_here_C]
        new.index_add_(0, codes_of(said_CL, vocab_size), law_C[is_here_C])
        law = new + ((law[:, None] * target_probs[length]).flatten() if length else 0)
    expected = joint_law(tuple(process(logits) for logits in target.logits))[0]
    return float((law - expected).abs().max())


@pytest.mark.parametrize(
    ("shape", "ids"), [*((shape, Tensor.clone) for shape in CERTAIN), *((shape, torch.zeros_like) for shape in EQUAL)]
)
def test_the_text_has_the_targets_law_where_children_are_certain(shape: str, ids: Callable[[Tensor], Tensor]) -> None:
    """Draftsmen that find too few continuations may repeat one: equal children of a node change no law."""
    assert certain_law_error(shape, ids=ids) < 1e-12


def test_the_harness_catches_a_rule_that_prefers_the_child_whose_path_goes_on() -> None:
    assert certain_law_error("2x1", ids=torch.zeros_like, verify=deepest_child) > 1e-3


def deepest_child(shape: Topology, ids_BN: Tensor, chosen_BT: Tensor, weights_BT: Tensor) -> Verdict:
    """The accepted node is the last one whose path was chosen."""
    differs_BN = chosen_BT.gather(1, shape.parents_BN) != ids_BN
    is_off_BT = (pad(differs_BN, (1, 0))[:, None] & shape.ancestors_BTT).any(-1)
    node_B1 = (~is_off_BT * torch.arange(is_off_BT.shape[1])).amax(1, keepdim=True)
    return Verdict(node_B1, chosen_BT.gather(1, node_B1), weights_BT.gather(1, node_B1))


def test_the_target_chooses_after_each_node_as_plain_decoding_does_at_that_place() -> None:
    tree, _, target_BTV, _ = drafted("3x2x1")
    shape, generator = tree.nodes(64), torch.Generator().manual_seed(3)
    plain_BTP = torch.rand(64, tree.depth + 1, 2, generator=generator, dtype=torch.float64)
    chosen_BT = Rule(processor(SAMPLINGS["temperature"]), verify_block).choose(target_BTV, shape.at_nodes(plain_BTP))
    for node, depth in enumerate(shape.depths_BT[0].tolist()):
        alone_B1 = draw(target_BTV[:, node].contiguous(), plain_BTP[:, depth])
        assert torch.equal(chosen_BT[:, node : node + 1], alone_B1)


def draft_stays(laws: NodeLaws, _ids_X1: Tensor | None) -> NodeLaws:
    """The ratio of a later child has the probability that the draft had from the start.

    It makes no difference whether the rejected child stays, since the target's residual lacks it.
    """
    return WITHOUT(laws, None)


def residual_not_normalised(laws: NodeLaws, ids_X1: Tensor | None) -> NodeLaws:
    left = WITHOUT(laws, ids_X1)
    return left._replace(factor_X1=left.reach_X1)


def reach_stays(laws: NodeLaws, ids_X1: Tensor | None) -> NodeLaws:
    """A node passes as if none of its children had been rejected."""
    left = WITHOUT(laws, ids_X1)
    ratio_X1 = laws.reach_X1 / left.reach_X1
    return left._replace(reach_X1=laws.reach_X1, factor_X1=left.factor_X1 * ratio_X1)


def target_stays(laws: NodeLaws, ids_X1: Tensor | None) -> NodeLaws:
    left = WITHOUT(laws, ids_X1)
    return left._replace(target_XV=laws.target_XV, factor_X1=left.reach_X1)


def residual_not_clamped(laws: NodeLaws) -> Tensor:
    return (laws.target_XV * laws.factor_X1 - laws.draft_XV).abs()


def not_clipped(laws: NodeLaws, ids_X1: Tensor, *, is_first: bool) -> Tensor:
    """A child can be reached with more than probability 1."""
    del is_first
    return laws.target_XV.gather(-1, ids_X1) * laws.factor_X1 / laws.draft_XV.gather(-1, ids_X1)


def without_any_residual(node_B1: Tensor, rest_BV: Tensor, target_row_BV: Tensor, uniforms_BP: Tensor) -> Verdict:
    """The next token is drawn from the target's row."""
    del rest_BV
    return DRAW_NEXT(node_B1, target_row_BV.clone(), target_row_BV, uniforms_BP)


def a_childs_number_again(tree: Tree, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Off by one: the second child reads the first one's number."""
    accept_BK = torch.cat([draws.accept_BK[:, :1], draws.accept_BK[:, :-1]], dim=1)
    return verify_tree(tree, draft, target_BTV, draws=draws._replace(accept_BK=accept_BK))


def the_last_childs_number_again(tree: Tree, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Off by one: the next token reads the last child's number."""
    residual_BP = torch.cat([draws.accept_BK[:, -1:], draws.residual_BP[:, 1:]], dim=1)
    return verify_tree(tree, draft, target_BTV, draws=draws._replace(residual_BP=residual_BP))


def the_first_childs_numbers_again(probs_BMV: Tensor, uniforms_BXP: Tensor) -> Tensor:
    """Off by one: the second child is drawn by the numbers of the first."""
    return draw_children(probs_BMV, torch.cat([uniforms_BXP[:, :1], uniforms_BXP[:, :-1]], dim=1))


def with_replacement(probs_BMV: Tensor, uniforms_BXP: Tensor) -> Tensor:
    width = uniforms_BXP.shape[1] // probs_BMV.shape[1]
    parts = uniforms_BXP.unflatten(1, (-1, width)).unbind(2)
    return torch.stack([draw_children(probs_BMV, part_BMP) for part_BMP in parts], dim=2).flatten(1)


WITHOUT, DRAW_NEXT = NodeLaws.without, draw_next
FAULTS: dict[str, list[Callable[..., object]]] = {
    "without": [draft_stays, residual_not_normalised, target_stays, reach_stays],
    "rest": [residual_not_clamped],
    "reach_of": [not_clipped],
    "draw_next": [without_any_residual],
    "verify": [a_childs_number_again, the_last_childs_number_again],
    "draw": [the_first_childs_numbers_again, with_replacement],
}


@pytest.mark.parametrize(
    ("place", "fault", "shape"),
    [
        pytest.param(place, fault, shape, marks=() if shape == "2x1" else pytest.mark.heavy)
        for place, faults in FAULTS.items()
        for fault in faults
        for shape in (("2x1",) if fault is reach_stays else ("2x1", "1x2", "3"))
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_harness_catches_a_planted_fault(
    place: str, fault: Callable[..., object], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted: dict[str, Any] = {place: fault} if place in {"verify", "draw"} else {}
    if not planted:
        monkeypatch.setattr(NodeLaws if hasattr(NodeLaws, place) else trees, place, fault)
    assert law_error(shape, SAMPLINGS["temperature"], vocab_size=4, **planted) > 1e-3


def test_a_later_child_is_accepted_by_the_ratio_of_what_the_rejected_one_leaves() -> None:
    target_V, draft_V = (torch.tensor(probs, dtype=torch.float64) for probs in ([1, 2, 3, 4], [4, 3, 2, 1]))
    target_probs = (target_V / 10).expand(1, 3, 4).contiguous()
    draft = Draft(torch.tensor([[0, 2]]), torch.stack([draft_V / 10, torch.zeros(4).double()])[None])
    # Token 0 is accepted below 1/4. Then (0, 0, 1, 3) / 4 is left of the target, and (0, 3, 2, 1) / 6 of the draft.
    for one, other, wanted in ((0.24, 0.9, [1, 2]), (0.26, 0.74, [2, 2]), (0.26, 0.76, None)):
        draws = numbers(2, accept=[[one, other]])
        verdict = verify_tree(Tree(tree_shape("2"), CPU), draft, target_probs, draws=draws)
        assert verdict.node_B1.item() == (wanted[0] if wanted else 0)
        # (0, 0, 0, 1) is left after both.
        assert wanted or verdict.next_ids_B1.item() == 3


def test_a_path_can_pass_whose_first_token_would_be_rejected_alone() -> None:
    """Reached with 1/2, then with min(1, 1/2 x 9/3): a rule that goes token by token accepts one half of these."""
    probs_V = torch.tensor([[[1.0, 3.0], [3.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    target_BTV = torch.stack([probs_V[0, 0] / 4, torch.tensor([9.0, 1.0]).double() / 10, probs_V[0, 2] / 2])[None]
    draft_BTV = torch.stack([probs_V[0, 2] / 2, torch.tensor([3.0, 7.0]).double() / 10, torch.zeros(2).double()])[None]
    draft = Draft(torch.tensor([[0, 0]]), draft_BTV)
    verdict = verify_tree(Tree(tree_shape("1x1"), CPU), draft, target_BTV, draws=numbers(2, accept=[[0.9, 0.9]]))
    assert verdict.node_B1.item() == 2


def numbers(num_drafted: int, *, accept: list[list[float]]) -> Draws:
    """Draws of a round in which every other number is one half."""
    half_BP = torch.full((len(accept), 2), 0.5, dtype=torch.float64)
    draft_BKP = half_BP[:, None].expand(-1, num_drafted, -1)
    return Draws(draft_BKP, torch.tensor(accept, dtype=torch.float64), half_BP, half_BP[:, None])


def drafted(shape: str, *, num_rows: int = 64, vocab_size: int = 50, device: torch.device = CPU) -> Drafted:
    """A tree, its draft from probabilities that depend on the node alone, the target's probabilities, and the draws."""
    tree, process = Tree(tree_shape(shape), device), processor(SamplingConfig(temperature=0.8, top_k=20))
    generator = torch.Generator().manual_seed(7)
    target_BTV, noise_BTV = torch.randn(2, num_rows, tree.num_drafted + 1, vocab_size, generator=generator).to(device)
    probs_BIV = process(target_BTV + 0.7 * noise_BTV)[:, : tree.num_parents]
    index_B = torch.arange(num_rows, device=device)
    draws = draws_of(UniformTable(tree.num_drafted, device), index_B, index_B)
    ids, parent = [], 0
    for level, width in zip(tree.levels, tree.shape.widths, strict=True):
        num_parents = len(level) // width
        uniforms_BXP = draws.draft_BKP[:, level.start - 1 : level.stop - 1]
        ids.append(draw_children(probs_BIV[:, parent : parent + num_parents], uniforms_BXP))
        parent += num_parents
    draft = Draft(torch.cat(ids, dim=1), pad(probs_BIV, (0, 0, 0, 1)))
    return tree, draft, process(target_BTV), draws


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_chain_is_drawn_as_without_a_tree_and_verified_as_a_block(depth: int) -> None:
    tree, draft, target_BTV, draws = drafted("x".join("1" * depth), num_rows=500)
    for place in range(depth):
        ids_B1 = draw(draft.drawn_law[:, place].contiguous(), draws.draft_BKP[:, place])
        assert torch.equal(ids_B1, draft.ids_BK[:, place : place + 1])
    chain = verify_block(draft, target_BTV, draws=draws)
    verdict = verify_tree(tree, draft, target_BTV, draws=draws)
    assert chain.node_B1.unique().numel() == depth + 1
    assert torch.equal(verdict.node_B1, chain.node_B1)
    assert torch.equal(verdict.next_ids_B1, chain.next_ids_B1)
    torch.testing.assert_close(verdict.weights_B1, chain.weights_B1)
    num_accepted_B1, path_BD = tree.nodes(500).path_to(verdict.node_B1)
    assert torch.equal(num_accepted_B1, verdict.node_B1)
    assert torch.equal(path_BD, torch.arange(1, depth + 1).expand(500, -1))

    copied = Draft(target_BTV.argmax(-1)[:, :-1] + draft.ids_BK % 2)
    chain = GREEDY.verify(copied, target_BTV, draws=NO_DRAWS)
    for own, wanted in zip(verify_tree_greedy(tree, copied, target_BTV), chain, strict=True):
        assert torch.equal(own, wanted)


def test_no_value_is_read_between_the_draw_and_the_verdict() -> None:
    device = torch.device("meta")
    tree, draft, target_BTV, draws = drafted("3x2x1", device=device)
    sampled = verify_tree(tree, draft, target_BTV, draws=draws)
    greedy = verify_tree_greedy(tree, draft, target_BTV)
    for verdict in (sampled, greedy):
        assert [part.shape for part in tensors_of(verdict)] == [(64, 1)] * 3


def test_children_differ_until_no_possible_token_is_left() -> None:
    _, draft, _, draws = drafted("3x2x1")
    first_B3, second_BX = draft.ids_BK[:, :3], draft.ids_BK[:, 3:9]
    assert first_B3.sort().values.diff().all()
    assert second_BX.unflatten(1, (3, 2)).diff().all()
    # With two possible tokens the third and fourth repeat one or cannot be; they are ids all the same.
    probs_BMV = torch.zeros(64, 1, 50)
    probs_BMV[..., 7], probs_BMV[..., 30] = 1.0, 2.0**-90
    ids_B4 = draw_children(probs_BMV, draws.draft_BKP[:, :4])
    assert ids_B4[:, :2].tolist() == [[7, 30]] * 64
    assert ids_B4.ge(0).logical_and(ids_B4.lt(50)).all()


def test_a_child_that_cannot_be_is_never_accepted() -> None:
    """The draft has one possible token and three children, two of which are a token that only the target can say."""
    probs_12V = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    target_1TV = torch.tensor([[[0.0, 0.0, 1.0]] * 4])
    draft = Draft(torch.tensor([[1, 2, 2]]), probs_12V)
    verdict = verify_tree(Tree(tree_shape("3"), CPU), draft, target_1TV, draws=numbers(3, accept=[[0.0, 0.0, 0.0]]))
    assert (verdict.node_B1.item(), verdict.next_ids_B1.item()) == (0, 2)


@pytest.mark.parametrize("shape", ["3x2x1", "2", "1x3"])
def test_nan_that_decides_is_in_the_weight_and_nan_elsewhere_is_not(shape: str) -> None:
    """All nodes that have children decide, as no path passes with NaN; a leaf if it is accepted."""
    tree, draft, target_BTV, draws = drafted(shape)
    clean = verify_tree(tree, draft, target_BTV, draws=draws)
    assert not clean.weights_B1.isnan().any()
    for node in range(tree.num_drafted + 1):
        broken_BTV = target_BTV.clone()
        broken_BTV[:, node] = float("nan")
        verdict = verify_tree(tree, draft, broken_BTV, draws=draws)
        decides_B = (clean.node_B1[:, 0] == node) | (node < tree.num_parents)
        assert torch.equal(verdict.weights_B1.isnan()[:, 0], decides_B)
        assert verdict.next_ids_B1.lt(50).all()
        greedy = verify_tree_greedy(tree, Draft(draft.ids_BK), broken_BTV)
        assert torch.equal(greedy.weights_B1.isnan()[:, 0], greedy.node_B1[:, 0] == node)


@pytest.mark.parametrize("text", ["dynamic-24x4x4", "dynamic-6x6x1", "dynamic-5x1x5", "dynamic-12x3x6"])
def test_a_dynamic_tree_has_the_most_probable_paths(text: str) -> None:
    """Every node is compared with all candidates, by the draft's probability of its path; parents come first."""
    tree, vocab_size, num_rows = Tree(tree_shape(text), CPU), 12, 3
    width = tree.shape.widths[0]
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randn(num_rows, vocab_size**depth, vocab_size, generator=generator) for depth in range(3)]
    seen: dict[int, Tensor] = {}

    def probs_after(row: int, path: tuple[int, ...]) -> Tensor:
        code = 0
        for token in path[-2:]:  # the draft knows two tokens
            code = code * vocab_size + token
        return (3 * tables[min(len(path), 2)][row, code]).softmax(-1)

    def read(level: Level | None) -> Tensor:
        if level is None:
            seen[0] = torch.zeros(num_rows, 1, 0, dtype=torch.int64)
            paths = seen[0]
        else:
            above = seen[level.depth - 1]
            at = parents_of(level)[..., None].expand(-1, -1, above.shape[2])
            paths = seen[level.depth] = torch.cat([above.gather(1, at), level.ids_BM[..., None]], dim=2)
            assert level.sees_BMA is not None
            assert level.sees_BMA.sum(-1).eq(level.depth + 1).all()
        return torch.stack(
            [torch.stack([probs_after(row, tuple(path)) for path in paths[row].tolist()]) for row in range(num_rows)]
        )

    drafted = tree.draft(read, torch.empty(num_rows, tree.num_drafted, 2), takes_best=False)
    parents_BN = cast("Topology", drafted.nodes).parents_BN
    assert drafted.is_certain
    for row in range(num_rows):
        wanted: dict[tuple[int, ...], float] = {}
        level_paths: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(tree.depth):
            best = sorted(level_paths, key=lambda path: -level_paths[path])[:width]
            level_paths = {
                (*path, int(token)): level_paths[path] * float(probs)
                for path in best
                for probs, token in zip(*probs_after(row, path).topk(width), strict=True)
            }
            wanted |= level_paths
        chosen = sorted(wanted, key=lambda path: -wanted[path])[: tree.num_drafted]
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafted.ids_BK[row].tolist(), parents_BN[row].tolist(), strict=True):
            assert parent < len(found)
            found.append((*found[parent], token))
        assert sorted(found[1:]) == sorted(chosen)


def test_equal_probabilities_leave_no_node_without_its_parent() -> None:
    """All candidates are as probable as the root, or not possible at all."""
    tree = Tree(tree_shape("dynamic-9x3x4"), CPU)
    certain = torch.zeros(2, 4, 6)
    certain[..., 2] = 1.0
    drafted = tree.draft(lambda level: certain[:, : 1 if level is None else 4], torch.empty(2, 9, 2), takes_best=False)
    shape = cast("Topology", drafted.nodes)
    assert shape.depths_BT.amax(1).tolist() == [3, 3]
    for row, path in enumerate(shape.paths_BTD[:, -1].tolist()):
        assert drafted.ids_BK[row, path[0] - 1] == 2


def test_dynamic_means_the_tree_of_its_paper() -> None:
    shape = tree_shape("dynamic")
    assert (shape.num_nodes, shape.depth, set(shape.widths), shape.read) == (60, 6, {10}, (10,) * 5)


NO_DYNAMIC = r"not the shape of a tree.*or dynamic-NODESxDEPTHxCHILDREN, such as dynamic-"
NO_STATIC = r"not the shape of a tree.*at least 1.*such as 2x2x1x1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"dynamic-{text}", NO_DYNAMIC) for text in ("", "60", "60x6", "60x6x10x1", "0x1x1")),
        ("Dynamic", NO_DYNAMIC),
        ("static-60x6x10", NO_DYNAMIC),
        # The nodes that its draft reads at least, and at most those that there are.
        ("dynamic-11x4x4", "need 12 to 52$"),
        ("dynamic-9x2x2", "need 2 to 6$"),
        ("dynamic-300x6x300", "need 1500 to 450300, and 256 is the most$"),
        *((text, NO_STATIC) for text in ("", "0", "2x0", "-1", "2x", "x2", "2 x 2", "2X2", "1.5", "٢", "2x2\n")),
        *(
            (text, f"{given}.*drafted tokens; 256 is the most")
            for text, given in (("257", "257"), ("16x16", "272"), ("9999x9999x9999", "more than"))
        ),
    ],
)
def test_a_text_that_is_no_shape_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_shape(text)
    assert tree_shape("16x15").num_nodes == 256


@pytest.mark.parametrize(
    ("empty", "paths"), [([], {0: 0, 2: 2, 4: 4}), ([0], {4: 0}), ([1, 3], {4: 1, 2: 2}), ([2], {4: 4}), ([4], {4: 4})]
)
def test_a_path_ends_where_nothing_may_follow(empty: list[int], paths: dict[int, int]) -> None:
    """The path to node 4 is 1, 3, 4; in a chain all nodes before it are on it."""
    nothing_1T = torch.zeros(1, 5, dtype=torch.bool)
    nothing_1T[:, empty] = True
    nodes = find_topology(torch.tensor([[0, 0, 1, 3]]), depth=3)
    for node, ends in paths.items():
        assert int(nodes.until(nothing_1T, torch.tensor([[node]]))) == ends
        assert int(Chain().until(nothing_1T, torch.tensor([[node]]))) == min([node, *empty])
