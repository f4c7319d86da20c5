"""MTP layers on the modules of the library; see `mtp`."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.modules_drafter import ModulesDrafter
from llama_ssp.extensions.heads.mtp import reads_before_norm
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.speculate.drafters.drafter import DrafterParts
from llama_ssp.types import LibraryPart


class MtpRunner(ModuleRunner):
    """MTP layers as a `Head`, or this rank's slice: a model with as many layers, which caches pair i in slot i.

    See `mtp`.
    """

    _hidden_BTE: Tensor
    num_token_ids = property(attrgetter("vocab_size"))

    def __init__(self, model: PreTrainedModel, **how: Any) -> None:
        super().__init__(model, **how)
        self._parts = [_part_of(model, number) for number in range(len(model.get_decoder().layers))]
        self.num_modules, self.chains = len(self._parts), not reads_before_norm(model.config.model_type)

    def make_drafter(self, parts: DrafterParts) -> HeadDrafter:
        """See `Head`; a tree is drafted by the first module alone, since each of the others reads several tokens."""
        is_chain = self.num_modules > 1 and parts.num_draft_tokens > 1 and not parts.tree
        return (ModulesDrafter if is_chain else HeadDrafter)(parts)

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """See `Head.hidden_of`."""
        return taps_BTX.to(self.dtype)

    def extend(
        self,
        ids_BT: Tensor,
        hidden_BTE: Tensor,
        positions_BT: Tensor,
        *,
        score_positions_B1: Tensor | None = None,
        module: int = 0,
        keeps_all: bool = False,
        **where: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `ModulesHead.extend`."""
        embedding: Any = self._model.get_input_embeddings()
        layer = self._model.get_decoder().layers[module]
        joined = torch.cat([layer.enorm(embedding(ids_BT)), layer.hnorm(hidden_BTE)], dim=-1)
        logits_BRV = self.forward(
            layer.eh_proj(joined),
            positions_BT,
            score_positions_BR=score_positions_B1,
            part=self._parts[module],
            **where,
        )
        if keeps_all or score_positions_B1 is None:
            return self._hidden_BTE, logits_BRV
        wanted_BRE = score_positions_B1[..., None].expand(-1, -1, self._hidden_BTE.shape[-1])
        return self._hidden_BTE.gather(1, wanted_BRE), logits_BRV

    def _keep_wanted_rows(self, head: LibraryPart, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the hidden states, which the next step reads."""
        (self._hidden_BTE,) = args
        return super()._keep_wanted_rows(head, args)


def _part_of(model: PreTrainedModel, number: int) -> LibraryPart:
    """Return the model with only one of its layers, and with the last norm of that module."""
    body: Any = model.get_decoder()
    layer = body.layers[number]
    decoder = _with_modules(body, layers=nn.ModuleList([layer]), norm=layer.norm if number else body.norm)
    return _with_modules(model, **{model.base_model_prefix: decoder})


def _with_modules(whole: LibraryPart, **others: nn.Module) -> LibraryPart:
    """Return a copy of a module with these submodules replaced; it shares everything else."""
    part = object.__new__(type(whole))
    part.__setstate__({**vars(whole), "_modules": {**whole._modules, **others}})
    return part
