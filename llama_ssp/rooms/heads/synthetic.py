"""Draft heads of generated weights, which compute the shipped head; see `weights.synthetic`."""

from dataclasses import replace

from llama_ssp import catalogue
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError
from llama_ssp.rooms.heads.layouts import HeadConfig
from llama_ssp.rooms.heads.sources import HeadSource, of_target
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.expansion import obstacle
from llama_ssp.weights.synthetic import Synthetic, noise_for

SMALL_HEAD = "tiny-eagle"  # of the first small model.


def head_of(target: Synthetic, shape: ModelShape, agreement: float) -> HeadSource:
    """Make the source of a head of these sizes over a target; raises as `synthesize`."""
    files = inspect(hub.resolve(catalogue.load(SMALL_HEAD)))
    assert isinstance(files.head, HeadConfig)
    small = of_target(files, files.head, target.small)
    if reason := obstacle(small.shape, shape):
        raise ConfigError(f"weights=synthetic needs the shape of a head that can hold {SMALL_HEAD} ({reason})")
    recipe = replace(target, small=small, shape=shape, noise=noise_for(files.folder, agreement))
    head = replace(small.head, layers=target.layers_of(small.layers), target_hidden_size=shape.hidden_size)
    return of_target(recipe, head, target)
