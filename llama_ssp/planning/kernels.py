"""Kernels that a GPU is given: what plans price, and what `tests/stub_gpu` counts and holds the engine to.

A kernel inside a CUDA graph takes `HardwareConfig.kernel_s` in addition to its bytes, so their number decides how near
decoding comes to the speed of a copy.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of an engine, without collectives, which are priced by their bytes and latency.

    Attributes:
        layer: of a decoder layer at few rows, products and attention included.
        frame: of a forward without its layers: embedding, rotary angles, last norm, head and its conversion to fp32.
        draw: of a sampled draw.
        verify: of a verification with commit.
    """

    layer: int
    frame: int
    draw: int
    verify: int


ENGINE = Kernels(layer=10, frame=8, draw=17, verify=38)
"""Of this engine, as counted by the stub device (`layer`) and at torch's dispatcher."""
ALL_REDUCES_PER_LAYER = 2
"""Under tensor parallelism."""
