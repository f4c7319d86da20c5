"""Draft heads of made weights, which compute the shipped head."""

from dataclasses import replace

from llama_ssp import catalogue
from llama_ssp.catalogue import ModelShape
from llama_ssp.extensions.heads.layouts import HeadConfig
from llama_ssp.extensions.heads.sources import HeadSource, of_target
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.source import MadeSource

SMALL_HEAD = "tiny-eagle"  # of the first small model.


def head_of(target: MadeSource, shape: ModelShape, agreement: float) -> HeadSource:
    """Make the source of a head of these sizes over a target; raises as `MadeSource.of_head`."""
    files = inspect(hub.resolve(catalogue.load(SMALL_HEAD)))
    assert isinstance(files.head, HeadConfig)
    small = of_target(files, files.head, target.small)
    recipe = target.of_head(small, shape, agreement)
    head = replace(small.head, layers=target.layers_of(small.layers), target_hidden_size=shape.hidden_size)
    return of_target(recipe, head, target)
