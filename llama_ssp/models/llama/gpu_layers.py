"""The layers of the lean decoder on a GPU: torch's products, and few kernels between them.

    norm | query-key-value | rotary, cache | attention | output + residual | norm | gate-up | silu | down + residual

Attention has a second kernel where a row is split. With tensor parallelism an all-reduce follows output and down, and
the next norm adds its result to the residual. Quantized weights have products of their own.

With `gpu_kernels=fused` products of plain weights take in what stands around them, for up to 32 tokens. No GPU has
timed them, so they are off by default:

    norm, query-key-value | rotary, cache | attention, its sum | output, residual | norm, gate-up, silu | down, residual

Each kernel of ours is first held to torch's operators on this device; those stand in for one that fails, for it alone.

Shapes: B sequences, T positions, M = B * T tokens, R tokens that get logits, I inputs, O outputs, E embedding width, V
vocabulary, X heads, U MLP units, S slots, D head dim.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.kernels.linear import Linear, PlainLinear
from llama_ssp.models.cache import CacheView, StaticCache
from llama_ssp.models.llama.attention import Attend
from llama_ssp.models.llama.layer import Layer, ResidualLinear, gated
from llama_ssp.models.llama.rotary import PlaceByKernel, PlaceByOperators, PlaceHeads, RmsNorm, RotateWrite
from llama_ssp.models.triton_tools import attempt, missing_packages
from llama_ssp.ranks.comms import Comm

_MOST_ROWS = 32
"""Of a fused product."""
_CHECKED_ROWS = (1, 5, 20)
_TOLERANCE = 0.02
"""Of the largest value: sums in another order, and one rounding more or less, differ by less."""
_SMALLEST_EXPONENT = -14
"""Of normal numbers in fp16."""


class OwnKernels(NamedTuple):
    """Our kernels that work on this device, as in `kernels`; None where torch's operators run instead."""

    rotate_write: RotateWrite | None = None
    add_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    gated: Callable[[Tensor], Tensor] | None = None


class Stream(NamedTuple):
    """The residual stream (M, E), and what nobody has added to it yet."""

    x_ME: Tensor
    pending_ME: Tensor | None = None

    def added(self) -> Tensor:
        """The stream with everything added."""
        return self.x_ME if self.pending_ME is None else self.x_ME + self.pending_ME


