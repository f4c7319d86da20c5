"""An MTP layer on the modules of the library; see `mtp`."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.rooms.heads.drafter import HeadDrafter


class MtpRunner(ModuleRunner):
    """An MTP layer as a `Head`, or this rank's slice of it: a model with one layer, whose cache holds pair i in slot i.

    See `mtp`.
    """

    _hidden_BRE: Tensor
    num_token_ids = property(attrgetter("vocab_size"))
    make_drafter = HeadDrafter

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """See `Head.hidden_of`."""
        return taps_BTX.to(self.dtype)

    def extend(
        self, ids_BT: Tensor, hidden_BTE: Tensor, positions_BT: Tensor, *, score_positions_B1: Tensor | None = None,
        **where: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `Head.extend`."""
        embedding: Any = self._model.get_input_embeddings()
        layer = self._model.get_decoder().layers[0]
        joined = torch.cat([layer.enorm(embedding(ids_BT)), layer.hnorm(hidden_BTE)], dim=-1)
        logits_BRV = self.forward(layer.eh_proj(joined), positions_BT, score_positions_BR=score_positions_B1, **where)
        return self._hidden_BRE, logits_BRV

    def _keep_wanted_rows(self, head: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401 - of torch
        """Keep those hidden states, which the next step reads."""
        args = super()._keep_wanted_rows(head, args) or args
        (self._hidden_BRE,) = args
        return args
