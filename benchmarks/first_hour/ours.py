"""Every use of a private name of `llama_ssp` by the first hour: kernels, and which path the engine takes.

Shapes: M tokens, I inputs, O outputs, X heads, D head dim, S positions, E embedding width.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.first_hour.step import Where
from llama_ssp.architectures.sizes import FIRST_PAGED_CAPABILITY
from llama_ssp.engine.executors import GraphExecutor
from llama_ssp.engine.loop import Decoder
from llama_ssp.models.cache import CacheView
from llama_ssp.models.llama.rotary import PlaceByKernel, PlaceByOperators, PlaceHeads, RmsNorm
from llama_ssp.models.runner import Runner
from llama_ssp.models.varlen import VarlenAttention, capability_of, torch_attention

EPS = 1e-6


def path_of(runner: Runner, decoder: Decoder | None = None) -> dict[str, str]:
    """Which path the forwards of a model take, and the rounds of a decoder."""
    by_length, fused = getattr(runner, "reads_by_length", False), getattr(runner, "is_fused", False)
    other = "masks" if getattr(runner, "uses_masks", True) else "compiled"
    path = {"attention": "lengths" if by_length else other, "layers": "few kernels" if fused else "operators"}
    if decoder is not None:
        graphs = decoder.executor if isinstance(decoder.executor, GraphExecutor) else None
        path["rounds"] = "graphs" if graphs and not graphs.failed else "no graphs"
    return path


def path_expected(where: Where, dtype: torch.dtype, *, has_graphs: bool) -> dict[str, str]:
    """Which path they should take: what the documentation promises of this GPU, and of this torch."""
    is_narrow, has_kernel = dtype.itemsize == 2, torch_attention() is not None  # noqa: PLR2004 - bytes
    if is_narrow and has_kernel and _has_pages(where.device):
        layers = {"attention": "lengths", "layers": "few kernels"}
    else:
        layers = {"attention": "masks"} if where.is_gpu else {}
    return layers | {"rounds": "graphs" if where.is_gpu and has_graphs else "no graphs"}


def _has_pages(device: torch.device) -> bool:
    """Whether torch's kernels read pages on a device."""
    return capability_of(device) >= FIRST_PAGED_CAPABILITY


def torch_attends(device: torch.device, num_splits: int | None = None) -> VarlenAttention | None:
    """Torch's attention by lengths with a number of splits, None for its own; None if this one has none for pages."""
    try:
        from torch.nn.attention import varlen  # noqa: PLC0415 - slow to import
    except ImportError:
        return None
    into: Callable[..., Tensor] | None = getattr(varlen, "varlen_attn_out", None)
    known = inspect.signature(into).parameters if into else {}
    splits = {"num_splits": num_splits} if num_splits else {}
    if into is None or not _has_pages(device) or not known.keys() >= {"block_table", *splits}:
        return None
    return lambda query, *operands, **options: into(torch.empty_like(query), query, *operands, **splits, **options)


def split_attention() -> tuple[VarlenAttention, int]:
    """Our attention over more blocks, and the most queries of a key-value head in a row."""
    from llama_ssp.models.llama import split_kernels  # noqa: PLC0415 - imports Triton

    return split_kernels.attend, split_kernels.MOST_ROWS


def fused_product(x_MI: Tensor, added_MI: Tensor, norm_I: Tensor) -> Callable[[Tensor], Tensor]:
    """Our product of the norm of a sum with gate and up (2 O, I), gated."""
    from llama_ssp.models.llama import kernels  # noqa: PLC0415 - imports Triton

    norm = kernels.NormWeight(norm_I, 1.0, EPS)
    return lambda weight_OI: kernels.product(x_MI, weight_OI, norm=norm, added_MI=added_MI, gates=True)[1]


def add_norm(x_ME: Tensor, added_ME: Tensor, weight_E: Tensor) -> Tensor:
    """The norm of a sum, which overwrites x, as the engine computes it on this device."""
    module = torch.nn.RMSNorm(len(weight_E)).to(weight_E)
    module.weight.data, module.variance_epsilon = weight_E, EPS  # type: ignore[assignment]
    if not x_ME.is_cuda:
        return RmsNorm(module)(x_ME.add_(added_ME))
    from llama_ssp.models.llama import kernels  # noqa: PLC0415 - imports Triton

    return kernels.add_norm(x_ME, added_ME, weight_E, EPS)


def placings(freqs_cis_S1P: Tensor, positions_BT: Tensor, view: CacheView) -> dict[str, PlaceHeads]:
    """What rotates heads and writes them to a cache: in the order of its rows, and by slots."""
    if not positions_BT.is_cuda:
        return {"in order": PlaceByOperators(freqs_cis_S1P[positions_BT.flatten()], view)}
    from llama_ssp.models.llama.kernels import rotate_write  # noqa: PLC0415 - imports Triton

    return {
        name: PlaceByKernel(rotate_write, freqs_cis_S1P, positions_BT.contiguous(), slots, view.buffer)
        for name, slots in {"in order": None, "by slots": view.slots_M}.items()
    }
