"""Whether the engine computes what it should, and by which path: `python -m benchmarks.first_hour.engine NAME`.

Graphs are held to eager rounds, number formats to fp32, fp32 to the CPU. The models are the shipped pair, made as
synthetic weights. Another path than expected is a fault, and so is a warning.

Shapes: B sequences, T positions, V vocabulary.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, MixtralConfig

from benchmarks.decoding import config_of, decode_once, load_pair, make_decoder, prompt, requests
from benchmarks.first_hour.runner import FOLDER
from benchmarks.first_hour.step import Check, Where, main, say, skip
from llama_ssp import Pair
from llama_ssp.architectures.engine import FIRST_CAPABILITY_BY_LENGTH
from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.copies.records import NGRAM, NgramConfig
from llama_ssp.extensions.synthetic.records import SyntheticConfig
from llama_ssp.kernels.attention_by_length import capability_of
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.settings.schema import SpeculationConfig
from llama_ssp.speculate.engine.executors import GraphExecutor, Recorder
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.storage.formats import OWN_DTYPE
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, ids_of

TARGET, DRAFT, HEAD = "tiny", "tiny-draft", "tiny-eagle"
DRAFTED = {
    "model-2x2x1": (DRAFT, "2x2x1"),
    "model-dynamic": (DRAFT, "dynamic-20x4x4"),
    "head-chain": (HEAD, None),
    "head-2x2x1": (HEAD, "2x2x1"),
    "head-dynamic": (HEAD, "dynamic-20x4x4"),
    "ngram-chain": (None, None),
    "ngram-3x2x1": (None, "3x2x1"),
}
"""Draft and tree of further rounds; no model is prompt look-up."""
FORMATS = {
    "bf16": (Dtype.bf16, "none", OWN_DTYPE, 0.05),
    "fp16": (Dtype.fp16, "none", OWN_DTYPE, 0.01),
    "int8_weight_only": (Dtype.fp16, "int8_weight_only", OWN_DTYPE, 0.05),
    "int4_weight_only": (Dtype.fp16, "int4_weight_only", OWN_DTYPE, 0.25),
    "fp8_weight_only": (Dtype.bf16, "fp8_weight_only", OWN_DTYPE, 0.15),
    "cache-bf16": (Dtype.fp16, "none", "bf16", 0.05),
    "cache-int8": (Dtype.fp16, "none", "int8", 0.05),
    "cache-fp8": (Dtype.bf16, "none", "fp8", 0.15),
}
"""Format, quantization, format of the cache, and the most total variation from fp32 on average over positions."""
FEW = 8
"""Positions of a forward: about as many as a round has, whose kernels are others than those of all at once."""
MOST_FROM_CPU = 1e-3
"""By which a probability in fp32 may differ from the CPU's: sums in other orders, and a GPU's faster functions."""
ROWS, POSITIONS = 16, 9
"""The most rows and positions of a round whose bits are compared."""
BUCKET_STEP = 64
"""Slots between two widths of the cache: small, so that graphs of several widths are recorded and replayed."""


def num_tokens(where: Where) -> int:
    """New tokens of a text, and positions that formats are compared over."""
    return 16 if where.is_small else 96


@cache
def pair_of(
    where: Where,
    dtype: Dtype,
    *,
    draft: str | None = DRAFT,
    quantization: str = "none",
    cache_dtype: str = OWN_DTYPE,
    reproducible: bool = False,
) -> Pair:
    """The shipped models."""
    config = config_of(TARGET, draft, dtype=dtype, device=where.device, quantization=quantization)
    if draft == HEAD:
        config.synthetic = SyntheticConfig()  # type: ignore[attr-defined] # of an extension
    model = replace(config.model, cache_dtype=cache_dtype)
    return load_pair(replace(config, model=model, reproducible=reproducible))


def path_of(runner: Runner, decoder: Decoder | None = None) -> dict[str, str]:
    """Which path the forwards of a model take, and the rounds of a decoder."""
    other = "masks" if getattr(runner, "uses_masks", True) else "compiled"
    path = {"attention": "lengths" if getattr(runner, "reads_by_length", False) else other}
    path["layers"] = "few kernels" if getattr(runner, "is_fused", False) else "operators"
    if decoder is not None:
        graphs = decoder.executor if isinstance(decoder.executor, GraphExecutor) else None
        path["rounds"] = "graphs" if graphs and not graphs.failed else "no graphs"
    return path


def path_expected(where: Where, dtype: torch.dtype, *, has_graphs: bool) -> dict[str, str]:
    """Which path they should take: what the documentation promises of this GPU."""
    path = {"rounds": "graphs" if where.is_gpu and has_graphs else "no graphs"}
    is_half = dtype.itemsize == 2
    if is_half and capability_of(where.device) >= FIRST_CAPABILITY_BY_LENGTH:
        return path | {"attention": "lengths", "layers": "few kernels"}
    return path | ({"attention": "masks"} if where.is_gpu else {})


def path_faults(where: Where, pair: Pair, decoder: Decoder | None = None, *, has_graphs: bool = True) -> Iterator[str]:
    """Say which path ran; a fault for each part of it that is not the expected one."""
    target = pair.models.target
    dtype = getattr(torch, pair.config.model.dtype.value)
    path, wanted = path_of(target, decoder), path_expected(where, dtype, has_graphs=has_graphs)
    say(path=path)
    for part, found in path.items():
        if found != wanted.get(part, found):
            yield f"{part}: {found}, expected {wanted[part]}"


def texts(where: Where, decoder: Decoder, pair: Pair, *, number: int) -> list[list[int]]:
    """New ids of some samples."""
    decoder.space.bucket_step = BUCKET_STEP
    wanted = requests(pair, number=number, prompt_tokens=40, new_tokens=num_tokens(where))
    return ids_of(complete(decoder, wanted))


def same_as_launched(
    where: Where,
    *,
    dtype: Dtype,
    draft: str | None = DRAFT,
    tree: str | None = None,
    modes: Sequence[bool] = (True,),
    batch_size: int = 2,
    temperatures: Sequence[float] = (0.0, 0.8),
) -> Iterator[str]:
    """Rounds: replayed twice as launched from Python, and at temperature 0 in fp32 with the target's own text.

    `modes` are plain (False) and speculative rounds; without `draft`, prompt look-up drafts.
    """
    if not where.is_gpu and dtype is not Dtype.fp32:
        skip("rounds in 16 bits are for GPUs")
    pair, number = pair_of(where, dtype, draft=draft), batch_size + 1
    if draft is None:
        pair = replace(pair, config=replace(pair.config, draft=NgramConfig(kind=NGRAM.name)))
    made = partial(make_decoder, pair, batch_size=batch_size, speculation=SpeculationConfig(tree=tree))
    for temperature, speculative in product(temperatures, modes):
        captured = made(speculative=speculative, temperature=temperature)
        launched = made(speculative=speculative, temperature=temperature, cuda_graphs=False)
        expected = texts(where, launched, pair, number=number)
        if any(texts(where, captured, pair, number=number) != expected for _ in range(2)):
            mode = "speculative" if speculative else "plain"
            yield f"{mode}, temperature {temperature:g}: another text with graphs than without"
        if speculative and temperature == 0 and dtype is Dtype.fp32:
            plain = made(speculative=False, temperature=0.0)
            if texts(where, plain, pair, number=number) != expected:
                yield "speculative greedy text is not the target's own"
        yield from path_faults(where, pair, captured)


def far_from_fp32(where: Where, *, name: str) -> Iterator[str]:
    """The probabilities of one of FORMATS, held to those in fp32 by their total variation, on average."""
    dtype, quantization, cache_dtype, limit = FORMATS[name]
    pair = pair_of(where, dtype, draft=None, quantization=quantization, cache_dtype=cache_dtype)
    yield from _far_from(where, pair, where, lambda far_TV: 0.5 * far_TV.abs().sum(-1).mean(), limit=limit)


def far_from_the_cpu(where: Where) -> Iterator[str]:
    """The probabilities in fp32, held to those of the CPU, whose kernels are all others, by the largest difference."""
    cpu, pair = Where(torch.device("cpu"), where.is_small), pair_of(where, Dtype.fp32, draft=None)
    yield from _far_from(where, pair, cpu, lambda far_TV: far_TV.abs().max(), limit=MOST_FROM_CPU)


def _far_from(
    where: Where, pair: Pair, other: Where, distance: Callable[[Tensor], Tensor], *, limit: float
) -> Iterator[str]:
    """Read a few positions at a time and all at once, and hold them to fp32 on another device."""
    wanted_TV = _probs(pair_of(other, Dtype.fp32, draft=None), other, at_a_time=num_tokens(where))
    for at_a_time in (FEW, num_tokens(where)):
        found = float(distance(_probs(pair, where, at_a_time=at_a_time) - wanted_TV))
        say(positions=at_a_time, variation=found)
        if not found <= limit:  # NaN is a fault too
            yield f"{at_a_time} positions: {found:.2g} from fp32 on {other.device.type}, at most {limit}"
    yield from path_faults(where, pair)


def _probs(pair: Pair, where: Where, *, at_a_time: int) -> Tensor:
    """The target's probabilities (T, V) behind each position of a prompt, fp64 on the CPU."""
    number = num_tokens(where)
    target = pair.models.target
    target.allocate(batch_size=1, capacity=number)
    ids_1T = torch.tensor([prompt(pair, number)], device=where.device)
    positions_1T = torch.arange(number, device=where.device)[None]
    pieces = zip(ids_1T.split(at_a_time, 1), positions_1T.split(at_a_time, 1), strict=True)
    logits = [target.forward(ids, positions, bucket=number) for ids, positions in pieces]
    return torch.softmax(torch.cat(logits, dim=1)[0].double().cpu(), dim=-1)