class NormedProduct:
    """A linear layer behind an RMS norm.

    Args:
        norm: before it.
        linear: the layer.
        kernels: those of ours that work.
        gates: the layer is gate and up of an MLP, and the result silu(gate) * up.
        dtype: of the result; None for that of the weights.

    Attributes:
        fused: the product with the norm and the gate in one kernel; None where it is not used.
    """

    fused: Callable[[Stream], tuple[Tensor, Tensor]] | None = None

    def __init__(
        self,
        norm: RmsNorm,
        linear: Linear,
        kernels: OwnKernels,
        *,
        gates: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._norm, self.linear, self._gates, self._dtype = norm, linear, gates, dtype
        self._add_norm, self._gated = kernels.add_norm, kernels.gated or gated

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the whole stream (M, E), which may overwrite the given one, and the product (M, O)."""
        x_ME, pending_ME = stream
        if self.fused and len(x_ME) <= _MOST_ROWS:
            return self.fused(stream)
        if pending_ME is not None and self._add_norm:
            normed_ME = self._add_norm(x_ME, pending_ME, self._norm.weight_E, self._norm.eps)
        else:
            x_ME = stream.added()
            normed_ME = self._norm(x_ME)
        y_MO = self.linear(normed_ME)
        y_MO = self._gated(y_MO) if self._gates else y_MO
        return x_ME, y_MO if self._dtype is None else y_MO.to(self._dtype)

    def fuse(self) -> None:
        """Use one kernel for few rows of plain weights."""
        from llama_ssp.models.llama import kernels  # noqa: PLC0415 - imports Triton

        # No product of a finite x with the scaled weight overflows.
        norm, linear = self._norm, self.linear
        scale = 2.0 ** -math.ceil(math.log2(max(float(norm.weight_E.abs().max()), 2.0**_SMALLEST_EXPONENT)))
        weight = kernels.NormWeight(norm.weight_E * scale, scale, norm.eps)
        assert isinstance(linear, PlainLinear)
        self.fused = lambda stream: kernels.product(
            stream.x_ME, linear.weight_OI, norm=weight, bias_O=linear.bias_O, added_MI=stream.pending_ME,
            gates=self._gates, dtype=self._dtype,
        )  # fmt: skip

    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""
        return self(Stream(x_MI))[1]


class AddedProduct:
    """A row-parallel linear layer whose output is added to the residual, at once or by the next norm.

    Attributes:
        fused: the product with the residual in one kernel; None where it is not used.
    """

    fused: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, residual: ResidualLinear) -> None:
        self.linear, self._residual = residual.linear, residual

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Stream:
        """Add the product of x to the residual, which may be overwritten."""
        if self._residual.is_shared:
            return Stream(residual_ME, self._residual.summed(x_MI))
        return Stream(self._added(x_MI, residual_ME))

    def _added(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        if self.fused and len(x_MI) <= _MOST_ROWS:
            return self.fused(x_MI, residual_ME)
        return self.linear.add(x_MI, residual_ME)

    def fuse(self) -> None:
        """Use one kernel for few rows of plain weights."""
        from llama_ssp.models.llama import kernels  # noqa: PLC0415 - imports Triton

        linear = self.linear
        assert isinstance(linear, PlainLinear)
        self.fused = lambda x_MI, residual_ME: kernels.product(
            x_MI, linear.weight_OI, bias_O=linear.bias_O, residual_MO=residual_ME
        )[1]

    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""
        return self._added(x_MI, x_MI.new_zeros(len(x_MI), self._residual.width))


class GpuLayer:
    """A layer, over the weights of the layer for every device."""

    def __init__(self, layer: Layer, kernels: OwnKernels) -> None:
        self._number, self._heads, self._head_norms = layer.number, layer.heads, layer.head_norms
        self.qkv = NormedProduct(layer.attention_norm, layer.qkv, kernels)
        self.output = AddedProduct(layer.output)
        self.gate_up = NormedProduct(layer.mlp_norm, layer.gate_up, kernels, gates=True)
        self.down = AddedProduct(layer.down)

    def forward(self, stream: Stream, place: PlaceHeads, attend: Attend) -> Stream:
        """Add attention, then the MLP, to the stream; see `Layer.forward`."""
        num_heads, num_kv_heads, head_dim, _ = self._heads
        x_ME, qkv_MO = self.qkv(stream)
        qkv_MXD = qkv_MO.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        placed = place(qkv_MXD, self._number, self._heads, self._head_norms)
        x_ME, gated_MI = self.gate_up(self.output(attend(*placed, self._heads), x_ME))
        return self.down(gated_MI, x_ME)


class GpuLayers:
    """The layers, the last norm and the head.

    Attributes:
        kernels: those of ours that work.
        layers, head: the parts.
    """

    def __init__(self, layers: Sequence[Layer], norm: RmsNorm, head: Linear, *, comm: Comm, fuses: bool) -> None:
        find = partial(find_kernels, layers[0], norm)
        self.kernels = attempt(find, instead="continuing with more kernels in every layer") or OwnKernels()
        self.layers = [GpuLayer(layer, self.kernels) for layer in layers]
        # Gathered logits are sent in 16 bits.
        self.head = NormedProduct(norm, head, self.kernels, dtype=torch.float32 if comm.size == 1 else None)
        if fuses and any(self.kernels):  # without Triton one sentence is enough
            self._fuse()

    def _fuse(self) -> None:
        """Fuse products of plain weights in 16 bits where that gives what torch's operators do on this device."""
        groups: dict[str, list[NormedProduct] | list[AddedProduct]] = {
            "qkv": [layer.qkv for layer in self.layers], "output": [layer.output for layer in self.layers],
            "gate_up": [layer.gate_up for layer in self.layers], "down": [layer.down for layer in self.layers],
            "head": [self.head],
        }  # fmt: skip
        for name, group in groups.items():
            linear = group[0].linear
            is_plain = type(linear) is PlainLinear and linear.weight_OI.dtype in {torch.float16, torch.bfloat16}
            instead = f"continuing with torch's product instead of a fused one for {name}"
            if is_plain and attempt(partial(_try_fused, group[0], name), instead=instead):
                for product in group:
                    product.fuse()

    def forward(
        self, x_ME: Tensor, place: PlaceHeads, attends: Sequence[Attend], *, score_positions_BR: Tensor | None
    ) -> Tensor:
        """Map the embedded tokens, which may be overwritten, to this rank's logits (B * R, V).

        `attends` are those of the layers; `score_positions_BR` is which of the T tokens to score, None for all.
        """
        stream = Stream(x_ME)
        for layer, attend in zip(self.layers, attends, strict=True):
            stream = layer.forward(stream, place, attend)
        if score_positions_BR is not None:
            x_BTE = stream.added().view(score_positions_BR.shape[0], -1, x_ME.shape[-1])
            places_BRE = score_positions_BR[..., None].expand(-1, -1, x_ME.shape[-1])
            stream = Stream(x_BTE.gather(1, places_BRE).flatten(0, 1))
        return self.head(stream)[1]


@torch.inference_mode()
def _try_fused(product: NormedProduct | AddedProduct, name: str) -> bool:
    assert isinstance(product.linear, PlainLinear)
    weight_OI, generator = product.linear.weight_OI, torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, weight_OI.shape[1], generator=generator).to(weight_OI) for rows in _CHECKED_ROWS]
    wanted = [product.try_out(x_MI) for x_MI in inputs]
    product.fuse()
    try:
        for x_MI, expected in zip(inputs, wanted, strict=True):
            _check(f"fused product {name}", product.try_out(x_MI), expected)
    except Exception:
        product.fused = None
        raise
    return True


