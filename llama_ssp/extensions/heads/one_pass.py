"""Draft heads of one pass on this rank: P-EAGLE, DFlash and DSpark; see `layouts`.

    P-EAGLE    pairs of taps and tokens, then pairs of one learned tap and the mask token; each sees earlier pairs
    DFlash     taps, whose keys and values each layer computes, then newest token and mask tokens; see `reaches`
    DSpark     the same, and for each position the logits of what follows the token drafted before it, and an estimate
               of whether its token will be accepted
    DFlash 2   the same, whose layers convolve over the block; the most probable tokens of a position get their final
               logits from the token drafted before it, and others none

A forward writes the positions that the target has verified, and after them the block's positions, which the next
forward overwrites. Source: see `layouts`.

Shapes: B sequences, C positions of the context, N of the block, T = C + N, K drafted tokens, M nodes of a tree, E
width, X taps, O drafted tokens of this rank, V vocabulary, S width of the Markov head or the selector, Q candidates,
U slots that are read, G groups of F features, or F that an estimate reads, L taps of a convolution.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.extensions.heads.layouts import CONFIDENCE, CONVOLUTIONS, MARKOV, MASK, SELECTOR
from llama_ssp.extensions.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.extensions.heads.protocol import Confident, Following
from llama_ssp.extensions.heads.reaches import Reach
from llama_ssp.extensions.heads.runner import Attention, HeadRunner
from llama_ssp.extensions.heads.sources import HeadSource
from llama_ssp.kernels.attention_by_length import VarlenAttention
from llama_ssp.kernels.between import OwnKernels, gated
from llama_ssp.kernels.linear import Linear, make_linear
from llama_ssp.kernels.parts import RmsNorm
from llama_ssp.models.graph_inputs import PerBucket, Workspace
from llama_ssp.models.llama.attention import Attend, LayerAttention, attend_by_mask
from llama_ssp.models.llama.layer import Layer, Stream, added, rows_at
from llama_ssp.models.runner import TreePlaces
from llama_ssp.models.vocabulary import own_part
from llama_ssp.models.weights import Loading, Weights
from llama_ssp.ranks.comms import Reads, best_of


class _Markov:
    """Logits (B, M, O) of the next token, from the embedding of one; some heads add hidden states, some a state."""

    def __init__(self, weights: Weights, outputs: slice) -> None:
        names = [name for name in weights.names(f"model.{MARKOV}.") if name.endswith("_proj.weight")]
        place = f"model.{MARKOV}.markov_w"
        self._embedding_VS = weights.take(f"{place}1.weight")
        self._output = make_linear(weights.take(f"{place}2.weight")[outputs].contiguous(), None)
        self.is_recurrent = any("joint" in name for name in names)
        self._inner = [make_linear(*weights.linear(name.removesuffix(".weight"))) for name in names]

    def embedded(self, ids_BM: Tensor) -> Tensor:
        """The embeddings (B, M, S) of tokens."""
        return functional.embedding(ids_BM, self._embedding_VS)

    def __call__(self, ids_BM: Tensor, hidden_BME: Tensor, state_BMS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the next state."""
        inner_MS = self.embedded(ids_BM).flatten(0, 1)
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
        self,
        ids_BT: Tensor,
        context_BCE: Tensor,
        positions_BT: Tensor,
        *,
        num_drafted: int,
        bucket: int,
        cache_rows_B: Tensor | None = None,
        tree: TreePlaces | None = None,
    ) -> Following:
        """See `OnePassHead.draft`."""
        num_context = context_BCE.shape[1]
        seen_BT = self._seen(tree.slots_BT if tree else positions_BT, num_context)
        tree = tree and tree._replace(sees_BTA=self._sees(tree.sees_BTA, num_context))
        attention = self._attention(
            positions_BT, bucket=bucket, cache_rows_B=cache_rows_B, consecutive=False, seen_BT=seen_BT, tree=tree
        )
        stream = self._read(ids_BT, context_BCE, attention)
        x_BKE = added(stream).view(len(ids_BT), -1, self._width)[:, -num_drafted:]
        x_ME, logits_MO = self._head((x_BKE.flatten(0, 1), None))
        return self._following(x_ME.view_as(x_BKE), logits_MO.view(len(ids_BT), num_drafted, -1))

    def _seen(self, positions_BT: Tensor, _num_context: int) -> Tensor:
        """Return the last position, or slot, that each of these positions sees."""
        return positions_BT

    def _sees(self, sees_BTA: Tensor, _num_context: int) -> Tensor:
        """Change the slots (B, T, A) that positions see, given as `TreePlaces.sees_BTA`: each sees earlier ones."""
        return sees_BTA

    def _read(
        self, ids_BT: Tensor, hidden_BTE: Tensor, attention: Attention, wanted_B1: Tensor | None = None
    ) -> Stream:
        masks_BNE = self._mask_11E.expand(len(ids_BT), ids_BT.shape[1] - hidden_BTE.shape[1], -1)
        return super()._read(ids_BT, torch.cat([hidden_BTE, masks_BNE], dim=1), attention, wanted_B1)

    def _following(self, _hidden_BKE: Tensor, logits_BKO: Tensor) -> Following:
        logits_BKV = self._of_target(self._joined(logits_BKO))
        return lambda depth, ids_BM, _: logits_BKV.narrow(1, depth, 1).expand(-1, ids_BM.shape[1], -1)


