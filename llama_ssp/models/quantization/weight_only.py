"""Linear layers whose weights alone are quantized: their base class, and int8 with a scale per output.

Each product reads half the bytes of fp16 weights, or less. It uses a kernel for packed weights if there is a fast one
for the number of rows; otherwise it unpacks blocks of weights that stay in the processor's cache.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from llama_ssp.config.formats import FEW_ROWS, UNPACKED_WEIGHTS
from llama_ssp.kernels.linear import Linear, NativeLinear, native_linear
from llama_ssp.models.triton_tools import attempt

_QUANTIZED_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Weights that are quantized at a time: few enough to need little memory, enough to keep a GPU busy."""
_UNPACKED_ELEMENTS = {"cpu": 2**20, "cuda": UNPACKED_WEIGHTS}
"""Weights that are unpacked at a time: few enough for a CPU's cache; on a GPU each step is a few kernels more."""
_FEW_ROWS = {"cpu": 8, "cuda": FEW_ROWS}
"""Up to so many rows the kernels for packed weights are faster than unpacking."""
_LARGEST_BYTE = 127
_CPU_VECTOR = 16
"""Weights that torch's CPU operator reads at a time, even past the end of a row."""

ProductOfFewRows = Callable[..., Tensor]


class QuantizedForm(Linear):
    """Base class of quantized layers.

    Attributes:
        native: the compiled product of the same weights, where this CPU has one that fits them.
    """

    native: NativeLinear | None = None


