"""Computes our Triton kernels in Triton's interpreter, on the CPU, and holds them to torch's operators.

`TRITON_INTERPRET=1 python -m tests.extensions.gpu.interpreted_kernels PART...` fails unless the parts are right.
"""

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, product
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from unittest.mock import Mock, patch

import numpy
import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from triton.runtime import interpreter

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.extensions.gpu import attention as choice
from llama_ssp.extensions.gpu import latents as choice_of_latents
from llama_ssp.extensions.gpu import one_order, records
from llama_ssp.extensions.gpu import recurrence as choice_of_recurrence
from llama_ssp.extensions.gpu.kernels import attention as attention_gpu
from llama_ssp.extensions.gpu.kernels import between as between_gpu
from llama_ssp.extensions.gpu.kernels import draw as draw_gpu
from llama_ssp.extensions.gpu.kernels import equal_parts as equal_parts_gpu
from llama_ssp.extensions.gpu.kernels import latents as latents_gpu
from llama_ssp.extensions.gpu.kernels import linear as linear_gpu
from llama_ssp.extensions.gpu.kernels import recurrence as recurrence_gpu
from llama_ssp.extensions.gpu.kernels.draw import draw_in_blocks, draw_tokens, softmax
from llama_ssp.extensions.gpu.kernels.halves import product_of_halves
from llama_ssp.extensions.gpu.kernels.linear import choose, product_of_few_rows, unpack_bytes, unpack_codes
from llama_ssp.extensions.modules import recurrent
from llama_ssp.extensions.modules.experts import OwnExperts
from llama_ssp.kernels import attention_by_length as varlen
from llama_ssp.kernels import linear
from llama_ssp.kernels.attention_by_length import CHECKED, VarlenAttention
from llama_ssp.kernels.between import rotate_write
from llama_ssp.kernels.latents import by_torch
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm, Sequences, rows_of
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.states import StateCache
from llama_ssp.models.weights import Loading
from llama_ssp.registry.operators import OPERATORS
from llama_ssp.speculate.sampling import processors
from llama_ssp.weights.in_memory import weights_of
from tests.extensions.gpu.interpreter import quicken
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.few_rows import OPERANDS
from tests.helpers.four_bits import rounded
from tests.helpers.models import build_checkpoint, load_lean, tiny_model
from tests.helpers.varlen_attention import varlen_attention
from tests.unit.models.llama.test_decoder import KINDS, modules, random_ids

Result = TypeVar("Result")
CPU = torch.device("cpu")
DTYPE = torch.float16
"""The interpreter computes no products in bf16."""
INTERPRETER = Lock()

GENERATOR = torch.Generator().manual_seed(0)


KEPT = [rows_of(name, DTYPE) for name in ("auto", "int8", "fp8")]
"""Not bf16, which the interpreter cuts off rather than rounds."""


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(DTYPE)


def assert_near(found: Tensor, wanted: Tensor, *, tolerance: float = 0.01) -> None:
    assert found.shape == wanted.shape
    assert ((found - wanted).abs() <= tolerance * wanted.abs().max()).all()


def norm_of_a_gpu(norm: RmsNorm, weight_E: Tensor, eps: float) -> None:
    """The attributes of a norm on a GPU: kernels read its weight as it is stored."""
    norm.by_length, norm.weight_E, norm.eps = False, weight_E.detach(), eps
    norm.least_square = len(weight_E) * eps


def by_lengths(
    attend: VarlenAttention,
    heads: Heads,
    *,
    queries: Sequence[int],
    lengths: Sequence[int],
    window: int | None,
    kept: KeptRows | None = None,
) -> Tensor:
    """Attention of rows of so many queries and slots, which lie as in a cache; the same values for each call."""
    generator = torch.Generator().manual_seed(1)
    num_rows, num_slots = len(lengths), max(lengths) + 3

    def numbers(values: Iterable[int]) -> Tensor:
        return torch.tensor([*values], dtype=torch.int32)

    cache = torch.randn(2, heads.num_kv, num_rows * num_slots, heads.dim, generator=generator).to(DTYPE)
    tokens = torch.randn(num_rows, 8, heads.num, heads.dim, generator=generator).to(DTYPE)
    # The last queries of a row are the same, however many it has.
    own = torch.cat([row[8 - number :] for row, number in zip(tokens, queries, strict=True)])
    keys, values = (kept.pack(cache) if kept else cache).transpose(1, 2).unbind()
    first_slots = [*(row * num_slots for row in reversed(range(num_rows))), 0]
    first_queries = numbers(accumulate(queries, initial=0))
    sequences = Sequences(first_queries, numbers(first_slots), numbers(lengths), max(queries), num_slots)
    return attend(own, keys, values, sequences, scale=heads.scale, window=window)


def split_rows() -> None:
    """Rows of any length, with and without a window; the last query of a row gets the same bits alone.

    With few parts, those of longer rows have several steps.
    """
    for parts, (num, num_kv, dim), window in ((128, (1, 1, 16), None), (2, (6, 2, 24), 3), (4, (8, 1, 16), 40)):
        heads = Heads(num, num_kv, dim, dim**-0.5)
        with patch.object(attention_gpu, "most_parts", return_value=parts):
            for queries, lengths in (((1, 1, 1), (1, 17, 70)), ((5, 2, 5), (5, 16, 65))):
                found, wanted = (
                    by_lengths(attend, heads, queries=queries, lengths=lengths, window=window)
                    for attend in (attention_gpu.attend, varlen_attention)
                )
                assert_near(found, wanted, tolerance=2e-3)
            if window is None:
                one, five = (
                    by_lengths(attention_gpu.attend, heads, queries=(number,), lengths=(70,), window=None)
                    for number in (1, 5)
                )
                assert torch.equal(one[-1], five[-1])
    heads = Heads(6, 2, 24, 24**-0.5)
    for kept in KEPT:
        found, wanted = (
            by_lengths(attend, heads, queries=(5, 2), lengths=(65, 17), window=None, kept=kept)
            for attend in (partial(attention_gpu.attend, kept=kept), varlen.unpacking(varlen_attention, kept))
        )
        assert_near(found, wanted, tolerance=2e-3)


