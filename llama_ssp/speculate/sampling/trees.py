"""Trees of drafted tokens: their shape, the draw of a node's children, and the rules that accept one path.

A tree has one fixed shape, so that a round is the same operators every time. Nodes are numbered level by level; node 0
is the row's newest text token, the others are drafted. A chain is a tree in which every node has one child.

    2x2x1      0 ->  1 ->  3 ->  7         the target reads   0   1 2   3 4 5 6   7 8 9 10
                 |     `-> 4 ->  8         accepted                2     5           9
                 `-> 2 ->  5 ->  9         the path, N = 10        2     5           9
                       `-> 6 -> 10

The children of a node are different tokens, drawn without replacement. The rules are pure functions on tensors,
vectorised over rows, with loops over depth and width only; the host reads no value.

Shapes: B sequences, N drafted tokens of a tree (K in `Draft` and `Draws`), T = N + 1 nodes with the root, D depth, W
children of a node, M nodes of a level, X = M W children of a level, I nodes that have children, V vocabulary, P = 2
uniforms per draw.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.settings.trees import tree_widths
from llama_ssp.shapes import static_shape
from llama_ssp.speculate.sampling.processors import draw, rows_at
from llama_ssp.speculate.sampling.rules import Draft, draw_next
from llama_ssp.speculate.sampling.uniforms import Draws

_LEAST_MASS = 2.0**-100
"""Probabilities with a smaller sum count as none: their reciprocal, and shares of them, would not be exact."""


class Tree:
    """The shape of a tree of drafted tokens.

    Attributes:
        widths: how many children every node has, level by level.
        num_drafted, depth, num_parents: N, D and I; nodes 0..I - 1 have children.
        levels: for each depth from 1 on, the range of its nodes.
        parents_N: the parent of each drafted node, int64.
        depths_T: the depth of each node, 0 for the root.
        ancestors_TT: whether row node sees column node: itself and its ancestors.
        children_TW: the children of each node, W = the largest width; 0 where there is none.
        paths_TD: the nodes from the root's child to each node. Beyond its depth the numbers count on as in a chain, so
            that moving slot `path[k]` to slot k + 1, in order, moves no slot after the path.
    """

    def __init__(self, widths: Sequence[int], device: torch.device) -> None:
        self.widths, self.depth = tuple(widths), len(widths)
        levels, parents = [range(1)], []
        for width in widths:
            parents += [parent for parent in levels[-1] for _ in range(width)]
            levels.append(range(levels[-1].stop, len(parents) + 1))
        self.levels = tuple(levels[1:])
        self.num_drafted, self.num_parents = len(parents), levels[-1].start

        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(parents, start=1):
            children[parent].append(node)
            paths.append([*paths[parent], node])
        on_path = [[column in {0, *path} for column in range(len(paths))] for path in paths]
        padded = [[*row, *[0] * (max(widths) - len(row))] for row in children]
        counted_on = [[*path, *range(len(path) + 1, self.depth + 1)] for path in paths]
        self.parents_N = torch.tensor(parents, device=device)
        self.depths_T = torch.tensor([len(path) for path in paths], device=device)
        self.ancestors_TT = torch.tensor(on_path, device=device)
        self.children_TW = torch.tensor(padded, device=device)
        self.paths_TD = torch.tensor(counted_on, device=device)

    @classmethod
    def of(cls, shape: str, device: torch.device) -> "Tree":
        """The tree of a shape such as `2x2x1`; raises ValueError as `tree_widths` does."""
        return cls(tree_widths(shape), device)


class TreeVerdict(NamedTuple):
    """How many drafted tokens are accepted, 0..D, which ones, and the token that follows them: resampled or bonus.

    `path_BD` is the last accepted node's row of `Tree.paths_TD`. For `weights_B1` see `Verdict`.
    """

    num_accepted_B1: Tensor
    path_BD: Tensor
    next_ids_B1: Tensor
    weights_B1: Tensor


def draw_children(probs_BMV: Tensor, uniforms_BXP: Tensor) -> Tensor:
    """Draw different children of each node of a level, without replacement, by the uniforms of these children.

    The first child has the probabilities of its node, the second those without the first's token, and so on. A node
    with fewer possible tokens than children has some token again; `verify_tree` never accepts it. A node's only child
    is the token that `draw` draws.

    Args:
        probs_BMV: the draft's probabilities after each node of a level, after the processors.
        uniforms_BXP: those of the children, at their places in `Draws.draft_BKP`.

    Returns:
        The ids (B, X), the children of a node side by side, as nodes are numbered.
    """
    num_rows, num_nodes, vocab_size = static_shape(probs_BMV)
    num_children = static_shape(uniforms_BXP)[1]
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


def verify_tree(tree: Tree, draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> TreeVerdict:
    """Accept a path of the tree that keeps the target's distribution: recursive rejection without replacement.

    At a node with the target's probabilities p and the draft's q its children are examined in order. A child c is
    accepted with probability min(1, p(c) / q(c)), and its own children are next. Otherwise p becomes the positive part
    of p - q, and q loses c; both are normalised. If no child is accepted, the next token is drawn from p. In a chain
    everything is as by `verify_speculative`, to the bit.

    Args:
        tree: the shape of the draft.
        draft: ids (B, N) by `draw_children`, and the probabilities (B, I + 1, V) of the children of nodes 0..I - 1;
            the last row is zero. Without probabilities every child is certain, as by `best_children`: its q is 1.
        target_probs_BTV: the target's probabilities after each node, after the same processors as the draft's.
        draws: the uniforms of a round of N drafted tokens, each node's at its own place.

    Source: Miao et al. 2023, arXiv:2305.09781, Algorithm 2; Chen et al. 2024, arXiv:2402.12374, Algorithm 2.
    """
    # The first children of all nodes are examined at once. The later ones take whole rows, and wait for their turn.
    at_BN = draft.ids_BK + tree.parents_N * static_shape(target_probs_BTV)[-1]
    ratio_BN = target_probs_BTV.flatten(1).gather(1, at_BN)
    if draft.probs_BTV is not None:
        ratio_BN = ratio_BN.div_(draft.probs_BTV.flatten(1).gather(1, at_BN))
    passes_first_BT = pad(draws.accept_BK < ratio_BN, (1, 0))
    # Node 0 stands for a child that is not there: its uniform is above every ratio.
    ids_BT, numbers_BT = pad(draft.ids_BK, (1, 0)), pad(draws.accept_BK, (1, 0), value=float("inf"))

    node_B1 = torch.zeros_like(draft.ids_BK[:, :1])
    for width in tree.widths:
        # A row that has stopped on an earlier level examines the same children again, and rejects them again.
        children_BW = tree.children_TW.index_select(0, node_B1.flatten())[:, :width]
        passes = [passes_first_BT.gather(1, children_BW[:, :1])]
        if width > 1:
            rows = _rows_of(node_B1, target_probs_BTV, draft.probs_BTV)
            passes += _later_passes(rows, ids_BT.gather(1, children_BW), numbers_BT.gather(1, children_BW))
        for passes_B1, child_B1 in zip(reversed(passes), reversed(children_BW.split(1, dim=1)), strict=True):
            node_B1 = torch.where(passes_B1, child_B1, node_B1)

    target_row_BV, _ = target_BV, draft_BV = _rows_of(node_B1, target_probs_BTV, draft.probs_BTV)
    children_BW = tree.children_TW.index_select(0, node_B1.flatten())
    ids_BW, is_there_BW = ids_BT.gather(1, children_BW), children_BW > 0
    if draft_BV is None:
        kept_BW = target_BV.gather(1, ids_BW).mul_(~is_there_BW)
        rest_BV = target_BV.clone()
        for ids_B1, kept_B1 in zip(ids_BW.split(1, dim=1), kept_BW.split(1, dim=1), strict=True):
            rest_BV.scatter_(1, ids_B1, torch.minimum(rest_BV.gather(1, ids_B1), kept_B1))
    else:
        for rejected in range(max(tree.widths) - 1):
            target_BV, draft_BV = _rejected(target_BV, draft_BV, ids_BW[:, rejected : rejected + 1])
            draft_BV.mul_(is_there_BW[:, rejected + 1 : rejected + 2])
        rest_BV = (target_BV - draft_BV).clamp_min_(0)
    _, next_ids_B1, weights_B1 = draw_next(node_B1, rest_BV, target_row_BV, draws.residual_BP)
    return _verdict(tree, node_B1, next_ids_B1, weights_B1)


def verify_tree_greedy(tree: Tree, draft: Draft, target_logits_BTV: Tensor) -> TreeVerdict:
    """Accept the longest path of drafted tokens that have the target's largest logit; the next token has it too."""
    best_BT = target_logits_BTV.argmax(-1)  # NaN counts as the largest
    largest_BT = target_logits_BTV.gather(-1, best_BT[..., None])[..., 0]
    differs_BN = best_BT.index_select(1, tree.parents_N) != draft.ids_BK
    is_off_BT = (pad(differs_BN, (1, 0))[:, None] & tree.ancestors_TT).any(-1)
    # Deeper nodes have larger numbers; the root is never off.
    node_B1 = (~is_off_BT * torch.arange(tree.num_drafted + 1, device=best_BT.device)).amax(1, keepdim=True)
    return _verdict(tree, node_B1, best_BT.gather(1, node_B1), largest_BT.gather(1, node_B1))


