"""The draw of a token by the operator of `kernels.draw_cpu`; `processors` decides where it is used.

Shapes: B rows, V vocabulary, P = 2 uniforms of a draw.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Draw = Callable[[Tensor, Tensor, float, int], Tensor]
"""Maps weights (B, V) in fp32 and uniforms (B, P) in fp64, contiguous, what a weight is multiplied by before it becomes
a whole number, and the tokens of a block, to ids (B, 1)."""

_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("draw(Tensor weights, Tensor uniforms, float units, int tokens_of_a_block) -> Tensor")


@cache
def compile_draw() -> Draw | None:
    """The operator, compiled at the first call; None for a CPU without the instructions.

    Raises:
        ImportError, OSError, AttributeError, RuntimeError: there is no llvmlite, or it does not work with this torch.
    """
    from llama_ssp.kernels import compiled, draw_cpu  # noqa: PLC0415 - imports LLVM

    if not compiled.has_features(draw_cpu.FEATURES):
        return None
    compiled.add_operator("draw", draw_cpu.emit, "draw")
    draw: Draw = torch.ops.llama_ssp.draw.default
    return draw
