"""Kernels at true shapes, each held to fp64 and timed: `python -m benchmarks.first_hour.kernels NAME`.

On a CPU torch's operators are checked in the same way, at tiny shapes. Times are those of CUDA graphs over several
copies of what is read, which no cache holds.

Shapes: R rows, T positions of each, Q = R * T queries, H query heads, N key-value heads, D head dim, S slots of all
rows, M = Q tokens, I inputs, O outputs, E embedding width, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.first_hour.step import Check, Where, main, say, skip
from llama_ssp.architectures.engine import FIRST_CAPABILITY_BY_LENGTH
from llama_ssp.extensions.eight_bits.linear import int8_weight_only_linear
from llama_ssp.extensions.four_bits.linear import int4_weight_only_linear
from llama_ssp.kernels.attention_by_length import VarlenAttention, capability_of, flash_attention
from llama_ssp.kernels.between import rotate_write
from llama_ssp.kernels.latents import by_torch as latents_by_torch
from llama_ssp.kernels.latents import find_attention as find_latents
from llama_ssp.kernels.linear import Linear, PlainLinear
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm, Sequences
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.engine.executors import Recorder
from llama_ssp.speculate.sampling.rules import make_rule

EPS, TOP_P = 1e-6, 0.9
MOST = {torch.float16: 0.005, torch.bfloat16: 0.02, torch.float32: 1e-4}
"""The largest error, of the largest value."""
MOST_Z = 6.0
"""Standard errors: a right kernel exceeds them in one of 10^8 frequencies."""
SPARE_SLOTS = 40
"""Of a row, beyond those in use."""
LEAST_LAUNCHES = 200
"""Between two waits for a GPU, each of which takes as long as some kernels."""
MATRICES = {
    "7B qkv": (12288, 4096),
    "7B output": (4096, 4096),
    "7B gate and up": (22016, 4096),
    "7B down": (4096, 11008),
    "30B qkv": (19968, 6656),
    "30B down": (6656, 17920),
    "65B output of 8 ranks": (8192, 1024),
    "head": (32000, 4096),
}
SMALL_MATRICES = {"tiny": (96, 256)}


def judge(
    name: str, pieces: Sequence[Callable[[], Tensor]], wanted: Tensor, where: Where, *, num_bytes: int = 0
) -> Iterator[str]:
    """Say the time of pieces of one kind and the first one's error; a fault if that is too large."""
    say(doing=name)
    try:
        found, seconds = timed(pieces, where)
    except RuntimeError as problem:
        yield f"{name}: {str(problem).strip().partition(chr(10))[0]}"
        return
    error = float((found.double() - wanted).abs().max() / wanted.abs().max())
    say(case=name, error=error, us=1e6 * seconds, gb_per_s=num_bytes / seconds / 1e9)
    if not error <= MOST[found.dtype]:  # NaN is a fault too
        yield f"{name}: off by {error:.2g} of the largest value, at most {MOST[found.dtype]:g}"


