"""The draw of a token from the weights of a vocabulary, in one operator: `cpu.draw`.

The reference is `draw` of `sampling.processors`, which decides where the operator is used.

Shapes: B rows, V vocabulary, P = 2 uniforms of a draw.
"""

from collections.abc import Callable

from torch import Tensor

from llama_ssp.cpu.operators import Operator, find_operator

NEEDS = ("avx512dq",)
"""Instructions of a CPU that the operator needs: others convert one number at a time."""

Draw = Callable[[Tensor, Tensor, float, int], Tensor]
"""Maps weights (B, V) in fp32 and uniforms (B, P) in fp64, contiguous, what a weight is multiplied by before it becomes
a whole number, and the tokens of a block, to ids (B, 1)."""


def find_draw(check: Callable[[Operator], None]) -> Draw | None:
    """The operator, if `check` finds that it computes the reference's ids; see `find_operator`."""
    return find_operator(
        "draw(Tensor weights, Tensor uniforms, float units, int tokens_of_a_block) -> Tensor",
        "draw", entry="draw", needs=NEEDS, check=check, instead="with a draw of twenty operators",
    )  # fmt: skip
