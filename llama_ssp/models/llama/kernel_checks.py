"""Holds our kernels to torch's operators on this device, each by itself; one that fails takes no other with it.

This module imports Triton; CPU builds of torch come without.

Shapes: B sequences, T positions, M tokens, X heads, I inputs, E embedding width, U MLP units, S slots, D head dim, P =
D / 2 pairs of dimensions.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llama_ssp.models.cache import CacheView, StaticCache
from llama_ssp.models.llama import kernels
from llama_ssp.models.llama.gpu_layers import AddNorm, OwnKernels
from llama_ssp.models.llama.layer import Layer, gated
from llama_ssp.models.llama.norm import RmsNorm
from llama_ssp.models.llama.rotary import PlaceByKernel, PlaceByOperators, PlaceHeads, RotateWrite
from llama_ssp.models.triton_tools import attempt, missing_packages

_TOLERANCE = 0.02
"""Of the largest value: sums in another order, and one rounding more or less, differ by less."""


@torch.inference_mode()
def find_kernels(layer: Layer, norm: RmsNorm) -> OwnKernels:
    """Those of our kernels that run here and are right; a warning says of each other one why it is not used."""
    tries: dict[str, Callable[[], object]] = {
        "rotate_write": partial(try_rotate_write, layer, like=norm.weight_E),
        "add_norm": partial(try_add_norm, norm),
        "gated": partial(try_gated, like=norm.weight_E),
    }
    found: dict[str, object] = {}
    for name, try_out in tries.items():
        found[name] = attempt(try_out, instead=f"continuing with torch's operators instead of the kernel {name}")
        if found[name] is None and missing_packages():
            break  # the others would say the same
    return OwnKernels(**found)  # type: ignore[arg-type]


def try_rotate_write(layer: Layer, *, like: Tensor) -> RotateWrite:
    """Our kernel for this layer's heads; RuntimeError if it does not compute what torch's operators do."""
    generator = torch.Generator().manual_seed(0)
    heads, num_slots = layer.heads, 8
    positions_BT = torch.tensor([[3, 4, 5], [0, 1, 2]], device=like.device)
    qkv_MXD = torch.randn(positions_BT.numel(), heads.num + 2 * heads.num_kv, heads.dim, generator=generator).to(like)
    angles_SP = torch.randn(num_slots, heads.dim // 2, generator=generator).to(like.device)
    freqs_cis_S1P = torch.polar(torch.ones_like(angles_SP), angles_SP)[:, None]

    def placed(place: Callable[[CacheView], PlaceHeads]) -> tuple[Tensor, ...]:
        cache = StaticCache(num_layers=1, batch_size=2, capacity=num_slots, device=like.device)
        view = cache.view(positions_BT, bucket=num_slots, cache_rows_B=None)
        return place(view)(qkv_MXD.clone(), 0, heads, layer.head_norms)

    wanted = placed(lambda view: PlaceByOperators(freqs_cis_S1P.index_select(0, positions_BT.flatten()), view))
    for in_order in (True, False):
        found = placed(
            lambda view, in_order=in_order: PlaceByKernel(  # type: ignore[misc]
                kernels.rotate_write, freqs_cis_S1P, positions_BT, None if in_order else view.slots_M, view.buffer
            )
        )
        for one, other in zip(found, wanted, strict=True):
            check("rotary embedding", one, other)
    return kernels.rotate_write


def try_add_norm(norm: RmsNorm) -> AddNorm:
    """Our kernel; RuntimeError if it does not compute what torch's operators do."""
    generator = torch.Generator().manual_seed(0)
    x_ME, added_ME = torch.randn(2, 5, norm.weight_E.shape[0], generator=generator).to(norm.weight_E)
    wanted_ME = x_ME + added_ME
    found_ME = kernels.add_norm(x_ME, added_ME, norm.weight_E, norm.eps)
    check("residual", x_ME, wanted_ME)
    check("norm", found_ME, norm(wanted_ME))
    return kernels.add_norm


def try_gated(*, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Our kernel; RuntimeError if it does not compute what torch's operators do."""
    gate_up_M2U = torch.randn(5, 2200, generator=torch.Generator().manual_seed(0)).to(like)
    check("gate", kernels.gated(gate_up_M2U), gated(gate_up_M2U))
    return kernels.gated


def check(name: str, found: Tensor, wanted: Tensor) -> None:
    """RuntimeError, with the name of the kernel, if values differ by more than rounding; NaN does."""
    if bool((~((found - wanted).abs() <= _TOLERANCE * wanted.abs().max())).any()):
        raise RuntimeError(f"the kernel of the {name} is wrong on this device")