def timed(pieces: Sequence[Callable[[], Tensor]], where: Where) -> tuple[Tensor, float]:
    """What the first of several pieces gives, and the least seconds of one; on a GPU as graphs, one after another."""

    def run() -> Tensor:
        first, *_ = [piece() for piece in pieces]
        return first

    if not where.is_gpu:
        started = time.perf_counter()
        return run(), (time.perf_counter() - started) / len(pieces)
    run()
    found, again = Recorder().record(run)
    num_turns = max(LEAST_LAUNCHES // len(pieces), 1)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_turns):
            again()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    assert isinstance(found, Tensor)
    return found, min(seconds) / len(pieces) / num_turns


def copies(num_bytes: int, where: Where) -> int:
    """How many copies of an operand no cache holds."""
    return max(1, min(64, 2**28 // num_bytes)) if where.is_gpu else 1


def in_fp64(dtype: torch.dtype | None = torch.float64) -> VarlenAttention:
    """Attention by torch's operators, row by row: in fp64, what others are held to; None computes in that of inputs."""

    def attend(
        queries_QHD: Tensor,
        keys_SND: Tensor,
        values_SND: Tensor,
        sequences: Sequences,
        *,
        scale: float,
        window: None,  # noqa: ARG001
    ) -> Tensor:
        found: list[Tensor] = []
        num = sequences.most_queries
        first_slots, lengths = sequences.first_slot_C1[:-1].tolist(), sequences.used_C.tolist()
        for row, (first, used) in enumerate(zip(first_slots, lengths, strict=True)):
            own = queries_QHD[num * row : num * (row + 1)].transpose(0, 1).to(dtype or queries_QHD.dtype)
            keys, values = (rows[first : first + used].transpose(0, 1).to(own) for rows in (keys_SND, values_SND))
            seen = torch.ones(num, used, dtype=torch.bool, device=own.device).tril(used - num)
            out = functional.scaled_dot_product_attention(
                own[None], keys[None], values[None], attn_mask=seen, enable_gqa=True, scale=scale
            )
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)

    return attend


def attention(attend: VarlenAttention, where: Where, *, most_queries: float = math.inf) -> Iterator[str]:
    """Hold an attention to fp64: short and long rows, one position, K + 1, and prompts.

    Each query's own key has a large share, and slots behind a row hold large numbers, so that neither can be missed.
    `most_queries` is of a key-value head in a row.
    """
    heads, num_slots = (((4, 4), (4, 2)), 512) if where.is_small else (((32, 32), (32, 8)), 2048)
    all_positions, dims = ((1, 5), (32,)) if where.is_small else ((1, 2, 5, 512), (32, 64, 128))
    for num_rows, num, (num_heads, num_kv), dim in product(
        (1, 3) if where.is_small else (1, 3, 32), all_positions, heads, dims
    ):
        if num * num_heads // num_kv > most_queries:
            continue
        for first in (0, 1) if num_rows == 1 else (0,):
            used = [(num_slots, num + 3, num_slots // 2 + 1)[(first + row) % 3] for row in range(num_rows)]
            name = f"{num_rows} rows of {max(used)} slots, {num} positions, {num_heads} over {num_kv} heads of {dim}"
            yield from _one_attention(attend, where, name, used, num, Heads(num_heads, num_kv, dim, dim**-0.5))


def _one_attention(  # noqa: PLR0917 - as they are used
    attend: VarlenAttention, where: Where, name: str, used: Sequence[int], num: int, heads: Heads
) -> Iterator[str]:
    """Hold rows of these lengths to fp64, `num` queries each."""
    num_heads, num_kv, dim, scale = heads
    dtype = torch.float16 if where.is_gpu else torch.float32
    num_rows, num_slots = len(used), max(used) + SPARE_SLOTS
    generator = torch.Generator(where.device).manual_seed(0)
    some = partial(torch.randn, generator=generator, device=where.device, dtype=dtype)
    queries = some(num_rows * num, num_heads, dim)
    num_bytes = sum(used) * num_kv * dim * 2 * dtype.itemsize
    # Heads come first in memory, as in the cache.
    pools = some(2, copies(num_bytes, where), num_kv, num_rows * num_slots, dim).transpose(2, 3)
    first_slots = [row * num_slots for row in reversed(range(num_rows))]
    for row, (first, length) in enumerate(zip(first_slots, used, strict=True)):
        own = queries[row * num : (row + 1) * num, :: num_heads // num_kv]
        pools[0, :, first + length - num : first + length] = own
        unused = slice(first + length, first + num_slots)
        pools[0, :, unused], pools[1, :, unused] = 30, 1000

    def numbers(*found: int) -> Tensor:
        return torch.tensor(found, dtype=torch.int32, device=where.device)

    first_queries = numbers(*range(0, (num_rows + 1) * num, num))
    sequences = Sequences(first_queries, numbers(*first_slots, 0), numbers(*used), num, num_slots)
    pieces = [partial(attend, queries, *each, sequences, scale=scale, window=None) for each in zip(*pools, strict=True)]
    wanted = in_fp64()(*pieces[0].args, **pieces[0].keywords)
    yield from judge(name, pieces, wanted, where, num_bytes=num_bytes)


def _ours(where: Where) -> Iterable[str]:
    if not where.is_gpu:
        skip("our attention is for GPUs")
    from llama_ssp.extensions.gpu.kernels.attention import MOST_ROWS, attend

    return attention(attend, where, most_queries=MOST_ROWS)


def _torch_s(where: Where) -> Iterable[str]:
    """Torch's flash attention, which reads prompts."""
    if where.is_gpu and capability_of(where.device) < FIRST_CAPABILITY_BY_LENGTH:
        skip("torch's flash attention is for newer GPUs")
    return attention(flash_attention if where.is_gpu else in_fp64(None), where)


def latents(where: Where) -> Iterator[str]:
    """Attention to latents by the device's operator, or torch's: rounds of rows of some lengths, as of DeepSeek V3."""
    dtype = torch.float16 if where.is_gpu else torch.float32
    rank, rotary, num_heads = (64, 16, 4) if where.is_small else (512, 64, 16)
    width, exact = rank + rotary, KeptRows(torch.float64)
    sizes = {"num_heads": num_heads, "rank": rank, "rotary": rotary}
    attend = find_latents(where.device, **sizes, kept=KeptRows(dtype), dtype=dtype)
    all_rows, all_slots = ((1, 3), (200,)) if where.is_small else ((1, 8, 32), (1024, 8192))
    for num_rows, num, num_slots in product(all_rows, (1, 5), all_slots):
        num_bytes = num_rows * num_slots * width * dtype.itemsize
        pools = _some(copies(num_bytes, where), num_rows, num_slots, width, like=(where, dtype))
        queries = _some(num_rows, num_heads, num, width, like=(where, dtype))
        ends = torch.tensor([num_slots // (1 + row % 3) for row in range(num_rows)], device=where.device)
        last = ends[:, None] - torch.arange(num, 0, -1, device=where.device)
        mask = torch.zeros(num_rows, 1, num, num_slots, dtype=dtype, device=where.device)
        hidden = torch.arange(num_slots, device=where.device) > last[..., None]
        mask.masked_fill_(hidden[:, None], float("-inf"))
        parts, scale = [pool.split((rank, rotary), -1) for pool in pools], 4 * width**0.5
        latents_BSR, rotary_BSP = (part.double() for part in parts[0])
        wanted = latents_by_torch(queries.double(), latents_BSR, rotary_BSP, mask.double(), scale, kept=exact)
        pieces = [partial(attend, queries, *each, mask, scale) for each in parts]
        name = f"{num_rows} rows of {num_slots} slots, {num} positions"
        yield from judge(name, pieces, wanted, where, num_bytes=num_bytes)


def products(
    where: Where,
    *,
    kind: Callable[[Tensor, None], Linear],
    bits: int,
    all_rows: Sequence[int] = (1, 5, 32, 64, 128, 512),
) -> Iterator[str]:
    """Products of weights that 4 or 8 bits hold exactly, for the rows of rounds and prompts."""
    dtype = torch.float16 if where.is_gpu else torch.float32
    for name, (outputs, inputs) in (SMALL_MATRICES if where.is_small else MATRICES).items():
        (least, most), num_bytes = (-8, 7) if bits == 4 else (-127, 127), outputs * inputs * bits // 8
        weight = torch.randint(least, most + 1, (outputs, inputs), device=where.device)
        weight[:, ::128], weight[:, 1::128] = least, most
        weight = (weight / 1024).to(dtype)
        layers = [kind(weight.clone(), None) for _ in range(copies(num_bytes, where))]
        for rows in all_rows:
            x = _some(rows, inputs, like=(where, dtype))
            pieces, wanted = [partial(layer, x) for layer in layers], x.double() @ weight.double().t()
            yield from judge(f"{name}, {rows} rows", pieces, wanted, where, num_bytes=num_bytes)


def _own_products(where: Where) -> Iterable[str]:
    """Ours of 16-bit weights for up to 16 rows, also where `find_halves` leaves them to cuBLAS."""
    if not where.is_gpu:
        skip("our products of 16-bit weights are for GPUs")
    from llama_ssp.extensions.gpu.kernels.halves import product_of_halves
    from llama_ssp.extensions.gpu.linear import HalvesLinear

    ours = partial(HalvesLinear, few_rows=product_of_halves, most_rows=16)
    return products(where, kind=ours, bits=16, all_rows=(1, 2, 5, 8, 16))


def rotary(where: Where) -> Iterator[str]:
    """The rotation of queries and keys with the write to the cache, for rows in order and for chosen ones."""
    dtype = torch.float16 if where.is_gpu else torch.float32
    for num_rows, num, (num_heads, num_kv), dim in product((1, 3), (1, 5), ((32, 32), (32, 8)), (64, 128)):
        positions = (
            torch.arange(num, device=where.device) + 7 * torch.arange(1, num_rows + 1, device=where.device)[:, None]
        )
        slots = (positions + 64 * torch.arange(num_rows, device=where.device)[:, None]).flatten()
        angles = torch.rand(64, dim // 2, device=where.device) * 6
        freqs_SP = torch.polar(torch.ones_like(angles), angles)
        qkv = _some(num_rows * num, num_heads + 2 * num_kv, dim, like=(where, dtype))
        parts = qkv.new_zeros(2 * num_kv, 64 * num_rows, dim)
        turns = freqs_SP[positions.flatten()][:, None]
        pairs = torch.view_as_complex(qkv[:, :-num_kv].double().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turns.to(torch.complex128)).flatten(-2)
        wanted = torch.cat([turned, qkv[:, -num_kv:].double()], 1)
        ways = {"in order": partial(rotate_write, freqs_cis_M1P=turns, slots_M=slots)}
        if where.is_gpu:
            from llama_ssp.extensions.gpu.kernels import between

            own = partial(
                between.rotate_write, turns_SP2=torch.view_as_real(freqs_SP), positions_BT=positions.contiguous()
            )
            ways = {"in order": own, "by slots": partial(own, slots_M=slots)}
        for way, place in ways.items():

            def placed(place: Callable[..., None] = place) -> Tensor:
                own_qkv = qkv.clone()  # noqa: B023
                place(own_qkv, parts=parts, heads=Heads(num_heads, num_kv, dim, 1.0), norms=())  # noqa: B023
                return torch.cat([own_qkv[:, :num_heads], parts[:, slots].transpose(0, 1)], 1)  # noqa: B023

            name = f"{num_rows} rows, {num} positions, {num_heads} over {num_kv} heads of {dim}, {way}"
            yield from judge(name, [placed], wanted, where)


def norms(where: Where) -> Iterator[str]:
    """The sum with the residual, and its RMS norm."""
    dtype = torch.float16 if where.is_gpu else torch.float32
    for rows, width in product((1, 5, 512), (2048, 4096, 6656, 8192)):
        x, added = (_some(rows, width, like=(where, dtype)) for _ in range(2))
        weight = _some(width, like=(where, dtype))
        wanted = functional.rms_norm((x + added).double(), (width,), weight.double(), EPS)
        pieces = [lambda: _add_norm(x.clone(), added, weight)]  # noqa: B023
        yield from judge(f"{rows} rows of {width}", pieces, wanted, where, num_bytes=6 * x.nbytes)


def draws(where: Where) -> Iterator[str]:
    """Draws of one token from Llama's vocabulary: their frequencies are the probabilities in fp64."""
    vocab_size, number = (512, 4096) if where.is_small else (32000, 16384)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(vocab_size, generator=generator).mul_(4).to(where.device)
    uniforms = torch.rand(number, 2, dtype=torch.float64, generator=generator).to(where.device)
    largest, order = torch.softmax(logits.double() / 0.8, -1).sort(descending=True)
    for name, sampling, num in (
        ("greedy", SamplingConfig(temperature=0.0), 1),
        ("sampled", SamplingConfig(temperature=0.8), vocab_size),
        ("top-k", SamplingConfig(temperature=0.8, top_k=20), 20),
        ("top-p", SamplingConfig(temperature=0.8, top_p=TOP_P), int((largest.cumsum(0) - largest < TOP_P).sum())),
    ):
        probs = torch.zeros_like(largest)
        probs[order[:num]] = largest[:num] / largest[:num].sum()
        rule = make_rule(sampling, VerificationConfig())
        ids = rule.draw(logits.expand(1, number, -1).contiguous(), uniforms[None])[0].flatten()
        shares = torch.bincount(ids, minlength=vocab_size) / number
        deviations = (shares - probs).abs() / (probs * (1 - probs) / number).sqrt().clamp_(min=1 / number)
        z = float(torch.where(probs * number >= 10, deviations, 0).max())
        say(case=name, z=z, outside=float(shares[probs == 0].sum()))
        if not (z <= MOST_Z and not shares[probs == 0].any()):
            yield f"{name}: frequencies are off by {z:.1f} standard errors"


def _add_norm(x_ME: Tensor, added_ME: Tensor, weight_E: Tensor) -> Tensor:
    """The norm of a sum, which overwrites x, as the engine computes it on this device."""
    if not x_ME.is_cuda:
        return RmsNorm(weight_E, EPS)(x_ME.add_(added_ME))
    from llama_ssp.extensions.gpu.kernels.between import add_norm

    return add_norm(x_ME, added_ME, weight_E, EPS)


def _some(*shape: int, like: tuple[Where, torch.dtype]) -> Tensor:
    return (torch.randn(shape, device=like[0].device) / math.sqrt(shape[-1])).to(like[1])


CHECKS: dict[str, Check] = {
    "attention-torch": _torch_s,
    "attention-ours": _ours,
    "latents": latents,
    "rotary": rotary,
    "norms": norms,
    "products": partial(products, kind=PlainLinear, bits=16),
    "products-ours": _own_products,
    "int8": partial(products, kind=int8_weight_only_linear, bits=8),
    "int4": partial(products, kind=int4_weight_only_linear, bits=4),
    "draws": draws,
}
if __name__ == "__main__":
    main(CHECKS)