@contextmanager
def dots_in_order() -> Iterator[None]:
    """In the block the sums of `tl.dot` go from one input to the next: NumPy's order depends on the size of a tile."""

    def create_dot(_: object, a: Any, b: Any, d: Any, *_others: object) -> Any:
        left, right = (each.data.astype(numpy.float32) for each in (a, b))
        total = d.data.astype(numpy.float32)
        for place in range(left.shape[-1]):
            total = total + left[..., place, None] * right[..., place, None, :]
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


BOTH = [(1, 9), (2, 2), (7, 5), (16, 8)]
"""Rows and positions that are computed together."""


def own_bits_of_queries(
    heads: Heads,
    kept: KeptRows,
    *,
    attend: VarlenAttention = attention_gpu.attend,
    window: int | None = None,
    both: Sequence[tuple[int, int]] = BOTH,
    dtype: torch.dtype = DTYPE,
) -> None:
    """A query has the bits that it has alone, among up to 16 rows and 9 positions; ours where parts are of one step.

    Results in fp32 show every bit of a sum.
    """
    most_rows, most_queries, num_slots = 16, 9, 50
    lengths = [most_queries + 7 * row % 39 for row in range(most_rows)]  # with the last query
    packed = kept.pack(some(2, heads.num_kv, most_rows * num_slots, heads.dim))
    keys, values = (packed if kept.largest else packed.to(dtype)).transpose(1, 2).unbind()
    queries = some(most_rows, most_queries, heads.num, heads.dim).to(dtype)
    numbers = partial(torch.tensor, dtype=torch.int32)

    def attended(rows: Sequence[int], first: int, number: int) -> Tensor:
        own = torch.cat([queries[row, first : first + number] for row in rows])
        used = [lengths[row] - most_queries + first + number for row in rows]
        first_queries = numbers([place * number for place in range(len(rows) + 1)])
        first_slots = numbers([*(row * num_slots for row in rows), 0])
        sequences = Sequences(first_queries, first_slots, numbers(used), number, num_slots)
        how: Any = {"scale": heads.scale, "window": window, "kept": kept}
        found: Tensor = attend(own, keys, values, sequences, **how)
        return found.view(len(rows), number, heads.num, heads.dim)

    singles = torch.cat([attended([*range(most_rows)], at, 1) for at in range(most_queries)], 1)
    for row in (0, 5, 15):
        assert torch.equal(attended([row], 4, 1)[0], singles[row, 4:5])
    for num_rows, number in both:
        assert torch.equal(attended(range(num_rows), 0, number), singles[:num_rows, :number]), (num_rows, number)


def latents_of(
    lengths: Sequence[int], number: int, *, heads: int, widths: tuple[int, int], kept: KeptRows
) -> tuple[Any, ...]:
    """Queries of so many positions, both parts of rows as in a cache, and a causal mask; the same rows each time."""
    generator = torch.Generator().manual_seed(1)
    most, num_slots = 9, 70
    queries = torch.randn(16, heads, most, sum(widths), generator=generator)[: len(lengths), :, :number]
    packed = [kept.pack(torch.randn(16, num_slots, width, generator=generator).to(DTYPE)) for width in widths]
    rows = torch.cat(packed, -1)[: len(lengths)].split([part.shape[-1] for part in packed], -1)
    last = torch.tensor(lengths)[:, None] - most + torch.arange(number)
    mask = torch.zeros(len(lengths), 1, number, num_slots, dtype=DTYPE)
    mask.masked_fill_((torch.arange(num_slots) > last[..., None])[:, None], float("-inf"))
    return queries.to(DTYPE), *rows, mask, sum(widths) ** -0.5


def attention_to_latents() -> None:
    """Odd sizes, several parts and tiles, kept in any format; holes in masks, as of trees and windows; and own bits."""
    lengths = [9 + 13 * row % 61 for row in range(16)]
    sizes: list[tuple[int, tuple[int, int]]] = [(5, (22, 6)), (1, (16, 16)), (9, (40, 16))]
    with patch.object(latents_gpu, "LATENT_PARTS", (2, 16, 32)), dots_in_order():
        for (heads, widths), kept in product(sizes, KEPT):
            if kept.largest and widths[0] % 4:
                continue  # scales are whole words
            given = latents_of(lengths[:3], 5, heads=heads, widths=widths, kept=kept)
            given[3][0, :, 2:, 3:40] = given[3][1, :, :, :33] = float("-inf")
            given[3][..., -1] = 0
            wanted = by_torch(*(each.float() if each is given[0] else each for each in given), kept=kept)
            assert_near(latents_gpu.attend(*given, kept=kept).float(), wanted, tolerance=2e-3)
        attend = partial(latents_gpu.attend, kept=KEPT[0])
        case = partial(latents_of, heads=2, widths=(22, 6), kept=KEPT[0])
        whole = attend(*case(lengths, 9))
        for num_rows, number in ((1, 9), (2, 2), (7, 5), (16, 1), (1, 1)):
            found = attend(*case(lengths[:num_rows], number))
            assert torch.equal(found, whole[:num_rows, :, :number]), (num_rows, number)
        # Of two heads, four parts and 23 numbers in fp32: some rows at once, or some positions of one.
        for most in (20, 4):
            with patch.object(latents_gpu, "LATENT_SUMS_BYTES", 4 * 2 * 4 * 23 * most):
                assert torch.equal(attend(*case(lengths[:7], 9)), whole[:7]), most
        queries, latents, rotary, mask, scale = case(lengths[:1], 9)
        found = attend(queries, latents[:, :64], rotary[:, :64], mask[..., :64], scale)
        assert torch.equal(found, whole[:1]), "a row's bits do not depend on the slots behind it"


