"""Whether this device computes what it should: graphs against eager, number formats against fp32, no waits in a round.

The models are the shipped pair, made as synthetic weights; `tests/gpu` and `gpu` run the same checks.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.gpu_engine import load_pair, make_decoder, prompt, requests
from llama_ssp import Pair
from llama_ssp.config.schema import Dtype
from llama_ssp.engine.executors.cuda_graph import CudaGraphExecutor
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.overlap import OverlappedExecutor
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.fused import apply_rotary, gated
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts

_T = TypeVar("_T")
TARGET, DRAFT = "tiny", "tiny-draft"
FORMATS = {
    "bf16": (Dtype.bf16, "none", 0.05),
    "fp16": (Dtype.fp16, "none", 0.01),
    "int8_weight_only": (Dtype.fp16, "int8_weight_only", 0.05),
}
"""Format, quantization, and the most total variation from fp32 on average over positions."""
NUM_POSITIONS, NUM_TOKENS = 96, 80
FEW = 8
"""Positions of a forward: about as many as a round has, whose kernels are others than those of all at once."""
MOST_FROM_CPU = 1e-3
"""By which a probability in fp32 may differ from the CPU's: sums in other orders, and a GPU's faster functions."""
BUCKET_STEP = 64
"""Slots between two widths of the cache: small, so that graphs of several widths are recorded and replayed."""


@torch.inference_mode()
def texts(decoder: Decoder, pair: Pair, *, number: int) -> list[list[int]]:
    """New ids of some samples."""
    decoder.bucket_step = BUCKET_STEP
    found: dict[int, list[int]] = {}
    wanted = requests(pair, number=number, prompt_tokens=40, new_tokens=NUM_TOKENS)
    for updates in decoder.run(wanted):
        found |= {update.completion.request.sample: update.completion.token_ids for update in updates}
    return [found[sample] for sample in range(number)]


def same_with_graphs(device: torch.device, *, dtype: Dtype, batch_size: int, temperature: float) -> list[str]:
    """Faults of replayed rounds, held to the same rounds launched from Python: plain and speculative, run twice."""
    pair = load_pair(TARGET, DRAFT, dtype=dtype, device=device)
    faults = []
    for mode, speculative in (("plain", False), ("speculative", True)):

        def decoder(*, cuda_graphs: bool, speculative: bool = speculative) -> Decoder:
            return make_decoder(
                pair, speculative=speculative, batch_size=batch_size, temperature=temperature, cuda_graphs=cuda_graphs
            )

        captured, number = decoder(cuda_graphs=True), batch_size + 1
        expected = texts(decoder(cuda_graphs=False), pair, number=number)
        if any(texts(captured, pair, number=number) != expected for _ in range(2)):
            faults.append(f"{mode}: another text with graphs than without")
        executor = captured.executor
        if device.type == "cuda" and not (isinstance(executor, CudaGraphExecutor) and not executor.failed):
            faults.append(f"{mode}: rounds could not be captured")
    return faults


def greedy_text_is_plain_text(device: torch.device) -> list[str]:
    """Faults of the speculative text at temperature 0 in fp32, held to the target's own."""
    pair = load_pair(TARGET, DRAFT, dtype=Dtype.fp32, device=device)
    plain, fast = (
        texts(make_decoder(pair, speculative=speculative, temperature=0.0), pair, number=1)
        for speculative in (False, True)
    )
    return [] if plain == fast else ["speculative greedy text is not the target's own"]


def far_from_fp32(device: torch.device, name: str) -> list[str]:
    """What is wrong with the probabilities of one of FORMATS, read a few positions at a time and all at once."""
    dtype, quantization, limit = FORMATS[name]
    wanted_TV = _probs(device, Dtype.fp32, "none", at_a_time=NUM_POSITIONS)
    faults = []
    for at_a_time in (FEW, NUM_POSITIONS):
        difference_TV = _probs(device, dtype, quantization, at_a_time=at_a_time) - wanted_TV
        variation = float(0.5 * difference_TV.abs().sum(-1).mean())
        if not variation <= limit:  # NaN is a fault too
            faults.append(f"{name}, {at_a_time} positions: total variation {variation:.4f} from fp32, at most {limit}")
    return faults


def far_from_the_cpu(device: torch.device) -> list[str]:
    """What is wrong with the probabilities in fp32, held to those of the CPU, whose kernels are all others."""
    wanted_TV = _probs(torch.device("cpu"), Dtype.fp32, "none", at_a_time=NUM_POSITIONS)
    faults = []
    for at_a_time in (FEW, NUM_POSITIONS):
        found_TV = _probs(device, Dtype.fp32, "none", at_a_time=at_a_time)
        difference = float((found_TV - wanted_TV).abs().max())
        if not difference <= MOST_FROM_CPU:
            faults.append(f"fp32, {at_a_time} positions: probabilities differ by {difference:.2g} from the CPU's")
    return faults


