"""Trees of drafted tokens: their shape, the choice of a node's children, and the rules that accept one path.

Nodes are numbered level by level; node 0 is the row's newest text token, later nodes are drafted. A chain is a tree in
which every node has one child. A static tree has one shape, a dynamic one another shape in every row and round, but
always as many nodes, so that a round is the same operators every time.

    2x2x1      0 ->  1 ->  3 ->  7         the target reads   0   1 2   3 4 5 6   7 8 9 10
                 |     `-> 4 ->  8         accepted                2     5           9
                 `-> 2 ->  5 ->  9         the path, N = 10        2     5           9
                       `-> 6 -> 10

The children of a node are drawn without replacement; or they are certain: a function of the text alone, such as the
most probable tokens. The rules are pure functions on tensors, vectorised over rows, with loops over depth and width
only; the host reads no value.

Shapes: B sequences, N drafted tokens of a tree (K in `Draft` and `Draws`), T = N + 1 nodes with the root, D depth, W
children of a node, M nodes of a level, X children of a level, I nodes that have children, A slots after the text, C
candidates, V vocabulary, P = 2 uniforms per draw.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.settings.trees import TreeShape
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft, Topology, Verdict, find_topology
from llama_ssp.speculate.sampling.processors import draw, rows_after
from llama_ssp.speculate.sampling.rules import draw_next
from llama_ssp.speculate.sampling.uniforms import Draws

_LEAST_MASS = 2.0**-100
"""Probabilities with a smaller sum count as none: their reciprocal, and shares of them, would not be exact."""


class Level(NamedTuple):
    """Nodes of one depth, which the draft reads for the probabilities of their children.

    Nodes of a tree are stored after the text in the order in which the draft reads them.

    Attributes:
        depth: the depth of these nodes.
        ids_BM: their tokens.
        first: in a tree, the slot of the first of them, where the root has slot 0.
        parents_BM: their parents, as indices among the nodes of the level before; None in a chain.
        sees_BMA: which of the slots from the root to the last of them each of them sees, its own included; None in a
            chain.
    """

    depth: int
    ids_BM: Tensor
    first: int = 0
    parents_BM: Tensor | None = None
    sees_BMA: Tensor | None = None


ReadLevel = Callable[[Level | None], Tensor]
"""Reads nodes of the draft, None for the root, and returns the logits (B, M, V) after them, or what its rule makes of
these."""


class Tree:
    """A tree of one shape, or one that the draft's probabilities shape.

    Attributes:
        shape: the shape as settings have it.
        num_drafted, depth, num_parents: N, D and I; nodes 0..I - 1 of a static tree have children.
        levels: of a static tree, for each depth from 1 on, the range of its nodes.
        topology: of a static tree, for one row.
        children_TW: of a static tree, the children of each node, W = the largest width; 0 where there is none.
        by_place_T, places_T: of a static tree, the nodes ordered with children before their parent, and the index of
            each node in that order.
    """

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        self.shape, self.num_drafted, self.depth = shape, shape.num_nodes, shape.depth
        levels, parents = [range(1)], []
        for width in shape.widths if not shape.is_dynamic else ():
            parents += [parent for parent in levels[-1] for _ in range(width)]
            levels.append(range(levels[-1].stop, len(parents) + 1))
        self.levels, self.num_parents = tuple(levels[1:]), levels[-1].start
        width = shape.widths[0]
        self._same_WW = torch.eye(width, dtype=torch.bool, device=device)
        self._root_11 = torch.ones(1, 1, dtype=torch.bool, device=device)
        if not shape.is_dynamic:
            self.topology = find_topology(torch.tensor([parents], device=device), depth=self.depth)
            children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
            for node, parent in enumerate(parents, start=1):
                children[parent].append(node)
            padded = [[*row, *[0] * (max(shape.widths) - len(row))] for row in children]
            self.children_TW = torch.tensor(padded, device=device)
            order = _children_first(children)
            self.by_place_T = torch.tensor(order, device=device)
            self.places_T = torch.tensor([order.index(node) for node in range(len(order))], device=device)

    def nodes(self, num_rows: int) -> Topology:
        """The topology of a static tree, for each of some rows."""
        return Topology(*(table.expand(num_rows, *table.shape[1:]) for table in self.topology))

    def draft(self, read: ReadLevel, uniforms_BKP: Tensor, *, takes_best: bool) -> Draft:
        """Draft a static tree, level by level: drawn children, or the most probable ones.

        The probabilities that they are drawn from are in the order of their parents.

        Args:
            read: see `ReadLevel`.
            uniforms_BKP: the uniforms of all nodes; see `draw_children`.
            takes_best: whether to take the children with the largest scores, without probabilities.
        """
        if self.shape.is_dynamic:
            return self._grow(read, takes_best=takes_best)
        level: Level | None = None
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        num_rows = uniforms_BKP.shape[0]
        above = range(1)
        for depth, (nodes, width) in enumerate(zip(self.levels, self.shape.widths, strict=True), start=1):
            scores_BMV = read(level)
            if takes_best:
                ids_BX = best_children(scores_BMV, width=width)
            else:
                uniforms_BXP = uniforms_BKP[:, nodes.start - 1 : nodes.stop - 1]
                ids_BX = draw_children(scores_BMV, uniforms_BXP)
                probs.append(scores_BMV)
            drafted.append(ids_BX)
            parents_1X = self.topology.parents_BN[:, nodes.start - 1 : nodes.stop - 1] - above.start
            sees_1XA = self.topology.ancestors_BTT[:, nodes.start : nodes.stop, : nodes.stop]
            level = Level(
                depth, ids_BX, nodes.start, parents_1X.expand(num_rows, -1), sees_1XA.expand(num_rows, -1, -1)
            )
            above = nodes
        nothing = [torch.zeros_like(first[:, :1]) for first in probs[:1]]  # no children are drawn from the last row
        law = torch.cat([*probs, *nothing], dim=1) if probs else POINT_MASS
        return Draft(torch.cat(drafted, dim=1), law, self.nodes(num_rows))

    def _grow(self, read: ReadLevel, *, takes_best: bool) -> Draft:
        """Draft a dynamic tree: the N most probable of the candidates, by the draft's probability of their paths.

        The root has W candidates as children, and so have the W most probable candidates of each level but the last.
        Probabilities are the softmax of the logits if the rule takes the best token, else those that the rule draws
        from. Among equal candidates a parent comes before its children, so that the chosen ones are a tree.

        Source: Li et al. 2024, arXiv:2406.16858, section 4.
        """
        width, _ = self._same_WW.shape
        given_BMV = read(None)
        num_rows = given_BMV.shape[0]
        # The nodes that were read last: their numbers as candidates, the logarithms of their paths, what they see.
        numbers_BM = torch.zeros_like(given_BMV[..., 0], dtype=torch.int64)
        paths_BM = torch.zeros_like(given_BMV[..., 0])
        sees_BMA = self._root_11.expand(num_rows, 1, 1)
        candidates: list[tuple[Tensor, ...]] = []
        for depth in range(1, self.depth + 1):
            probs_BMW, ids_BMW = (given_BMV.softmax(-1) if takes_best else given_BMV).topk(width)
            scores_BX = (paths_BM[..., None] + probs_BMW.log()).flatten(1)
            ids_BX = ids_BMW.flatten(1)
            candidates.append((ids_BX, numbers_BM.repeat_interleave(width, dim=1), scores_BX))
            if depth < self.depth:
                paths_BM, best_BM = scores_BX.topk(width)
                first = 1 + (width + (depth - 2) * width**2 if depth > 1 else 0)
                numbers_BM, parents_BM = best_BM + first, best_BM // width
                above_BMA = sees_BMA.gather(1, parents_BM[..., None].expand(-1, -1, sees_BMA.shape[2]))
                sees_BMA = torch.cat([above_BMA, self._same_WW.expand(num_rows, -1, -1)], dim=-1)
                level = Level(depth, ids_BX.gather(1, best_BM), 1 + (depth - 1) * width, parents_BM, sees_BMA)
                given_BMV = read(level)
        ids_BC, parents_BC, scores_BC = (torch.cat(levels, dim=1) for levels in zip(*candidates, strict=True))
        order_BC = scores_BC.sort(dim=1, descending=True, stable=True).indices
        chosen_BN = order_BC[:, : self.num_drafted].sort(dim=1).values  # level by level
        # The new number of each candidate, and of the root.
        numbers_BN = torch.ones_like(chosen_BN).cumsum(1)
        numbers_BC = pad(torch.zeros_like(ids_BC), (1, 0)).scatter(1, chosen_BN + 1, numbers_BN)
        parents_BN = numbers_BC.gather(1, parents_BC.gather(1, chosen_BN))
        return Draft(ids_BC.gather(1, chosen_BN), nodes=find_topology(parents_BN, depth=self.depth))


def _children_first(children: list[list[int]], node: int = 0) -> list[int]:
    """The nodes of a tree with children before their parent, earlier children first."""
    return [*(below for child in children[node] for below in _children_first(children, child)), node]


def draw_children(probs_BMV: Tensor, uniforms_BXP: Tensor) -> Tensor:
    """Draw the children of each node of a level by the uniforms of these children.

    The first child has the probabilities of its node; the second has the same without the first one's token, and so on.
    If a node has fewer possible tokens than children, some child repeats a token; `verify_tree` never accepts that
    child. A node's only child is the token that `draw` draws.

    Args:
        probs_BMV: the draft's probabilities after each node of a level, after the processors.
        uniforms_BXP: the children's uniforms, at their indices in `Draws.draft_BKP`.

    Returns:
        The ids (B, X), the children of a node next to each other, as nodes are numbered.
    """
    num_rows, num_nodes, vocab_size = probs_BMV.shape
    num_children = uniforms_BXP.shape[1]
    width = num_children // num_nodes
    rest_XV = probs_BMV.reshape(num_rows * num_nodes, vocab_size)
    children: list[Tensor] = []
    for uniforms_XP in uniforms_BXP.reshape(num_rows * num_nodes, width, -1).unbind(1):
        if children:
            rest_XV = _others(rest_XV, children[-1])
        children.append(draw(rest_XV, uniforms_XP))
    return torch.cat(children, dim=1).reshape(num_rows, num_children)


def best_children(scores_BMV: Tensor, *, width: int) -> Tensor:
    """Take the `width` <= V tokens with the largest scores as the children of each node of a level: ids (B, X)."""
    if width == 1:
        return scores_BMV.argmax(-1)  # of equal scores the one that a chain takes
    return scores_BMV.topk(width).indices.flatten(1)


def verify_tree(tree: Tree, draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Accept a path of the tree that passes a joint test and keeps the target's distribution: traversal verification.

    The root is reached with probability a = 1. At a node that is reached with a, with the target's probabilities p and
    the draft's q, its children are examined in order. A child c is reached with min(1, a p(c) / q(c)). If c and all
    nodes below it are rejected, p becomes r / S, where r is the positive part of a p - q and S its sum, a becomes S /
    (S + 1 - a), and q loses c and is normalised. After its children the node itself passes with the remaining a, and
    the first node that passes ends the path: children come before their parent. The next token is drawn from the
    remaining p of that node. A tree in which each node has one child is verified as by `verify_block`.

    The remaining a and p do not depend on acceptances, so all nodes of a level are examined at once.

    Args:
        tree: the shape of the draft.
        draft: ids (B, N) by `draw_children`, and the probabilities (B, I + 1, V) of the children of nodes 0..I - 1;
            the last row is zero.
        target_probs_BTV: the target's probabilities after each node, after the same processors as the draft's.
        draws: the uniforms of a round of N drafted tokens, each node's at its own index.

    Source: Weng et al. 2025, arXiv:2505.12398, Algorithm 2.
    """
    draft_probs_BTV = draft.drawn_law
    reach_BM1 = torch.ones_like(target_probs_BTV[:, :1, :1])
    reached, left, above = [], [], range(1)
    for nodes, width in zip(tree.levels, tree.shape.widths, strict=True):
        target_BMV, draft_BMV = (probs[:, above.start : above.stop] for probs in (target_probs_BTV, draft_probs_BTV))
        laws = NodeLaws(reach_BM1, reach_BM1, target_BMV, draft_BMV)
        ids_BMW = draft.ids_BK[:, nodes.start - 1 : nodes.stop - 1].unflatten(1, (-1, width))
        children = []
        for place, ids_BM1 in enumerate(ids_BMW.split(1, dim=2)):
            children.append(laws.reach_of(ids_BM1, is_first=place == 0))
            laws = laws.without(ids_BM1 if place < width - 1 else None)
        reached.append(reach_BM1)
        left.append(laws.reach_X1)
        reach_BM1, above = torch.cat(children, dim=2).flatten(1)[..., None], nodes
    reach_BT, left_BT = (torch.cat([*levels, reach_BM1], dim=1)[..., 0] for levels in (reached, left))
    # The root passes in any case; its place is the last.
    passes_BT = pad(draws.accept_BK, (1, 0), value=-1.0) < left_BT
    node_B1 = tree.by_place_T[torch.where(passes_BT, tree.places_T, tree.num_drafted).amin(1, keepdim=True)]

    reach_B1, (target_BV,) = reach_BT.gather(1, node_B1), rows_after(node_B1, target_probs_BTV)
    # Nodes without children share the draft's last row.
    (draft_BV,) = rows_after(node_B1.clamp_max(tree.num_parents), draft_probs_BTV)
    laws = NodeLaws(reach_B1, reach_B1, target_BV, draft_BV)
    children_BW = tree.children_TW.index_select(0, node_B1.flatten())
    ids_BW, is_there_BW = pad(draft.ids_BK, (1, 0)).gather(1, children_BW), children_BW > 0
    for place in range(max(tree.shape.widths) - 1):
        laws = laws.without(ids_BW[:, place : place + 1])
        laws = laws._replace(draft_XV=laws.draft_XV * is_there_BW[:, place + 1 : place + 2])
    return draw_next(node_B1, laws.rest(), target_BV, draws.residual_BP).noting(left_BT)