def wrong_latents_are_not_used() -> None:
    """The kernel is held to torch's operators for the model's heads, widths and rows."""
    right, how = latents_gpu.attend, {"device": CPU, "num_heads": 3, "rank": 24, "rotary": 8, "dtype": DTYPE}
    with patch.object(choice_of_latents, "_CHECKED_SLOTS", 80), patch.object(latents_gpu, "LATENT_PARTS", (2, 16, 32)):
        for wrong in (None, lambda *given, kept: right(*given, kept=kept) * 1.1):
            choice_of_latents.find_latents.cache_clear()
            with patch.object(latents_gpu, "attend", wrong or right):
                assert bool(choice_of_latents.find_latents(**how, kept=KEPT[1])) is (wrong is None)
    assert choice_of_latents.find_latents(**how | {"dtype": torch.float32}, kept=KEPT[1]) is None


def own_bits_of_rows() -> None:
    """A row of a product has the bits that it has alone, among up to 16; of 16 bits among 2 to 16."""
    sizes = {
        "int8": (33, 2100),
        "fp8": (33, 2176),
        "int4, 128": (20, 2176),
        "int4, 32": (33, 1056),
        "mxfp4": (33, 1056),
        "nvfp4": (20, 2080),
    }
    for form, (num_outputs, num_inputs) in sizes.items():
        operands, _ = OPERANDS[form](num_outputs, num_inputs)
        for dtype, num_processors in ((DTYPE, 1), (torch.float32, 132)):
            x = torch.randn(16, num_inputs, generator=GENERATOR).to(dtype)
            whole = product_on(num_processors, x, *operands)
            for number in range(1, 16) if dtype is DTYPE else (1, 8, 9):
                assert torch.equal(product_on(num_processors, x[:number], *operands), whole[:number]), (form, number)
    weight, x = some(18, 1104), some(16, 1104)
    whole = product_of_halves(x, weight)
    for number in range(2, 16):
        assert torch.equal(product_of_halves(x[:number], weight), whole[:number]), number


def own_bits() -> None:
    """Attention and products of each row, whatever others there are."""
    with dots_in_order():
        own_bits_of_rows()
        with patch.object(attention_gpu, "most_parts", return_value=8):
            own_bits_of_queries(Heads(2, 1, 24, 24**-0.5), KEPT[0])


def bits_of_all_rows() -> None:
    """A row of a product has the bits that it has alone, among 40, in every format; 16 bits from one row on.

    A residual takes the upper digits of a sum away, so that rounding to 16 bits hides none of it.
    """
    sizes = {"int8": 2100, "fp8": 2176, "int4, 128": 2176, "int4, 32": 1056, "mxfp4": 1056, "nvfp4": 2080}
    operands: dict[str, Sequence[Tensor]] = {form: OPERANDS[form](18, size)[0] for form, size in sizes.items()}
    operands["halves"], sizes["halves"] = [some(33, 2192)], 2192
    for (form, weights), num_processors in product(operands.items(), (1, 132)):  # the latter splits the inputs
        x = some(40, sizes[form]) / 64
        residual = -product_on(num_processors, x, *weights)
        whole = product_on(num_processors, x, *weights, residual_MO=residual)
        for number in range(1, 17) if form == "halves" else (1, 16, 33):
            found = product_on(num_processors, x[:number], *weights, residual_MO=residual[:number])
            assert torch.equal(found, whole[:number]), (form, number)


ALL = [*((rows, 1 + 5 * rows % 9) for rows in range(1, 17)), *((16, number) for number in range(1, 10))]
"""Each number of rows, and of positions."""
EQUAL_CASES: list[tuple[Heads, KeptRows, int | None]] = [
    (Heads(2, 1, 24, 24**-0.5), KEPT[0], None),
    (Heads(3, 1, 40, 40**-0.5), KEPT[0], 5),
    (Heads(3, 1, 16, 0.25), KEPT[1], 20),
    (Heads(2, 2, 16, 0.25), KEPT[2], None),
]


def bits_of_equal_parts() -> None:
    """A query has the bits that it has alone: borders of parts, several joins and launches, windows, kept formats."""
    with patch.object(equal_parts_gpu, "_JOINED", 2), patch.object(equal_parts_gpu, "EQUAL_PARTS_BYTES", 2**16):
        for number, (heads, kept, window) in enumerate(EQUAL_CASES):
            both = BOTH if number else ALL
            how: Any = {"attend": equal_parts_gpu.attend, "window": window, "both": both, "dtype": torch.float32}
            own_bits_of_queries(heads, kept, **how)
    for heads, kept, window in EQUAL_CASES[:3]:
        how = {"lengths": (70, 8, 33), "queries": (8, 2, 5), "window": window, "kept": kept}
        attend = partial(equal_parts_gpu.attend, kept=kept)
        wanted = by_lengths(varlen.unpacking(varlen_attention, kept), heads, **how)
        assert_near(by_lengths(attend, heads, **how), wanted, tolerance=2e-3)


