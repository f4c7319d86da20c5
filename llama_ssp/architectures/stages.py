"""Shares the layers of a model out over stages, for planner and loader alike. Moves and times nothing.

    stage 0      embedding, layers 0 to 9        stage 1      layers 10 to 20        stage 2     layers 21 to 29, output

A token passes the stages one after the other. So the slowest stage should be as fast as it can be: the last one, which
also reads the output, has fewer layers where that is large.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.matrices import Inventory
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError


def stage_layers(shape: ModelShape, num_stages: int, given: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage: as many as `given`, or shared out so that the slowest stage reads least.

    Of equally fast ways, the one whose fullest stage has the fewest parameters.

    Raises:
        PlacementError: there are more stages than layers, or layers read more than the hidden states before them.
    """
    num_layers = shape.num_hidden_layers
    if num_stages > 1 and not record_of(shape.model_type).has_stages:
        raise PlacementError(no_stages(shape.model_type))
    if num_stages > num_layers:
        raise PlacementError(f"{num_layers} layers cannot be shared by {num_stages} stages: use at most {num_layers}")
    counts = given or min(_ways(num_layers, num_stages), key=_cost(inventory(shape)))
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def no_stages(model_type: str) -> str:
    """The sentence for a model whose layers read more than the hidden states of the layer before."""
    return (
        "placement.target.stages needs layers that read of earlier ones only the hidden states of the one before, and "
        f"those of {model_type} models read more: leave it out, and all ranks share every layer"
    )


def _ways(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Numbers of layers of each stage: any of the last, as equal as possible of the others, fewer first."""
    if num_stages == 1:
        return [(num_layers,)]
    found = []
    for of_last in range(1, num_layers - num_stages + 2):
        each, num_more = divmod(num_layers - of_last, num_stages - 1)
        found.append((*(each + (place >= num_stages - 1 - num_more) for place in range(num_stages - 1)), of_last))
    return found


def _cost(held: Inventory) -> Callable[[tuple[int, ...]], tuple[float, ...]]:
    """The function from numbers of layers to the most parameters that a stage reads, and holds, and unevenness."""
    layer = sum(matrix.num_elements for matrix in held.layer) + held.layer_vectors
    tables, output = sum(table.num_elements for table in held.embeddings), held.output.num_elements

    def cost(counts: tuple[int, ...]) -> tuple[float, ...]:
        read = [count * layer for count in counts]
        read[-1] += output
        return max(read), max(read[0] + tables, *read), sum(size**2 for size in read)

    return cost
