"""Stages of a model on threads: a group for the ranks of each stage, and one for each pair of ranks that send."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from llama_ssp.architectures.stages import stage_layers
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.stages import ModelStage
from llama_ssp.weights.source import WeightSource
from tests.helpers.fake_comm import thread_comms

Result = TypeVar("Result")


def loadings(
    origin: WeightSource, num_stages: int, tp_size: int, *, layers: Sequence[int] | None = None, **how: object
) -> list[Loading]:
    """What each rank of `num_stages` times `tp_size` loads, stage after stage."""
    of_stages = stage_layers(origin.shape, num_stages, layers)
    pairs = [[thread_comms(2) for _ in range(tp_size)] for _ in range(num_stages - 1)]
    found = []
    for number in range(num_stages):
        for comm in thread_comms(tp_size):
            stage = ModelStage(
                number=number,
                num_stages=num_stages,
                layers=of_stages[number],
                before=pairs[number - 1][comm.rank][1] if number else None,
                behind=pairs[number][comm.rank][0] if number < num_stages - 1 else None,
            )
            found.append(replace(Loading(origin), comm=comm, stage=stage, **how))  # type: ignore[arg-type]
    return found


def on_stages(num_ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """Run `work` of each rank at the same time."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, range(num_ranks)))