def equal_bits(where: Where, *, name: str) -> Iterator[str]:
    """With `reproducible=true`, in one of FORMATS: bits of logits of rounds and prompts, and texts with a draft."""
    if not where.is_gpu and name not in {"bf16", "int8_weight_only"}:
        skip("rounds in 16 bits are for GPUs")
    dtype, quantization, cache_dtype, _ = FORMATS[name]
    pair = pair_of(where, dtype, quantization=quantization, cache_dtype=cache_dtype, reproducible=True)
    target, length = pair.models.target, 24 if where.is_small else 180
    target.allocate(batch_size=ROWS, capacity=length)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(target.vocab_size, (ROWS, length), generator=generator).to(where.device)
    places_T = torch.arange(length, device=where.device)

    def read(rows_B: Tensor, positions_BT: Tensor) -> Tensor:
        ids = ids_BT.index_select(0, rows_B).gather(1, positions_BT)
        return target.forward(ids, positions_BT, bucket=length, cache_rows_B=rows_B).clone()

    rows_B = torch.arange(ROWS, device=where.device)
    alone = [[read(row_1, place_1[None]) for place_1 in places_T.split(1)] for row_1 in rows_B.split(1)]
    alone_BTV = torch.cat([torch.cat(of_row, dim=1) for of_row in alone])
    for rows, number in product(range(1, ROWS + 1), range(1, POSITIONS + 1)):
        positions_BT = rows_B[:rows, None] * 11 % (length - number) + places_T[:number]
        wanted_BTV = alone_BTV[:rows].gather(1, positions_BT[..., None].expand(-1, -1, target.vocab_size))
        if not torch.equal(read(rows_B[:rows], positions_BT), wanted_BTV):
            yield f"{rows} rows of {number} positions have other bits than single positions"
    if not torch.equal(read(rows_B, places_T.expand(ROWS, -1).contiguous()), alone_BTV):
        yield f"prompts of {length} tokens have other bits than single positions"
    for batch_size in (1, 3):
        made = partial(make_decoder, pair, batch_size=batch_size, temperature=0.0)
        plain, drafted = (texts(where, made(speculative=drafts), pair, number=2) for drafts in (False, True))
        if plain != drafted:
            yield f"batch size {batch_size}: a greedy text with a draft is not plain text"


