"""Tries our kernels on this device before they are used: whether they compute what torch does, and are not slower.

A product is timed over the weights of several layers in turn, so that none is found in a cache, and as a CUDA graph, so
that Python does not count. It costs a second or two when a model is built, and longer where Triton has yet to compile.

Shapes: M rows, I inputs, O outputs, S slots, P pairs of dimensions.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from llama_ssp.models.cache import StaticCache
from llama_ssp.models.llama import kernels
from llama_ssp.models.llama.layer import Layer
from llama_ssp.models.llama.rotary import PlaceByKernel, PlaceByOperators, RotateWrite

_log = logging.getLogger(__name__)

TILES = (kernels.Tile(), kernels.Tile(outputs=64, inputs=64, num_stages=6))
_TIMED_ROWS = {16: (1, 5), 32: (20,)}
"""Numbers of rows that are tried, by those of the tile that holds them."""
_TIMED_LAYERS, _NUM_REPLAYS = 8, 3
_WORTH_S = 1e-6
"""What torch's operators must save for each product, to be taken for more kernels than one."""
_TOLERANCE = 0.02
"""Of the largest value: sums in another order, and one rounding more or less, differ by less."""


class Product(ABC):
    """A product with our kernel or with torch's operators.

    Attributes:
        tiles: the tile of our kernel by its rows; None for torch's operators.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.weight_OI = weight_OI
        self.tiles: dict[int, kernels.Tile | None] = dict.fromkeys(_TIMED_ROWS)

    def tile(self, x_MI: Tensor) -> kernels.Tile | None:
        """The tile for so many rows."""
        return self.tiles[kernels.padded(x_MI.shape[0])]

    @abstractmethod
    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""


@torch.inference_mode()
def choose(products: Sequence[Product]) -> None:
    """Give products of one shape the fastest tile of those that are right, or torch's operators."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = products[0].weight_OI
    for padded_rows, numbers in _TIMED_ROWS.items():
        inputs = [
            torch.randn(number, weight_OI.shape[1], generator=generator).to(weight_OI.device, weight_OI.dtype)
            for number in numbers
        ]
        best, least_s = None, _seconds(products, inputs, padded_rows, None) - _WORTH_S * len(inputs)
        for tile in reversed(TILES):
            if not _works(products[0], inputs, padded_rows, tile):
                continue
            took_s = _seconds(products, inputs, padded_rows, tile)
            if took_s <= least_s:
                best, least_s = tile, took_s
        for product in products:
            product.tiles[padded_rows] = best


def _works(product: Product, inputs: Sequence[Tensor], padded_rows: int, tile: kernels.Tile) -> bool:
    """Whether our kernel runs here, and computes what torch's operators do."""
    for x_MI in inputs:
        product.tiles[padded_rows] = None
        wanted_MO = product.try_out(x_MI)
        product.tiles[padded_rows] = tile
        try:
            found_MO = product.try_out(x_MI)
        except Exception as error:  # noqa: BLE001 - compilers raise what they like, such as for too much shared memory
            _log.debug("a tile of %s does not run here: %s", tile, error)
            return False
        is_wrong_MO = ~((found_MO - wanted_MO).abs() <= _TOLERANCE * wanted_MO.abs().max())  # so is NaN
        if bool(is_wrong_MO.any()):
            _log.warning("a fused product of shape %s is wrong on this device and not used", [*product.weight_OI.shape])
            return False
    return True


def _seconds(
    products: Sequence[Product], inputs: Sequence[Tensor], padded_rows: int, tile: kernels.Tile | None
) -> float:
    """The least time of a product with each of the inputs."""
    timed = products[:_TIMED_LAYERS]
    for product in timed:
        product.tiles[padded_rows] = tile

    def run() -> None:
        for x_MI in inputs:
            for product in timed:
                product.try_out(x_MI)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    least_ms = math.inf
    for _ in range(_NUM_REPLAYS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        least_ms = min(least_ms, started.elapsed_time(ended))
    return least_ms * 1e-3 / len(timed)


@torch.inference_mode()
def tried_rotate_write(layer: Layer, *, dtype: torch.dtype, device: torch.device) -> RotateWrite:
    """Our kernel for this layer's heads; raises RuntimeError if it does not compute what torch's operators do."""
    generator = torch.Generator().manual_seed(0)
    heads, num_slots = layer.heads, 8
    positions_BT = torch.tensor([[3, 4, 5], [0, 1, 2]], device=device)
    qkv_MXD = torch.randn(positions_BT.numel(), heads.num + 2 * heads.num_kv, heads.dim, generator=generator)
    qkv_MXD = qkv_MXD.to(device, dtype)
    angles_SP = torch.randn(num_slots, heads.dim // 2, generator=generator).to(device)
    freqs_cis_S1P = torch.polar(torch.ones_like(angles_SP), angles_SP)[:, None]
    results = []
    for is_ours in (False, True):
        cache = StaticCache(num_layers=1, batch_size=2, capacity=num_slots, device=device)
        if is_ours:
            place: PlaceByKernel | PlaceByOperators = PlaceByKernel(
                kernels.rotate_write, freqs_cis_S1P, positions_BT, None, cache.buffers(num_slots)
            )
        else:
            view = cache.view(positions_BT, bucket=num_slots, cache_rows_B=None)
            place = PlaceByOperators(freqs_cis_S1P.index_select(0, positions_BT.flatten()), view)
        results.append(place(qkv_MXD.clone(), 0, heads, layer.head_norms))
    for found, wanted in zip(*results, strict=True):
        if bool((~((found - wanted).abs() <= _TOLERANCE * wanted.abs().max())).any()):
            raise RuntimeError("the kernel for the rotary embedding is wrong on this device")
    return kernels.rotate_write