class _Slots(Workspace):
    """The numbers of the slots of a row, by bucket."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        slots_S, self.num_slots = torch.arange(num_slots, device=device), num_slots
        self.shown = PerBucket(lambda bucket: slots_S[:bucket])


class _Selector:
    """Scores the best tokens of a position's logits (B, 1, V) by the token before it: logits (B, M, V)."""

    def __init__(self, weights: Weights, num_candidates: int) -> None:
        self._before_VS, self._after_VS, projection_SE = (
            weights.take(f"model.{SELECTOR}.{name}.weight")
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection")
        )
        self._project, self._num_candidates = make_linear(projection_SE, None), num_candidates

    def __call__(self, logits_B1V: Tensor, ids_BM: Tensor, hidden_B1E: Tensor) -> Tensor:
        best_B1Q, ids_B1Q = logits_B1V.topk(self._num_candidates, dim=-1)
        before_BMS = functional.embedding(ids_BM, self._before_VS) * self._project(hidden_B1E.flatten(0, 1))[:, None]
        after_BQS = functional.embedding(ids_B1Q[:, 0], self._after_VS)
        scores_BMQ = best_B1Q + (before_BMS @ after_BQS.mT).to(best_B1Q.dtype)
        nowhere_BMV = logits_B1V.new_full((*ids_BM.shape, logits_B1V.shape[-1]), float("-inf"))
        return nowhere_BMV.scatter_(2, ids_B1Q.expand_as(scores_BMQ), scores_BMQ)


