"""Linear layers by the kernels of `cpu_kernels.products`, and whether this machine has them.

Shapes: M rows (tokens), I inputs, O outputs.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from llama_ssp.config.formats import INT4_GROUP as GROUP
from llama_ssp.models.linear import Linear
from llama_ssp.weights import int4_rows

BLOCK = 16
"""Outputs of a block, and inputs that a kernel takes at a time: a layer has a multiple of both."""
DOTS, NIBBLES = "dots", "nibbles"
SIGN_BIT = 128
FLOATS = {"singles": torch.float32, "halves": torch.float16}
"""The kinds with one scale, and the number formats of their weights."""

COMPILED = {"int8_weight_only": "bytes", "int8": DOTS, "int4_weight_only": NIBBLES}
"""The kinds of the storage formats."""

Product = Callable[..., Tensor]

_log = logging.getLogger(__name__)
_library = torch.library.Library("llama_ssp", "FRAGMENT")
_SCHEMA = "product_{}(Tensor x, Tensor weights, Tensor scales, Tensor bias, Tensor residual, Tensor norm, "
for _kind in ("singles", "halves", "bytes", DOTS, NIBBLES):
    _library.define(f"{_SCHEMA.format(_kind)}float least_square, bool gates) -> Tensor")


@cache
def product_of(kind: str) -> Product | None:
    """The operator of a kind of `products`, compiled at the first call; None where this machine cannot have it.

    Without the package, or if it does not work, a warning says so, once; a CPU without the instructions is silent.
    """
    try:
        from llama_ssp.cpu_kernels import compiled, operator, products  # noqa: PLC0415 - imports LLVM

        if not compiled.has_features(products.FEATURES[kind]):
            return None
        compiled.add_operator(f"product_{kind}", partial(operator.emit, kind), "product", shared=("part",))
        product: Product = getattr(torch.ops.llama_ssp, f"product_{kind}").default
        _check(kind, product)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        _log.warning("continuing without compiled kernels for quantized weights, which is slower: %s", reason)
        return None
    return product


def _check(kind: str, product: Product) -> None:
    """RuntimeError if a small product is wrong."""
    none = torch.empty(0)
    if kind == NIBBLES:
        codes_OI = torch.arange(BLOCK * GROUP).view(BLOCK, GROUP).remainder(15).to(torch.uint8)
        scales_O1, zeros_O1 = torch.full((BLOCK, 1), 0.5), torch.arange(BLOCK)[:, None]
        x_MI = torch.arange(GROUP).sub(60.0).expand(2, -1).contiguous()
        packed = pack_nibbles(codes_OI, int4_rows.words_of(scales_O1, zeros_O1))
        y_MO = product(x_MI, packed, torch.tensor(1.0), none, none, none, 0.0, False)
        if not torch.equal(y_MO, x_MI @ (codes_OI - zeros_O1).mul(0.5).t()):
            raise RuntimeError("the product of nibbles is wrong on this CPU")
        return
    weight_OI = torch.arange(BLOCK * BLOCK).view(BLOCK, BLOCK).remainder(11).sub(5)
    values_OI = weight_OI.to(FLOATS.get(kind, torch.int8))
    x_MI = torch.arange(-127.0, 129.0, 16)[None].expand(2, -1).clamp(max=127).contiguous()
    scales_O = torch.ones(() if kind in FLOATS else BLOCK)
    y_MO = product(x_MI, pack(kind, values_OI), scales_O, none, none, none, 0.0, False)
    if not torch.equal(y_MO, x_MI @ weight_OI.t().float()):
        raise RuntimeError(f"the product of {kind} is wrong on this CPU")


def pack(kind: str, values_OI: Tensor) -> Tensor:
    """Lay weights out in blocks of outputs, as `products` draws it."""
    num_outputs, num_inputs = values_OI.shape
    if kind == DOTS:
        words = values_OI.to(torch.int16).add_(SIGN_BIT).to(torch.uint8).view(-1, BLOCK, num_inputs // 4, 4)
    else:
        words = values_OI.view(-1, BLOCK, num_inputs, 1)
    return words.transpose(1, 2).reshape(num_outputs // BLOCK, -1)


def pack_nibbles(codes_OI: Tensor, words_OG: Tensor) -> Tensor:
    """Lay codes (0 to 15, in bytes) and the words of their groups out in blocks of outputs, as `nibbles` draws it."""
    low, high = codes_OI.view(-1, BLOCK, codes_OI.shape[1] // GROUP, GROUP // 8, 4, 2).unbind(5)
    codes = (low | high << 4).permute(0, 2, 3, 1, 4).flatten(2)
    # The zero's share is subtracted from a sum, so a group of zeros yields none only if its scale is none.
    is_zero_OG = (codes_OI.unflatten(1, (-1, GROUP)) == int4_rows.zeros_of(words_OG)[..., None]).all(2)
    words_OG = words_OG.masked_fill(is_zero_OG, 0)
    heads = words_OG.view(-1, BLOCK, words_OG.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([heads, codes], dim=2).flatten(1)


class NativeLinear(Linear):
    """A linear layer by a compiled product, of weights that `fits`.

    Args:
        kind: of `products`.
        values_OI: weights in int8, fp16 or fp32, or codes of 4 bits.
        scales_O: one an output; of fp16 and fp32 one number; of 4 bits the words of all groups.
        bias_O: None for none.

    Attributes:
        kind: see above.
        least_square: what is added to the sum of the squares of a row by the norm; see `take_in`.

    Rows, sums and results are fp32. In other number formats, rows and results are converted.
    """

    least_square = 0.0

    def __init__(self, kind: str, values_OI: Tensor, scales_O: Tensor, bias_O: Tensor | None) -> None:
        product = product_of(kind)
        assert product
        self.kind, self._product = kind, product
        if kind == NIBBLES:
            self._packed, self._scales_O = pack_nibbles(values_OI, scales_O), torch.tensor(1.0)
        else:
            self._packed, self._scales_O = pack(kind, values_OI), scales_O
        self._bias_O = bias_O
        self._none = self._norm = self._scales_O.new_empty(0, dtype=torch.float32)

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sum(x_MI, None)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sum(x_MI, residual_MO)

    def _sum(self, x_MI: Tensor, residual_MO: Tensor | None) -> Tensor:
        if x_MI.dtype is torch.float32:
            bias_O = self._none if self._bias_O is None else self._bias_O
            return self._call(x_MI, bias_O, self._none if residual_MO is None else residual_MO)
        y_MO = self._call(x_MI.float(), self._none, self._none).to(x_MI.dtype)
        if self._bias_O is not None:
            y_MO.add_(self._bias_O)
        return y_MO if residual_MO is None else y_MO.add_(residual_MO)

    def take_in(self, norm: Tensor, least_square: float, *, gates: bool) -> bool:
        """From now on `fused` does what stands around the product too: the RMS norm before it, the gate after it.

        Args:
            norm: weight (I,) of the norm, in fp32.
            least_square: what is added to the sum of the squares of a row.
            gates: outputs are gate and up of an MLP, and the result is silu(gate) * up.

        Returns False, and changes nothing, if the kernel cannot do it.
        """
        num_blocks = self._packed.shape[0]
        if norm.dtype is not torch.float32 or (gates and (self._bias_O is not None or num_blocks % 2)):
            return False
        self._norm, self.least_square, self._gates = norm, least_square, gates
        if gates:  # the blocks of gate and up take turns
            self._packed = self._packed.view(2, num_blocks // 2, -1).transpose(0, 1).reshape(num_blocks, -1)
            if self._scales_O.ndim:
                self._scales_O = self._scales_O.view(2, -1, BLOCK).transpose(0, 1).reshape(-1)
        return True

    def fused(self, x_MI: Tensor) -> Tensor:
        """Norm, product and gate of fp32 rows; only after `take_in`."""
        packed, scales_O, bias_O, norm = self.operands
        return self._product(x_MI, packed, scales_O, bias_O, self._none, norm, self.least_square, self._gates)

    @property
    def has_norm(self) -> bool:
        """Whether it has taken in the norm of its rows."""
        return bool(self._norm.numel())

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self._packed.device

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights, scales, bias and norm, as operators take them; empty ones for none."""
        return self._packed, self._scales_O, self._none if self._bias_O is None else self._bias_O, self._norm

    def _call(self, x_MI: Tensor, bias_O: Tensor, residual_MO: Tensor) -> Tensor:
        # The kernel reads rows one behind the other.
        x_MI, residual_MO = (part if part.is_contiguous() else part.contiguous() for part in (x_MI, residual_MO))
        scales_O = self._scales_O if self._scales_O.dtype is torch.float32 else self._scales_O.float()
        return self._product(x_MI, self._packed, scales_O, bias_O, residual_MO, self._none, 0.0, False)


