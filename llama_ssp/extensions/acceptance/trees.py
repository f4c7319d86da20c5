"""Computes how much of a given text rounds of a tree accept, on the way down of `sampling.trees.verify_tree`.

A node that is reached with weight a accepts the text's next token x by one of its children with a probability that
follows from a, from p and q there, and from the children that are examined before: x is child k with the draft's
probability q_k(x), and is reached with b = min(1, a_k p_k(x) / q_k(x)), which is the weight further down. Nodes off the
text matter only as these earlier children. They are drawn as the rule rejects them, in proportion to the positive part
of q_k - a_k p_k, and the way to x in proportion to its share, so that the products of shares have the right mean. Draws
at different places are independent, which keeps sums over ways of a text exact on average.

Children that are certain need no draws: x leaves their tree at one depth.

Shapes: X beginnings, D depth, V vocabulary, A outcomes of a choice, B texts, N drafted tokens of a tree.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.speculate.sampling.draft import Draft, Topology
from llama_ssp.speculate.sampling.trees import NodeLaws

Pick = Callable[[Tensor], Tensor]
"""Draws an outcome (X, 1) for each row of weights (X, A), any one of a row without weights."""
NUM_COURSES = 4
"""Draws of siblings for each beginning, whose mean is kept."""


class Place(NamedTuple):
    """The target's and the draft's probabilities (X, V) after a text, and its next token, (X, 1)."""

    target_XV: Tensor
    draft_XV: Tensor
    ids_X1: Tensor


def reach_along(places: Iterable[Place], widths: Sequence[int], pick: Pick) -> Tensor:
    """Return the probability (X, D) that a round accepts at least 1, 2, ..., D tokens of the text.

    The siblings are drawn once, so this is one sample of an estimate whose mean is exact.

    Args:
        places: one for each of the next D tokens of the text, in order.
        widths: the number of children of a node, for each depth.
        pick: draws the rejected siblings, and the child by which the path goes on along the text.
    """
    reach_X1 = carried_X1 = torch.ones(())
    found: list[Tensor] = []
    for (target_XV, draft_XV, ids_X1), width in zip(places, widths, strict=True):
        reach_X1 = reach_X1.to(target_XV).expand(len(target_XV), 1)
        laws, untried_X1 = NodeLaws(reach_X1, reach_X1, target_XV, draft_XV), torch.ones_like(reach_X1)
        of_children = []
        for place in range(width):
            child_X1 = laws.reach_of(ids_X1, is_first=place == 0)
            of_children.append((untried_X1 * laws.draft_XV.gather(-1, ids_X1) * child_X1, child_X1))
            if place < width - 1:
                rejected_XV = (laws.draft_XV - laws.target_XV * laws.factor_X1).clamp_min_(0)
                laws = laws.without(pick(rejected_XV))
                untried_X1 = untried_X1 / laws.factor_X1  # the mass of rejections
        shares_XW, children_XW = (torch.cat(parts, dim=1) for parts in zip(*of_children, strict=True))
        wanted_X1 = (target_XV.gather(-1, ids_X1) * reach_X1).clamp_min(torch.finfo(target_XV.dtype).tiny)
        carried_X1 = carried_X1 * (shares_XW.sum(1, keepdim=True) / wanted_X1).clamp_max(1.0)
        found.append(carried_X1)
        reach_X1 = children_XW.gather(1, pick(shares_XW))
    return torch.cat(found, dim=1)


def log_steps(places: Sequence[Place], widths: Sequence[int], generator: torch.Generator) -> Tensor:
    """Logarithms (X, D) of the probability of each further token, the mean over `NUM_COURSES` draws of siblings."""

    def pick(weights_XA: Tensor) -> Tensor:
        return (weights_XA / torch.empty_like(weights_XA).exponential_(generator=generator)).argmax(1, keepdim=True)

    num_courses = NUM_COURSES if max(widths) > 1 else 1
    reach_XD = torch.stack([reach_along(places, widths, pick) for _ in range(num_courses)]).mean(0)
    before_XD = torch.cat([torch.ones_like(reach_XD[:, :1]), reach_XD[:, :-1]], dim=1)
    return (reach_XD / before_XD).nan_to_num_(0.0).clamp_max_(1.0).log_()


def log_steps_of(draft: Draft, ids_BD: Tensor) -> Tensor:
    """The same (B, D) of a tree of certain children: 0 as far as the text's next tokens are in it."""
    assert isinstance(draft.nodes, Topology), "a tree"
    depth = draft.nodes.paths_BTD.shape[2]
    chosen_BT = torch.cat([ids_BD, ids_BD[:, -1:]], dim=1).gather(1, draft.nodes.depths_BT)
    node_B1 = draft.nodes.accept(draft.ids_BK, chosen_BT, chosen_BT).node_B1
    num_accepted_B1, _ = draft.nodes.path_to(node_B1)
    is_in_BD = torch.arange(depth, device=ids_BD.device) < num_accepted_B1
    return torch.where(is_in_BD, 0.0, float("-inf"))
