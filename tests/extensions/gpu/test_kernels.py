"""The Triton kernels without a GPU: their values in Triton's interpreter, and what ptxas makes of them."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.engine import (
    LATENT_PARTS,
    LATENT_QUERIES,
    PART_SLOTS,
    equal_part_slots,
    equal_tile_rows,
    most_parts,
)
from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.kernels.parts import rows_of
from llama_ssp.storage.formats import CACHES
from tests.extensions.gpu.ahead_of_time import CAPABILITIES, CHAINED, Compiled, compile_kernel
from tests.helpers.lanes import grid, heavy, slow

pytestmark = pytest.mark.triton
pytest.importorskip("triton")
NAMES = ("between", "linear", "halves", "attention", "equal_parts", "draw", "recurrence", "latents")
between_gpu, linear_gpu, halves_gpu, attention_gpu, equal_parts_gpu, draw_gpu, recurrence_gpu, latents_gpu = (
    import_module(f"llama_ssp.extensions.gpu.kernels.{name}") for name in NAMES
)

MOST_SHARED = 163 * 1024
"""Bytes of a block on an A100."""


@grid(
    capability=CAPABILITIES, dtype=["fp16", "bf16"], has_norms=[False, True], head_dim=[96, 128], cache=[*CACHES.all()]
)
def test_the_kernel_of_the_rotary_embedding_needs_no_stack(
    capability: int, dtype: str, has_norms: bool, head_dim: int, cache: str
) -> None:
    kept = rows_of(cache, NUMBERS[dtype])
    types = {"turns": "*fp32", "positions": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("qkv", "query_norm", "key_norm"), f"*{dtype}")
    types["parts"] = STORED[kept.stored_dtype]
    constants: dict[str, object] = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "HEADS": 8,
        "PAIRS": 64 if head_dim > 64 else 32,
        "WIDTH": kept.width(head_dim),
        "LARGEST": kept.largest,
        "IS_FLOAT": kept.dtype.is_floating_point,
    }
    constants |= dict.fromkeys(("slots",) if has_norms else ("slots", "query_norm", "key_norm"))
    found = compile_kernel(between_gpu.rotate_write_kernel, types, constants, capability=capability, num_warps=4)
    assert found.is_chained == (capability >= CHAINED)


RECURRENCES: dict[str, dict[str, object]] = {
    "Qwen3-Next": {"HEADS": 32, "HEADS_OF_KEY": 2, "KEY": 128, "VALUE": 128, "skips": None},
    "Kimi Linear": {"HEADS": 32, "HEADS_OF_KEY": 1, "KEY": 128, "VALUE": 128, "skips": None, "IS_BY_ROW": True},
    "Granite 4": {"HEADS": 128, "HEADS_OF_KEY": 128, "KEY": 128, "VALUE": 64, "rates": None},
    "Falcon-H1": {"HEADS": 24, "HEADS_OF_KEY": 24, "KEY": 256, "VALUE": 128, "rates": None},
}


@pytest.mark.parametrize(
    ("kind", "capability"), [("Qwen3-Next", 90), ("Granite 4", 80), slow("Kimi Linear", 80), slow("Falcon-H1", 90)]
)
def test_the_kernel_of_recurrent_layers_needs_no_stack(kind: str, capability: int) -> None:
    kernel, sizes = recurrence_gpu.recur_kernel, RECURRENCES[kind]
    numbers = ("x", "decays", "rates", "weight", "bias", "log_rates", "times", "skips", "out", "inputs")
    types = dict.fromkeys(numbers, "*bf16") | dict.fromkeys(("firsts", "takens", "rows"), "*i64")
    types |= dict.fromkeys(("least", "most", "rate_factor"), "fp32") | {"states": "*fp32"}
    keys, values = recurrence_gpu.tiles_of(sizes["KEY"], sizes["VALUE"])
    constants = {"IS_BY_ROW": False, "WIDTH": 4, "KEYS": keys, "VALUES": values} | sizes
    uneven = ["num_tokens", "num_inputs", "num_kept"]
    compile_kernel(kernel, types, constants, capability=capability, num_warps=4, uneven=uneven)


ATTENTION = {
    "queries": "*{}",
    "attended": "*{}",
    "first_queries": "*i32",
    "used": "*i32",
    "first_slots": "*i32",
    "parts": "*fp32",
    "sums": "*fp32",
    "scale": "fp32",
}
NUMBERS = {"fp16": torch.float16, "bf16": torch.bfloat16}
STORED = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8"}
"""Triton's names of pointers."""


