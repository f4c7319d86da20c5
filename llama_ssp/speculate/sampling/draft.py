"""A draft, as a rule is given it, and the verdict on it.

A draft is a tree: node 0 is the newest token of the text, and the drafted tokens are its nodes 1, 2, ... Each is drawn
from a law. A chain, in which node j is the child of node j - 1, and a point mass need no memory.

Shapes: B sequences, K drafted tokens (N of a tree), T = K + 1 nodes with the root, D depth, V vocabulary, P = 2
uniforms per draw.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Verdict(NamedTuple):
    """The path that is accepted, and the token that follows it: resampled or bonus.

    Attributes:
        node_B1: the path's last node, 0 for an empty path; in a chain this is the number of accepted tokens.
        weights_B1: the weight of the next token: NaN if the logits after the accepted tokens contain NaN, or other
            logits on which the verdict depends do.
    """

    node_B1: Tensor
    next_ids_B1: Tensor
    weights_B1: Tensor

    def noting(self, numbers_BX: Tensor) -> "Verdict":
        """Make the weight NaN if one of these numbers is NaN, since comparisons with NaN accept nothing."""
        return self._replace(weights_B1=torch.add(self.weights_B1, numbers_BX.sum(1, keepdim=True), alpha=0.0))

    def where(self, is_other_B1: Tensor, other: "Verdict") -> "Verdict":
        """Replace the verdict by another one in some rows."""
        return Verdict(*(torch.where(is_other_B1, *parts) for parts in zip(other, self, strict=True)))


class PointMass(NamedTuple):
    """The distribution of tokens that are a function of the text, such as greedy drafts: each has probability 1."""


Law = Tensor | PointMass
"""Processed probabilities (B, T, V) that tokens were drawn from, or a point mass at each token.

The last row is zero: nothing was drafted there, so the residual is the target's distribution. Of a tree there is a row
for each node that has children.
"""
POINT_MASS = PointMass()


class Chain(NamedTuple):
    """The nodes of a chain."""

    def accept(self, ids_BK: Tensor, chosen_BT: Tensor, weights_BT: Tensor) -> Verdict:
        """Accept the path of certain tokens that the target chooses as well; the target also chooses the next token.

        The target chooses by random numbers of each position alone, or takes its best tokens, so the text is that of
        plain decoding, whatever is drafted.

        Args:
            ids_BK: the drafted tokens.
            chosen_BT: the token that the target draws after each node, or its best one.
            weights_BT: the weights of these tokens.
        """
        if not ids_BK.shape[1]:
            return Verdict(torch.zeros_like(chosen_BT), chosen_BT, weights_BT)
        node_B1 = (chosen_BT[:, :-1] == ids_BK).cumprod(1).sum(1, keepdim=True)
        return Verdict(node_B1, chosen_BT.gather(-1, node_B1), weights_BT.gather(-1, node_B1))

    def at_nodes(self, places_BTP: Tensor) -> Tensor:
        """Give each node the value (B, T) of its children's depth, given a value for each depth after the text."""
        return places_BTP

    def until(self, nothing_BT: Tensor, node_B1: Tensor) -> Tensor:
        """Return the first node on the path to `node_B1` after which no token may follow, or else `node_B1`."""
        return node_B1.minimum((nothing_BT.cumsum(1) == 0).sum(1, keepdim=True))


