"""Tries products of a few rows on a GPU: with weights in 16 bits where cuBLAS is slower, and with packed weights.

Shapes: M rows, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from llama_ssp.extensions.gpu.attempts import attempt, check
from llama_ssp.kernels.linear import FewRows, Kernel, PlainLinear
from llama_ssp.models.quantization.weight_only import JoinedExperts
from llama_ssp.storage.formats import FEW_ROWS

_MEASURED = ("H200",)
"""Parts of the names of GPUs whose products in 16 bits were timed next to cuBLAS; see `docs/findings/gpus.md`."""
_SLOWER = {(10240, 5120), (49152, 576)}
"""Outputs and inputs of the only ones of 105 matrices for which cuBLAS was faster by more than 2 % at up to 5 rows."""
_NARROW = 4096
"""The most outputs of a narrow matrix."""
_MOST_ROWS, _MOST_ROWS_NARROW = 8, 16
"""The most rows at which our kernel was faster than cuBLAS, in general and for narrow matrices."""
HALVES = (torch.float16, torch.bfloat16)


class HalvesLinear(PlainLinear):
    """torch's product, and for up to `most_rows` rows, for which it was faster on this kind of GPU, our own."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, few_rows: Callable[..., Tensor], most_rows: int
    ) -> None:
        super().__init__(weight_OI, bias_O)
        self._few_rows, self._most_rows = few_rows, most_rows

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if len(x_MI) > self._most_rows:
            return super().__call__(x_MI, residual_MO)
        return self._few_rows(x_MI, self.weight_OI, bias_O=self.bias_O, residual_MO=residual_MO)


def find_halves(weight_OI: Tensor, **_how: Any) -> Kernel | None:
    """The kernel of a matrix in fp16 or bf16 whose product by cuBLAS is slower for a few rows; None if it never is."""
    if weight_OI.dtype not in HALVES or torch.version.hip:
        return None
    name, shape = torch.cuda.get_device_name(weight_OI.device), tuple(weight_OI.shape)
    if shape in _SLOWER or not any(part in name for part in _MEASURED):
        return None
    product = _halves_of(weight_OI.dtype)
    most_rows = _MOST_ROWS_NARROW if shape[0] <= _NARROW else _MOST_ROWS
    return partial(HalvesLinear, few_rows=product, most_rows=most_rows) if product else None


@cache
def _halves_of(dtype: torch.dtype) -> Callable[..., Tensor] | None:
    def tried() -> Callable[..., Tensor]:
        from llama_ssp.extensions.gpu.kernels.halves import product_of_halves

        weight_OI = torch.linspace(-1, 1, 33 * 1104).view(33, 1104).sin().to(dtype).cuda()
        for num_rows in (1, 8, 16):
            x_MI = torch.linspace(0, 9, num_rows * 1104).view(num_rows, 1104).cos().to(dtype).cuda()
            check("product of a few rows", product_of_halves(x_MI, weight_OI), x_MI @ weight_OI.t())
        return product_of_halves

    return attempt(tried, instead="continuing with cuBLAS for few rows")


def find_few_rows(name: str, operands: Sequence[Tensor]) -> FewRows | None:
    """The products of a few rows with the weights of a format, tried with small operands.

    `operands` are a layer's, which the small ones resemble: weights with their outputs first, then scales or
    words, a row for each group of inputs. Without the product a warning says, once, what the format of this `name`
    costs.
    """
    weights_OI, *scales = operands
    num_inputs = weights_OI.shape[1] * _weights_of_a_byte(weights_OI.dtype)
    groups = tuple([num_inputs // len(part) if part.ndim > 1 else 0 for part in scales])
    return few_rows_of(name, tuple([part.dtype for part in operands]), groups)


@cache
def few_rows_of(name: str, dtypes: tuple[torch.dtype, ...], groups: tuple[int, ...]) -> FewRows | None:
    """`find_few_rows` for operands of these dtypes; `groups` are the inputs per row of scales and words, 0 for all.

    It is tried for one row and for the most, since these have tiles of their own, with inputs in fp16 and in bf16, if
    the GPU computes in that.
    """

    def tried() -> FewRows:
        from llama_ssp.extensions.gpu.kernels import linear

        num_inputs, num_outputs = 256, 16
        ones = [torch.ones(num_outputs, num_inputs // _weights_of_a_byte(dtypes[0]))]
        ones += [torch.ones(num_inputs // group, num_outputs) if group else torch.ones(num_outputs) for group in groups]
        operands = [part.to(dtype).cuda() for part, dtype in zip(ones, dtypes, strict=True)]
        for dtype in HALVES if torch.cuda.is_bf16_supported(False) else HALVES[:1]:
            for num_rows in (1, FEW_ROWS):
                linear.product_of_few_rows(torch.ones(num_rows, num_inputs, dtype=dtype).cuda(), *operands)
        return linear

    return attempt(tried, instead=f"{name} unpacks its weights in every forward, which is slower than fp16")


def _weights_of_a_byte(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.uint8 else 1


def tried_experts(joined: JoinedExperts, *, num_experts: int, num_inputs: int) -> JoinedExperts | None:
    """Return `joined` after a trial product of one token with one expert; None, after a warning, if that fails."""

    def tried() -> JoinedExperts:
        x_1I = torch.ones(1, num_inputs, dtype=torch.float16, device=joined.device)
        first_11 = torch.zeros(1, 1, dtype=torch.int64, device=joined.device)
        joined(x_1I, joined.choose(first_11, num_experts, value_bytes=x_1I.element_size()))
        return joined

    return attempt(tried, instead="continuing with one product for each expert, without CUDA graphs")
