"""A draft head of EAGLE-3 on this rank: one layer over embeddings and hidden states of the target.

    pair of position i    the target's taps of token i, or the head's own output there, and token i + 1
    its logits            of token i + 2, over the tokens that the head drafts

    taps | norms | fc \
                       hidden | norm \
    token | embedding | norm -------- query-key-value | attention, output + hidden | MLP + | norm | logits

Source: arXiv:2503.01840; `weights.head` reads the public layouts.

Shapes: B sequences, T positions, R scored ones, M = B * T tokens, E width, X taps, D drafted tokens, V vocabulary.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llama_ssp.architectures.eagle3 import NUM_TAPS
from llama_ssp.kernels.between import OwnKernels, RmsNorm
from llama_ssp.kernels.linear import Linear, make_linear
from llama_ssp.models.llama.attention import LayerAttention
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.layer import Layer, Stream, take
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import TreePlaces
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.head import HeadSource


def build_modules(origin: HeadSource) -> PreTrainedModel:
    """The modules of a head, of the names of `weights.head`: those of a model of one layer, and the head's own."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415 - slow to import, and needed only here

    head, width = origin.head, origin.shape.hidden_size
    config = deepcopy(origin.config)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: Any = model_class(config)
    layer: Any = model.model.layers[0]
    norm = type(layer.input_layernorm)
    for name in ("q_proj", "k_proj", "v_proj"):
        whole: nn.Linear = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(2 * width, whole.out_features, bias=whole.bias is not None))
    layer.hidden_norm = norm(width, eps=config.rms_norm_eps)
    model.model.embed_tokens = nn.Embedding(origin.shape.num_token_ids, width)
    tap_width = head.target_hidden_size
    model.model.fc = nn.Linear(NUM_TAPS * tap_width, width, bias=False)
    if head.norms_taps == "fc_norm":
        model.model.fc_norm = nn.ModuleList([norm(tap_width, eps=config.rms_norm_eps) for _ in range(NUM_TAPS)])
    elif head.norms_taps:
        model.model.input_norm = norm(NUM_TAPS * tap_width, eps=config.rms_norm_eps)
    built: PreTrainedModel = model
    return built


class _JoinedProduct:
    """The product of queries, keys and values, of the normed embedding beside the normed hidden state."""

    def __init__(self, layer: Any, linear: Linear, *, norm_before_residual: bool) -> None:  # noqa: ANN401
        self._embedding_norm, self._hidden_norm = RmsNorm(layer.input_layernorm), RmsNorm(layer.hidden_norm)
        self.linear, self._norm_before_residual = linear, norm_before_residual

    def __call__(self, embedded_ME: Tensor, hidden_ME: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to (M, E), and the product (M, O)."""
        normed_ME = self._hidden_norm(hidden_ME)
        joined = torch.cat([self._embedding_norm(embedded_ME), normed_ME], dim=-1)
        return (normed_ME if self._norm_before_residual else hidden_ME), self.linear(joined)


class HeadLayer(Layer):
    """The layer of a head."""

    qkv: Any

    def _first_product(self, layer: Any, linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401, ARG002
        return _JoinedProduct(layer, linear, norm_before_residual=layer.norm_before_residual)

    def extend(self, embedded_ME: Tensor, hidden_ME: Tensor, attend: LayerAttention) -> Stream:
        """Like `forward`; may overwrite the hidden state."""
        x_ME, qkv_MO = self.qkv(embedded_ME, hidden_ME)
        attended_ME = attend(qkv_MO, self.number, self.heads, self.head_norms)
        x_ME, gated_MI = self.gate_up(self.output(attended_ME, x_ME))
        return self.down(gated_MI, x_ME)


class HeadRunner(LeanRunner):
    """A draft head, or this rank's slice of it, with its cache, which holds pair i in slot i.

    Args:
        model: from `build_modules`, sharded; unusable afterwards.
        origin: of the head.
        comm: the ranks that share it.
        fill: see `LeanRunner`.
        precision: see `LeanRunner`.
    """

    layer_class = HeadLayer

    def __init__(
        self,
        model: PreTrainedModel,
        origin: HeadSource,
        *,
        comm: Comm,
        fill: Callable[[str], None],
        precision: Precision = UNQUANTIZED,
    ) -> None:
        body: Any = model.model
        body.layers[0].norm_before_residual = origin.head.norm_before_residual
        super().__init__(model, comm=comm, fill=fill, precision=precision)
        self.tapped_layers = origin.layers
        self.num_token_ids = origin.shape.num_token_ids
        self._fc = make_linear(*take(body.fc), kernel=precision.kernel)
        self._tap_norms = [RmsNorm(norm) for norm in getattr(body, "fc_norm", [])]
        self._input_norm = RmsNorm(body.input_norm) if hasattr(body, "input_norm") else None
        self._feeds_norm = origin.head.norm_output
        drafts_all = self.vocab_size == self.num_token_ids
        self._token_ids_D = None if drafts_all else origin.token_ids().to(self.device)

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """See `Head.hidden_of`."""
        taps_MX = taps_BTX.flatten(0, 1).to(self.dtype)
        if self._tap_norms:
            parts = taps_MX.chunk(len(self._tap_norms), dim=-1)
            taps_MX = torch.cat([norm(part) for norm, part in zip(self._tap_norms, parts, strict=True)], dim=-1)
        elif self._input_norm:
            taps_MX = self._input_norm(taps_MX)
        hidden_ME = self._fc(taps_MX)
        return hidden_ME.view(*taps_BTX.shape[:2], -1)

    def extend(
        self,
        ids_BT: Tensor,
        hidden_BTE: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_B1: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        tree: TreePlaces | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Head.extend`."""
        batch_size, _ = ids_BT.shape
        attention = self._attention(positions_BT, bucket=bucket, cache_rows_B=cache_rows_B, consecutive=consecutive,
                                    tree=tree)  # fmt: skip
        (layer,), (window,) = self._layers, self._windows
        assert isinstance(layer, HeadLayer)
        stream = layer.extend(self._embed(ids_BT.flatten()), hidden_BTE.flatten(0, 1), attention[window])
        hidden_BRE, logits_BRD = self._scored(stream, batch_size, score_positions_B1)
        if self._feeds_norm:
            hidden_BRE = self._norm(hidden_BRE)
        if self._token_ids_D is None:
            return hidden_BRE, logits_BRD
        nowhere_BRV = logits_BRD.new_full((*logits_BRD.shape[:2], self.num_token_ids), float("-inf"))
        return hidden_BRE, nowhere_BRV.index_copy_(2, self._token_ids_D, logits_BRD)