def _verdict(tree: Tree, node_B1: Tensor, next_ids_B1: Tensor, weights_B1: Tensor) -> TreeVerdict:
    """The verdict that accepts the path to a node."""
    node_B = node_B1.flatten()
    num_accepted_B1 = tree.depths_T.index_select(0, node_B)[:, None]
    return TreeVerdict(num_accepted_B1, tree.paths_TD.index_select(0, node_B), next_ids_B1, weights_B1)


def _rows_of(node_B1: Tensor, target_probs_BTV: Tensor, draft_probs_BTV: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The probabilities (B, V) of what follows one node of each row: the target's, and the draft's or zeros."""

    def row(probs: Tensor) -> Tensor:
        num_rows, num_positions, _ = static_shape(probs)
        at_B1 = node_B1.clamp_max(num_positions - 1)  # nodes without children share the draft's last row
        return probs.flatten(0, 1).index_select(0, rows_at(at_B1, num_rows=num_rows, num_positions=num_positions))

    return row(target_probs_BTV), None if draft_probs_BTV is None else row(draft_probs_BTV)


def _later_passes(rows: tuple[Tensor, Tensor | None], ids_BW: Tensor, numbers_BW: Tensor) -> list[Tensor]:
    """Whether each child of a node but the first passes, (B, 1), after those before it were rejected."""
    passes = []
    ids, numbers = ids_BW.split(1, dim=1), numbers_BW.split(1, dim=1)
    for (rejected_B1, ids_B1), numbers_B1 in zip(pairwise(ids), numbers[1:], strict=True):
        target_BV, draft_BV = rows
        if draft_BV is None:
            rows = _others(target_BV, rejected_B1), None
            passes.append(numbers_B1 < rows[0].gather(1, ids_B1))
            continue
        rows = _rejected(target_BV, draft_BV, rejected_B1)
        target_at_B1, draft_at_B1 = (row_BV.gather(1, ids_B1) for row_BV in rows)
        # Where the draft had too few tokens, its probabilities are 0 by now.
        passes.append((numbers_B1 < target_at_B1 / draft_at_B1) & (draft_at_B1 > 0))
    return passes


def _rejected(target_BV: Tensor, draft_BV: Tensor, ids_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions of a node after a child with these ids was rejected."""
    return _normalised((target_BV - draft_BV).clamp_min_(0)), _others(draft_BV, ids_B1)


def _others(probs_XV: Tensor, ids_X1: Tensor) -> Tensor:
    """The distribution without one token of each row; zero if no other token is possible."""
    return _normalised(probs_XV.scatter(1, ids_X1, 0.0))


def _normalised(weights_XV: Tensor) -> Tensor:
    """Make the sum of each row 1, in place, or 0 if nothing is there; NaN stays NaN."""
    sums_X1 = weights_XV.sum(-1, keepdim=True)
    return weights_XV.mul_(sums_X1.reciprocal().masked_fill_(sums_X1 <= _LEAST_MASS, 0.0))