def bits_of_prompts() -> None:
    """The tokens of a prompt, in groups of positions, have the bits that they have alone."""
    heads, length = Heads(6, 2, 16, 0.25), 75
    keys, values = some(2, length, heads.num_kv, heads.dim).float()
    queries, numbers = some(length, heads.num, heads.dim).float(), partial(torch.tensor, dtype=torch.int32)

    def attended(first: int, number: int, window: int | None) -> Tensor:
        sequences = Sequences(numbers([0, number]), numbers([0, 0]), numbers([first + number]), number, length + 90)
        how: Any = {"scale": heads.scale, "window": window}
        return equal_parts_gpu.attend(queries[first : first + number], keys, values, sequences, **how)

    for window in (None, 20):
        whole = attended(0, length, window)
        for first, number in ((0, 1), (9, 1), (16, 1), (31, 2), (33, 40), (length - 1, 1)):
            assert torch.equal(attended(first, number, window), whole[first : first + number]), (window, first)


def planted_splits_are_found() -> None:
    """Parts and inputs of a sum that depend on the number of positions, or rows."""

    def by_positions(*operands: Any, **how: Any) -> Tensor:
        slots = 32 if operands[3].most_queries > 4 else 16
        with patch.object(equal_parts_gpu, "equal_part_slots", return_value=slots):
            return equal_parts_gpu.attend(*operands, **how)

    with pytest.raises(AssertionError, match=r"\(7, 5\)"):
        own_bits_of_queries(*EQUAL_CASES[0][:2], attend=by_positions, both=[(2, 2), (7, 5)], dtype=torch.float32)
    tiles = linear_gpu.tiles_of

    def by_rows(*, num_rows: int, num_processors: int, **sizes: int) -> linear_gpu.Tiles:
        return tiles(num_rows=num_rows, num_processors=num_processors if num_rows > 8 else 1, **sizes)

    with patch.object(linear_gpu, "tiles_of", by_rows), pytest.raises(AssertionError):
        bits_of_all_rows()


def whole_model_of_equal_bits(kind: str, quantization: str = "none") -> None:
    """The logits of a model that `reproducible=true` loads have the bits of single positions, prompts too."""
    origin, precision = weights_of(modules(kind, DTYPE), what="model"), Precision(quantization=quantization)
    packed: Any = importlib.import_module("llama_ssp.extensions.eight_bits.linear")
    packed.few_rows_of, packed.compiled_for = (lambda *_: linear_gpu), (lambda *_: None)
    with operators_of_gpus(), patch.object(varlen, "_CHECKED_LENGTHS", (90, 80, 77)):
        loading = Loading(origin, device=CPU, reproducible=True, precision=precision)
        runner = LeanRunner(loading, kernel=linear.PlainLinear, varlen=varlen_attention)
    assert runner.is_invariant
    runner.allocate(batch_size=2, capacity=40)
    ids = random_ids(2, 30)

    def read(rows: Sequence[int], first: int, number: int) -> Tensor:
        places = (first + torch.arange(number)).expand(len(rows), -1).contiguous()
        of = torch.tensor([*rows])
        return runner.forward(ids[of].gather(1, places), places, bucket=40, cache_rows_B=of)

    alone = torch.cat([torch.cat([read([row], at, 1) for at in range(18)], 1) for row in range(2)])
    for rows, first, number in (([1, 0], 15, 3), ([1], 9, 9), ([0, 1], 0, 18)):
        assert torch.equal(read(rows, first, number), alone[rows, first : first + number]), (rows, number)
    prompts = Prompts(ids, torch.tensor([18, 13]), [18, 13], longest=18)
    found = read_prompts(runner, prompts, rows=[0, 1], buckets=Buckets(step=40, num_slots=40))
    assert torch.equal(found, torch.stack([alone[0, 17], alone[1, 12]]))


def equal_bits() -> None:
    """Everything that `reproducible=true` runs."""
    with dots_in_order():
        for each in (bits_of_all_rows, bits_of_equal_parts, planted_splits_are_found):
            each()


def prompts_of_equal_bits() -> None:
    """The part of `equal_bits` that takes seconds."""
    with dots_in_order():
        bits_of_prompts()


def models_of_equal_bits() -> None:
    """Plain and packed weights, and windows."""
    with dots_in_order(), patch.object(one_order, "_CHECKED_SLOTS", 60):
        whole_model_of_equal_bits("mistral, window")
        whole_model_of_equal_bits("llama", "int8_weight_only")


@contextmanager
def operators_of_gpus() -> Iterator[None]:
    """In the block a CPU has the operators of a GPU that are chosen when a model is built."""
    chosen = [records.BETWEEN, records.ATTENTION_BY_LENGTH, records.RECURRENCE, records.JOINED_EXPERTS]
    chosen.append(records.EQUAL_BITS)
    with patch.dict(OPERATORS.records):
        for record in chosen:
            OPERATORS.register(replace(record, device="cpu"))
        yield


