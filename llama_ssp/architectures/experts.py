"""The sizes of experts in place of an MLP, of which a router chooses some for each token, by the fields of a config."""

from collections.abc import Callable
from functools import partial
from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk")
_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_UNITS = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_OF_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
_DENSE = ("first_k_dense_replace", "moe_layer_start_index")


def first_size(field: Callable[[str], Any], *names: str) -> int:
    """The first of some fields of a config that has a size above 0, of the layers the largest; 0 if none has."""
    for name in names:
        values = value if isinstance(value := field(name), list) else [value]
        if size := max((value for value in values if type(value) is int), default=0):
            return size
    return 0


def expert_sizes(field: Callable[[str], Any], *, num_layers: int) -> dict[str, Any]:
    """The sizes of experts as `ModelShape` has them, from the fields of a config; none of a dense model."""
    first = partial(first_size, field)
    num_experts, num_chosen = first(*EXPERTS), first(*_CHOSEN)
    if num_experts < 2 or not num_chosen or field("is_moe") is False:
        return {}
    units = first(*_UNITS)
    step, without = max(first("decoder_sparse_step", "interleave_moe_layer_step"), 1), field("mlp_only_layers") or []
    dense = {number for number in range(num_layers) if (number + 1) % step or number in without}
    dense |= {*range(first(*_DENSE))}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": min(num_chosen, num_experts),
        "moe_intermediate_size": units,
        "shared_intermediate_size": first(*_OF_SHARED)
        or (first("intermediate_size") if field("enable_moe_block") else 0)  # of a Gemma 4
        or units * (first(*_SHARED) or int(bool(field("intermediate_size_mlp")))),  # the latter is a Llama 4's
        "num_dense_layers": min(len(dense), num_layers - 1),
    }