class WeightOnlyLinear(QuantizedForm):
    """Base class of forms whose inputs are not quantized.

    Args:
        operands: the packed weights with their outputs first, and their scales, as the kernel takes them.
        num_inputs: of the layer.
        bias_O: of the layer; None for none.
        few_rows: the kernel for a few rows; None if this machine has no fast one.
    """

    def __init__(
        self, operands: tuple[Tensor, Tensor], num_inputs: int, bias_O: Tensor | None, few_rows: ProductOfFewRows | None
    ) -> None:
        self._operands = operands
        self._num_inputs = num_inputs
        self._bias_O = bias_O
        self._few_rows = few_rows

    @abstractmethod
    def unpack(self, outputs: slice, into_CI: Tensor) -> None:
        """Write the weights of some outputs, in the dtype of the inputs, into given memory."""

    def scale(self, y_MO: Tensor) -> Tensor:
        """Finish the product of unpacked weights, which may be overwritten."""
        return y_MO

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sum(x_MI, None)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sum(x_MI, residual_MO)

    def _sum(self, x_MI: Tensor, residual_MO: Tensor | None) -> Tensor:
        """The product with bias and residual, which a GPU's kernel adds itself."""
        if self.native:
            return self.native(x_MI) if residual_MO is None else self.native.add(x_MI, residual_MO)
        if self._few_rows is None or x_MI.shape[0] > _FEW_ROWS[x_MI.device.type]:
            y_MO = self._unpacked(x_MI)
        elif x_MI.is_cuda:
            return self._few_rows(x_MI, *self._operands, bias_O=self._bias_O, residual_MO=residual_MO)
        else:
            y_MO = self._few_rows(x_MI, *self._operands)
        if self._bias_O is not None:
            y_MO.add_(self._bias_O)
        return y_MO if residual_MO is None else y_MO.add_(residual_MO)

    def _unpacked(self, x_MI: Tensor) -> Tensor:
        """Unpack the weights of some outputs at a time, and multiply."""
        num_outputs = len(self._operands[0])
        num_rows = min(max(_UNPACKED_ELEMENTS[x_MI.device.type] // self._num_inputs, 1), num_outputs)
        unpacked_CI = x_MI.new_empty(num_rows, self._num_inputs)
        y_MO = x_MI.new_empty(x_MI.shape[0], num_outputs)
        for number, y_MC in enumerate(y_MO.split(num_rows, dim=1)):
            weight_CI = unpacked_CI[: y_MC.shape[1]]
            self.unpack(slice(number * num_rows, number * num_rows + len(weight_CI)), weight_CI)
            if x_MI.is_cuda:
                torch.mm(x_MI, weight_CI.t(), out=y_MC)
            else:
                y_MC.copy_(torch.mm(x_MI, weight_CI.t()))
        return self.scale(y_MO)


class Int8WeightOnlyLinear(WeightOnlyLinear):
    """The format `int8_weight_only`.

    In fp16 weights are scaled before the product, because unscaled sums would overflow; otherwise outputs after it.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        quantize = partial(quantize_by_blocks, weight_OI, _to_bytes)
        self.native = native_linear("bytes", quantize, weight_OI, bias_O)
        if self.native:
            return
        num_inputs = weight_OI.shape[1]
        kernel = _product_of_few_rows(weight_OI.device.type, weight_OI.dtype, num_inputs % _CPU_VECTOR == 0)
        super().__init__(quantize(), num_inputs, bias_O, kernel)

    def unpack(self, outputs: slice, into_CI: Tensor) -> None:
        """See `WeightOnlyLinear`."""
        bytes_OI, scales_O = self._operands
        if into_CI.dtype is torch.float16 and into_CI.is_cuda:
            torch.mul(bytes_OI[outputs], scales_O[outputs, None], out=into_CI)  # one kernel, and the same bits
            return
        into_CI.copy_(bytes_OI[outputs])
        if into_CI.dtype is torch.float16:
            into_CI.mul_(scales_O[outputs, None])

    def scale(self, y_MO: Tensor) -> Tensor:
        """See `WeightOnlyLinear`."""
        return y_MO if y_MO.dtype is torch.float16 else y_MO.mul_(self._operands[1])


def quantize_by_blocks(weight_OI: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Quantize a few rows at a time, which gives the same result as all at once."""
    num_rows = max(_QUANTIZED_ELEMENTS[weight_OI.device.type] // weight_OI.shape[1], 1)
    values, scales = zip(*map(quantize, weight_OI.split(num_rows)), strict=True)
    return torch.cat(values), torch.cat(scales)


def _to_bytes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and their scales (O,), which are rounded to the weight's dtype first."""
    numbers = torch.finfo(weight_OI.dtype)
    tiny = max(numbers.smallest_normal * numbers.eps, torch.finfo(torch.float32).smallest_normal)
    scales_O = (weight_OI.abs().amax(1).float() / _LARGEST_BYTE).to(weight_OI.dtype).clamp_(min=tiny)
    bytes_OI = (weight_OI / scales_O.float()[:, None]).round_().clamp_(-_LARGEST_BYTE, _LARGEST_BYTE)
    return bytes_OI.to(torch.int8), scales_O


@cache
def _product_of_few_rows(device: str, dtype: torch.dtype, has_whole_vectors: bool) -> ProductOfFewRows | None:
    """The int8 kernel for a few rows, if this build has a fast one.

    torch's operator is fast only on a CPU in bf16; unpacking is faster in fp32 and fp16. On a GPU each of its threads
    reads a row of the weights alone, which is slow.
    """
    if device == "cuda":
        return kernel_of_gpus("int8_weight_only", (torch.ones(16, 256, dtype=torch.int8), torch.ones(16, dtype=dtype)))
    if device == "cpu" and dtype is torch.bfloat16 and has_whole_vectors:
        ones = torch.ones(2, _CPU_VECTOR, dtype=dtype)
        with suppress(AttributeError, RuntimeError):
            product: ProductOfFewRows = torch.ops.aten._weight_int8pack_mm
            product(ones, ones.to(torch.int8), ones[:, 0])
            return product
    return None


def kernel_of_gpus(name: str, operands: tuple[Tensor, Tensor]) -> ProductOfFewRows | None:
    """Triton's kernel, tried with small operands for 256 inputs, so that a GPU that cannot compile it unpacks instead.

    It is tried for one row and for the most, since these have tiles of their own, and for scales that are no numbers
    with inputs in fp16 and in bf16, if the GPU computes in that.
    Without it a warning says, once, what the format of this `name` costs.
    """
    instead = f"{name} unpacks its weights in every forward, which is slower than fp16"
    return attempt(partial(_tried_kernel, operands), instead=instead)


def _tried_kernel(operands: tuple[Tensor, Tensor]) -> ProductOfFewRows:
    from llama_ssp.models.quantization.few_rows_kernel import product_of_few_rows  # noqa: PLC0415 - CPU builds come without Triton

    weight_OI, scales = (operand.cuda() for operand in operands)
    halves = (torch.float16, torch.bfloat16) if torch.cuda.is_bf16_supported(False) else (torch.float16,)
    for dtype in (scales.dtype,) if scales.is_floating_point() else halves:
        for num_rows in (1, FEW_ROWS):
            product_of_few_rows(torch.ones(num_rows, 256, dtype=dtype).cuda(), weight_OI, scales)
    return product_of_few_rows
