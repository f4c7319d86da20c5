"""How the int8 kernel cuts a product: enough blocks, whole steps, and nothing but the tile of rows depends on rows."""

from dataclasses import replace
from functools import partial

import pytest

from llama_ssp.models.quantization.int8_tiles import STEP, Tiles, tiles_of
from tests.helpers.lanes import grid

H200 = 132
SHAPES = {
    "TinyLlama, keys and values of one of 4 ranks": (128, 2048),
    "TinyLlama, output": (2048, 2048),
    "TinyLlama, down": (2048, 5632),
    "7B, queries, keys and values of one of 8 ranks": (1536, 4096),
    "7B, down": (4096, 11008),
    "7B, gate and up": (22016, 4096),
    "30B, output of one of 8 ranks": (6656, 832),
    "65B, gate and up": (44032, 8192),
}
cut = partial(tiles_of, num_processors=H200, value_bytes=2)


@grid(shape=list(SHAPES.values()), num_rows=[1, 5, 20, 64])
def test_every_multiprocessor_has_a_block_unless_splits_would_be_short(shape: tuple[int, int], num_rows: int) -> None:
    num_outputs, num_inputs = shape
    tiles = cut(num_rows=num_rows, num_outputs=num_outputs, num_inputs=num_inputs)
    blocks = tiles.grid[0] * tiles.num_splits
    assert blocks >= H200 or tiles.split_inputs <= 3 * STEP
    assert tiles.grid[0] * tiles.outputs >= num_outputs > (tiles.grid[0] - 1) * tiles.outputs
    assert tiles.grid[1] * tiles.rows >= num_rows > (tiles.grid[1] - 1) * tiles.rows
    assert tiles.grid[2] == tiles.num_splits


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_large_matrices_need_no_second_kernel(shape: tuple[int, int]) -> None:
    num_outputs, num_inputs = shape
    tiles = cut(num_rows=5, num_outputs=num_outputs, num_inputs=num_inputs)
    assert (tiles.num_splits == 1) == (num_outputs > 16 * (H200 - 1) or num_inputs < 4 * STEP)


@grid(num_inputs=[16, 511, 512, 1500, 2048, 11008], num_outputs=[16, 128, 1000])
def test_splits_cover_all_inputs_and_none_is_empty(num_inputs: int, num_outputs: int) -> None:
    tiles = cut(num_rows=1, num_outputs=num_outputs, num_inputs=num_inputs)
    assert tiles.split_inputs % STEP == 0
    assert (tiles.num_splits - 1) * tiles.split_inputs < num_inputs <= tiles.num_splits * tiles.split_inputs


@grid(shape=list(SHAPES.values()), value_bytes=[2, 4])
def test_the_inputs_of_a_sum_do_not_depend_on_the_number_of_rows(shape: tuple[int, int], value_bytes: int) -> None:
    """Verifying K + 1 tokens then gives the bits of decoding them one by one."""
    num_outputs, num_inputs = shape

    def partition(num_rows: int) -> Tiles:
        tiles = cut(num_rows=num_rows, num_outputs=num_outputs, num_inputs=num_inputs, value_bytes=value_bytes)
        return replace(tiles, rows=0, num_stages=0, grid=(tiles.grid[0], 0, tiles.grid[2]))

    assert len({partition(num_rows) for num_rows in range(1, 65)}) == 1