def native_of(linear: Linear) -> NativeLinear | None:
    """What computes a layer, or a quantized form of one; None if that is no compiled product."""
    found = linear if isinstance(linear, NativeLinear) else getattr(linear, "native", None)
    return found if isinstance(found, NativeLinear) else None


def fits(kind: str, shape: torch.Size) -> bool:
    """Whether this CPU has the kernel, and a weight of this shape consists of whole blocks."""
    num_outputs, num_inputs = shape
    taken = GROUP if kind == NIBBLES else BLOCK
    return not (num_outputs % BLOCK or num_inputs % taken) and product_of(kind) is not None


def native_linear(
    kind: str, quantize: Callable[[], tuple[Tensor, Tensor]], weight_OI: Tensor, bias_O: Tensor | None
) -> NativeLinear | None:
    """A layer that `fits`, on a CPU; None for others.

    `quantize` gives the weights (O, I) in int8, and their scales.
    """
    if weight_OI.device.type != "cpu" or not fits(kind, weight_OI.shape):
        return None
    return NativeLinear(kind, *quantize(), bias_O)


def native_floats(kind: str, weight_OI: Tensor, bias_O: Tensor | None, *, scale: float = 1.0) -> NativeLinear:
    """A layer of fp32 weights, or of ones that fp16 holds, multiplied by `scale`, a power of two."""
    weight_OI = weight_OI if scale == 1.0 else weight_OI * scale
    return NativeLinear(kind, weight_OI.to(FLOATS[kind]), torch.tensor(1 / scale), bias_O)