class NodeLaws(NamedTuple):
    """The distributions of the children of some nodes, after some children were rejected.

    Attributes:
        reach_X1: the probability that the node is reached, a in `verify_tree`.
        factor_X1: the factor that makes a p of `target_XV`.
        target_XV: the target's distribution, not normalised.
        draft_XV: the draft's distribution; zero if no child remains.
    """

    reach_X1: Tensor
    factor_X1: Tensor
    target_XV: Tensor
    draft_XV: Tensor

    def reach_of(self, ids_X1: Tensor, *, is_first: bool) -> Tensor:
        """The probability of reaching the next child; 0 where the draft had no token for it."""
        draft_X1 = self.draft_XV.gather(-1, ids_X1)
        reach_X1 = self.target_XV.gather(-1, ids_X1).mul_(self.factor_X1).div_(draft_X1).clamp_max_(1.0)
        return reach_X1 if is_first else reach_X1.masked_fill_(draft_X1 == 0, 0.0)

    def rest(self) -> Tensor:
        """The positive part of a p - q."""
        return (self.target_XV * self.factor_X1).sub_(self.draft_XV).clamp_min_(0)

    def without(self, ids_X1: Tensor | None) -> "NodeLaws":
        """Return the distributions after a child and all nodes below it are rejected.

        `ids_X1` is None if no child follows.
        """
        rest_XV = self.rest()
        sums_X1 = rest_XV.sum(-1, keepdim=True)
        # Where both agree nothing is left, and no child is rejected.
        factor_X1 = (1 - self.reach_X1).add_(sums_X1).clamp_min_(_LEAST_MASS).reciprocal_()
        draft_XV = self.draft_XV if ids_X1 is None else _others(self.draft_XV, ids_X1)
        return NodeLaws(sums_X1 * factor_X1, factor_X1, rest_XV, draft_XV)


def _others(probs_XV: Tensor, ids_X1: Tensor) -> Tensor:
    """The distribution without one token of each row; zero if no other token is possible, and NaN stays NaN."""
    weights_XV = probs_XV.scatter(-1, ids_X1, 0.0)
    sums_X1 = weights_XV.sum(-1, keepdim=True)
    return weights_XV.mul_(sums_X1.reciprocal().masked_fill_(sums_X1 <= _LEAST_MASS, 0.0))
