"""The exact law of a round that drafts a tree, measured by driving its draw and its rule at their borders.

As in `exact_law` every border is found by bisection of the answers. A child is taken to have one border in its own
uniform number: the harness finds it where its ancestors have the number 0 and all other nodes the largest one. It then
drives the rule through all combinations of numbers on either side of the borders, and adds up their volumes.
Vocabularies have 3 or 4 tokens, for the reason that `choice_law` gives.

Shapes: C drafted trees, N drafted tokens of a tree, T = N + 1, I nodes with children, V vocabulary, W children of a
node, D depth, P = 2 numbers of a draw, S stops: pairs of a drafted tree and the node where the rule stops.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.trees import Tree, draw_children, verify_tree
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, Draws
from tests.helpers.exact_law import LARGEST_UNIFORM, choice_law, codes_of
from tests.helpers.table_models import TableModel

Process = Callable[[Tensor], Tensor]


VerifyTree = Callable[..., Verdict]
DrawChildren = Callable[[Tensor, Tensor], Tensor]


def tree_law(
    tree: Tree,
    process: Process,
    *,
    target: TableModel,
    draft: TableModel,
    verify: VerifyTree = verify_tree,
    draw: DrawChildren = draw_children,
) -> Tensor:
    """Measure the law of the first D + 1 tokens of a text: a round's, and further ones of the target's law.

    The models have one table for prefixes of up to D tokens. Returns fp64 (V^(D + 1),), exact to about 1e-14.
    """
    target_probs = [process(logits[0]) for logits in target.logits]
    texts = round_texts(tree, process, target=target, draft=draft, verify=verify, draw=draw)
    law = texts[0]
    for length, text_law in enumerate(texts[1:], start=1):
        law = text_law + (law[:, None] * target_probs[length]).flatten()
    return law


def round_texts(
    tree: Tree,
    process: Process,
    *,
    target: TableModel,
    draft: TableModel,
    verify: VerifyTree = verify_tree,
    draw: DrawChildren = draw_children,
) -> list[Tensor]:
    """Measure the law of what one round adds: for n = 0..D accepted tokens, of the n + 1 new ones, (V^(n + 1),)."""
    target_probs, draft_probs = ([process(logits[0]) for logits in model.logits] for model in (target, draft))
    return _Round(tree, target_probs, draft_probs, verify=verify, draw=draw).texts()


class _Round:
    """The trees (C, N) that can be drafted, the law of each, and what the rule makes of them."""

    def __init__(
        self,
        tree: Tree,
        target_probs: list[Tensor],
        draft_probs: list[Tensor],
        *,
        verify: VerifyTree,
        draw: DrawChildren,
    ) -> None:
        self._tree, self._verify, self._vocab_size = tree, verify, target_probs[0].shape[-1]
        self._ids_CN = torch.zeros(1, 0, dtype=torch.long)
        self._law_C = torch.ones(1, dtype=torch.float64)
        laws = [_children_law(draw, draft_probs[depth], width=width) for depth, width in enumerate(tree.shape.widths)]
        for node in range(tree.num_parents):
            self._add_children(laws[int(tree.topology.depths_BT[0][node])], node)
        self._target_CTV = self._rows(target_probs, num_nodes=tree.num_drafted + 1)
        self._draft_CIV = pad(self._rows(draft_probs, num_nodes=tree.num_parents), (0, 0, 0, 1))

    def texts(self) -> list[Tensor]:
        """For n = 0..D accepted tokens, the law of the n + 1 new ones, (V^(n + 1),)."""
        borders_CN = self._borders()
        sides = torch.tensor(list(product((False, True), repeat=self._tree.num_drafted)))
        trees, weights, accepts = [], [], []
        for is_below_N in sides:
            weight_C = torch.where(is_below_N, borders_CN, 1 - borders_CN).prod(1) * self._law_C
            trees.append(weight_C.nonzero()[:, 0])
            weights.append(weight_C[trees[-1]])
            accepts.append((torch.where(is_below_N, borders_CN, borders_CN + 1) / 2)[trees[-1]])
        trees_X, weights_X = torch.cat(trees), torch.cat(weights)
        accept_XN = torch.cat(accepts).clamp_max_(LARGEST_UNIFORM)
        verdict = self._decide(trees_X, accept_XN)
        node_X1 = verdict.node_B1
        stops, stop_X = (trees_X * (self._tree.num_drafted + 1) + node_X1[:, 0]).unique(return_inverse=True)
        reach_S = weights_X.new_zeros(stops.shape[0]).index_add_(0, stop_X, weights_X)
        some_S = torch.zeros_like(stops).scatter_(0, stop_X, torch.arange(stop_X.shape[0]))
        trees_S, accept_SN = trees_X[some_S], accept_XN[some_S]

        def choose(rows_B: Tensor, uniforms_BP: Tensor) -> Tensor:
            return self._decide(trees_S[rows_B], accept_SN[rows_B], uniforms_BP).next_ids_B1[:, 0]

        next_law_SV = choice_law(
            choose, num_rows=stops.shape[0], num_coordinates=PER_DRAW, num_answers=self._vocab_size
        )
        num_accepted_S1, path_SD = self._tree.nodes(len(some_S)).path_to(node_X1[some_S])
        path_ids_SD = self._ids_CN[trees_S].gather(1, path_SD - 1)
        return [
            self._text_law(path_ids_SD[is_here_S, :num], (reach_S[:, None] * next_law_SV)[is_here_S])
            for num in range(self._tree.depth + 1)
            for is_here_S in [num_accepted_S1[:, 0] == num]
        ]

    def _text_law(self, accepted_SD: Tensor, law_SV: Tensor) -> Tensor:
        codes_SV = codes_of(accepted_SD, self._vocab_size)[:, None] * self._vocab_size + torch.arange(self._vocab_size)
        law = law_SV.new_zeros(self._vocab_size ** (accepted_SD.shape[1] + 1))
        return law.index_add_(0, codes_SV.flatten(), law_SV.flatten())

    def _add_children(self, law_PA: Tensor, node: int) -> None:
        """Extend every tree by the children of a node in all ways that can be drawn."""
        law_CA = law_PA[self._codes(node)] * self._law_C[:, None]
        trees, answers = law_CA.nonzero(as_tuple=True)
        width = self._tree.shape.widths[int(self._tree.topology.depths_BT[0][node])]
        children = torch.tensor(list(product(range(self._vocab_size), repeat=width)))[answers]
        self._ids_CN = torch.cat([self._ids_CN[trees], children], dim=1)
        self._law_C = law_CA[trees, answers]

    def _codes(self, node: int) -> Tensor:
        """The code (C,) of the drafted tokens up to a node."""
        path_D = self._tree.topology.paths_BTD[0, node, : int(self._tree.topology.depths_BT[0][node])]
        return codes_of(self._ids_CN[:, path_D - 1], self._vocab_size)

    def _rows(self, probs: list[Tensor], *, num_nodes: int) -> Tensor:
        return torch.stack(
            [probs[int(self._tree.topology.depths_BT[0][node])][self._codes(node)] for node in range(num_nodes)], dim=1
        )

    def _decide(self, trees_B: Tensor, accept_BN: Tensor, residual_BP: Tensor | None = None) -> Verdict:
        unused_BP = accept_BN.new_full((accept_BN.shape[0], PER_DRAW), 0.5)
        draws = Draws(
            unused_BP[:, None].expand(-1, accept_BN.shape[1], -1),
            accept_BN,
            unused_BP if residual_BP is None else residual_BP,
            unused_BP[:, None],
        )
        draft = Draft(self._ids_CN[trees_B], self._draft_CIV[trees_B])
        return self._verify(self._tree, draft, self._target_CTV[trees_B], draws=draws)

    def _borders(self) -> Tensor:
        """Below which number each node is accepted, (C, N)."""
        tree, (num_trees, num_drafted) = self._tree, self._ids_CN.shape
        trees_X = torch.arange(num_trees).repeat_interleave(num_drafted)
        node_X = torch.arange(1, num_drafted + 1).repeat(num_trees)
        level_X1 = tree.topology.depths_BT[0][node_X, None] - 1
        accept_XN = torch.where(tree.topology.ancestors_BTT[0][node_X, 1:], 0.0, LARGEST_UNIFORM).double()

        def is_accepted(at_X: Tensor) -> Tensor:
            verdict = self._decide(trees_X, accept_XN.scatter(1, node_X[:, None] - 1, at_X[:, None]))
            num_accepted_X1, path_XD = tree.nodes(len(node_X)).path_to(verdict.node_B1)
            return ((num_accepted_X1 > level_X1) & (path_XD.gather(1, level_X1) == node_X[:, None]))[:, 0]

        low_X = torch.zeros(trees_X.shape[0], dtype=torch.float64)
        high_X = torch.full_like(low_X, LARGEST_UNIFORM)
        never_X, always_X = ~is_accepted(low_X), is_accepted(high_X)
        for _ in range(54):
            middle_X = (low_X + high_X) / 2
            passes_X = is_accepted(middle_X)
            low_X, high_X = torch.where(passes_X, middle_X, low_X), torch.where(passes_X, high_X, middle_X)
        return high_X.masked_fill_(never_X, 0.0).masked_fill_(always_X, 1.0).view(num_trees, num_drafted)


def _children_law(draw: DrawChildren, probs_PV: Tensor, *, width: int) -> Tensor:
    """The law (V^t, V^W) of the children of a node, for all prefixes of t tokens."""
    num_prefixes, vocab_size = probs_PV.shape

    def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
        return codes_of(draw(probs_PV[rows_B, None], uniforms_BC.unflatten(1, (width, PER_DRAW))), vocab_size)

    return choice_law(choose, num_rows=num_prefixes, num_coordinates=PER_DRAW * width, num_answers=vocab_size**width)
