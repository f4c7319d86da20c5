"""The draw of a token in one operator, compared with torch's operators.

Shapes: B sequences, V vocabulary, P = 2 uniforms per draw.
"""

from functools import cache

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.extensions.cpu.operators import Operator, find_operator
from llama_ssp.speculate.sampling.processors import DRAW_UNITS, draw_units, some_draws

COMPILED_DRAW_NEEDS = ("avx512dq",)
"""Instructions of a CPU that its operator needs: CPUs without them convert one number at a time."""


@cache
def find_draw() -> Operator | None:
    """The draw in one operator, on a CPU that it compiles for, compared with torch's operators.

    It takes contiguous weights in fp32, uniforms, what a weight is multiplied by before it becomes a whole number, and
    the tokens of a block.
    """

    def check(draw: Operator) -> None:
        weights_BV, uniforms_BP = some_draws(8)
        found_B1 = draw(weights_BV, uniforms_BP, DRAW_UNITS, tokens_of_a_block(1000))
        wanted_B1 = draw_units(weights_BV * DRAW_UNITS, uniforms_BP, vocab_size=1000)
        if bool((found_B1 != wanted_B1).any()):
            raise RuntimeError("the compiled one is wrong on this CPU")

    return find_operator(
        "draw(Tensor weights, Tensor uniforms, float units, int tokens_of_a_block) -> Tensor",
        "draw",
        entry="draw",
        needs=COMPILED_DRAW_NEEDS,
        check=check,
        instead="with a draw of twenty operators",
    )
