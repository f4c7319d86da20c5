"""The kernels of the lean decoder without a GPU: their values in Triton's interpreter, and what ptxas makes of them."""

import os
import re
import subprocess
import sys
from functools import cache

import pytest

from tests.helpers.ahead_of_time import CAPABILITIES, Compiled, compile_kernel
from tests.helpers.lanes import grid

pytestmark = [pytest.mark.triton, pytest.mark.seconds]

MOST_SHARED = 163 * 1024
"""Bytes of a block on an A100."""
INPUTS_OF_A_STEP = 128
PRODUCTS: dict[str, dict[str, bool]] = {
    "query-key-value": {"HAS_NORM": True},
    "after a sum of the ranks": {"HAS_NORM": True, "HAS_ADDED": True},
    "gate-up": {"HAS_NORM": True, "GATES": True},
    "output": {"HAS_RESIDUAL": True},
    "with a bias": {"HAS_NORM": True, "HAS_BIAS": True},
}
FLAGS = ("HAS_ADDED", "HAS_NORM", "HAS_BIAS", "HAS_RESIDUAL", "GATES")
OPTIONAL = {"added": "HAS_ADDED", "norm": "HAS_NORM", "bias": "HAS_BIAS", "residual": "HAS_RESIDUAL"}
NUMBERS = ("num_rows", "num_outputs", "num_inputs")


@cache
def compiled(kind: str, *, capability: int, dtype: str, rows: int) -> Compiled:
    from llama_ssp.models.llama import kernels

    flags = dict.fromkeys(FLAGS, False) | PRODUCTS[kind]
    tile = kernels.Tile()
    constants: dict[str, object] = {**flags, "ROWS": rows, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
    constants |= {name: None for name, flag in OPTIONAL.items() if not flags[flag]}
    pointers = dict.fromkeys(("x", "added", "summed", "norm", "weight", "bias", "residual", "y"), f"*{dtype}")
    types = {**pointers, **dict.fromkeys(NUMBERS, "i32"), "eps": "fp32", "unscale": "fp32"}
    return compile_kernel(
        kernels.product_kernel, types, constants, capability=capability, num_warps=4, num_stages=tile.num_stages,
        uneven=["num_rows"],
    )  # fmt: skip


every_product = grid(kind=list(PRODUCTS), capability=CAPABILITIES, dtype=["fp16", "bf16"], rows=[16, 32])


@every_product
def test_no_register_of_a_product_is_spilled(kind: str, capability: int, dtype: str, rows: int) -> None:
    found = compiled(kind, capability=capability, dtype=dtype, rows=rows)
    assert found.stack_bytes == 0
    assert found.shared_bytes <= MOST_SHARED


@every_product
def test_every_weight_of_a_product_is_multiplied_by_one_warp(kind: str, capability: int, dtype: str, rows: int) -> None:
    """A warp that did what another one does would double the products: 16 x 8 x 16 numbers an instruction."""
    from llama_ssp.models.llama import kernels

    found, tile = compiled(kind, capability=capability, dtype=dtype, rows=rows), kernels.Tile()
    num_matrices = 2 if PRODUCTS[kind].get("GATES") else 1
    of_a_warp = num_matrices * (rows // 16) * (tile.outputs // 8) * (tile.inputs // 16) // 4
    assert found.count(r"\bHMMA\.16816\.F32") == of_a_warp


@grid(capability=CAPABILITIES, dtype=["fp16", "bf16"], has_norms=[False, True], head_dim=[64, 96, 128])
def test_the_kernel_of_the_rotary_embedding_needs_no_stack(
    capability: int, dtype: str, has_norms: bool, head_dim: int
) -> None:
    from llama_ssp.models.llama import kernels

    types = {"turns": "*fp32", "positions": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("qkv", "query_norm", "key_norm", "parts"), f"*{dtype}")
    types |= dict.fromkeys(("num_slots", "all_slots", "num_positions"), "i32")
    constants: dict[str, object] = {
        "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "HAS_SLOTS": False, "HAS_NORMS": has_norms,
        "HEADS": 8, "PAIRS": 64 if head_dim > 64 else 32, "slots": None,
    }  # fmt: skip
    if not has_norms:
        constants |= {"query_norm": None, "key_norm": None}
    found = compile_kernel(kernels.rotate_write_kernel, types, constants, capability=capability, num_warps=4)
    assert found.stack_bytes == 0


ATTENTION = {
    "queries": "*{}", "keys": "*{}", "values": "*{}", "attended": "*{}", "first_queries": "*i32", "used": "*i32",
    "pages": "*i32", "parts": "*fp32", "sums": "*fp32", "scale": "fp32",
}  # fmt: skip
UNEVEN = ("left", "num_parts", "pages_stride")
STRIDES = ("query_stride", "query_head_stride", "page_stride", "slot_stride", "head_stride")


@grid(capability=CAPABILITIES, dtype=["fp16", "bf16"], head_dim=[96, 64], rows=[16, 64], has_window=[False, True])
def test_split_attention_needs_no_stack_and_multiplies_every_key_by_one_warp(
    capability: int, dtype: str, head_dim: int, rows: int, has_window: bool
) -> None:
    """A warp multiplies 16 x 8 x 16 numbers at once: 16 slots by all dimensions, then 16 slots to all dimensions."""
    from llama_ssp.models.llama import split_kernels

    dims = 128 if head_dim > 64 else 64
    types = {name: kind.format(dtype) for name, kind in ATTENTION.items()} | dict.fromkeys((*UNEVEN, *STRIDES), "i32")
    shared = {"HEAD_DIM": head_dim, "HAS_WINDOW": has_window, "PARTS": 128, "SLOTS": split_kernels.SLOTS}
    found = compile_kernel(
        split_kernels.attend_part, types, {**shared, "GROUP": 4, "DIMS": dims, "PAGE": 256, "ROWS": rows},
        capability=capability, num_warps=rows // 16, num_stages=3, uneven=UNEVEN,
    )  # fmt: skip
    assert found.stack_bytes == 0
    assert found.shared_bytes <= MOST_SHARED
    if rows < 64:  # four warps share so few slots out otherwise, and on an H100 multiply together
        assert found.count(r"\bHMMA\.16816\.F32") == 2 * (split_kernels.SLOTS // 8) * (dims // 16)
    whole = compile_kernel(
        split_kernels.attend_whole, types, {**shared, "WIDTH": 32}, capability=capability, num_warps=4, uneven=UNEVEN
    )
    assert whole.stack_bytes == 0


def test_values_are_those_of_torch_s_operators() -> None:
    """In a process of its own, because Triton reads at its import that it is to interpret."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.helpers.interpreted_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^right: (.*)$", ended.stdout, re.MULTILINE) == [
        "products", "rotary and cache", "residual and norm", "gate", "split rows", "choice of attention",
        "wrong kernels are refused", "whole models", "several ranks", "draws",
    ]  # fmt: skip