class _Convolution:
    """Two convolutions over a block's positions, around a part of a layer; its input adds to the factors of both."""

    def __init__(self, weights: Weights, place: str) -> None:
        self._base_2LE = weights.take(f"{place}.base_kernel")
        self._project = make_linear(weights.take(f"{place}.kernel_projection.weight"), None)

    def __call__(self, x_ME: Tensor, part: Callable[[Tensor], Tensor], *, num_rows: int) -> Tensor:
        _, num_taps, width = self._base_2LE.shape
        both_BN2LG = self._project(x_ME).view(num_rows, len(x_ME) // max(num_rows, 1), 2, num_taps, -1)
        for number in range(2):
            x_BNE = x_ME.view(num_rows, -1, width)
            added_BNLG = both_BN2LG[:, :, number]
            group = width // added_BNLG.shape[-1]
            factors_BNLE = self._base_2LE[number] + added_BNLG.repeat_interleave(group, dim=-1)
            # Before its first position a block has nothing.
            shifted = [functional.pad(x_BNE, (0, 0, tap, 0))[:, : x_BNE.shape[1]] for tap in range(num_taps)]
            x_ME = (torch.stack(shifted, dim=2) * factors_BNLE).sum(2).flatten(0, 1)
            x_ME = x_ME if number else part(x_ME)
        return x_ME


class BlockLayer(Layer):
    """A layer of DFlash."""

    qkv: Any

    def _first_product(self, norm: Callable[[str], RmsNorm], linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401
        return SimpleNamespace(norm=norm("input_layernorm"), linear=linear)  # which only the block's positions pass

    def read(self, x_ME: Tensor, context_BCE: Tensor, attend: LayerAttention) -> Tensor:
        """The stream (M, E) of the block, M = B * N, after the layer, which writes the context as well."""
        attended_ME = self._attended(self.qkv.norm(x_ME), context_BCE, attend)
        if not len(x_ME):
            return x_ME
        x_ME, gated_MI = self.gate_up(self.output(attended_ME, x_ME))
        return added(self.down(gated_MI, x_ME))

    def _attended(self, x_ME: Tensor, context_BCE: Tensor, attend: LayerAttention) -> Tensor:
        """The attended heads (M, I) of the block's positions, whose input is normed."""
        num_rows, num_context, width = context_BCE.shape
        both_BTE = torch.cat([context_BCE, x_ME.view(num_rows, -1, width)], dim=1)
        attended_TI = attend(self.qkv.linear(both_BTE.flatten(0, 1)), self.number, self.heads, self.head_norms)
        return attended_TI.view(num_rows, -1, attended_TI.shape[-1])[:, num_context:].flatten(0, 1)


class ConvolvingLayer(BlockLayer):
    """A layer of DFlash 2."""

    gate_up: Any

    def __init__(self, weights: Weights, number: int, **parts: Any) -> None:
        super().__init__(weights, number, **parts)
        self._convolve = [_Convolution(weights, f"model.layers.{number}.{name}") for name in CONVOLUTIONS]

    def _second_product(self, norm: Callable[[str], RmsNorm], linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401
        return SimpleNamespace(norm=norm("post_attention_layernorm"), linear=linear)  # a convolution is between them

    def read(self, x_ME: Tensor, context_BCE: Tensor, attend: LayerAttention) -> Tensor:
        """See `BlockLayer.read`."""
        attention, mlp = self._convolve

        def attended(normed_ME: Tensor) -> Tensor:
            heads_MI = self._attended(normed_ME, context_BCE, attend)
            return added(self.output(heads_MI, torch.zeros_like(normed_ME)))

        def fed(normed_ME: Tensor) -> Tensor:
            return added(self.down(gated(self.gate_up.linear(normed_ME)), torch.zeros_like(normed_ME)))

        if not len(x_ME):
            self._attended(x_ME, context_BCE, attend)
            return x_ME
        x_ME = x_ME + attention(self.qkv.norm(x_ME), attended, num_rows=len(context_BCE))
        return x_ME + mlp(self.gate_up.norm(x_ME), fed, num_rows=len(context_BCE))


class BlockRunner(ParallelRunner):
    """A head of DFlash or DSpark; see `OnePassHead`."""

    layer_class: type[Layer] = BlockLayer
    tokens_ahead = 0
    _slots: _Slots | None

    def __init__(self, loading: Loading) -> None:
        assert isinstance(loading.origin, HeadSource)
        self._config, self._slots = loading.origin.head, None
        if self._config.selector:
            self.layer_class = ConvolvingLayer
        super().__init__(loading)

    def _choose_attention(self, varlen: VarlenAttention | None) -> None:
        """Choose the attention: with masks of the head's own if some layers do not see everything."""
        if self._config.sees_all:
            super()._choose_attention(varlen)
        else:
            self._varlen = self._compiled = None
            self.uses_masks = False

    def allocate(self, *, batch_size: int, capacity: int, **how: Any) -> None:
        """See `Runner.allocate`."""
        super().allocate(batch_size=batch_size, capacity=capacity, **how)
        if not self._config.sees_all and (self._slots is None or self._slots.num_slots < capacity):
            self._slots = _Slots(capacity, self.device)

    def _take_others(self, weights: Weights, loading: Loading) -> None:
        super()._take_others(weights, loading)
        norm = RmsNorm(weights.take("model.hidden_norm.weight"), self._norm.eps)
        self._context_norm = loading.into.keep(norm, "_context_norm")
        self._markov_rank = self._config.markov_rank
        outputs = slice(self._first_output, self._first_output + self._head_sizes[self._comm.rank])
        markov = _Markov(weights, outputs) if self._markov_rank else None
        self._markov = loading.into.keep(markov, "_markov")
        confidence = [
            weights.take(f"model.{CONFIDENCE}.{part}") for part in ("weight", "bias") if self._config.confidence_size
        ]
        self._confidence = loading.into.keep(confidence, "_confidence")
        selector = _Selector(weights, self._config.selector[1]) if self._config.selector else None
        self._selector = loading.into.keep(selector, "_selector")

    def block_size(self, num_drafted: int) -> int:
        """See `OnePassHead.block_size`."""
        return num_drafted + (not self._config.drafts_at_anchor)

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """See `Head.hidden_of`."""
        return self._context_norm(super().hidden_of(taps_BTX))

    def _seen(self, positions_BT: Tensor, num_context: int) -> Tensor:
        """See `ParallelRunner`; with own masks, the context, whose attention has no effect, sees no slot."""
        if not self._config.sees_all:
            return functional.pad(positions_BT[:, num_context:], (num_context, 0), value=-1)
        first_B1, last_B1 = positions_BT[:, :1], positions_BT[:, -1:]
        seen_BC = functional.pad(first_B1, (0, num_context - 1))
        return torch.cat([seen_BC, last_B1.expand(-1, positions_BT.shape[1] - num_context)], dim=1)

    def _sees(self, sees_BTA: Tensor, num_context: int) -> Tensor:
        """See `ParallelRunner`; each position of the block sees the entire block."""
        return torch.cat([sees_BTA[:, :num_context], torch.ones_like(sees_BTA[:, num_context:])], dim=1)

    def _masked(self, positions_BT: Tensor, tree: TreePlaces | None, *, bucket: int) -> dict[Any, Attend]:
        """Return the attention for each `Reach`; positions are those that `_seen` returns."""
        if self._config.sees_all:
            return {**super()._masked(positions_BT, tree, bucket=bucket)}
        assert self._slots
        slots_U, group = self._slots.shown[bucket], self._heads.num // self._heads.num_kv
        attends: dict[Any, Attend] = {}
        for reach in dict.fromkeys(self._config.reaches):
            first_BT1, last_BT1 = (bound_BT[..., None] for bound_BT in _bounds(positions_BT, reach))
            hidden_BTU = (slots_U < first_BT1) | (slots_U > last_BT1)
            mask_BTU = torch.zeros_like(hidden_BTU, dtype=self.dtype).masked_fill_(hidden_BTU, float("-inf"))
            mask_B1QU = mask_BTU.repeat_interleave(group, dim=1)[:, None]
            attends[reach] = partial(
                attend_by_mask,
                mask_B1QS=mask_B1QU,
                batch_size=len(positions_BT),
                by_position=self._by_position,
                kept=self._kept,
            )
        return attends

    def _read(
        self, ids_BT: Tensor, hidden_BTE: Tensor, attention: Attention, wanted_B1: Tensor | None = None
    ) -> Stream:
        ids_BN = ids_BT[:, hidden_BTE.shape[1] :]
        x_ME = self.embed(ids_BN.flatten())
        x_ME = x_ME if self._config.embedding_scale == 1.0 else x_ME * self._config.embedding_scale
        sees: Sequence[Any] = [None] * len(self._layers) if self._config.sees_all else self._config.reaches
        for layer, reach in zip(self._layers, sees, strict=True):
            assert isinstance(layer, BlockLayer)
            x_ME = layer.read(x_ME, hidden_BTE, attention[reach])
        return rows_at(x_ME if ids_BN.numel() else hidden_BTE.flatten(0, 1), wanted_B1), None

    def _following(self, hidden_BKE: Tensor, logits_BKO: Tensor) -> Following:
        logits_BKO = self._bent(logits_BKO)
        if self._selector:
            return self._selected(self._norm(hidden_BKE), logits_BKO)
        if not self._confidence:
            return self._joining(hidden_BKE, logits_BKO)
        following, normed_BKE = self._joining(hidden_BKE, logits_BKO), self._norm(hidden_BKE)

        def confidence(before_BK: Tensor) -> Tensor:
            features_BKF = normed_BKE[:, : before_BK.shape[1]]
            if self._confidence[0].shape[1] > normed_BKE.shape[2]:
                assert self._markov
                features_BKF = torch.cat([features_BKF, self._markov.embedded(before_BK)], dim=-1)
            return functional.linear(features_BKF, *self._confidence)[..., 0]

        return Confident(following, confidence)

    def _joining(self, hidden_BKE: Tensor, logits_BKO: Tensor) -> Following:
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

    def _bent(self, logits: Tensor) -> Tensor:
        """Logits as the head's config scales and bends them."""
        head = self._config
        logits = logits if head.logits_scale == 1.0 else logits * head.logits_scale
        return (logits / head.softcap).tanh() * head.softcap if head.softcap > 0 else logits

    def _selected(self, hidden_BKE: Tensor, logits_BKO: Tensor) -> Following:
        """Select among all tokens on every rank, as DFlash 2 does, and return what is read of the result."""
        logits_BKV = self._comm.all_gather_last(logits_BKO, self._head_sizes).float()
        selector = self._selector
        assert selector

        def following(depth: int, ids_BM: Tensor, _parents_BM: Tensor | None) -> Tensor:
            found_BMV = selector(logits_BKV.narrow(1, depth, 1), ids_BM, hidden_BKE.narrow(1, depth, 1))
            if self.reads is Reads.best:
                return self._of_target(best_of(found_BMV))
            found_BMV = self._of_target(found_BMV)
            return own_part(found_BMV, self.num_token_ids, self._comm) if self.reads is Reads.own else found_BMV

        return following


def _bounds(positions_BT: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """The first and last position that each position of a block sees; -1, outside of a block, sees position 0 alone."""
    last_B1 = positions_BT.amax(1, keepdim=True)
    anchor_B1 = torch.where(positions_BT < 0, last_B1, positions_BT).amin(1, keepdim=True)
    last_BT = positions_BT if reach.is_causal else last_B1.expand_as(positions_BT)
    first_BT = torch.zeros_like(positions_BT)
    if reach.window and reach.from_anchor:
        first_BT = (anchor_B1 - reach.window).expand_as(positions_BT)
    elif reach.window:
        first_BT, last_BT = positions_BT - reach.window + 1, last_BT.minimum(positions_BT + reach.window - 1)
    return first_BT.masked_fill(positions_BT < 0, 0), last_BT.masked_fill(positions_BT < 0, 0)
