"""A draft head of EAGLE-3 on this rank: layers over embeddings and hidden states of the target.

    pair of position i    the target's taps of token i, or the head's own output there, and token i + 1
    its logits            of token i + 2, over the tokens that the head drafts

    taps | norms | fc \
                       hidden | norm \
    token | embedding | norm -------- query-key-value | attention, output + hidden | MLP + | ... norm | logits

Source: arXiv:2503.01840; `sources` reads the public layouts.

Shapes: B sequences, T positions, R scored ones, M = B * T tokens, E width, X taps, D drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.mtp import JOIN, JOINED_NORMS
from llama_ssp.extensions.heads.sources import HeadSource
from llama_ssp.kernels.between import OwnKernels
from llama_ssp.kernels.linear import Kernel, Linear, make_linear
from llama_ssp.kernels.parts import RmsNorm
from llama_ssp.models.llama.attention import LayerAttention
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.layer import Layer, Stream
from llama_ssp.models.weights import Loading, Weights
from llama_ssp.ranks.comms import Reads

Attention = Mapping[int | None, LayerAttention]
"""The attention of a forward, by window."""


class _JoinedProduct:
    """The product of queries, keys and values, of a normed embedding and a normed hidden state, the stream."""

    norm_before_residual: bool = False

    def __init__(self, norm: Callable[[str], RmsNorm], linear: Linear) -> None:
        self._embedding_norm, self._hidden_norm = norm("input_layernorm"), norm("hidden_norm")
        self.linear = linear

    def __call__(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to (M, E), and the product (M, O)."""
        embedded_ME, hidden_ME = pair
        normed_ME = self._hidden_norm(hidden_ME)
        joined = torch.cat([self._embedding_norm(embedded_ME), normed_ME], dim=-1)
        return (normed_ME if self.norm_before_residual else hidden_ME), self.linear(joined)


class HeadLayer(Layer):
    """A layer of a head; the first one reads pairs. It may overwrite the hidden states."""

    qkv: Any

    def _first_product(self, norm: Callable[[str], RmsNorm], linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401
        return super()._first_product(norm, linear, own) if self.number else _JoinedProduct(norm, linear)


class MtpLayer(Layer):
    """An MTP layer; see `mtp`."""

    def __init__(self, weights: Weights, number: int, *, eps: float, kernel: Kernel | None, **parts: Any) -> None:
        super().__init__(weights, number, eps=eps, kernel=kernel, **parts)
        place = f"model.layers.{number}"
        self._norms = [RmsNorm(weights.take(f"{place}.{name}.weight"), eps) for name in JOINED_NORMS]
        self._join = make_linear(*weights.linear(f"{place}.{JOIN}"), kernel=kernel)

    def forward(self, stream: Any, attend: LayerAttention, stop: int, wanted_BR: Tensor | None = None) -> Stream:  # noqa: ANN401
        """See `Layer.forward`; the stream is a pair."""
        both = [norm(x_ME) for norm, x_ME in zip(self._norms, stream, strict=True)]
        return super().forward((self._join(torch.cat(both, dim=-1)), None), attend, stop, wanted_BR)


class PairRunner(LeanRunner):
    """A draft head, or this rank's slice of it, with its cache, which holds pair i in slot i; by itself an MTP layer.

    Its origin is an `MtpSource`.
    """

    layer_class: type[Layer] = MtpLayer
    _feeds_norm = True
    _token_ids_D: Tensor | None = None
    make_drafter = HeadDrafter

    def __init__(self, loading: Loading) -> None:
        super().__init__(loading)
        self.num_token_ids = loading.origin.shape.num_token_ids

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
        **where: Any,
    ) -> tuple[Tensor, Tensor]:
        """See `Head.extend`."""
        stream = self._read(ids_BT, hidden_BTE, self._attention(positions_BT, **where), score_positions_B1)
        hidden_BRE, logits_BRD = self._scored(stream, len(ids_BT), None)
        if self._feeds_norm:
            hidden_BRE = self._norm(hidden_BRE)
        return hidden_BRE, self._of_target(logits_BRD)

    def _read(
        self, ids_BT: Tensor, hidden_BTE: Tensor, attention: Attention, wanted_B1: Tensor | None = None
    ) -> Stream:
        """Read pairs through all layers; the last one returns the wanted positions alone."""
        stream: Stream = self.embed(ids_BT.flatten()), hidden_BTE.flatten(0, 1)
        for layer, window, stop in self._at_once(ids_BT.numel()):
            wanted = wanted_B1 if stop == len(self._layers) else None
            stream = layer.forward(stream, attention[window], stop, wanted)
        return stream

    def _of_target(self, logits_BRD: Tensor) -> Tensor:
        """Return logits over the target's tokens, or the best token, from logits over the head's own tokens."""
        if self._token_ids_D is None:
            return logits_BRD
        if self.reads is Reads.best:
            largest_BR1, ids_BR1 = logits_BRD.split(1, dim=-1)
            return torch.cat([largest_BR1, self._token_ids_D[ids_BR1.long()].float()], dim=-1)
        nowhere_BRV = logits_BRD.new_full((*logits_BRD.shape[:2], self.num_token_ids), float("-inf"))
        return nowhere_BRV.index_copy_(2, self._token_ids_D, logits_BRD)


class HeadRunner(PairRunner):
    """A head of EAGLE-3, and the code that other heads share with it; its origin is a `HeadSource`."""

    layer_class: type[Layer] = HeadLayer

    def _take_others(self, weights: Weights, loading: Loading) -> None:
        """Take the product of the taps, and their norms."""
        source, into = loading.origin, loading.into
        assert isinstance(source, HeadSource)
        if isinstance(joined := self._layers[0].qkv, _JoinedProduct):
            joined.norm_before_residual = source.head.norm_before_residual
        self._config, self._feeds_norm, eps = source.head, source.head.norm_output, source.config.rms_norm_eps
        drafts_all = self.vocab_size == source.shape.num_token_ids
        self._token_ids_D = None if drafts_all else into.keep(source.token_ids().to(self.device), "_token_ids_D")
        self._fc = into.keep(make_linear(*weights.linear("model.fc"), kernel=loading.precision.kernel), "_fc")
        self._tap_norms, self._input_norm = (
            into.keep([RmsNorm(weights.take(name), eps) for name in weights.names(f"model.{stored}.")], kept)
            for stored, kept in (("fc_norm", "_tap_norms"), ("input_norm", "_input_norm"))
        )

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """See `Head.hidden_of`."""
        taps_MX = taps_BTX.flatten(0, 1).to(self.dtype)
        if self._tap_norms:
            parts = taps_MX.chunk(len(self._tap_norms), dim=-1)
            taps_MX = torch.cat([norm(part) for norm, part in zip(self._tap_norms, parts, strict=True)], dim=-1)
        for norm in self._input_norm:
            taps_MX = norm(taps_MX)
        hidden_ME = self._fc(taps_MX)
        return hidden_ME.view(*taps_BTX.shape[:2], -1)