@grid(
    capability=CAPABILITIES,
    dtype=["fp16", "bf16"],
    head_dim=[96, 64],
    rows=[16, 64],
    has_window=[False, True],
    cache=[*CACHES.all()],
)
def test_split_attention_needs_no_stack_and_multiplies_every_key_by_one_warp(
    capability: int, dtype: str, head_dim: int, rows: int, *, has_window: bool, cache: str
) -> None:
    """A warp multiplies 16 x 8 x 16 numbers at once: 16 slots by all dimensions, then 16 slots to all dimensions."""
    dims, slots = 128 if head_dim > 64 else 64, PART_SLOTS
    kept = rows_of(cache, NUMBERS[dtype])
    types = {name: kind.format(dtype) for name, kind in ATTENTION.items()}
    types |= dict.fromkeys(("keys", "values"), STORED[kept.stored_dtype])
    shared = {"HEAD_DIM": head_dim, "HAS_WINDOW": has_window, "PARTS": most_parts(1), "SLOTS": slots}
    compiled = partial(compile_kernel, types=types, capability=capability, uneven=("left", "num_parts"))
    found = compiled(
        attention_gpu.attend_part,
        constants={**shared, "GROUP": 4, "DIMS": dims, "ROWS": rows, "KIND": attention_gpu.KINDS.get(kept.dtype, 0)},
        num_warps=rows // 16,
        num_stages=3,
    )
    assert found.shared_bytes <= MOST_SHARED
    if rows < 64:  # four warps share so few slots out otherwise, and on an H100 multiply together
        assert found.count(r"\bHMMA\.16816\.F32") == 2 * (slots // 8) * (dims // 16)
    whole = compiled(attention_gpu.attend_whole, constants={**shared, "WIDTH": 32}, num_warps=4)
    assert found.is_chained == whole.is_chained == (capability >= CHAINED)


@grid(
    capability=CAPABILITIES, dtype=["fp16", "bf16"], rank=[512, 256], rows=[16, LATENT_QUERIES], cache=[*CACHES.all()]
)
def test_attention_to_latents_needs_no_stack(capability: int, dtype: str, rank: int, rows: int, cache: str) -> None:
    """With the widths of DeepSeek V3 and of MiniCPM3."""
    kept, rotary = rows_of(cache, NUMBERS[dtype]), 64 if rank > 256 else 32
    types = dict.fromkeys(("queries", "masks", "attended"), f"*{dtype}")
    types |= dict.fromkeys(("parts", "sums"), "*fp32") | dict.fromkeys(("scale", "mask_scale"), "fp32")
    types |= dict.fromkeys(("latents", "rotary"), STORED[kept.stored_dtype])
    compiled = partial(compile_kernel, types=types, capability=capability)
    found = compiled(
        latents_gpu.attend_part,
        constants={
            "RANK": rank,
            "ROTARY": rotary,
            "RANKS": rank,
            "ROTARIES": rotary,
            "ROWS": rows,
            "SLOTS": 16,
            **dict(zip(("SHORT_PARTS", "SHORT", "LONG"), LATENT_PARTS, strict=True)),
            "KIND": attention_gpu.KINDS.get(kept.dtype, 0),
        },
        num_warps=8,
        num_stages=1 if kept.largest else 2,
        uneven=("num_queries", "num_slots", "num_parts"),
    )
    assert found.shared_bytes <= MOST_SHARED
    whole = compiled(
        latents_gpu.attend_whole, constants={"RANK": rank, "WIDTH": 32, "BLOCK": 16}, num_warps=1, uneven=("num_parts",)
    )
    assert found.is_chained == whole.is_chained == (capability >= CHAINED)


@grid(
    capability=CAPABILITIES,
    dtype=["fp16", "bf16"],
    head_dim=[96, 64],
    group=[4, 48],
    has_window=[False, True],
    cache=[*CACHES.all()],
)
def test_attention_in_equal_parts_needs_no_stack_and_multiplies_every_key_once_a_tile(
    capability: int, dtype: str, head_dim: int, group: int, *, has_window: bool, cache: str
) -> None:
    """Whatever the rows and positions, a model has one tile."""
    dims, slots, rows = 128 if head_dim > 64 else 64, PART_SLOTS, equal_tile_rows(group)
    kept = rows_of(cache, NUMBERS[dtype])
    types = {name: kind.format(dtype) for name, kind in ATTENTION.items()}
    types |= dict.fromkeys(("keys", "values"), STORED[kept.stored_dtype])
    shared = {"GROUP": group, "HEAD_DIM": head_dim, "HAS_WINDOW": has_window, "PART": equal_part_slots(8), "ROWS": rows}
    uneven = "left", "num_parts", "first_group", "num_groups"
    compiled = partial(compile_kernel, types=types, capability=capability, uneven=uneven)
    found = compiled(
        equal_parts_gpu.attend_equal_part,
        constants={**shared, "DIMS": dims, "SLOTS": slots, "KIND": attention_gpu.KINDS.get(kept.dtype, 0)},
        num_warps=rows // 16,
        num_stages=3,
    )
    assert found.shared_bytes <= MOST_SHARED
    if rows < 64:
        assert found.count(r"\bHMMA\.16816\.F32") == 2 * (slots // 8) * (dims // 16)
    whole = compiled(equal_parts_gpu.join_parts, constants={**shared, "JOINED": 32, "WIDTH": 32}, num_warps=4)
    assert found.is_chained == whole.is_chained == (capability >= CHAINED)


@grid(capability=CAPABILITIES, vocab_size=[128_256])
def test_the_kernels_of_a_draw_need_no_stack(capability: int, vocab_size: int) -> None:
    tokens = tokens_of_a_block(vocab_size)
    types = {"sums": "*i64", "uniforms": "*fp64", "ids": "*i64", "units": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(("weights", "logits", "peaks", "totals", "probs"), "*fp32")
    blocks = 1 << (-(-vocab_size // tokens) - 1).bit_length()
    for kernel, num_warps, constants in (
        (draw_gpu.block_peaks, 4, {"TOKENS": 1024}),
        (draw_gpu.block_probs, 4, {"TOKENS": 1024, "BLOCKS": 128}),
        *[(draw_gpu.sum_blocks, 1, {"TOKENS": tokens, "DRAWS": draws}) for draws in (False, True)],
        (draw_gpu.pick_token, 4, {"TOKENS": tokens, "BLOCKS": blocks}),
    ):
        uneven = ["uniforms", "num_blocks"]
        found = compile_kernel(kernel, types, constants, capability=capability, num_warps=num_warps, uneven=uneven)
        assert found.is_chained == (capability >= CHAINED)


@grid(capability=CAPABILITIES, dtype=["fp16", "bf16"], unused=[("added", "ids"), ("ids",), ()])
def test_norms_and_gates_need_no_stack_and_read_weights_alone_before_they_wait(
    capability: int, dtype: str, unused: tuple[str, ...]
) -> None:
    types = dict.fromkeys(("x", "added", "weight", "normed", "gate_up", "gated"), f"*{dtype}")
    types |= {"eps": "fp32", "ids": "*i64"}
    compiled = partial(compile_kernel, types=types, capability=capability)
    constants: dict[str, object] = {"WIDTH": 4096} | dict.fromkeys(unused)
    norm = compiled(between_gpu.add_norm_kernel, constants=constants, num_warps=8)
    gate = compiled(between_gpu.gated_kernel, constants={"UNITS": 1024}, num_warps=4)
    assert gate.is_chained == (capability >= CHAINED)
    if capability >= CHAINED:
        of_one = norm.steps.count("l") // (3 if unused == ("ids",) else 2)
        assert norm.steps.startswith(of_one * "l" + "RWl")
        assert len(norm.steps.strip("ls")) == 2


@pytest.mark.parametrize(
    "parts",
    [
        ["operators"],
        ["qwen3", "recurrent layers"],
        ["quantized cache", "several ranks"],
        ["latents"],
        slow(["own bits"]),
        heavy(["prompts of equal bits"]),
        slow(["equal bits"]),
        slow(["models of equal bits"]),
        slow(["llama, no groups", "mistral, window", "qwen3 by masks", "quantized weights"]),
    ],
    ids=", ".join,
)
def test_values_are_those_of_torch_s_operators(parts: list[str]) -> None:
    """In a process of its own, because Triton reads at its import that it is to interpret."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.extensions.gpu.interpreted_kernels", *parts],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


# Products of a few rows with weights of 8 or 4 bits.

GROUPS = {"halves": 0, "int8": 0, "fp8": 128, "int4": 128, "int4_64": 64, "int4_32": 32, "mxfp4": 32, "nvfp4": 16}
"""The inputs that share a word; none in fp16 and bf16 (halves), and in int8."""
MOST_INSTRUCTIONS = {("int8", 2): 6, ("int8", 4): 6, ("int4", 2): 4, ("int4", 4): 5}
"""Of a thread, for each weight of a form and inputs of so many bytes.

While a byte arrives, an H200 has time for 6, an H100 for 8 and an A100 for 9; a byte is two weights in int4.
"""
MOST_SHARED_OF_FEW_ROWS = 99 * 1024
"""Bytes of a block on GPUs since 2020."""
VALUE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
H200 = 132
"""Multiprocessors."""


def tiles(num_rows: int, num_outputs: int, num_inputs: int = 4096, *, form: str = "int8", value_bytes: int = 2) -> Any:
    return linear_gpu.tiles_of(
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        num_processors=H200,
        value_bytes=value_bytes,
        weight_bits=4 if "4" in form else 16 if form == "halves" else 8,
        group=GROUPS[form],
    )


@cache
def compiled(
    form: str, capability: int, dtype: str, num_rows: int, *, num_outputs: int = 8192, of_experts: bool = False
) -> Compiled:
    """The kernel as it is called for a matrix with 4096 inputs on an H200, or for those of experts."""
    group = GROUPS[form]
    cut = tiles(num_rows, num_outputs, form=form, value_bytes=VALUE_BYTES[dtype])
    is_split = cut.grid[2] > 1
    constants = {
        "ROWS": cut.rows,
        "OUTPUTS": cut.outputs,
        "INPUTS": cut.warp_inputs,
        "WARPS": cut.num_warps,
        "GROUP": group,
        "IS_SPLIT": is_split,
        "PTX": True,
        "bias": None,
    }
    types = {"x": f"*{dtype}", "residual": f"*{dtype}", "y": "*fp32" if is_split else f"*{dtype}"}
    if of_experts:
        types["blocks"] = "*i32"
    else:
        constants["blocks"] = None
    unused = {"halves": ["words", "scales"], "int8": ["words"], "mxfp4": [], "nvfp4": []}
    constants |= dict.fromkeys(unused.get(form, ["scales"]))
    word = {"fp8": "*fp32", "mxfp4": "*u8", "nvfp4": "*i8"}.get(form, "*i32")
    weight = "*u8" if "4" in form else f"*{dtype}" if form == "halves" else "*i8"
    types |= {"weight": weight, "words": word, "scales": "*fp32"}
    return compile_kernel(
        linear_gpu._product,
        types,
        constants,
        capability=capability,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        uneven=["num_rows"],
    )


def num_weights(form: str, dtype: str, *, num_outputs: int = 8192) -> int:
    """Weights of a warp in a step, if no other warp has them too."""
    cut = tiles(1, num_outputs, form=form, value_bytes=VALUE_BYTES[dtype])
    return int(cut.outputs * linear_gpu.STEP // cut.num_warps)


@grid(form=[*GROUPS][1:], capability=CAPABILITIES, dtype=list(VALUE_BYTES), num_rows=[5, 16, 20])
def test_no_register_is_spilled_and_every_weight_is_multiplied_once_and_never_converted_as_an_integer(
    form: str, capability: int, dtype: str, num_rows: int
) -> None:
    """A warp that did what another one does would double its products; 16 rows are of experts."""
    found = compiled(form, capability, dtype, num_rows, of_experts=num_rows == 16)
    if capability >= CHAINED:
        assert re.match("Wl+Rl*s+$", found.steps)
    assert found.shared_bytes <= MOST_SHARED_OF_FEW_ROWS
    assert not found.count(r"\bI2F")
    num_tiles = num_weights(form, dtype) // (16 * 16)
    tiles_of_rows = {5: 1, 16: 2, 20: 4 if dtype != "fp32" else 2}[num_rows]
    assert found.count(r"\bHMMA\.16816\.F32") == num_tiles * tiles_of_rows * (3 if dtype == "fp32" else 1)


@grid(capability=CAPABILITIES, dtype=["fp16", "bf16"])
def test_the_kernel_of_one_row_reads_16_bytes_at_once_and_its_first_weights_before_it_waits(
    capability: int, dtype: str
) -> None:
    types = dict.fromkeys(("x", "weight", "residual", "y"), f"*{dtype}")
    constants = {"OUTPUTS": 8, "INPUTS": 1024, "bias": None}
    found = compile_kernel(halves_gpu.row_kernel, types, constants, capability=capability, num_warps=4)
    num_loads = 8 * 1024 // (8 * 128)
    if capability >= CHAINED:
        assert re.match(f"l{{{num_loads}}}Wl+R[ls]+$", found.steps)
    assert found.count(r"\bLDG\.E\S*\.128") == num_loads + 1 == found.count(r"\bLDG")
    assert not found.count(r"\bBAR")


@grid(capability=CAPABILITIES, dtype=["fp16", "bf16"], num_rows=[5, 16, 20])
def test_every_weight_of_16_bits_is_multiplied_once(capability: int, dtype: str, num_rows: int) -> None:
    found = compiled("halves", capability, dtype, num_rows)
    assert found.shared_bytes <= MOST_SHARED_OF_FEW_ROWS
    num_tiles = num_weights("halves", dtype) // (16 * 16)
    assert found.count(r"\bHMMA\.16816\.F32") == num_tiles * {5: 1, 16: 2, 20: 4}[num_rows]


@grid(num_experts=[127, 512], capability=CAPABILITIES)
def test_the_kernel_that_finds_the_pairs_of_experts_needs_no_stack(num_experts: int, capability: int) -> None:
    sizes = {"PAIRS": linear_gpu.PAIRS, "EXPERTS": 1 << num_experts.bit_length(), "ROWS": 8}
    types, uneven = {"experts": "*i64", "blocks": "*i32"}, ["num_pairs", "num_experts"]
    compile_kernel(linear_gpu._find_block, types, sizes, capability=capability, num_warps=4, uneven=uneven)


@grid(form=["int8", "int4"], capability=CAPABILITIES, dtype=list(VALUE_BYTES), num_outputs=[8192, 2048, 512])
def test_a_weight_takes_few_instructions(form: str, capability: int, dtype: str, num_outputs: int) -> None:
    """Of large matrices in int4 and halves so few that an H200 waits for memory, up to 8 rows."""
    found = compiled(form, capability, dtype, 5, num_outputs=num_outputs)
    waits = form == "int4" and dtype != "fp32" and num_outputs == 8192
    most = 3 if waits else MOST_INSTRUCTIONS[form, VALUE_BYTES[dtype]]
    assert 32 * len(found.body) <= most * num_weights(form, dtype, num_outputs=num_outputs)


FOURS = torch.stack([torch.arange(256).to(torch.uint8).roll(place) for place in range(4)], dim=1).contiguous()
"""Every byte in every place of a register."""
REGISTERS = FOURS.view(torch.int32)[:, 0].contiguous()


def pairs(operation: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """An operation on both halves of registers."""

    def computed(*operands: Tensor) -> Tensor:
        numbers = [operand[:, None].view(dtype).float() for operand in operands]
        return operation(*numbers).to(dtype).view(torch.int32)[:, 0]

    return computed


def permuted(first: Tensor, second: Tensor, selector: Tensor) -> Tensor:
    """Choose four of eight bytes; all threads have one selector, which repeats no signs."""
    chosen = [int(selector[0]) >> 4 * place & 15 for place in range(4)]
    return torch.stack([first, second], dim=1).view(torch.uint8)[:, chosen].contiguous().view(torch.int32)[:, 0]


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": torch.clone,
    "xor.b32": torch.bitwise_xor,
    "and.b32": torch.bitwise_and,
    "shr.u32": lambda word, places: (word.long() % 2**32 >> places.long()).to(torch.int32),
    "prmt.b32": permuted,
    "sub.f16x2": pairs(torch.sub, torch.float16),
    "fma.rn.f16x2": pairs(lambda first, second, third: first * second + third, torch.float16),
    "fma.rn.bf16x2": pairs(lambda first, second, third: first * second + third, torch.bfloat16),
}
"""Of PTX, whose inline assembly Triton's interpreter does not compute."""


def run_ptx(program: str, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a program of INSTRUCTIONS, one a line, and return all registers: int32, a value for each thread."""
    registers = dict(operands)

    def value(name: str) -> Tensor:
        number = int(name, 0) if name[0].isdigit() else None
        return registers[name] if number is None else torch.full((256,), number).to(torch.int32)

    for name, line in re.findall(r"^([a-z]\S+) (.*);$", program, re.MULTILINE):
        to, *others = line.split(", ")
        registers[to] = INSTRUCTIONS[name](*map(value, others))
    return registers


def halves(registers: dict[str, Tensor], first: int, dtype: torch.dtype) -> Tensor:
    """The four numbers in two registers."""
    return torch.stack([registers[f"${first}"], registers[f"${first + 1}"]], dim=1).view(dtype).float()


@pytest.mark.parametrize(("name", "dtype", "first"), [("FP16", torch.float16, 1024), ("BF16", torch.bfloat16, 128)])
def test_the_conversions_by_bits_are_exact_for_every_byte_in_every_place(
    name: str, dtype: torch.dtype, first: int
) -> None:
    registers = run_ptx(getattr(linear_gpu, f"_BYTES_TO_{name}").value, {"$2": REGISTERS})
    assert torch.equal(halves(registers, 0, dtype), FOURS.view(torch.int8).float())
    for zero in (0, 8, 16):
        zeros = torch.full((256, 2), first + zero, dtype=dtype).view(torch.int32)[:, 0].contiguous()
        operands = {"$4": REGISTERS, "$5": zeros, "$6": zeros}
        registers = run_ptx(getattr(linear_gpu, f"_HALVES_TO_{name}").value, operands)
        assert torch.equal(halves(registers, 0, dtype), (FOURS & 15).float() - zero)
        assert torch.equal(halves(registers, 2, dtype), (FOURS >> 4).float() - zero)


SHAPES = {
    "TinyLlama, output": ((2048, 2048), 1, 128),
    "TinyLlama, down": ((2048, 5632), 1, 128),
    "7B, queries, keys and values of one of 8 ranks": ((1536, 4096), 1, 96),
    "7B, output and down": ((4096, 11008), 1, 128),
    "65B, gate and up": ((44032, 8192), 1, 1376),
    "half of the multiprocessors idle": ((1024, 4096), 2, 128),
    "most of them idle": ((512, 4096), 4, 128),
    "a few outputs": ((100, 8192), 16, 112),
    "too short to split": ((128, 2048), 1, 8),
}
"""Outputs and inputs, splits, and blocks for up to 8 rows."""


@pytest.mark.parametrize(("shape", "num_splits", "num_blocks"), SHAPES.values(), ids=SHAPES)
def test_no_matrix_leaves_half_of_the_multiprocessors_idle_where_a_split_pays(
    shape: tuple[int, int], num_splits: int, num_blocks: int
) -> None:
    cut = tiles(5, *shape)
    assert (cut.grid[2], math.prod(cut.grid)) == (num_splits, num_blocks)


@grid(num_outputs=[16, 33, 128, 1000, 22016], num_inputs=[16, 511, 1500, 2048, 11008], num_rows=[1, 5, 9, 20, 64])
def test_blocks_cover_all_rows_outputs_and_inputs_and_none_is_empty(
    num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    cut = tiles(num_rows, num_outputs, num_inputs)
    assert cut.split_inputs % linear_gpu.STEP == 0
    sizes = (num_rows, cut.rows), (num_outputs, cut.outputs), (num_inputs, cut.split_inputs)
    for number, (size, of_a_block) in zip(cut.grid, sizes, strict=True):
        assert (number - 1) * of_a_block < size <= number * of_a_block


@grid(shape=[shape for shape, _, _ in SHAPES.values()], form=["int8", "int8, fp32", "halves", "int4"])
def test_the_inputs_of_a_sum_do_not_depend_on_the_number_of_rows(shape: tuple[int, int], form: str) -> None:
    """Verifying K + 1 tokens then gives the bits of decoding them one by one."""
    form, *wide = form.split(", ")
    cuts = [tiles(num_rows, *shape, form=form, value_bytes=4 if wide else 2) for num_rows in (*range(1, 65), 512)]
    assert len({cut._replace(rows=0, num_stages=0, grid=cut.grid[1:]) for cut in cuts}) == 1