@torch.inference_mode()
def _probs(device: torch.device, dtype: Dtype, quantization: str, *, at_a_time: int) -> Tensor:
    """The target's probabilities (T, V) behind each position of a prompt, fp64 on the CPU."""
    pair = load_pair(TARGET, None, dtype=dtype, device=device, quantization=quantization)
    target = pair.models.target
    target.allocate(batch_size=1, capacity=NUM_POSITIONS)
    ids_1T = torch.tensor([prompt(pair, NUM_POSITIONS)], device=device)
    positions_1T = torch.arange(NUM_POSITIONS, device=device)[None]
    pieces = zip(ids_1T.split(at_a_time, 1), positions_1T.split(at_a_time, 1), strict=True)
    logits = [target.forward(ids, positions, bucket=NUM_POSITIONS) for ids, positions in pieces]
    return torch.softmax(torch.cat(logits, dim=1)[0].double().cpu(), dim=-1)


@torch.inference_mode()
def packed_unlike_padded(device: torch.device) -> list[str]:
    """What is wrong with the probabilities behind packed prompts, held to padded ones; nothing where all are padded."""
    target = load_pair(TARGET, None, dtype=Dtype.fp16, device=device).models.target
    if not target.packs_prompts:
        return []
    lengths = [NUM_POSITIONS, 1, NUM_POSITIONS // 3]
    ids_RS = torch.arange(5, 5 + len(lengths) * NUM_POSITIONS, device=device).view(len(lengths), -1)
    prompts = Prompts(ids_RS, torch.tensor(lengths, device=device), lengths, longest=NUM_POSITIONS)
    found = []
    for is_packed in (True, False):
        target.packs_prompts = is_packed
        target.allocate(batch_size=len(lengths), capacity=NUM_POSITIONS)
        buckets = Buckets(step=NUM_POSITIONS, num_slots=NUM_POSITIONS)
        logits_RV = read_prompts(target, prompts, rows=[2, 0, 1], buckets=buckets)
        found.append(torch.softmax(logits_RV.double(), dim=-1))
    variation, (_, _, limit) = float(0.5 * (found[0] - found[1]).abs().sum(-1).max()), FORMATS["fp16"]
    return (
        [] if variation <= limit else [f"packed prompts: total variation {variation:.4f} from padded, at most {limit}"]
    )


def not_compiled(device: torch.device) -> list[str]:
    """Parts that go on without a compiler on a GPU: what they compute is right, but slow."""
    if device.type != "cuda":
        return []
    _probs(device, Dtype.fp32, "none", at_a_time=FEW)
    parts = {"the MLP's gate": gated, "rotary": apply_rotary}
    faults = [f"{name} could not be compiled" for name, part in parts.items() if not part.is_compiled]
    target = load_pair(TARGET, None, dtype=Dtype.fp16, device=device).models.target
    assert isinstance(target, LeanRunner)
    if not target.reads_by_length:
        faults.append("attention by the lengths of rows does not work")
    elif not target.is_fused:
        faults.append("kernels for few tokens do not work")
    return faults


def waits_in_a_round(device: torch.device, *, cuda_graphs: bool) -> list[str]:
    """Faults of rounds and admissions while torch refuses whatever waits for the device; nothing to see on a CPU."""
    pair = load_pair(TARGET, DRAFT, dtype=Dtype.fp16, device=device)
    faults = []
    for speculative in (False, True):
        decoder = make_decoder(pair, speculative=speculative, batch_size=2, cuda_graphs=cuda_graphs)
        texts(decoder, pair, number=2)
        executor = decoder.executor
        assert not isinstance(executor, OverlappedExecutor)
        executor.draft = watched(executor.draft)  # type: ignore[method-assign]
        executor.verify = watched(executor.verify)  # type: ignore[method-assign]
        decoder._admit = watched(decoder._admit)  # type: ignore[method-assign]
        try:
            texts(decoder, pair, number=2)
        except RuntimeError as error:
            faults.append(f"a round or an admission waits for the device: {error}")
    return faults


def watched(piece: Callable[..., _T]) -> Callable[..., _T]:
    """A function in which torch raises RuntimeError for whatever waits for the device."""

    def no_waits(*args: object, **kwargs: object) -> _T:
        with _no_waits():
            return piece(*args, **kwargs)

    return no_waits


@contextmanager
def _no_waits() -> Iterator[None]:
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


def all_faults(device: torch.device) -> dict[str, list[str]]:
    """Every check with what it found, in the order of their importance."""
    found: dict[str, Callable[[], list[str]]] = {}
    for dtype in (Dtype.fp32, Dtype.fp16):
        for batch_size, temperature in ((1, 0.0), (3, 0.8)):
            name = f"graphs against eager, {dtype.name}, batch {batch_size}, temperature {temperature:g}"
            found[name] = partial(same_with_graphs, device, dtype=dtype, batch_size=batch_size, temperature=temperature)
    found["greedy text, speculative against plain"] = partial(greedy_text_is_plain_text, device)
    found["fp32 against the CPU"] = partial(far_from_the_cpu, device)
    for name in FORMATS:
        found[f"{name} against fp32"] = partial(far_from_fp32, device, name)
    found["packed prompts against padded"] = partial(packed_unlike_padded, device)
    for cuda_graphs in (False, True):
        name = f"waits in a round, {'replayed' if cuda_graphs else 'eager'}"
        found[name] = partial(waits_in_a_round, device, cuda_graphs=cuda_graphs)
    found["elementwise parts compiled"] = partial(not_compiled, device)
    return {name: _faults_of(check) for name, check in found.items()}


def _faults_of(check: Callable[[], list[str]]) -> list[str]:
    """What a check finds; one that cannot be made is a fault, and the others are made all the same."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises
        return [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
