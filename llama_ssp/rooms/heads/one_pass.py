"""Draft heads of one pass on this rank: P-EAGLE, DFlash and DSpark; see `layouts`.

    P-EAGLE    pairs of taps and tokens, then pairs of one learned tap and the mask token; each sees earlier pairs
    DFlash     taps, whose keys and values each layer computes, then newest token and mask tokens, which see everything
    DSpark     the same, and for each position the logits of what follows the token drafted before it

A forward writes the positions that the target has verified, and the block's positions after them, which the next one
overwrites. Source: see there.

Shapes: B sequences, C positions of the context, N of the block, T = C + N, K drafted tokens, M nodes of a tree, E
width, X taps, O drafted tokens of this rank, S width of the Markov head.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels.between import OwnKernels
from llama_ssp.kernels.linear import Linear, make_linear
from llama_ssp.kernels.parts import RmsNorm
from llama_ssp.models.llama.attention import LayerAttention
from llama_ssp.models.llama.layer import Layer, Stream, added, rows_at
from llama_ssp.models.weights import Loading, Weights
from llama_ssp.rooms.heads.layouts import MARKOV, MASK
from llama_ssp.rooms.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.rooms.heads.protocol import Following
from llama_ssp.rooms.heads.runner import Attention, HeadRunner


class _Markov:
    """Logits (B, M, O) of the next token, from the embedding of one; some heads add hidden states, some a state."""

    def __init__(self, weights: Weights, outputs: slice) -> None:
        names = [name for name in weights.names(f"model.{MARKOV}.") if name.endswith("_proj.weight")]
        place = f"model.{MARKOV}.markov_w"
        self._embedding_VS = weights.take(f"{place}1.weight")
        self._output = make_linear(weights.take(f"{place}2.weight")[outputs].contiguous(), None)
        self.is_recurrent = any("joint" in name for name in names)
        self._inner = [make_linear(*weights.linear(name.removesuffix(".weight"))) for name in names]

    def __call__(self, ids_BM: Tensor, hidden_BME: Tensor, state_BMS: Tensor) -> tuple[Tensor, Tensor]:
        """Return them, and the next state."""
        inner_MS = functional.embedding(ids_BM.flatten(), self._embedding_VS)
        state_MS, hidden_ME = state_BMS.flatten(0, 1), hidden_BME.flatten(0, 1)
        if self.is_recurrent:
            joined = self._inner[0](torch.cat([state_MS, inner_MS, hidden_ME], dim=-1))
            gate_MS, candidate_MS, inner_MS = joined.chunk(3, dim=-1)
            state_MS = torch.lerp(candidate_MS.tanh(), state_MS, gate_MS.sigmoid())
            inner_MS = inner_MS.tanh()
        elif self._inner:
            inner_MS = inner_MS * self._inner[0](torch.cat([hidden_ME, inner_MS], dim=-1)).sigmoid()
        return self._output(inner_MS).view(*ids_BM.shape, -1), state_MS.view_as(state_BMS)


class ParallelRunner(HeadRunner):
    """A head of P-EAGLE; see `OnePassHead`."""

    tokens_ahead = 1
    make_drafter = OnePassDrafter
    _mask_11E: Tensor

    def _take_others(self, weights: Weights, loading: Loading) -> None:
        super()._take_others(weights, loading)
        self.mask_token_id = self._config.mask_token_id
        for name in weights.names(f"model.{MASK}"):
            mask_11E = self.hidden_of(weights.take(name)[None, None])
            self._mask_11E = loading.into.keep(mask_11E, "_mask_11E")

    def block_size(self, num_drafted: int) -> int:
        """See `OnePassHead.block_size`."""
        return num_drafted - 1

    def draft(
        self, ids_BT: Tensor, context_BCE: Tensor, positions_BT: Tensor, *, num_drafted: int, bucket: int
    ) -> Following:
        """See `OnePassHead.draft`."""
        attention = self._attention(
            positions_BT, bucket=bucket, consecutive=False, seen_BT=self._seen(positions_BT, context_BCE.shape[1])
        )
        stream = self._read(ids_BT, context_BCE, attention)
        x_BKE = added(stream).view(len(ids_BT), -1, self._width)[:, -num_drafted:]
        x_ME, logits_MO = self._head((x_BKE.flatten(0, 1), None))
        return self._following(x_ME.view_as(x_BKE), logits_MO.view(len(ids_BT), num_drafted, -1))

    def _seen(self, positions_BT: Tensor, _num_context: int) -> Tensor:
        """The last position that each position sees."""
        return positions_BT

    def _read(
        self, ids_BT: Tensor, hidden_BTE: Tensor, attention: Attention, wanted_B1: Tensor | None = None
    ) -> Stream:
        masks_BNE = self._mask_11E.expand(len(ids_BT), ids_BT.shape[1] - hidden_BTE.shape[1], -1)
        return super()._read(ids_BT, torch.cat([hidden_BTE, masks_BNE], dim=1), attention, wanted_B1)

    def _following(self, _hidden_BKE: Tensor, logits_BKO: Tensor) -> Following:
        logits_BKV = self._of_target(self._joined(logits_BKO))
        return lambda depth, ids_BM, _: logits_BKV.narrow(1, depth, 1).expand(-1, ids_BM.shape[1], -1)


class BlockLayer(Layer):
    """A layer of DFlash."""

    qkv: Any

    def _first_product(self, norm: Callable[[str], RmsNorm], linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401, ARG002
        return SimpleNamespace(norm=norm("input_layernorm"), linear=linear)  # which only the block's positions pass

    def read(self, x_ME: Tensor, context_BCE: Tensor, attend: LayerAttention) -> Tensor:
        """The stream (M, E) of the block, M = B * N, after the layer, which writes the context as well."""
        num_rows, num_context, width = context_BCE.shape
        both_BTE = torch.cat([context_BCE, self.qkv.norm(x_ME).view(num_rows, -1, width)], dim=1)
        attended_TE = attend(self.qkv.linear(both_BTE.flatten(0, 1)), self.number, self.heads, self.head_norms)
        if not len(x_ME):
            return x_ME
        attended_BNE = attended_TE.view(num_rows, -1, attended_TE.shape[-1])[:, num_context:]
        x_ME, gated_MI = self.gate_up(self.output(attended_BNE.flatten(0, 1), x_ME))
        return added(self.down(gated_MI, x_ME))


class BlockRunner(ParallelRunner):
    """A head of DFlash or DSpark; see `OnePassHead`."""

    layer_class = BlockLayer
    tokens_ahead = 0

    def _take_others(self, weights: Weights, loading: Loading) -> None:
        super()._take_others(weights, loading)
        norm = RmsNorm(weights.take("model.hidden_norm.weight"), self._norm.eps)
        self._context_norm = loading.into.keep(norm, "_context_norm")
        self._markov_rank = self._config.markov_rank
        outputs = slice(self._first_output, self._first_output + self._head_sizes[self._comm.rank])
        markov = _Markov(weights, outputs) if self._markov_rank else None
        self._markov = loading.into.keep(markov, "_markov")

    def block_size(self, num_drafted: int) -> int:
        """See `OnePassHead.block_size`."""
        return num_drafted + (not self._config.drafts_at_anchor)

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """See `Head.hidden_of`."""
        return self._context_norm(super().hidden_of(taps_BTX))

    def _seen(self, positions_BT: Tensor, num_context: int) -> Tensor:
        first_B1, last_B1 = positions_BT[:, :1], positions_BT[:, -1:]
        seen_BC = functional.pad(first_B1, (0, num_context - 1))  # what the context sees has no effect
        return torch.cat([seen_BC, last_B1.expand(-1, positions_BT.shape[1] - num_context)], dim=1)

    def _read(
        self, ids_BT: Tensor, hidden_BTE: Tensor, attention: Attention, wanted_B1: Tensor | None = None
    ) -> Stream:
        ids_BN = ids_BT[:, hidden_BTE.shape[1] :]
        x_ME = self.embed(ids_BN.flatten())
        for layer in self._layers:
            assert isinstance(layer, BlockLayer)
            x_ME = layer.read(x_ME, hidden_BTE, attention[None])
        return rows_at(x_ME if ids_BN.numel() else hidden_BTE.flatten(0, 1), wanted_B1), None

    def _following(self, hidden_BKE: Tensor, logits_BKO: Tensor) -> Following:
        if self._markov is None:
            return super()._following(hidden_BKE, logits_BKO)
        hidden_BKE, markov = self._norm(hidden_BKE), self._markov
        state_BMS = hidden_BKE.new_zeros(len(hidden_BKE), 1, self._markov_rank)

        def following(depth: int, ids_BM: Tensor, parents_BM: Tensor | None) -> Tensor:
            nonlocal state_BMS
            if parents_BM is not None:
                state_BMS = state_BMS.gather(1, parents_BM[..., None].expand(-1, -1, self._markov_rank))
            hidden_BME = hidden_BKE.narrow(1, depth, 1).expand(-1, ids_BM.shape[1], -1)
            added_BMO, state_BMS = markov(ids_BM, hidden_BME, state_BMS)
            return self._of_target(self._joined(logits_BKO.narrow(1, depth, 1) + added_BMO))

        return following
