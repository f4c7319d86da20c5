"""The parts between the products of a Llama-like layer: norms, rotary embedding, write to the cache, gate.

    part           reference, for every device    on a GPU, in Triton
    rotate_write   `rotate_write`                 `between_gpu.rotate_write`: one kernel, norms of heads included
    add_norm       `RmsNorm`, often of a sum      `between_gpu.add_norm`: the first layer's embedding included
    gated          `gated`                        `between_gpu.gated`

On a CPU compiled operators take in what stands around them where they can (`linear`, `attention`, `layer`).
`find_own_kernels` tries each kernel on its device; the reference stands in for one that fails, for it alone.

Shapes: B rows, T positions, M = B * T tokens, E width of what is normalized, U MLP units, X = H + 2 N heads, H query
heads, N key-value heads, S positions, D head dim, P = D / 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels.choice_gpu import TOLERANCE, attempt, check, missing_packages
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm

_STEP = 0.08
"""Share of the largest value: the widest step of a kept number is less."""


def norm_heads(qkv_MXD: Tensor, norms: Sequence[RmsNorm], heads: Heads) -> None:
    """Norm queries and keys in place."""
    turned_MXD = qkv_MXD.narrow(1, 0, heads.num + heads.num_kv)
    for norm, part in zip(norms, turned_MXD.split([heads.num, heads.num_kv], 1), strict=True):
        part.copy_(norm(part))


def rotate_write(
    qkv_MXD: Tensor, freqs_cis_M1P: Tensor, slots_M: Tensor, parts: Tensor,
    *, heads: Heads, norms: Sequence[RmsNorm], kept: KeptRows | None = None,
) -> None:  # fmt: skip
    """Norm and turn queries and keys in place, in fp32, and write keys and values to the cache.

    Args:
        qkv_MXD: queries, keys and values.
        freqs_cis_M1P: each token's complex rotary factors, for adjacent pairs of dimensions.
        slots_M: of the tokens, among the slots of all rows.
        parts: the layer's part of the cache; see `LayerBuffer`.
        heads: of the layer.
        norms: of query heads and of key heads, in models that have them.
        kept: how keys and values are kept; None for their own dtype.
    """
    if norms:
        norm_heads(qkv_MXD, norms, heads)
    turned_MXD = qkv_MXD.narrow(1, 0, heads.num + heads.num_kv)
    in_fp32 = turned_MXD.float()
    torch.view_as_complex(in_fp32.unflatten(-1, (-1, 2))).mul_(freqs_cis_M1P)
    if in_fp32 is not turned_MXD:
        turned_MXD.copy_(in_fp32)
    written_M2ND = qkv_MXD.narrow(1, heads.num, 2 * heads.num_kv)
    kept_M2NW = kept.pack(written_M2ND) if kept else written_M2ND
    parts.index_copy_(1, slots_M, kept_M2NW.transpose(0, 1))


def gated(gate_up_M2U: Tensor) -> Tensor:
    """silu(gate) * up of the concatenated gate and up (M, 2 U); returns (M, U)."""
    gate_MU, up_MU = gate_up_M2U.chunk(2, dim=-1)
    return functional.silu(gate_MU).mul_(up_MU)


@dataclass
class OwnKernels:
    """Kernels of `between_gpu` that work on this device; None where the reference runs instead."""

    rotate_write: Callable[..., None] | None = None
    add_norm: Callable[..., Tensor] | None = None
    gated: Callable[[Tensor], Tensor] | None = None


@torch.inference_mode()
def find_own_kernels(norm: RmsNorm, heads: Heads, head_norms: Sequence[RmsNorm], kept: KeptRows) -> OwnKernels:
    """Find our kernels that run here and are right; a warning says of each other kernel why it is not used.

    Raises:
        ImportError: Triton is missing.
    """
    from llama_ssp.kernels import between_gpu  # noqa: PLC0415 - CPU builds of torch come without Triton

    like, generator = norm.weight_E, torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    def add_norm() -> Callable[..., Tensor]:
        x_ME, added_ME = some(2, 5, like.shape[0])
        wanted_ME = x_ME + added_ME
        found_ME = between_gpu.add_norm(x_ME, added_ME, like, norm.eps)
        check("residual", x_ME, wanted_ME)
        check("norm", found_ME, norm(wanted_ME))
        check("norm", between_gpu.add_norm(x_ME, None, like, norm.eps), norm(wanted_ME))
        ids_M = torch.tensor([4, 0, 3], device=like.device)
        check(
            "norm", between_gpu.add_norm(x_ME[:3].clone(), added_ME, like, norm.eps, ids_M=ids_M), norm(added_ME[ids_M])
        )
        return between_gpu.add_norm

    def gate() -> Callable[..., Tensor]:
        gate_up_M2U = some(5, 2200)
        check("gate", between_gpu.gated(gate_up_M2U), gated(gate_up_M2U))
        return between_gpu.gated

    def rotate() -> Callable[..., None]:
        num_slots, positions_BT = 8, torch.tensor([[3, 4, 5], [0, 1, 2]])
        slots_M = (positions_BT + torch.tensor([[0], [num_slots]])).flatten().to(like.device)
        qkv_MXD = some(positions_BT.numel(), heads.num + 2 * heads.num_kv, heads.dim)
        angles_SP, positions_BT = some(num_slots, heads.dim // 2).float(), positions_BT.to(like.device)
        freqs_cis_SP = torch.polar(torch.ones_like(angles_SP), angles_SP)

        def placed(place: Callable[..., None]) -> tuple[Tensor, Tensor]:
            own_MXD, sizes = qkv_MXD.clone(), (2 * heads.num_kv, 2 * num_slots, kept.width(heads.dim))
            parts = torch.zeros(sizes, dtype=kept.stored_dtype, device=qkv_MXD.device)
            place(own_MXD, parts=parts, heads=heads, norms=head_norms, kept=kept)
            return own_MXD[:, : heads.num], kept.unpack(parts, torch.float32)

        freqs_cis_M1P = freqs_cis_SP.index_select(0, positions_BT.flatten())[:, None]
        wanted = placed(partial(rotate_write, freqs_cis_M1P=freqs_cis_M1P, slots_M=slots_M))
        # A number next to a step's middle may differ by a step.
        allowed = TOLERANCE, _STEP if kept.largest else TOLERANCE
        own = partial(between_gpu.rotate_write, turns_SP2=torch.view_as_real(freqs_cis_SP), positions_BT=positions_BT)
        for slots in (None, slots_M):
            for one, other, tolerance in zip(placed(partial(own, slots_M=slots)), wanted, allowed, strict=True):
                check("rotary embedding", one, other, tolerance=tolerance)
        return between_gpu.rotate_write

    found, tries = OwnKernels(), {"rotate_write": rotate, "add_norm": add_norm, "gated": gate}
    for name, try_out in tries.items():
        kernel = attempt(try_out, instead=f"continuing with torch's operators instead of the kernel {name}")
        setattr(found, name, kernel)
        if kernel is None and missing_packages():
            break  # the others would say the same
    return found
