"""The numbers of one round for given keys and starts, as a batch looks them up."""

from torch import Tensor

from llama_ssp.sampling.uniforms import Draws, UniformTable


def draws_of(table: UniformTable, keys_B: Tensor, starts_B: Tensor) -> Draws:
    """Make and name the numbers of the rounds that begin at `starts_B`."""
    return table.split(table.uniforms(keys_B, starts_B))