class Topology(NamedTuple):
    """Parents, depths and paths of the nodes, in the trees of some rows.

    Attributes:
        parents_BN: the parent of each drafted node, int64.
        depths_BT: the depth of each node, 0 for the root.
        ancestors_BTT: whether row node sees column node: itself and its ancestors.
        paths_BTD: the nodes from the root's child to each node. After the node's own depth the numbers continue as in a
            chain, so that moving slot `path[k]` to slot k + 1, in order, moves no slot after the path.
    """

    parents_BN: Tensor
    depths_BT: Tensor
    ancestors_BTT: Tensor
    paths_BTD: Tensor

    def accept(self, ids_BN: Tensor, chosen_BT: Tensor, weights_BT: Tensor) -> Verdict:
        """See `Chain.accept`.

        Which children there are says nothing about the target's choices: the text has the law of these. Each node of a
        path holds the token that was chosen at its parent. Of equal children the first counts: to take the one whose
        path goes on would prefer drafted tokens.
        """
        _, num_nodes, depth = self.paths_BTD.shape
        fits_BN = chosen_BT.gather(1, self.parents_BN) == ids_BN
        places_BN = num_nodes - torch.ones_like(ids_BN).cumsum(1)  # the largest is the first
        node_B1 = torch.zeros_like(ids_BN[:, :1])
        for _ in range(depth):
            place_B1 = (places_BN * (fits_BN & (self.parents_BN == node_B1))).amax(1, keepdim=True)
            node_B1 = torch.where(place_B1 > 0, num_nodes - place_B1, node_B1)
        return Verdict(node_B1, chosen_BT.gather(1, node_B1), weights_BT.gather(1, node_B1))

    def at_nodes(self, places_BTP: Tensor) -> Tensor:
        """See `Chain.at_nodes`."""
        return places_BTP.gather(1, self.depths_BT[..., None].expand(-1, -1, places_BTP.shape[2]))

    def until(self, nothing_BT: Tensor, node_B1: Tensor) -> Tensor:
        """See `Chain.until`; the first of a path has the smallest number."""
        index_B1T = node_B1[..., None].expand(-1, -1, nothing_BT.shape[1])
        ends_BT = self.ancestors_BTT.gather(1, index_B1T)[:, 0] & nothing_BT
        return torch.where(ends_BT.any(1, keepdim=True), ends_BT.long().argmax(1, keepdim=True), node_B1)

    def path_to(self, node_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Return the path to a node: its number of nodes (B, 1), and the node's row of `paths_BTD`, (B, D)."""
        index_B1D = node_B1[..., None].expand(-1, -1, self.paths_BTD.shape[2])
        return self.depths_BT.gather(1, node_B1), self.paths_BTD.gather(1, index_B1D)[:, 0]


def find_topology(parents_BN: Tensor, *, depth: int) -> Topology:
    """Make the topology of trees of depth D = `depth`, given the parents of their nodes, which have smaller numbers."""
    up_BT = pad(parents_BN, (1, 0))  # the root is its own parent
    nodes_BT = torch.ones_like(up_BT).cumsum(1) - 1
    found = [nodes_BT]
    for _ in range(depth):
        found.append(up_BT.gather(1, found[-1]))
    upwards_BTA = torch.stack(found, dim=-1)  # a node, its parent, ..., the root again and again
    depths_BT = (upwards_BTA > 0).sum(-1)
    num_rows, num_nodes = up_BT.shape
    ancestors_BTT = torch.zeros(num_rows, num_nodes, num_nodes, dtype=torch.bool, device=up_BT.device)
    ancestors_BTT.scatter_(2, upwards_BTA, torch.ones_like(upwards_BTA, dtype=torch.bool))
    steps_D = nodes_BT[0, :1] + torch.ones(depth, dtype=torch.int64, device=up_BT.device).cumsum(0) - 1
    above_BTD = depths_BT[..., None] - 1 - steps_D
    paths_BTD = torch.where(above_BTD >= 0, upwards_BTA.gather(2, above_BTD.clamp_min(0)), steps_D + 1)
    return Topology(parents_BN, depths_BT, ancestors_BTT, paths_BTD)


class Draft(NamedTuple):
    """Drafted tokens, the distribution that each was drawn from, and their tree.

    Attributes:
        num_B1: the number of tokens of a chain that count in each row; a number above K counts all. The other tokens
            are treated as not drafted. In a tree, a row with 0 has no token that counts. Whether a token counts may
            depend on the text and the tokens before it, not on itself or later ones. Empty if all tokens of all rows
            count.
    """

    ids_BK: Tensor
    law: Law = POINT_MASS
    nodes: Chain | Topology = Chain()
    num_B1: Tensor | tuple[()] = ()

    @property
    def num_tokens(self) -> int:
        """K; 0 is plain decoding."""
        return self.ids_BK.shape[1]

    @property
    def is_certain(self) -> bool:
        """Whether no token was drawn: each is a function of the text."""
        return isinstance(self.law, PointMass)

    @property
    def drawn_law(self) -> Tensor:
        """The probabilities (B, T, V) of a draft that is not certain."""
        assert isinstance(self.law, Tensor), "a draft of drawn tokens"
        return self.law

    def probs_like(self, like_BTV: Tensor) -> Tensor:
        """The probabilities of any draft; of a point mass in the shape and number format of `like_BTV`."""
        if not self.is_certain:
            return self.drawn_law
        probs_BTV = torch.zeros_like(like_BTV)
        probs_BTV[:, :-1].scatter_(-1, self.ids_BK[..., None], 1.0)
        return probs_BTV

    @property
    def told_ids(self) -> Tensor:
        """The ids (B, K), -1 for tokens that do not count."""
        if not isinstance(self.num_B1, Tensor):
            return self.ids_BK
        return self.ids_BK.masked_fill(torch.ones_like(self.ids_BK).cumsum(1) > self.num_B1, -1)

    def at_most(self, most_B1: Tensor) -> "Draft":
        """Return the draft with at most `most_B1` tokens of each row counted; a tree counts nothing in rows with 0."""
        num_B1 = self.num_B1.minimum(most_B1) if isinstance(self.num_B1, Tensor) else most_B1
        return self._replace(num_B1=num_B1)

    def first(self, num_tokens: int = 1) -> "Draft":
        """Return the chain of its first `num_tokens` tokens."""
        ids_BK = self.ids_BK[:, :num_tokens]
        if not num_tokens:
            return Draft(ids_BK)
        if self.is_certain:
            return Draft(ids_BK, num_B1=self.num_B1)
        first_BKV = self.drawn_law[:, :num_tokens]
        law_BTV = torch.cat([first_BKV, torch.zeros_like(first_BKV[:, :1])], dim=1)
        return Draft(ids_BK, law_BTV, num_B1=self.num_B1)

    def followed_by(self, other: "Draft") -> "Draft":
        """Return the chain that consists of the tokens of this chain and of another one."""
        ids_BK = torch.cat([self.ids_BK, other.ids_BK], dim=1)
        if self.is_certain or other.is_certain:
            return Draft(ids_BK)
        probs_BKV = self.drawn_law[:, : self.ids_BK.shape[1]]
        return Draft(ids_BK, torch.cat([probs_BKV, other.drawn_law], dim=1))
