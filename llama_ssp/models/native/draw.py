"""The draw of a token by the operator of `draw_operator`, and whether this machine has it.

Shapes: B rows, V vocabulary, P = 2 uniforms of a draw.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Draw = Callable[[Tensor, Tensor, float, int], Tensor]
"""Maps weights (B, V) in fp32 and uniforms (B, P) in fp64, contiguous, what a weight is multiplied by before it becomes
a whole number, and the tokens of a block, to ids (B, 1)."""

_log = logging.getLogger(__name__)
_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("draw(Tensor weights, Tensor uniforms, float units, int tokens_of_a_block) -> Tensor")


@cache
def find_draw() -> Draw | None:
    """The operator, compiled at the first call; None where this machine cannot have it.

    Without llvmlite, or if it does not work, a warning says so, once; a CPU without the instructions is silent.
    """
    try:
        from llama_ssp.models.native import compiled, draw_operator  # noqa: PLC0415 - imports LLVM

        if not compiled.has_features(draw_operator.FEATURES):
            return None
        compiled.add_operator("draw", draw_operator.emit, "draw")
        draw: Draw = torch.ops.llama_ssp.draw.default
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        _log.warning("continuing with a draw of twenty operators, which is slower: %s", reason)
        return None
    return draw
