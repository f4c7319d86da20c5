"""Compiled products: which weights they take, how these are packed, and their check.

    fp32 of whole blocks, in 16 bits where fp16 holds them; packed weights of formats that have a `Product`

Shapes: M rows (tokens), I inputs, O outputs, G groups of inputs.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from llama_ssp.extensions.cpu.code.kinds import (
    BLOCK,
    DOTS,
    E2M1,
    E4M3,
    E4M3_DTYPE,
    E4M3_SHRINK,
    IN_FP16,
    IN_FP32,
    SIGN_BIT,
)
from llama_ssp.extensions.cpu.operators import Operator, find_operator
from llama_ssp.kernels.linear import Kernel, NativeLinear, added, can_halve
from llama_ssp.storage.formats import FP4_GROUP, Product, StorageFormat, format_of
from llama_ssp.weights import byte_rows

FLOATS = {IN_FP32: torch.float32, IN_FP16: torch.float16}
"""The products with one scale, and the number formats of their weights."""


@cache
def product_of(product: Product) -> Operator | None:
    """The operator of a product, compiled at the first call; None where this machine cannot have it."""
    return find_operator(
        f"product_{product.kind}(Tensor x, Tensor weights, Tensor scales, Tensor bias, Tensor residual, Tensor norm, "
        "float least_square, bool gates) -> Tensor",
        "linear",
        product,
        entry="product",
        shared=("part",),
        needs=product.needs,
        check=partial(_check, product),
        instead="without compiled kernels for quantized weights",
    )


def _check(product: Product, operator: Operator) -> None:
    """Raise RuntimeError if a small product is wrong."""
    num_inputs, none = product.group or BLOCK, torch.empty(0)
    weight_OI = torch.arange(BLOCK * num_inputs).view(BLOCK, num_inputs).remainder(9).sub(4)
    x_MI = torch.linspace(-127, 113, BLOCK).repeat(2, num_inputs // BLOCK).clamp(max=127)
    packed, scales = operands(product, *sample(product, weight_OI, 0.5))
    wanted_MO = x_MI @ weight_OI.t().float() * 0.5
    if not torch.equal(operator(x_MI, packed, scales, none, none, none, 0.0, False), wanted_MO):
        raise RuntimeError(f"the product of {product.kind} is wrong on this CPU")


def sample(product: Product, weight_OI: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Whole numbers from -4 to 4, times a scale, as `CompiledLinear` takes them."""
    if product in FLOATS:
        return weight_OI.to(FLOATS[product]), torch.tensor(scale)
    if not product.group:
        return weight_OI.to(torch.int8), torch.full((len(weight_OI),), scale)
    scales_OG = torch.full((len(weight_OI), weight_OI.shape[1] // product.group), scale)
    if product.codes == E2M1:
        dtype, ones_O = byte_rows.dtype_of_scales(product), torch.ones(len(weight_OI))
        scales_OS = torch.full((len(weight_OI), weight_OI.shape[1] // product.scaled), scale).to(dtype)
        return byte_rows.pack_fp4(byte_rows.e2m1_codes_of(weight_OI), scales_OS.view(torch.uint8), ones_O), ones_O
    if product.codes == E4M3:
        return weight_OI.to(torch.float8_e4m3fn).view(torch.uint8), scales_OG
    zeros_O1 = torch.arange(len(weight_OI))[:, None].remainder(4).add(6)
    return (weight_OI + zeros_O1).to(torch.uint8), byte_rows.int4_words(scales_OG, zeros_O1)


def operands(product: Product, values_OI: Tensor, scales_O: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and scales of `CompiledLinear` as operators take them: weights in blocks, as `code.linear` draws them."""
    if product.codes == E2M1:
        codes, scales_OS, _ = byte_rows.split_fp4(values_OI)
        halves = byte_rows.unpack_codes(codes.unflatten(1, (-1, FP4_GROUP // 2)))
        shrink = E4M3_SHRINK if product.scale_dtype == E4M3_DTYPE else 1.0
        return _pack_groups(product, torch.cat(halves, dim=2).flatten(1), scales_OS), scales_O * shrink
    if product.group:
        return _pack_groups(product, values_OI, scales_O), torch.tensor(1.0)
    num_outputs, num_inputs = values_OI.shape
    if product.codes == DOTS:
        words = (values_OI.view(torch.uint8) ^ SIGN_BIT).view(-1, BLOCK, num_inputs // 4, 4)  # 128 more, in one copy
    else:
        words = values_OI.view(-1, BLOCK, num_inputs, 1)
    return words.transpose(1, 2).reshape(num_outputs // BLOCK, 1, -1), scales_O


def _pack_groups(product: Product, codes_OI: Tensor, words_OG: Tensor) -> Tensor:
    """Lay the bytes of E4M3, or codes (0 to 15, in bytes), and the words of their groups in blocks of outputs.

    Words of E4M3 are the scales times 2^8, words of 4-bit floats the bytes of the scales.
    """
    num_groups = words_OG.shape[1]
    codes_BOGI = codes_OI.view(-1, BLOCK, num_groups, codes_OI.shape[1] // num_groups)
    if product.codes == E4M3:
        return _with_heads(words_OG * E4M3_SHRINK, codes_BOGI.permute(0, 2, 3, 1).flatten(2))
    low, high = codes_BOGI.unflatten(3, (-1, 4, 2)).unbind(5)
    codes = (low | high << 4).permute(0, 2, 3, 1, 4).flatten(2)
    if product.codes == E2M1:
        return _with_heads(words_OG, codes)
    # The zero's share is subtracted from a sum, so a group of zeros yields zero only if its scale is zero.
    zeros_OG1 = byte_rows.zeros_of(words_OG)[..., None].to(torch.uint8)  # as int32 they would widen the codes
    is_zero_OG = (codes_OI.unflatten(1, (num_groups, -1)) == zeros_OG1).all(2)
    return _with_heads(words_OG.masked_fill(is_zero_OG, 0), codes)


def _with_heads(words_OG: Tensor, codes: Tensor) -> Tensor:
    """Put the words in front of the groups of all blocks."""
    heads = words_OG.view(-1, BLOCK, words_OG.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([heads, codes], dim=2)


class CompiledLinear(NativeLinear):
    """A linear layer by a compiled product, of weights that `fits`.

    Args:
        product: the product whose operator the layer calls.
        values_OI: weights in int8, fp16 or fp32, the bytes of FP8, or codes of 4 bits; `byte_rows` for 4-bit floats.
        scales_O: a scale per output; for fp16 and fp32 one number; for FP8 the scales, for int4 the words of all
            groups.
        bias_O: the bias; None for no bias.
    """

    def __init__(self, product: Product, values_OI: Tensor, scales_O: Tensor, bias_O: Tensor | None) -> None:
        operator = product_of(product)
        assert operator
        self.product, self._operator = product, operator
        self._packed, self._scales_O = operands(product, values_OI, scales_O)
        self._none = self._norm = self._scales_O.new_empty(0, dtype=torch.float32)
        self._bias_O = self._none if bias_O is None else bias_O
        # In fp32 a trace would hold conversions that do nothing.
        self._widens = {self._scales_O.dtype, self._bias_O.dtype} != {torch.float32}

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if x_MI.dtype is torch.float32:
            return self._call(x_MI, self._none if residual_MO is None else residual_MO)
        return added(self._call(x_MI.float(), self._none).to(x_MI.dtype), residual_MO)

    def _call(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        # The kernel reads rows that follow each other.
        x_MI, residual_MO = (part if part.is_contiguous() else part.contiguous() for part in (x_MI, residual_MO))
        packed, scales_O, bias_O, _ = self.operands
        if self._widens:
            scales_O, bias_O = scales_O.float(), bias_O.float()
        return self._operator(x_MI, packed, scales_O, bias_O, residual_MO, self._none, 0.0, False)

    def take_in(self, norm: Tensor, least_square: float, *, gates: bool) -> bool:
        """See `NativeLinear`."""
        num_blocks = self._packed.shape[0]
        if norm.dtype is not torch.float32 or (gates and (self._bias_O is not self._none or num_blocks % 2)):
            return False
        self._norm, self.least_square, self._gates = norm, least_square, gates
        if gates:  # the blocks of gate and up take turns
            self._packed = self._packed.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            if self._scales_O.ndim:
                self._scales_O = self._scales_O.view(2, -1, BLOCK).transpose(0, 1).reshape(-1)
        return True

    def fused(self, x_MI: Tensor) -> Tensor:
        """See `NativeLinear`."""
        packed, scales_O, bias_O, norm = self.operands
        if self._widens:
            scales_O, bias_O = scales_O.float(), bias_O.float()
        operands = packed, scales_O, bias_O, self._none, norm, self.least_square, self._gates
        if x_MI.dtype is torch.float32:
            return self._operator(x_MI, *operands)
        return self._operator(x_MI.float(), *operands).to(x_MI.dtype)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights, scales, bias and norm, as operators take them; empty ones for none."""
        return self._packed, self._scales_O, self._bias_O, self._norm


def fits(product: Product, shape: torch.Size) -> bool:
    """Whether this CPU has the kernel, and a weight of this shape consists of whole blocks."""
    num_outputs, num_inputs = shape
    return not (num_outputs % BLOCK or num_inputs % (product.group or BLOCK)) and product_of(product) is not None


def native_floats(product: Product, weight_OI: Tensor, bias_O: Tensor | None, *, scale: float = 1.0) -> CompiledLinear:
    """A layer of fp32 weights, or of ones that fp16 holds, multiplied by `scale`, a power of two."""
    weight_OI = weight_OI if scale == 1.0 else weight_OI.float() * scale
    return CompiledLinear(product, weight_OI.to(FLOATS[product]), torch.tensor(1 / scale), bias_O)


def find_linear(weight_OI: Tensor, *, in_halves: float | None, keeps_weight: bool) -> Kernel | None:
    """Return the kernel of a weight; `in_halves` is the factor with which fp16 holds it exactly, None for none."""
    if in_halves and fits(IN_FP16, weight_OI.shape):
        return partial(native_floats, IN_FP16, scale=in_halves)
    is_fp32 = weight_OI.dtype is torch.float32
    if not is_fp32 or (in_halves and can_halve()) or keeps_weight or not fits(IN_FP32, weight_OI.shape):
        return None
    return partial(native_floats, IN_FP32)


def find_packed(storage: str, shape: torch.Size) -> Callable[..., CompiledLinear] | None:
    """The function that makes a layer of packed weights of this shape in a storage format; None for other shapes."""
    product = format_of(storage).product
    return partial(CompiledLinear, product) if fits(product, shape) else None


def find_block(storage: StorageFormat) -> int | None:
    """Return the number that must divide inputs and outputs of a format's layers; None if it has no product."""
    return BLOCK if storage.compiled and product_of(storage.compiled) else None