def waits_in_a_round(where: Where, *, cuda_graphs: bool) -> Iterator[str]:
    """Rounds, admissions and ends of rows while torch refuses what waits for the device; nothing to see on a CPU."""
    pair = pair_of(where, Dtype.fp16 if where.is_gpu else Dtype.fp32)
    for speculative in (False, True):
        decoder = make_decoder(pair, speculative=speculative, batch_size=2, cuda_graphs=cuda_graphs)
        texts(where, decoder, pair, number=2)
        executor = decoder.executor
        executor.run = no_waits()(executor.run)  # type: ignore[method-assign]
        freed = patch.object(BatchState, "vacate", no_waits()(BatchState.vacate))
        try:
            with freed, patch.object(Decoding, "_read", no_waits()(Decoding._read)):
                texts(where, decoder, pair, number=5)  # some end while others decode, and rows are taken again
        except RuntimeError as error:
            yield f"a round, an admission or the end of a row waits for the device: {error}"
        yield from path_faults(where, pair, decoder, has_graphs=cuda_graphs)


def experts(where: Where) -> Iterator[str]:
    """Forwards of a few tokens through a random Mixtral of quantized experts: without waits, and alike as graphs."""
    width, units, num_layers = (64, 96, 2) if where.is_small else (1536, 4096, 4)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=units,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    dtype = torch.bfloat16 if where.is_gpu else torch.float32
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        for quantization in ("none", "int8_weight_only", "int4_weight_only"):
            precision = Precision(quantization=quantization)
            runner = load_model(Loading(inspect(Path(folder)), dtype=dtype, device=where.device, precision=precision))
            runner.allocate(batch_size=1, capacity=64)
            for number in (1, 5):
                ids_BT, positions_BT = torch.zeros(2, 1, number, dtype=torch.int64, device=where.device)
                positions_BT += torch.arange(number, device=where.device)
                forward = partial(runner.forward, ids_BT, positions_BT, bucket=64)
                say(doing=f"{quantization}, {number} tokens")
                forward()
                if not where.is_gpu or quantization == "none":  # torch's grouped product waits
                    continue
                with no_waits():
                    forward()
                logits, replay = Recorder().record(forward)
                for seed in range(3):
                    ids_BT.random_(config.vocab_size, generator=torch.Generator(where.device).manual_seed(seed))
                    wanted = forward().clone()
                    replay()
                    if not torch.equal(wanted, logits):
                        yield f"{quantization}, {number} tokens: a graph gives other logits than Python"
                took_us = {"us": 1e6 * seconds_of(replay), "launched_us": 1e6 * seconds_of(forward)}
                say(quantization=quantization, tokens=number, **took_us)


