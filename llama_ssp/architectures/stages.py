"""Shares the layers of a model out over stages, for planner and loader alike. Moves and times nothing.

    stage 0      embedding, layers 0 to 9        stage 1      layers 10 to 20        stage 2     layers 21 to 29, output

A token passes the stages one after the other. So the slowest stage should be as fast as it can be: the last one, which
also reads the output, has fewer layers where that is large.
"""

from collections.abc import Sequence
from functools import lru_cache
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
    counts = given or ([num_layers] if num_stages == 1 else _shared_out(inventory(shape), num_stages))
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def no_stages(model_type: str) -> str:
    """The sentence for a model whose layers read more than the hidden states of the layer before."""
    return (
        "placement.target.stages needs layers that read of earlier ones only the hidden states of the one before, and "
        f"those of {model_type} models read more: leave it out, and all ranks share every layer"
    )


def _shared_out(held: Inventory, num_stages: int) -> tuple[int, ...]:
    """Numbers of layers of each stage; see `stage_layers`."""
    sizes = held.sizes or (held.by_layer(0).num_parameters,) * held.num_layers
    tables, output = sum(table.num_elements for table in held.embeddings), held.output.num_elements
    return _fastest(tuple(accumulate(sizes, initial=0)), num_stages, tables=tables, output=output)


@lru_cache(maxsize=256)  # a search asks for the same models thousands of times
def _fastest(ends: tuple[int, ...], num_stages: int, *, tables: int, output: int) -> tuple[int, ...]:
    """The best numbers of layers by the parameters of layers 0 to n: few at the most, then even, then early.

    The first n layers on the first stages are shared out best, whatever follows.
    """
    num_layers = len(ends) - 1
    best: dict[int, tuple[int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        stops = [num_layers] if is_last else range(stage + 1, num_layers - num_stages + stage + 2)
        found = {}
        for stop in stops:
            ways = []
            for start, (read, fullest, squares, counts) in best.items():
                if start < stop:
                    size = ends[stop] - ends[start] + is_last * output
                    own = size + (stage == 0) * tables
                    ways.append((max(read, size), max(fullest, own), squares + size**2, (*counts, stop - start)))
            found[stop] = min(ways)
        best = found
    return best[num_layers][-1]
