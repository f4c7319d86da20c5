"""How the int8 kernel cuts a product: enough blocks, whole steps, and nothing but the tile of rows depends on rows."""

import math
from dataclasses import replace
from functools import partial

import pytest
from llama_ssp.models.quantization.few_rows_tiles import STEP, Tiles, tiles_of

from tests.helpers.lanes import grid

H200 = 132
SHAPES = {
    "TinyLlama, output": ((2048, 2048), 1, 128),
    "TinyLlama, down": ((2048, 5632), 1, 128),
    "7B, queries, keys and values of one of 8 ranks": ((1536, 4096), 1, 96),
    "7B, output and down": ((4096, 11008), 1, 256),
    "7B, gate and up": ((22016, 4096), 1, 688),
    "30B, output of one of 8 ranks": ((6656, 832), 1, 208),
    "65B, gate and up": ((44032, 8192), 1, 1376),
    "half of the multiprocessors idle": ((1024, 4096), 2, 128),
    "most of them idle": ((512, 4096), 4, 128),
    "a few outputs": ((100, 8192), 16, 112),
    "too short to split": ((128, 2048), 1, 8),
}
"""Outputs and inputs, splits, and blocks for up to 8 rows."""
MATRICES = [shape for shape, _, _ in SHAPES.values()]
cut = partial(tiles_of, num_processors=H200, value_bytes=2)


@pytest.mark.parametrize(("shape", "num_splits", "num_blocks"), SHAPES.values(), ids=SHAPES)
def test_no_matrix_leaves_half_of_the_multiprocessors_idle_where_a_split_pays(
    shape: tuple[int, int], num_splits: int, num_blocks: int
) -> None:
    tiles = cut(num_rows=5, num_outputs=shape[0], num_inputs=shape[1])
    assert (tiles.num_splits, math.prod(tiles.grid)) == (num_splits, num_blocks)


@grid(num_outputs=[16, 33, 4096, 22016], num_rows=[1, 5, 9, 20, 64])
def test_blocks_cover_all_outputs_and_rows_and_none_is_empty(num_outputs: int, num_rows: int) -> None:
    tiles = cut(num_rows=num_rows, num_outputs=num_outputs, num_inputs=512)
    assert (tiles.grid[1] - 1) * tiles.outputs < num_outputs <= tiles.grid[1] * tiles.outputs
    assert (tiles.grid[0] - 1) * tiles.rows < num_rows <= tiles.grid[0] * tiles.rows


@grid(num_inputs=[16, 511, 512, 1500, 2048, 11008], num_outputs=[16, 128, 1000])
def test_splits_cover_all_inputs_and_none_is_empty(num_inputs: int, num_outputs: int) -> None:
    tiles = cut(num_rows=1, num_outputs=num_outputs, num_inputs=num_inputs)
    assert tiles.split_inputs % STEP == 0
    assert tiles.grid[2] == tiles.num_splits
    assert (tiles.num_splits - 1) * tiles.split_inputs < num_inputs <= tiles.num_splits * tiles.split_inputs


@grid(shape=MATRICES, value_bytes=[2, 4])
def test_the_inputs_of_a_sum_do_not_depend_on_the_number_of_rows(shape: tuple[int, int], value_bytes: int) -> None:
    """Verifying K + 1 tokens then gives the bits of decoding them one by one."""
    num_outputs, num_inputs = shape

    def partition(num_rows: int) -> Tiles:
        tiles = cut(num_rows=num_rows, num_outputs=num_outputs, num_inputs=num_inputs, value_bytes=value_bytes)
        return replace(tiles, rows=0, num_stages=0, grid=(0, *tiles.grid[1:]))

    assert len({partition(num_rows) for num_rows in range(1, 65)}) == 1