@torch.inference_mode()
def find_kernels(layer: Layer, norm: RmsNorm) -> OwnKernels:
    """Those of our kernels that run here and are right; a warning says of each other one why it is not used.

    Raises:
        ImportError: Triton is missing.
    """
    from llama_ssp.models.llama import kernels  # noqa: PLC0415 - CPU builds of torch come without Triton

    like, generator = norm.weight_E, torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    def add_norm() -> Callable[..., Tensor]:
        x_ME, added_ME = some(2, 5, like.shape[0])
        wanted_ME = x_ME + added_ME
        found_ME = kernels.add_norm(x_ME, added_ME, like, norm.eps)
        _check("residual", x_ME, wanted_ME)
        _check("norm", found_ME, norm(wanted_ME))
        return kernels.add_norm

    def gate() -> Callable[[Tensor], Tensor]:
        gate_up_M2U = some(5, 2200)
        _check("gate", kernels.gated(gate_up_M2U), gated(gate_up_M2U))
        return kernels.gated

    found: dict[str, object] = {}
    rotate_write = partial(_try_rotate_write, layer, kernels.rotate_write, some)
    tries: dict[str, Callable[[], object]] = {"rotate_write": rotate_write, "add_norm": add_norm, "gated": gate}
    for name, try_out in tries.items():
        found[name] = attempt(try_out, instead=f"continuing with torch's operators instead of the kernel {name}")
        if found[name] is None and missing_packages():
            break  # the others would say the same
    return OwnKernels(**found)  # type: ignore[arg-type]


def _try_rotate_write(layer: Layer, kernel: RotateWrite, some: Callable[..., Tensor]) -> RotateWrite:
    heads, num_slots, positions_BT = layer.heads, 8, torch.tensor([[3, 4, 5], [0, 1, 2]])
    qkv_MXD = some(positions_BT.numel(), heads.num + 2 * heads.num_kv, heads.dim)
    angles_SP, positions_BT = some(num_slots, heads.dim // 2).float(), positions_BT.to(qkv_MXD.device)
    freqs_cis_S1P = torch.polar(torch.ones_like(angles_SP), angles_SP)[:, None]

    def placed(place: Callable[[CacheView], PlaceHeads]) -> tuple[Tensor, ...]:
        cache = StaticCache(num_layers=1, batch_size=2, capacity=num_slots, device=qkv_MXD.device)
        view = cache.view(positions_BT, bucket=num_slots, cache_rows_B=None)
        return place(view)(qkv_MXD.clone(), 0, heads, layer.head_norms)

    def by_kernel(view: CacheView, *, in_order: bool) -> PlaceHeads:
        return PlaceByKernel(kernel, freqs_cis_S1P, positions_BT, None if in_order else view.slots_M, view.buffer)

    wanted = placed(lambda view: PlaceByOperators(freqs_cis_S1P.index_select(0, positions_BT.flatten()), view))
    for in_order in (True, False):
        for one, other in zip(placed(partial(by_kernel, in_order=in_order)), wanted, strict=True):
            _check("rotary embedding", one, other)
    return kernel


def _check(name: str, found: Tensor, wanted: Tensor) -> None:
    """RuntimeError, with the name of the kernel, if values differ by more than rounding; NaN does."""
    if bool((~((found - wanted).abs() <= _TOLERANCE * wanted.abs().max())).any()):
        raise RuntimeError(f"the kernel of the {name} is wrong on this device")
