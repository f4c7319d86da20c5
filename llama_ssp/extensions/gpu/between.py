"""Tries the kernels between products, one by one; the reference replaces a kernel that fails.

Shapes: B rows, T positions, M = B * T tokens, E width of what is normalized, U MLP units, X = H + 2 N heads, H query
heads, N key-value heads, S positions, D head dim, P = D / 2.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from llama_ssp.extensions.gpu.attempts import TOLERANCE, attempt, check, missing_packages
from llama_ssp.kernels.between import OwnKernels, gated, rotate_write
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm

_STEP = 0.08
"""Tolerance as a share of the largest value; the widest step between kept numbers is smaller."""


def find_between(norm: RmsNorm, heads: Heads, head_norms: Sequence[RmsNorm], kept: KeptRows) -> OwnKernels | None:
    """Our kernels that work on this GPU; None if Triton is missing."""
    find = partial(find_own_kernels, norm, heads, head_norms, kept)
    return attempt(find, instead="continuing with more kernels in every layer")


@torch.inference_mode()
def find_own_kernels(norm: RmsNorm, heads: Heads, head_norms: Sequence[RmsNorm], kept: KeptRows) -> OwnKernels:
    """Find our kernels that run here and are right; a warning says of each other kernel why it is not used.

    Raises:
        ImportError: Triton is missing.
    """
    from llama_ssp.extensions.gpu.kernels import between

    like, generator = norm.weight_E, torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    def add_norm() -> Callable[..., Tensor]:
        x_ME, added_ME = some(2, 5, like.shape[0])
        wanted_ME = x_ME + added_ME
        found_ME = between.add_norm(x_ME, added_ME, like, norm.eps)
        check("residual", x_ME, wanted_ME)
        check("norm", found_ME, norm(wanted_ME))
        check("norm", between.add_norm(x_ME, None, like, norm.eps), norm(wanted_ME))
        ids_M = torch.tensor([4, 0, 3], device=like.device)
        check("norm", between.add_norm(x_ME[:3].clone(), added_ME, like, norm.eps, ids_M=ids_M), norm(added_ME[ids_M]))
        return between.add_norm

    def gate() -> Callable[..., Tensor]:
        gate_up_M2U = some(5, 2200)
        check("gate", between.gated(gate_up_M2U), gated(gate_up_M2U))
        return between.gated

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
        own = partial(between.rotate_write, turns_SP2=torch.view_as_real(freqs_cis_SP), positions_BT=positions_BT)
        for slots in (None, slots_M):
            for one, other, tolerance in zip(placed(partial(own, slots_M=slots)), wanted, allowed, strict=True):
                check("rotary embedding", one, other, tolerance=tolerance)
        return between.rotate_write

    found, tries = OwnKernels(), {"rotate_write": rotate, "add_norm": add_norm, "gated": gate}
    for name, try_out in tries.items():
        kernel = attempt(try_out, instead=f"continuing with torch's operators instead of the kernel {name}")
        setattr(found, name, kernel)
        if kernel is None and missing_packages():
            break  # the others would say the same
    return found