def rotary_and_cache() -> None:
    """Rows at different positions, in order or in rows of their own, with and without norms of heads."""
    both = False, True
    cases = [*product((8, 12), both, both, KEPT[:1]), *product((12,), both[:1], both, KEPT[1:])]
    for head_dim, has_norms, in_order, kept in cases:
        num_heads, num_kv, num_slots = 6, 2, 10
        positions = torch.tensor([[3, 4], [0, 1], [8, 9]])
        rows = torch.tensor([[0], [1], [2]] if in_order else [[2], [0], [1]])
        slots = (rows * num_slots + positions).flatten()
        angles = torch.randn(num_slots, head_dim // 2, generator=GENERATOR)
        freqs = torch.polar(torch.full_like(angles, 1.5), angles)
        norms = [RmsNorm(some(head_dim), 1e-2) for _ in range(2 if has_norms else 0)]
        qkv, found = some(positions.numel(), num_heads + 2 * num_kv, head_dim), []
        turns = torch.view_as_real(freqs)
        by_kernel = partial(between_gpu.rotate_write, turns_SP2=turns, positions_BT=positions)
        for place in (
            partial(by_kernel, slots_M=None if in_order else slots),
            partial(rotate_write, freqs_cis_M1P=freqs[positions.flatten()][:, None], slots_M=slots),
        ):
            own, sizes = qkv.clone(), (2 * num_kv, len(rows) * num_slots, kept.width(head_dim))
            parts = torch.zeros(sizes, dtype=kept.stored_dtype)
            place(own, parts=parts, heads=Heads(num_heads, num_kv, head_dim, 1.0), norms=norms, kept=kept)
            found.append((own[:, :num_heads], kept.unpack(parts, torch.float32)))
        (ours, our_parts), (theirs, their_parts) = found
        assert_near(ours, theirs, tolerance=2e-3)
        assert_near(our_parts, their_parts, tolerance=0.08 if kept.largest else 2e-3)
        # Values are not turned, so that both round the same numbers; a turned key may be a step apart.
        assert torch.equal(our_parts[num_kv:], their_parts[num_kv:])


def wrong_kernels_are_not_used() -> None:
    """Each is held to torch's operators, and takes no other with it."""
    model = modules("qwen3", DTYPE)
    turn, normed, gate = between_gpu.rotate_write, between_gpu.add_norm, between_gpu.gated
    wrongs: dict[str, Any] = {
        "rotate_write": lambda qkv, *, turns_SP2, **options: turn(qkv, turns_SP2=-turns_SP2, **options),
        "add_norm": lambda *arguments, **options: normed(*arguments, **options) * 1.1,
        "gated": lambda gate_up: gate(gate_up) / 0,
    }
    for name, wrong in wrongs.items():
        right = getattr(between_gpu, name)
        setattr(between_gpu, name, wrong)
        runner = load_lean(model)
        with operators_of_gpus():
            runner._use_own_kernels()
        setattr(between_gpu, name, right)
        assert [each for each, kernel in vars(runner._own).items() if not kernel] == [name]


def choice_of_attention() -> None:
    """Ours is compared with a mask, and serves the queries of rounds."""
    theirs, right, none = Mock(), attention_gpu.attend, torch.empty(0)
    tried = partial(
        choice._with_ours,
        theirs,
        Heads(16, 1, 16, 0.25),
        device=CPU,
        dtype=DTYPE,
        has_windows=True,
        kept=KeptRows(DTYPE),
    )
    with patch.object(attention_gpu, "attend", side_effect=right) as ours:
        chosen = tried()
        ours.side_effect = None
        for most_queries in (1, 4, 5):
            ours.reset_mock()
            chosen(none, none, none, Sequences(none, none, none, most_queries, 50))
            assert ours.called == (most_queries < 5) != theirs.called, most_queries
        ours.side_effect = lambda *arguments, **options: right(*arguments, **options) * 1.2
        with pytest.raises(RuntimeError, match="split attention gives wrong values in row 0 where rows have 1 queries"):
            tried()


def on_gpu(runner: LeanRunner) -> LeanRunner:
    """The same runner as on a GPU."""
    with operators_of_gpus():
        runner._use_own_kernels()
    assert runner.is_fused
    return runner


def rounds(runner: LeanRunner) -> list[Tensor]:
    """A prompt for each row, ragged rounds, of which one scores some tokens, and prompts of two lengths."""
    runner.allocate(batch_size=2, capacity=40)
    ids = random_ids(2, 30)
    starts = torch.tensor([[4], [11]])
    prompts = Prompts(ids, torch.tensor([12, 9]), [12, 9], longest=12)
    return [
        runner.forward(ids[:, :12], torch.arange(12).expand(2, -1), bucket=40, cache_rows_B=torch.tensor([1, 0])),
        runner.forward(ids.gather(1, starts + torch.arange(3)), starts + torch.arange(3), bucket=40),
        runner.forward(ids[:, :2], starts + torch.arange(2), bucket=40, score_positions_BR=torch.tensor([[1], [0]])),
        runner.forward(ids[:, 12:13], starts + 1, bucket=40),
        read_prompts(runner, prompts, rows=[1, 0], buckets=Buckets(step=40, num_slots=40)),
    ]


def residual_and_norm() -> None:
    x, added, weight = some(3, 100), some(3, 100), some(100)
    wanted = x + added
    found = between_gpu.add_norm(x, added, weight, 1e-2)
    assert torch.equal(x, wanted)
    for each in (found, between_gpu.add_norm(x, None, weight, 1e-2)):
        assert_near(each, functional.rms_norm(wanted.float(), (100,), weight.float(), 1e-2).to(DTYPE), tolerance=2e-3)
    of_tokens = between_gpu.add_norm(torch.empty_like(x), wanted, weight, 1e-2, ids_M=torch.tensor([2, 0, 2]))
    assert torch.equal(of_tokens, between_gpu.add_norm(x, None, weight, 1e-2)[[2, 0, 2]])


def gate() -> None:
    gate_up = some(3, 2200) * 5
    wanted = functional.silu(gate_up[:, :1100]) * gate_up[:, 1100:]
    assert_near(between_gpu.gated(gate_up), wanted, tolerance=2e-3)


def whole_model(
    kind: str,
    attend: VarlenAttention | None = varlen_attention,
    *,
    precision: Precision = UNQUANTIZED,
    tolerance: float = 0.02,
) -> None:
    """Forwards of 40 tokens, then of few, by lengths or by masks, next to torch's operators by masks."""
    by_operators, runner = (
        load_lean(modules(kind, DTYPE), precision=precision, varlen=varlen) for varlen in (None, attend)
    )
    wanted = rounds(by_operators)
    with patch.object(functional, "embedding", side_effect=AssertionError("the norm looks tokens up")):
        found = rounds(on_gpu(runner))
    for ours, theirs in zip(found, wanted, strict=True):
        assert_near(ours, theirs, tolerance=tolerance)


def several_ranks() -> None:
    """The sum of the ranks waits in the stream for the next product; uneven heads, and biases after the sum."""
    family, changes = KINDS["llama, biases"]
    comms = thread_comms(3)
    with tempfile.TemporaryDirectory() as name:
        model = build_checkpoint(Path(name), family, dtype=DTYPE, **changes)
        model.config._attn_implementation = "sdpa"
        runners = [on_gpu(load_lean(Path(name), comm=comm, varlen=varlen_attention)) for comm in comms]
    wanted = rounds(load_lean(model))
    for found in on_ranks(comms, lambda comm: rounds(runners[comm.rank])):
        for ours, theirs in zip(found, wanted, strict=True):
            assert_near(ours, theirs, tolerance=0.02)


def one_at_a_time(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """Triton interprets on one thread only."""

    def launch(*arguments: object, **options: object) -> Result:
        with INTERPRETER:
            return kernel(*arguments, **options)

    return launch


def softmax_of_parts(parts: Sequence[torch.Tensor], *, scale: float) -> torch.Tensor:
    stats: list[torch.Tensor] = []

    def kept(own: torch.Tensor, *, tokens: int) -> torch.Tensor:
        assert tokens >= parts[0].shape[1] / own.shape[2]
        stats.append(own)
        return own

    for part in parts:
        softmax(part, scale=scale, join=kept)
    joined = torch.cat(stats, dim=-1)
    return torch.cat([softmax(part, scale=scale, join=lambda _own, **_: joined) for part in parts], dim=1)


def draws() -> None:
    """The same ids as torch's operators draw, for every size of a vocabulary, and for weights that vanish."""
    for vocab_size in (3, 1001):
        weights = (4 * torch.randn(4, vocab_size, generator=GENERATOR)).softmax(-1)
        weights *= torch.rand(4, vocab_size, generator=GENERATOR) < 0.5
        weights[:, -1] += 1e-9
        uniforms = torch.rand(4, 3, 2, generator=GENERATOR, dtype=torch.float64)[:, 1]
        uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
        size = tokens_of_a_block(vocab_size)
        wanted = processors.draw(weights, uniforms)
        assert torch.equal(draw_tokens(weights, uniforms, processors.DRAW_UNITS, size), wanted)
        blocks = draw_in_blocks(weights, uniforms, processors.DRAW_UNITS, size)
        assert torch.equal(processors.token_of_blocks(blocks, uniforms), wanted)
        units = weights * processors.DRAW_UNITS
        assert torch.equal(draw_tokens(units, uniforms, 1.0, size), wanted)
        logits = torch.randn(4, vocab_size, generator=GENERATOR).mul_(9).to(torch.float16)
        logits[2, : vocab_size // 2] = float("-inf")
        logits[3] = float("-inf")
        logits[3, -1] = 5.0
        with patch.object(draw_gpu, "SOFTMAX_TOKENS", size):
            found = softmax(logits, scale=1 / 0.7)
            first = [2 * size, vocab_size - 2 * size] if vocab_size > 3 else [2, 1]
            assert torch.equal(softmax_of_parts(logits.split(first, dim=1), scale=1 / 0.7), found)
        torch.testing.assert_close(found, (logits.float() * (1 / 0.7)).softmax(-1), rtol=3e-6, atol=0)
    for number in ("nan", "inf"):
        logits = torch.zeros(2, 100)
        logits[0, 3] = float(number)
        assert softmax(logits, scale=2.0).isnan().all(1).tolist() == [True, False]
    nothing = torch.full((2, 100), float("nan"))
    ids = draw_tokens(nothing, uniforms[:2], processors.DRAW_UNITS, 8)
    assert ((ids >= 0) & (ids < 100)).all()


def dot_of_bf16() -> None:
    """Teach the interpreter, which keeps bf16 as its bits, to multiply them."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *others: create_dot(
        self, widened(a), widened(b), *others
    )


def product_on(num_processors: int, *operands: Tensor, **options: Any) -> Tensor:
    """The product on a GPU with so many multiprocessors."""
    with patch.object(linear_gpu, "_num_processors", return_value=num_processors):
        return product_of_few_rows(*operands, **options)


def few_rows() -> None:
    """Borders of all kinds, tiles of all sizes, splits. Sums are exact, so that the order of the sums does not show."""
    borders = [
        ("int8", 33, 80),
        *((form, 33, 128) for form in ("int4, 128", "fp8")),
        *((form, 33, 96) for form in ("mxfp4", "nvfp4")),
    ]
    splits = [
        ("int8", 20, 2100),
        *((form, 20, 2176) for form in ("int4, 128", "fp8")),
        *((form, 20, 2080) for form in ("int4, 32", "mxfp4", "nvfp4")),
    ]
    of_dtypes = product((torch.float32, torch.bfloat16), splits)
    for dtype, (form, num_outputs, num_inputs) in chain(
        product([DTYPE], [*borders, *splits, ("int4, 64", 20, 2112)]), of_dtypes
    ):
        operands, numbers = OPERANDS[form](num_outputs, num_inputs)
        x = (torch.randint(-8, 9, (40, num_inputs)) / 8).to(dtype)
        wanted = x.double() @ numbers.t()
        cut = ((1, 1), (9, 1), (40, 1), (5, 132))
        for num_rows, num_processors in cut if dtype is torch.float16 else cut[1::2]:
            y = product_on(num_processors, x[:num_rows], *operands)
            if dtype is torch.bfloat16:  # which the interpreter cuts off rather than rounds
                assert ((y - wanted[:num_rows]).abs() <= wanted[:num_rows].abs() / 128).all()
            else:
                assert torch.equal(y, wanted[:num_rows].to(dtype)), (dtype, form, num_inputs, num_rows)
    for form in ("int8", "int4, 128", "nvfp4"):
        operands, numbers = OPERANDS[form](16, 2176)
        x, bias, residual = (torch.randint(-8, 9, shape).to(torch.float16) for shape in ((3, 2176), (16,), (3, 16)))
        wanted = (x.double() @ numbers.t() + bias.double() + residual.double()).half()
        for num_processors in (1, 132):
            y = product_on(num_processors, x, *operands, bias_O=bias, residual_MO=residual)
            assert torch.equal(y, wanted)
        operands, numbers = OPERANDS[form](40, 768)
        x = torch.randn(3, 768)
        wanted = x.double() @ numbers.t()
        y = product_on(1, x, *operands)
        assert (y - wanted).abs().max() < 1e-6 * wanted.abs().max(), "fp32 inputs lost digits"


def unpacked_weights() -> None:
    """Some outputs of a matrix, whole groups of inputs and less."""
    for form, dtype, num_outputs, num_inputs in (
        ("int4, 128", torch.float16, 5, 128),
        ("int4, 128", torch.float32, 9, 17 * 128),
        ("int4, 32", torch.float16, 5, 1056),
        ("mxfp4", torch.float16, 5, 1056),
        ("nvfp4", torch.float32, 9, 96),
    ):
        (codes, words, *scales), numbers = OPERANDS[form](num_outputs, num_inputs)
        found = torch.empty(num_outputs - 2, num_inputs, dtype=dtype)
        unpack_codes(codes[2:], words[:, 2:], found, *(each[2:] for each in scales))
        assert torch.equal(found, numbers[2:].to(dtype))
    (weights, scales_O), numbers = OPERANDS["int8"](20, 5000)
    found = torch.empty(18, 5000, dtype=torch.float16)
    unpack_bytes(weights[2:], scales_O[2:], found)
    assert torch.equal(found, numbers[2:].half())


def halves() -> None:
    """Exact sums for borders of all kinds, and a row's own bits whatever other rows are there, in both kernels."""
    for dtype, num_outputs, num_inputs in ((torch.float16, 18, 1104), (torch.bfloat16, 9, 80)):
        weight, x = ((torch.randint(-8, 9, (size, num_inputs)) / 8).to(dtype) for size in (num_outputs, 16))
        bias, residual = (torch.randint(-8, 9, shape).to(dtype) for shape in ((num_outputs,), (16, num_outputs)))
        wanted = x.double() @ weight.double().t() + bias.double() + residual.double()
        for num_rows in (1, 2, 16):
            y = product_of_halves(x[:num_rows], weight, bias_O=bias, residual_MO=residual[:num_rows])
            # The interpreter cuts bf16 off rather than rounds.
            allowed = wanted[:num_rows].abs() * (2.0**-7 if dtype is torch.bfloat16 else 2.0**-11)
            assert ((y - wanted[:num_rows]).abs() <= allowed).all(), (dtype, num_outputs, num_inputs, num_rows)
    weight, x = some(16, 592), some(16, 592)
    alone, together = product_of_halves(x[:2], weight), product_of_halves(x, weight)
    assert torch.equal(alone, together[:2])


def experts() -> None:
    """Experts with one pair, with several blocks, with none, and of other ranks; sums are exact."""
    num_experts, num_outputs = 5, 20
    for form, num_inputs in (
        ("int8", 2100),
        ("fp8", 384),
        ("int4, 128", 2176),
        ("int4, 32", 160),
        ("mxfp4", 96),
        ("nvfp4", 2080),
    ):
        operands, numbers = OPERANDS[form](num_experts * num_outputs, num_inputs)
        weights, bias = numbers.unflatten(0, (num_experts, -1)), torch.randint(-8, 9, (num_experts * num_outputs,))
        for num_tokens, num_processors in ((1, 1), (40, 264)):
            scores = torch.rand(num_tokens, num_experts + 1)
            scores[:, 3], scores[:, 0] = -1.0, 2.0  # of the five one is never chosen, and one always
            ids = scores.topk(2).indices
            chosen = choose(ids, num_experts, value_bytes=DTYPE.itemsize)
            x = (torch.randint(-8, 9, (num_tokens, num_inputs)) / 8).to(DTYPE)
            y = product_on(num_processors, x, *operands, bias_O=bias.to(DTYPE), chosen=chosen)
            of_each = torch.einsum("mi,xoi->mxo", x.double(), weights) + bias.view(num_experts, -1)
            of_each = functional.pad(of_each, (0, 0, 0, 1))
            assert torch.equal(y, of_each.gather(1, ids[..., None].expand(-1, -1, num_outputs)).flatten(0, 1).to(DTYPE))


def modules_of_experts() -> None:
    """Experts of a module, joined, and one by one from their views of the same weights; the last id is elsewhere."""
    config: Any = MixtralConfig(hidden_size=64, intermediate_size=160, num_local_experts=3)
    x, ids, weights = some(4, 64), torch.tensor([[0, 2], [2, 3], [3, 0], [2, 0]]), some(4, 2)
    for extension in ("eight_bits", "four_bits"):
        own_kernels: Any = importlib.import_module(f"llama_ssp.extensions.{extension}.linear")
        own_kernels.few_rows_of, own_kernels.compiled_for = (lambda *_: linear_gpu), (lambda *_: None)
    for kind in ("int8_weight_only", "int4_weight_only", "mxfp4"):
        module: Any = MixtralExperts(config).to(DTYPE)
        for name, parameter in module.named_parameters():
            parameter.data = some(*parameter.shape) / (8 if name == "down_proj" else 4)
        kernel = Precision(quantization=kind).kernel
        assert kernel
        packing = (lambda w, b, make=kernel: make(rounded("mxfp4", w), b)) if kind == "mxfp4" else kernel
        with operators_of_gpus():
            own = OwnExperts(module, packing)
        assert own._of_few, kind
        found = own(x, ids, weights)
        own._of_few = None
        assert_near(found, own(x, ids, weights), tolerance=2e-3)


def of_each_row(x: Tensor, weight: Tensor, _bias: Tensor | None = None) -> Tensor:
    """A linear layer whose bits do not depend on the number of rows."""
    return (x[..., None, :] * weight).sum(-1)


RECURRENT: dict[str, dict[str, int]] = {
    "qwen3_next, dense": {"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    "kimi_linear, dense": {"linear_num_heads": 2},
    "falcon_h1": {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_n_groups": 1},
}


def recurrent_layers() -> None:
    """Each kind of recurrence and of layout, with states, inputs and the bits of a row and of a token alone."""
    for kind, heads in RECURRENT.items():
        model = tiny_model(kind, **heads)
        recurrent.adapt(model)
        mixer: Any = next(recurrent.mixers_of(model))
        layer, width = recurrent.state_of(mixer), model.config.hidden_size
        like = recurrent.convolution_of(mixer).weight
        right = choice_of_recurrence._tried(mixer, width, recurrent.mix_of(mixer), layer, like)
        x_BTE = torch.randn(2, 3, width, generator=GENERATOR)
        found: dict[str, list[Tensor]] = {}
        for name, batch_size, num_tokens in (("all", 2, 3), ("a row", 1, 3), ("a token", 2, 1), ("operators", 2, 3)):
            mixer.own_kernels = None if name == "operators" else right
            cache = StateCache([layer], batch_size=batch_size, num_kept=3, dtype=torch.float32)
            outputs = []
            for x, positions in zip(x_BTE.split(num_tokens, 1), torch.arange(3).split(num_tokens), strict=True):
                view = cache.view(positions.expand(batch_size, -1), taken_B=None, cache_rows_B=None)
                with patch.object(functional, "linear", of_each_row):
                    outputs.append(recurrent.mix_of(mixer)(mixer, x[:batch_size], view))
            rings = [ring.unflatten(0, (batch_size, -1)) for ring in (*cache.inputs.values(), *cache.states.values())]
            found[name] = [torch.cat(outputs, 1), *rings]
        for *own, wanted in zip(*(found[name] for name in ("all", "a row", "a token", "operators")), strict=True):
            assert torch.equal(own[0][:1], own[1]), kind
            assert torch.equal(own[0], own[2]), kind
            assert ((own[0] - wanted).abs() <= 1e-5 * wanted.abs().max()).all(), kind


def wrong_recurrence_is_not_used() -> None:
    """It is held to torch's operators at load."""
    model = tiny_model("qwen3_next, dense", **RECURRENT["qwen3_next, dense"])
    right, wrong = recurrence_gpu.recur, lambda *places, **options: -right(*places, **options)
    for kernel in (right, wrong):
        vars(recurrence_gpu)["recur"] = kernel
        with operators_of_gpus():
            recurrent.use_own_kernels(model, CPU)
        assert bool(next(recurrent.mixers_of(model)).own_kernels) is (kernel is right)
    vars(recurrence_gpu)["recur"] = right


def check(*parts: str) -> None:
    quicken()
    dot_of_bf16()
    linear_gpu._num_processors = cache(lambda _: 132)
    linear.can_pack = cache(lambda _: False)  # plain weights, as on a GPU: some CPUs pack 16 bits
    patch.object(RmsNorm, "__init__", norm_of_a_gpu).start()
    for name in ("rotate_write", "add_norm", "gated"):
        setattr(between_gpu, name, one_at_a_time(getattr(between_gpu, name)))
    attention_gpu.attend = one_at_a_time(attention_gpu.attend)
    vars(varlen)["_CHECKED_LENGTHS"] = 300, 100, 77
    if "operators" not in parts:  # models here have rows of a few slots
        vars(varlen)["_CHECKED_LENGTHS"] = 70, 20, 7
        vars(varlen)["CHECKED"] = CHECKED[:-1]
    for each in chain.from_iterable(PARTS[part] for part in parts):
        each()


PARTS: dict[str, Sequence[Callable[[], None]]] = {
    "operators": [
        rotary_and_cache,
        residual_and_norm,
        gate,
        split_rows,
        choice_of_attention,
        wrong_kernels_are_not_used,
        draws,
        few_rows,
        unpacked_weights,
        halves,
        experts,
        modules_of_experts,
    ],
    "own bits": [own_bits],
    "latents": [attention_to_latents, wrong_latents_are_not_used],
    "equal bits": [equal_bits],
    "prompts of equal bits": [prompts_of_equal_bits],
    "models of equal bits": [models_of_equal_bits],
    "recurrent layers": [recurrent_layers, wrong_recurrence_is_not_used],
    "several ranks": [several_ranks],
    "llama, no groups": [partial(whole_model, "llama, no groups")],
    "mistral, window": [partial(whole_model, "mistral, window")],
    "qwen3": [partial(whole_model, "qwen3")],
    "qwen3 by masks": [partial(whole_model, "qwen3", None)],
    "quantized weights": [partial(whole_model, "llama", precision=Precision(quantization="int8_weight_only"))],
    "quantized cache": [partial(whole_model, "llama", precision=Precision(cache_dtype="int8"), tolerance=0.05)],
}


if __name__ == "__main__":
    check(*sys.argv[1:])
