"""Tries our kernels on this device before they are used: whether they compute what torch does, and are not slower.

A product is timed over the weights of several layers in turn, so that none is found in a cache, and as a CUDA graph, so
that Python does not count. It costs a second or two when a model is built, and longer where Triton has yet to compile.

Shapes: B sequences, T positions, M tokens, X heads, I inputs, O outputs, E embedding width, S slots, D head dim, P =
D / 2 pairs of dimensions.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import triton
from torch import Tensor

from llama_ssp.distributed.gpu.capturing import capture_stream
from llama_ssp.models.cache import CacheView, StaticCache
from llama_ssp.models.linear import Linear, PlainLinear
from llama_ssp.models.llama import kernels
from llama_ssp.models.llama.layer import Layer
from llama_ssp.models.llama.norm import RmsNorm
from llama_ssp.models.llama.rotary import PlaceByKernel, PlaceByOperators, PlaceHeads, RotateWrite

_log = logging.getLogger(__name__)

Choices = dict[str, list[int]]
"""The tile of each product, by all that it depends on; empty for torch's operators."""
TILES = (kernels.Tile(), kernels.Tile(outputs=64, inputs=64, num_stages=4))
_TIMED_ROWS = {16: (1, 5), 32: (20,)}
"""Numbers of rows that are tried, by those of the tile that holds them."""
_TIMED_LAYERS, _NUM_REPLAYS = 8, 10
_WORTH_S = 1e-6
"""What torch's operators must save for each product, to be taken for more kernels than one."""
_TOLERANCE = 0.02
"""Of the largest value: sums in another order, and one rounding more or less, differ by less."""


class Product(ABC):
    """A linear layer, with our kernel or with its own operators.

    Attributes:
        linear: the layer.
        plain: the layer, if our kernel can read its weights.
        tiles: the tile of our kernel by its rows; None for the layer's own operators.
    """

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        is_plain = type(linear) is PlainLinear and linear.weight_OI.dtype in {torch.float16, torch.bfloat16}
        self.plain = linear if isinstance(linear, PlainLinear) and is_plain else None
        self.tiles: dict[int, kernels.Tile | None] = dict.fromkeys(_TIMED_ROWS)

    def tile(self, x_MI: Tensor) -> kernels.Tile | None:
        """The tile for so many rows, if it is ours."""
        return self.tiles.get(kernels.padded(x_MI.shape[0]))

    @abstractmethod
    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""


@torch.inference_mode()
def choose(products: Sequence[Product]) -> None:
    """Give products of one shape the fastest tile of those that are right, or torch's operators."""
    if products[0].plain is None:
        return
    generator = torch.Generator().manual_seed(0)
    weight_OI = products[0].plain.weight_OI
    for padded_rows, numbers in _TIMED_ROWS.items():
        inputs = [
            torch.randn(number, weight_OI.shape[1], generator=generator).to(weight_OI.device, weight_OI.dtype)
            for number in numbers
        ]
        best, least_s = None, seconds_of(products, inputs, padded_rows, None) + _WORTH_S * len(inputs)
        for tile in reversed(TILES):
            if not _works(products[0], inputs, padded_rows, tile):
                continue
            took_s = seconds_of(products, inputs, padded_rows, tile)
            if took_s <= least_s:
                best, least_s = tile, took_s
        for product in products:
            product.tiles[padded_rows] = best


def choices_of(products: Mapping[str, Sequence[Product]]) -> Choices:
    """What `choose` has chosen for products of one shape each, by their names."""
    return {key: list(group[0].tiles[rows] or ()) for key, group, rows in _chosen(products)}


def use_choices(products: Mapping[str, Sequence[Product]], choices: Choices) -> None:
    """Use earlier choices, those of `choices_of`, so that texts are rounded as they were; see `choose`.

    What was chosen on another GPU, or by other versions, is left out. Raises ValueError for a tile that there is not.
    """
    tiles = {tuple(tile): tile for tile in TILES}
    for key, group, rows in _chosen(products):
        if key in choices:
            wanted = tuple(choices[key])
            if wanted and wanted not in tiles:
                raise ValueError(f"it has no tile {choices[key]}")
            for product in group:
                product.tiles[rows] = tiles.get(wanted)


