"""Tries the kernels of draws and of the softmax together, against torch's operators.

Shapes: B sequences, V vocabulary, C blocks of tokens.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType

from torch import Tensor

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.extensions.gpu.attempts import attempt
from llama_ssp.speculate.sampling.processors import DRAW_UNITS, draw_units, some_draws, token_of_blocks

_TOLERANCE = 1e-4
"""Tolerance of a kernel's probabilities, whose exponentials differ from torch's in the last bits."""


def find_draw() -> Callable[..., Tensor] | None:
    """Return the kernel of `processors.draw`, which draws a token for each row; None if the kernels fail."""
    return getattr(tried_kernels(), "draw_tokens", None)


def find_softmax() -> Callable[..., Tensor] | None:
    """Return the kernel of the softmax of logits times a scale; None if the kernels fail."""
    return getattr(tried_kernels(), "softmax", None)


def find_draw_in_blocks() -> Callable[..., Tensor] | None:
    """Return the kernel of `shards.draw_in_blocks`, which draws a token in each block; None if the kernels fail."""
    return getattr(tried_kernels(), "draw_in_blocks", None)


@cache
def tried_kernels() -> ModuleType | None:
    """The kernels; None, after a warning, if they do not work on this GPU."""

    def tried() -> ModuleType:
        from llama_ssp.extensions.gpu.kernels import draw

        (weights_BV, uniforms_BP), size = (drawn.cuda() for drawn in some_draws(64)), tokens_of_a_block(1000)
        found_B1 = draw.draw_tokens(weights_BV, uniforms_BP, DRAW_UNITS, size)
        wanted_B1 = draw_units(weights_BV * DRAW_UNITS, uniforms_BP, vocab_size=1000)
        blocks_B2C = draw.draw_in_blocks(weights_BV, uniforms_BP, DRAW_UNITS, size)
        in_blocks_B1 = token_of_blocks(blocks_B2C, uniforms_BP)
        probs_BV = draw.softmax(weights_BV.log(), scale=1.0)
        is_near_BV = (probs_BV - weights_BV).abs() <= _TOLERANCE * weights_BV
        if bool(((found_B1 != wanted_B1) | (in_blocks_B1 != wanted_B1)).any() or not is_near_BV.all()):
            raise RuntimeError("ids or probabilities are wrong")
        return draw

    return attempt(tried, instead="continuing with draws of twenty kernels instead of two")
