"""Shapes in plain numbers."""

from torch import Tensor


def static_shape(values: Tensor) -> tuple[int, ...]:
    """The shape as Python integers, which no operator asks the tensor for again."""
    return tuple(int(size) for size in values.shape)