def _chosen(products: Mapping[str, Sequence[Product]]) -> Iterator[tuple[str, Sequence[Product], int]]:
    """Each choice: what it depends on, the products that it is for, and the rows of the tile."""
    for name, group in products.items():
        if plain := group[0].plain:
            num_outputs, num_inputs = plain.weight_OI.shape
            dtype = str(plain.weight_OI.dtype).removeprefix("torch.")
            known = f"{made_on(plain.weight_OI.device)}: {name}, {num_outputs} x {num_inputs}, {dtype}"
            for rows in group[0].tiles:
                yield f"{known}, {rows} rows", group, rows


def made_on(device: torch.device) -> str:
    """What every choice depends on: the kind of GPU, and the versions of what makes its kernels."""
    gpu = torch.cuda.get_device_name(device)
    return f"{gpu}, torch {torch.__version__}, triton {triton.__version__}"


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
            _log.warning("a fused product of %d inputs is wrong on this device and not used", x_MI.shape[1])
            return False
    return True


def seconds_of(
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

    return replay_s(run) / len(timed)


def replay_s(run: Callable[[], None]) -> float:
    """The least time of a call on the current GPU, as a CUDA graph."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
        run()
    least_ms = math.inf
    for _ in range(_NUM_REPLAYS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        least_ms = min(least_ms, started.elapsed_time(ended))
    return least_ms * 1e-3


@torch.inference_mode()
def try_rotate_write(layer: Layer, *, like: Tensor) -> RotateWrite:
    """Our kernel for this layer's heads; RuntimeError if it does not compute what torch's operators do."""
    generator = torch.Generator().manual_seed(0)
    heads, num_slots = layer.heads, 8
    positions_BT = torch.tensor([[3, 4, 5], [0, 1, 2]], device=like.device)
    qkv_MXD = torch.randn(positions_BT.numel(), heads.num + 2 * heads.num_kv, heads.dim, generator=generator).to(like)
    angles_SP = torch.randn(num_slots, heads.dim // 2, generator=generator).to(like.device)
    freqs_cis_S1P = torch.polar(torch.ones_like(angles_SP), angles_SP)[:, None]

    def placed(place: Callable[[CacheView], PlaceHeads]) -> tuple[Tensor, ...]:
        cache = StaticCache(num_layers=1, batch_size=2, capacity=num_slots, device=like.device)
        view = cache.view(positions_BT, bucket=num_slots, cache_rows_B=None)
        return place(view)(qkv_MXD.clone(), 0, heads, layer.head_norms)

    wanted = placed(lambda view: PlaceByOperators(freqs_cis_S1P.index_select(0, positions_BT.flatten()), view))
    for in_order in (True, False):
        found = placed(
            lambda view, in_order=in_order: PlaceByKernel(  # type: ignore[misc]
                kernels.rotate_write, freqs_cis_S1P, positions_BT, None if in_order else view.slots_M, view.buffer
            )
        )
        for one, other in zip(found, wanted, strict=True):
            _check("rotary embedding", one, other)
    return kernels.rotate_write


@torch.inference_mode()
def try_add_norm(norm: RmsNorm) -> None:
    """Raise RuntimeError if our kernel does not compute what torch's operators do."""
    generator = torch.Generator().manual_seed(0)
    x_ME, added_ME = torch.randn(2, 5, norm.weight_E.shape[0], generator=generator).to(norm.weight_E)
    wanted_ME = x_ME + added_ME
    found_ME = kernels.add_norm(x_ME, added_ME, norm.weight_E, norm.eps)
    _check("residual", x_ME, wanted_ME)
    _check("norm", found_ME, norm(wanted_ME))


def _check(name: str, found: Tensor, wanted: Tensor) -> None:
    if bool((~((found - wanted).abs() <= _TOLERANCE * wanted.abs().max())).any()):
        raise RuntimeError(f"the kernel of the {name} is wrong on this device")
