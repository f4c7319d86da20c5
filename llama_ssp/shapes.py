"""Shapes in plain numbers."""

from torch import Tensor


def static_shape(values: Tensor) -> tuple[int, ...]:
    """Return the shape as Python integers, which a trace keeps as constants."""
    return tuple(int(size) for size in values.shape)