def seconds_of(piece: Callable[[], object], *, num: int = 50) -> float:
    """Of one call on a GPU."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num):
        piece()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / num


def trace(where: Where) -> Iterator[str]:
    """Keep a profiler's trace of a few rounds of 7B with a draft, and say where their time goes."""
    names = (TARGET, DRAFT) if where.is_small else ("7B", "tinyllama_1B")
    pair = load_pair(config_of(*names, dtype=Dtype.fp16 if where.is_gpu else Dtype.fp32, device=where.device))
    decoder = make_decoder(pair, speculative=True)
    wanted = requests(pair, number=1, prompt_tokens=512, new_tokens=8)
    for seed in (0, 1):
        decode_once(decoder, wanted, seed=seed)
    with profile(activities=[ProfilerActivity.CUDA if where.is_gpu else ProfilerActivity.CPU]) as seen:
        decode_once(decoder, wanted, seed=2)
    took = {event.key[:80]: event.self_device_time_total or event.self_cpu_time_total for event in seen.key_averages()}
    say(kernels_us=dict(sorted(took.items(), key=lambda each: each[1], reverse=True)[:25]))
    seen.export_chrome_trace(str(Path(os.environ.get(FOLDER, ".")) / "round.trace.json.gz"))
    yield from path_faults(where, pair, decoder)


@contextmanager
def no_waits() -> Iterator[None]:
    """Let torch raise RuntimeError for whatever waits for the device."""
    if not torch.cuda.is_available():
        yield
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at the first time that the mode is new
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


CHECKS: dict[str, Check] = {
    f"graphs-{dtype.name}-batch-{batch_size}": partial(
        same_as_launched, dtype=dtype, modes=(False, True), batch_size=batch_size, temperatures=(temperature,)
    )
    for dtype in (Dtype.fp32, Dtype.fp16, Dtype.bf16)
    for batch_size, temperature in ((1, 0.0), (3, 0.8))
}
CHECKS |= {
    f"rounds-{name}-{dtype.name}": partial(same_as_launched, draft=draft, tree=tree, dtype=dtype)
    for name, (draft, tree) in DRAFTED.items()
    for dtype in (Dtype.fp32, Dtype.bf16)
}
greedy_text = partial(same_as_launched, dtype=Dtype.fp32, batch_size=1, temperatures=(0.0,))
CHECKS |= {"greedy-text": greedy_text, "fp32-of-the-cpu": far_from_the_cpu}
CHECKS |= {f"near-fp32-{name}": partial(far_from_fp32, name=name) for name in FORMATS}
CHECKS |= {f"equal-bits-{name}": partial(equal_bits, name=name) for name in FORMATS}
CHECKS |= {
    f"no-waits-{how}": partial(waits_in_a_round, cuda_graphs=is_captured)
    for how, is_captured in (("eager", False), ("replayed", True))
}

CHECKS |= {"experts": experts, "trace": trace}

if __name__ == "__main__":
    main(CHECKS)
