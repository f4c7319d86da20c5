"""Products and attention whose sums have one order, whatever the rows and positions: `reproducible=true` on a GPU.

    products     the kernel of a few rows, for any number of them, in 16, 8 and 4 bits
    attention    parts of one size from the row's first slot on; see `kernels.equal_parts`

Before their first use, both are compared on this GPU with torch's operators, and with the bits of a row alone.

Shapes: M rows, I inputs, O outputs; Q queries, H query heads, N key-value heads, D head dim, S slots.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from llama_ssp.extensions.gpu.attempts import attempt, check
from llama_ssp.extensions.gpu.linear import HALVES, HalvesLinear
from llama_ssp.kernels.attention_by_length import VarlenAttention, fault_of
from llama_ssp.kernels.equal_bits import EqualBits
from llama_ssp.kernels.linear import Kernel, Linear, PlainLinear, make_linear
from llama_ssp.kernels.parts import Heads, KeptRows, Sequences
from llama_ssp.models.graph_inputs import find_parts
from llama_ssp.models.quantization.weight_only import WeightOnlyLinear

_ROWS_AT_ONCE = 4096
"""The most rows of a call: kernels compute offsets in 32 bits."""
_INSTEAD = "continuing with sums in other orders"
_CHECKED_SLOTS, _CHECKED_POSITIONS = 600, 9


class _InBlocks(Linear):
    """A product of at most `_ROWS_AT_ONCE` rows at once."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if len(x_MI) <= _ROWS_AT_ONCE:
            return self._linear(x_MI, residual_MO)
        blocks = x_MI.split(_ROWS_AT_ONCE)
        residuals = [None] * len(blocks) if residual_MO is None else residual_MO.split(_ROWS_AT_ONCE)
        return torch.cat([self._linear(*each) for each in zip(blocks, residuals, strict=True)])


class OneOrder(EqualBits):
    """Operators of one model; `few_rows` is the kernel of a few rows."""

    def __init__(self, few_rows: Callable[..., Tensor]) -> None:
        self.holds, self._few_rows = True, few_rows

    def kernel(self, make: Kernel | None) -> Kernel:
        """See `EqualBits`; layers of packed weights take their own kernel of a few rows for all rows."""

        def made(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
            linear = (make or make_linear)(weight_OI, bias_O)
            if isinstance(linear, PlainLinear) and linear.weight_OI.dtype in HALVES:
                weight_OI, bias_O = linear.weight_OI, linear.bias_O
                return _InBlocks(HalvesLinear(weight_OI, bias_O, few_rows=self._few_rows, most_rows=_ROWS_AT_ONCE))
            packed = [*find_parts(linear, WeightOnlyLinear, seen=set())]  # type: ignore[type-abstract]
            self.holds = self.holds and bool(packed) and all(part.has_few_rows for part in packed)
            for part in packed:
                part.most_rows = _ROWS_AT_ONCE
            return _InBlocks(linear)

        return made

    def attention(
        self, heads: Heads, *, device: torch.device, dtype: torch.dtype, has_windows: bool, kept: KeptRows
    ) -> VarlenAttention | None:
        """See `EqualBits`."""
        try_out = partial(_tried_attention, heads, device=device, dtype=dtype, has_windows=has_windows, kept=kept)
        found = attempt(try_out, instead=_INSTEAD)
        self.holds = self.holds and found is not None
        return found


def find_equal_bits(like: Tensor) -> OneOrder | None:
    """Return the operators of a model whose weights are like `like`; None if sums have no such order on its device."""
    product = None if like.dtype not in HALVES or torch.version.hip else _tried_product(like.dtype, like.device)
    return product and OneOrder(product)


@cache
def _tried_product(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor] | None:
    def tried() -> Callable[..., Tensor]:
        from llama_ssp.extensions.gpu.kernels.linear import product_of_few_rows

        weight_OI = torch.linspace(-1, 1, 33 * 2192).view(33, 2192).sin().to(device, dtype)
        x_MI = torch.linspace(0, 9, 40 * 2192).view(40, 2192).cos().to(device, dtype)
        y_MO = product_of_few_rows(x_MI, weight_OI)
        check("product of a few rows", y_MO, x_MI @ weight_OI.t())
        # What is left of a sum without its upper digits, which 16 bits hold.
        rest_MO = product_of_few_rows(x_MI, weight_OI, residual_MO=-y_MO)
        for num_rows in (1, 8, 9, 16, 17):
            some_MO = product_of_few_rows(x_MI[:num_rows], weight_OI, residual_MO=-y_MO[:num_rows])
            if not torch.equal(some_MO, rest_MO[:num_rows]):
                raise RuntimeError(f"{num_rows} rows of a product have other bits than among 40")
        return product_of_few_rows

    return attempt(tried, instead=_INSTEAD)


def _tried_attention(
    heads: Heads, *, device: torch.device, dtype: torch.dtype, has_windows: bool, kept: KeptRows
) -> VarlenAttention:
    """Return our kernel; RuntimeError if it is wrong for these heads, or a query's bits depend on other queries."""
    from llama_ssp.extensions.gpu.kernels import equal_parts

    ours: VarlenAttention = partial(equal_parts.attend, kept=kept)
    fault = fault_of(ours, device=device, dtype=dtype, heads=heads, has_windows=has_windows, kept=kept)
    if fault:
        raise RuntimeError(f"the kernel of attention in equal parts gives {fault}")
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    queries_QHD = some(_CHECKED_POSITIONS, heads.num, heads.dim)
    pools = [kept.pack(some(_CHECKED_SLOTS, heads.num_kv, heads.dim)) for _ in range(2)]

    def attended(first: int, number: int, window: int | None) -> Tensor:
        used = _CHECKED_SLOTS - _CHECKED_POSITIONS + first + number
        numbers = partial(torch.tensor, dtype=torch.int32, device=device)
        sequences = Sequences(numbers([0, number]), numbers([0, 0]), numbers([used]), number, _CHECKED_SLOTS)
        return ours(queries_QHD[first : first + number], *pools, sequences, scale=heads.scale, window=window)

    for window in (None, 100) if has_windows else (None,):
        alone = [attended(place, 1, window) for place in range(_CHECKED_POSITIONS)]
        if not torch.equal(torch.cat(alone), attended(0, _CHECKED_POSITIONS, window)):
            raise RuntimeError(f"queries have other bits among {_CHECKED_POSITIONS} than alone")
    return ours
