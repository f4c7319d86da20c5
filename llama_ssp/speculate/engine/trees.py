"""Rounds that draft a tree of tokens and verify all its nodes in one forward.

    text   ... t        slot   L-1   L   L+1   L+2   L+3        the target reads the root and all nodes, each of which
    nodes      | 1 3           t     1    2     3     4         sees the text and its ancestors;
               ` 2 4           after a path of 2 and 4:         what it has kept of the accepted path moves to the
                               t     2    4                     slots behind the text

Node j stands j slots behind the newest token, at the position of its depth. The accepted path moves in the cache of the
target, and in the taps of a head; the draft reads it anew.

Shapes: B sequences, S slots, N drafted tokens, T = N + 1 nodes with the root, D depth, V vocabulary.
"""

import torch
from torch import Tensor

from llama_ssp.models.cache import Taps
from llama_ssp.models.runner import Runner
from llama_ssp.speculate.drafters.drafter import Drafter, TreeTables
from llama_ssp.speculate.engine.round import DraftChoice, Round, Stage
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.rules import Draft
from llama_ssp.speculate.sampling.trees import Tree


class TreeRound(Round):
    """The target, a drafter of trees, and the verifier, applied to a batch; see `Round`."""

    reads_alike = False

    def __init__(
        self, target: Runner, drafter: Drafter, *, verifier: Verifier, tree: Tree, taps: Taps | None = None
    ) -> None:
        super().__init__(target, drafter, verifier=verifier, taps=taps)
        self._tree, self._tables = tree, TreeTables(tree.num_drafted, target.device)
        self._steps_D = torch.arange(tree.depth, device=target.device)

    def verify_stage(self, choice: DraftChoice, *, bucket: int) -> Stage:
        """See `Round.verify_stage`."""
        stage = super().verify_stage(choice, bucket=bucket)
        return stage._replace(reads=(*stage.reads, self._tree, self._tables, self._steps_D))

    def _verify(self, choice: DraftChoice, bucket: int, state: BatchState, *drafted: Tensor) -> Tensor:
        if not drafted:
            return super()._verify(choice, bucket, state)
        uniforms_BN, ids_BN, *others = drafted
        draft = Draft(ids_BN, *((None, *others) if self._tree.shape.is_dynamic else (*others, None)[:1]))
        shape = self._tree.topology_of(draft)
        lengths_B1 = state.lengths_B[:, None]
        root_B1 = lengths_B1 - 1
        positions_BT, places = self._tables.places(root_B1, 0, shape.depths_BT, shape.ancestors_BTT, bucket=bucket)
        ids_BT = torch.cat([state.tokens_BS.gather(1, root_B1), ids_BN], dim=1)
        logits_BTV = self.target.forward(ids_BT, positions_BT, bucket=bucket, taps=self.taps, tree=places)
        decision, path_BD = self.verifier.verify_tree(
            self._tree, shape, draft, self.verifier.process(logits_BTV), draws=self.uniforms.split(uniforms_BN),
            is_plain_B1=self._is_plain(choice, state),
        )  # fmt: skip
        from_BD, to_BD = root_B1 + path_BD, lengths_B1 + self._steps_D
        self.target.move(from_BD, to_BD)
        if self.taps:
            self.taps.move(from_BD, to_BD)
        path_ids_BD = ids_BN.gather(1, path_BD - 1)
        state.tokens_BS.scatter_(1, to_BD, path_ids_BD)
        return state.commit(decision, drafted_ids_BK=path_ids_BD)
