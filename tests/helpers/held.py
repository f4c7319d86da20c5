"""The weights that an object holds, by whatever name, each once."""

from collections.abc import Iterator

from torch import Tensor

from llama_ssp.kernels.linear import HalfLinear


def weights(holder: object, seen: dict[int, object] | None = None) -> Iterator[Tensor | HalfLinear]:
    """The tensors, of which those that share memory count once, and the linear layers in 16 bits."""
    seen = {} if seen is None else seen
    if id(holder) in seen:
        return
    seen[id(holder)] = holder  # kept, so that no other object gets its id
    if isinstance(holder, Tensor):
        # What oneDNN has packed, for one layer, has no storage.
        storage = -id(holder) if holder.is_mkldnn else holder.untyped_storage().data_ptr()
        if storage not in seen:
            seen[storage] = holder
            yield holder
    elif isinstance(holder, list | tuple):
        for item in holder:
            yield from weights(item, seen)
    elif isinstance(holder, dict):
        yield from weights(list(holder.values()), seen)
    elif hasattr(holder, "__dict__") and not callable(getattr(holder, "__func__", None)):
        if isinstance(holder, HalfLinear):
            yield holder
        yield from weights(vars(holder), seen)


def held_bytes(holder: object, *, least: int = 17) -> int:
    """The bytes of its tensors of at least so many numbers: of no constants, as nf4's sixteen values, a norm's eps."""
    return sum(found.nbytes for found in weights(holder) if isinstance(found, Tensor) and found.numel() >= least)
