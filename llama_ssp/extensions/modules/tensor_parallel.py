"""Tensor parallelism with plain tensors: replaces each module in the model's `tp_plan` by a sharded one.

A sharded module holds this rank's slice and calls one collective. `architectures.matrices` decides which slice that is;
`loading` fills it, using the module's `slices`.

    column:  every rank computes some of the outputs from the whole input, and keeps them or gathers all
    row:     every rank computes all outputs from some of the inputs; the sum over the ranks is the result

Shapes: B sequences, T positions, I inputs, O outputs (of the whole or of the slice), E embedding width.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from llama_ssp.architectures.family import no_plan, record_of
from llama_ssp.architectures.matrices import (
    HEAD_CUTS,
    IN_PARTS,
    Cut,
    RankShard,
    WholeParts,
    cut_of,
    split_blocks,
    stays_whole,
    vocabulary_parts,
)
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.extensions.modules.experts import OwnExperts
from llama_ssp.extensions.modules.recurrent import shared_heads
from llama_ssp.models.vocabulary import embed
from llama_ssp.models.weights import Slice
from llama_ssp.ranks.comms import Comm
from llama_ssp.types import LibraryPart

EXPERTS = "moe_tp_experts"
"""The library's style of a module of experts, each of which is cut."""
RECURRENT = "recurrent"
"""Our style of a gated delta rule, whose key heads ranks share, with the value heads of each."""
_LAYER = re.compile(r"\.\d+(?=\.|$)")


class LocalModule(nn.Module):
    """Holds slices of another module's parameters.

    Attributes:
        slices: the slice of each parameter by name; the others are whole.
    """

    weight: Tensor
    bias: Tensor | None
    slices: dict[str, Slice]

    def __init__(self, whole: nn.Module, slices: dict[str, Slice]) -> None:
        """Make empty parameters of the slices' sizes, on the module's device."""
        super().__init__()
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(whole, name, None))
        _cut_parameters(self, {name: cut for name, cut in slices.items() if getattr(self, name) is not None})


class ColumnLinear(LocalModule):
    """Some of the outputs of a linear layer, with their biases."""

    def __init__(self, whole: nn.Linear, parts: tuple[range, ...]) -> None:
        super().__init__(whole, {"weight": Slice(0, parts), "bias": Slice(0, parts)})

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the whole input (B, T, I) to this rank's outputs (B, T, O)."""
        return functional.linear(x_BTI, self.weight, self.bias)


class GatheredLinear(ColumnLinear):
    """The output: column-parallel, and its logits are gathered on all ranks.

    Attributes:
        first: the number of this rank's first output.
    """

    def __init__(self, whole: nn.Linear, of_ranks: Sequence[range], *, comm: Comm) -> None:
        own = of_ranks[comm.rank]
        super().__init__(whole, (own,))
        self._comm, self._sizes = comm, tuple(map(len, of_ranks))
        self.first, self._gathers = own.start, True

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the whole input (B, T, I) to the outputs of all ranks (B, T, O)."""
        return self.joined(super().forward(x_BTI))

    def gather(self, *, is_wanted: bool) -> None:
        """Gather outputs from now on, or keep this rank's own."""
        self._gathers = is_wanted

    def joined(self, y_BTO: Tensor) -> Tensor:
        """The outputs of all ranks, or this one's."""
        return self._comm.all_gather_last(y_BTO, self._sizes) if self._gathers else y_BTO


class RowLinear(LocalModule):
    """Some of the inputs of a linear layer; the bias is whole and is added to the sum."""

    def __init__(self, whole: nn.Linear, parts: tuple[range, ...], *, comm: Comm) -> None:
        super().__init__(whole, {"weight": Slice(1, parts)})
        self._comm = comm

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map this rank's inputs (B, T, I) to all outputs (B, T, O)."""
        return self.joined(functional.linear(x_BTI, self.weight))

    def joined(self, y_BTO: Tensor) -> Tensor:
        """Sum the outputs of all ranks, and add the bias."""
        y_BTO = self._comm.all_reduce(y_BTO)
        return y_BTO if self.bias is None else y_BTO.add_(self.bias)


class VocabularyEmbedding(LocalModule):
    """Some of the rows of an embedding; ranks without a token's row contribute zeros.

    Gemma's multiplies its output by `embed_scale`.
    """

    embed_scale: Tensor | None

    def __init__(self, whole: nn.Embedding, part: range, *, comm: Comm) -> None:
        super().__init__(whole, {"weight": Slice(0, (part,))})
        self._part = part
        self._comm = comm
        self.register_buffer("embed_scale", getattr(whole, "embed_scale", None), persistent=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Look token ids up; the result is (B, T, E)."""
        embedded_BTE = embed(ids_BT, self.weight, self._part, self._comm)
        return embedded_BTE if self.embed_scale is None else embedded_BTE * self.embed_scale.to(self.weight.dtype)


def shard(
    model: PreTrainedModel, shape: ModelShape, comm: Comm, *, own: RankShard, whole: WholeParts = WholeParts.none
) -> None:
    """Replace the modules of a model, on the meta device, by this rank's sharded ones; no-op for one rank.

    Modules of the parts `whole` stay as they are: every rank computes them from the same inputs, without a collective.
    PlacementError if it has no plan, or one with an unknown style or module, or there are more ranks than heads.
    """
    if comm.size == 1:
        return
    shared = defaultdict[str, dict[str, int]](dict)
    for name, module, style in _cut_modules(model, shape, comm.size, whole):
        if style in _CUT_AS_ONE:
            _CUT_AS_ONE[style](module, own, comm)
            continue
        place, _, leaf = name.rpartition(".")
        attention, cut, size = model.get_submodule(place), units_of(model, name), _size_of(module, style)
        if cut in HEAD_CUTS and not hasattr(attention, "kv_b_proj"):  # heads of latents have any width
            has_gates = record_of(shape.model_type).gates_queries and leaf == "q_proj"
            _check_heads(name, size // (1 + has_gates), cut, shape, getattr(attention, "head_dim", shape.head_dim))
        model.set_submodule(name, _local(name, module, style, cut=cut, own=own, comm=comm))
        if cut is not Cut.vocabulary:
            shared[place][leaf] = size
    for name, sizes in shared.items():
        parent: Any = model.get_submodule(name)
        if any(cut_of(f"{name}.{leaf}") in HEAD_CUTS for leaf in sizes):
            _cut_heads(parent, own)
        elif hasattr(parent, "activation_sparsity"):
            parent._gaussian_topk = partial(_sparse, parent.activation_sparsity, sizes["gate_proj"], comm)
        _check_vectors(name, parent, {*sizes.values()} - {getattr(parent, "head_dim", shape.head_dim)})


def _cut_modules(
    model: PreTrainedModel, shape: ModelShape, num_ranks: int, whole: WholeParts
) -> Iterator[tuple[str, nn.Module, str]]:
    """The modules that ranks share, by name and with their style; PlacementError if there is no plan."""
    plan = _plan_of(model)
    if not plan:
        raise PlacementError(no_plan(shape.model_type, num_ranks))
    for name, module in list(model.named_modules()):
        style = _style(model, plan, name)
        # A family's own embedding class does more than look up; it stays whole unless the family's record allows it.
        is_own_embedding = isinstance(module, nn.Embedding) and type(module) is not nn.Embedding
        if style.startswith("replicated") or (is_own_embedding and not record_of(shape.model_type).cuts_own_embedding):
            continue
        if style in _CUT_AS_ONE or not stays_whole(name, whole):
            yield name, module, style


def _check_vectors(name: str, parent: nn.Module, widths: set[int]) -> None:
    """Refuse parameters beside linear layers that are as wide as what ranks share: norms over all heads, or all units.

    A statistic without parameters shows in no shape: the tests compare each family and flag with uncut modules.
    """
    for place, module in parent.named_modules():
        if isinstance(module, LocalModule | nn.Linear):
            continue
        for leaf, values in module.named_parameters(recurse=False):
            if leaf not in getattr(module, "slices", {}) and not widths.isdisjoint(values.shape[-1:]):
                full_name = ".".join(filter(None, (name, place, leaf)))
                raise PlacementError(
                    f"{full_name} spans {values.shape[-1]} features, which ranks share: run this model on one rank"
                )


def _check_heads(name: str, size: int, cut: Cut, shape: ModelShape, head_dim: int) -> None:
    queries, keys = shape.num_attention_heads, shape.num_key_value_heads
    said = (
        head_dim
        * {Cut.query_heads: queries, Cut.kv_heads: keys, **dict.fromkeys((Cut.fused_qkv, Cut.qkv), queries + 2 * keys)}[
            cut
        ]
    )
    if size != said:
        message = f"{name} has {size} features where the config says {said} ({cut.value}): run this model on one rank"
        raise PlacementError(message)


def cut_dim(model: PreTrainedModel, name: str, *, whole: WholeParts) -> int | None:
    """The dimension of a linear layer's weight that `shard` cuts, and 0 of experts; None for whole modules."""
    style = _style(model, _plan_of(model), name)
    if style == EXPERTS:
        return 0
    if style.startswith("replicated") or stays_whole(name, whole):
        return None
    return int(style == "rowwise")


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """The tensor-parallel style of each module by name; empty if none of a layer is known."""
    family = record_of(model.config.model_type)
    plan: dict[str, str] = {**model.tp_plan, **family.tp_plan}
    if plan and family.cuts_vocabulary:
        # Some versions of transformers leave it whole; the memory plan assumes that it is split.
        plan.setdefault("model.embed_tokens", "embedding_rowwise")
    if not any(".*." in name for name in plan):
        return {}
    # Fused matrices are cut in parts, so that what follows them needs no gathered inputs.
    fused = {name: "colwise" for name in plan if name.endswith(IN_PARTS)}
    return {name: _SAME_STYLES.get(style, style) for name, style in plan.items()} | fused


_SAME_STYLES = {"rowwise_split_input": "rowwise", "mla_kv_a_proj": "replicated", "local_params": "replicated"}
"""Every rank has the latents that keys and values are made of; attention's own parameters are cut with its heads."""


def _style(model: PreTrainedModel, plan: dict[str, str], name: str) -> str:
    """The style of a module; `replicated` inside recurrent layers, which are cut whole, and for attention named so."""
    parent, style = name.rpartition(".")[0], plan.get(_LAYER.sub(".*", name), "replicated")
    if plan.get(_LAYER.sub(".*", parent)) == RECURRENT and shared_heads(model.get_submodule(parent)):
        return "replicated"
    return "replicated" if style == RECURRENT and not shared_heads(model.get_submodule(name)) else style


def units_of(model: PreTrainedModel, name: str) -> Cut:
    """The units that a module is cut along, as its family says, or by its name."""
    return record_of(model.config.model_type).cuts.get(name.rpartition(".")[2]) or cut_of(name)


def _local(name: str, module: nn.Module, style: str, *, cut: Cut, own: RankShard, comm: Comm) -> LocalModule:
    """Make this rank's sharded module."""
    size = _size_of(module, style)
    of_ranks = vocabulary_parts(size, comm.size) if cut is Cut.vocabulary else ()
    parts = own.features(cut, size)
    match style, module:
        case "colwise", nn.Linear():
            return ColumnLinear(module, parts)
        case "colwise_gather_output" | "colwise_rep", nn.Linear() if of_ranks:
            return GatheredLinear(module, of_ranks, comm=comm)
        case "rowwise", nn.Linear():
            return RowLinear(module, parts, comm=comm)
        case "embedding_rowwise", nn.Embedding():
            return VocabularyEmbedding(module, parts[0], comm=comm)
    kind = f"{name} ({type(module).__name__})"
    raise PlacementError(f"the plan cuts {kind} by {style}, which is not supported: run this model on one rank")


def _size_of(module: nn.Module, style: str) -> int:
    """The features of a linear layer, or the rows of an embedding, along the dimension that is cut."""
    weight: Any = module.weight
    size: int = weight.shape[int(style == "rowwise")]
    return size


def _cut_experts(experts: LibraryPart, shard: RankShard, comm: Comm) -> None:
    """Keep this rank's units of each expert, or its experts, and add up the ranks' results.

    The first one adds the last bias of experts that are cut.
    """
    experts.register_forward_hook(lambda _module, _inputs, y_ME: comm.all_reduce(y_ME))
    if shard.spreads_experts:
        own = shard.own_experts(experts.num_experts)
        for name, number in {"num_routed": experts.num_experts, "num_experts": len(own)}.items():
            setattr(experts, name, number)
        parts = tuple(range(number, number + 1) for number in own)
        _cut_parameters(experts, {name: Slice(0, parts) for name, _ in experts.named_parameters()})
        experts.register_forward_pre_hook(partial(_keep_own, shard))
        return
    outputs, inputs = (2, 1) if getattr(experts, "is_transposed", False) else (1, 2)
    (units,) = shard.features(Cut.mlp_units, experts.down_proj.shape[inputs])
    has_gate = hasattr(experts, "gate_up_proj")
    if not has_gate:
        gate_up: tuple[range, ...] = (units,)
    elif getattr(experts, "is_concatenated", True):
        gate_up = shard.features(Cut.gate_up, experts.gate_up_proj.shape[outputs])
    else:  # columns of gate and up take turns
        gate_up = (range(2 * units.start, 2 * units.stop),)
    slices = {"gate_up_proj" if has_gate else "up_proj": Slice(outputs, gate_up), "down_proj": Slice(inputs, (units,))}
    if getattr(experts, "has_bias", False):
        slices["gate_up_proj_bias"] = Slice(1, gate_up)
        if comm.rank:
            zeros = torch.zeros(experts.down_proj_bias.shape)
            del experts.down_proj_bias
            experts.register_buffer("down_proj_bias", zeros, persistent=False)
    _cut_parameters(experts, slices)


def _cut_recurrent(mixer: LibraryPart, shard: RankShard, comm: Comm) -> None:
    """Keep this rank's key heads of a recurrence, with their value heads, and add up the ranks' results."""
    num_heads = shared_heads(mixer)
    heads = split_blocks(num_heads, shard.num_ranks)[shard.rank]

    def own(size: int, *, behind: int = 0) -> range:
        """The features of the own heads among all heads' `size` features, which begin at `behind`."""
        return range(behind + heads.start * size // num_heads, behind + heads.stop * size // num_heads)

    num_channels = len(mixer.conv1d.weight)
    key_dim = getattr(mixer, "key_dim", num_channels // 3)
    mixed = own(key_dim), own(key_dim, behind=key_dim), own(num_channels - 2 * key_dim, behind=2 * key_dim)
    for name, module in mixer.named_modules():
        if name in {"conv1d", "in_proj_qkv"}:
            _cut_parameters(module, {"weight": Slice(0, mixed)})
        elif name in {"out_proj", "o_proj"}:
            _cut_parameters(module, {"weight": Slice(1, (own(module.in_features),))})
        elif isinstance(module, nn.Linear) and not name.endswith("_a_proj"):  # features of one key head after the other
            _cut_parameters(module, {"weight": Slice(0, (own(module.out_features),))})
    decays: LibraryPart = getattr(mixer, "forget_gate", mixer)
    slices = {"A_log": Slice(decays.A_log.shape.index(decays.A_log.numel()), (own(decays.A_log.numel()),))}
    _cut_parameters(decays, slices | {"dt_bias": Slice(0, (own(len(decays.dt_bias)),))})
    for name in ("num_k_heads", "num_v_heads", "num_heads", "key_dim", "value_dim", "qkv_dim"):
        if hasattr(mixer, name):
            setattr(mixer, name, len(own(getattr(mixer, name))))
    mixer.register_forward_hook(lambda _module, _inputs, y_BTE: comm.all_reduce(y_BTE))


_CUT_AS_ONE = {EXPERTS: _cut_experts, RECURRENT: _cut_recurrent}
"""Functions by style that cut a module with all that is in it."""


def _keep_own(
    shard: RankShard, experts: LibraryPart, args: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop the experts of other ranks; the library's modules multiply their first expert by 0 instead."""
    x_ME, chosen_MK, weights_MK = args
    is_own_MK = chosen_MK % shard.num_ranks == shard.rank
    elsewhere = experts.num_experts if isinstance(experts, OwnExperts) else 0
    return x_ME, (chosen_MK // shard.num_ranks).where(is_own_MK, elsewhere), weights_MK * is_own_MK


def _cut_parameters(module: LibraryPart, slices: dict[str, Slice]) -> None:
    """Keep slices of parameters of a module, empty."""
    for name, (dim, parts) in slices.items():
        sizes = list(getattr(module, name).shape)
        sizes[dim] = sum(map(len, parts))
        setattr(module, name, nn.Parameter(getattr(module, name).new_empty(sizes), requires_grad=False))
    module.slices = slices  # read by `loading`


def _cut_heads(attention: LibraryPart, own: RankShard) -> None:
    """Keep attention's parameters of this rank's heads, and set its numbers of heads.

    Its own vectors (sinks, biases of gates) have a number for each head, matrices of norms a row, and lists a module.
    """
    queries, keys = own.heads.query_heads, own.heads.kv_heads
    of_size = {own.num_heads: queries, own.heads.num_kv_heads: keys}
    for module in list(attention.modules()):
        if isinstance(module, nn.ModuleList) and len(module) in of_size:  # what stays has its stored name
            for number in {*range(len(module))} - {*of_size[len(module)]}:
                delattr(module, str(number))
        if not isinstance(module, LocalModule | nn.Linear):
            by_heads = {
                name: Slice(0, (of_size[len(values)],))
                for name, values in module.named_parameters(recurse=False)
                if values.ndim > (module is not attention) and len(values) in of_size
            }
            if by_heads:
                _cut_parameters(module, by_heads)
    counts = {
        "num_heads": len(queries),
        "num_attention_heads": len(queries),
        "num_key_value_heads": len(keys),
        "num_kv_heads": len(keys),
        "num_key_value_groups": len(queries) // len(keys),
    }
    patched: dict[str, Any] = {name: counts[name] for name in counts.keys() & vars(attention).keys()}
    for name in {"embed_dim", "split_size"} & vars(attention).keys():  # the width of all heads' outputs
        patched[name] = len(queries) * getattr(attention, name) // own.num_heads
    if hasattr(attention, "qkv_proj"):  # the library finds the parts of its output by the config
        patched["config"] = copy(attention.config)
        patched["config"].update({"num_attention_heads": len(queries)})
    for name, value in patched.items():
        setattr(attention, name, value)


def _sparse(sparsity: float, num_units: int, comm: Comm, gates_BTU: Tensor) -> Tensor:
    """Keep the gates (B, T, U) of this rank above a quantile of a normal law with all gates' mean and deviation.

    It replaces Gemma 3n's own method, which sees this rank's gates alone.
    """
    values_BTU = gates_BTU.float()
    sums_BT2 = comm.all_reduce(torch.stack([values_BTU.sum(-1), values_BTU.square().sum(-1)], -1))
    mean_BT1, square_BT1 = (sums_BT2 / num_units).split(1, -1)
    deviation_BT1 = (square_BT1 - mean_BT1.square()).clamp(min=0).sqrt()
    return functional.relu(gates_BTU - (mean_BT1 + deviation_BT1 * NormalDist().inv_cdf(sparsity)).to(gates_BTU.dtype))
