"""Whether this device computes what it should: graphs against eager, number formats against fp32, no waits in a round.

The models are the shipped pair, made as synthetic weights; `tests/gpu` and `gpu` run the same checks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.gpu_engine import load_pair, make_decoder, prompt, requests
from llama_ssp import Pair
from llama_ssp.config.schema import Dtype, Quantization
from llama_ssp.decoding.captured import CapturedRounds
from llama_ssp.decoding.loop import Decoder

TARGET, DRAFT = "tiny", "tiny-draft"
FORMATS = {
    "bf16": (Dtype.bf16, Quantization.none, 0.05),
    "fp16": (Dtype.fp16, Quantization.none, 0.01),
    "int8_weight_only": (Dtype.fp16, Quantization.int8_weight_only, 0.05),
}
"""Format, quantization, and the most total variation from fp32 on average over positions."""
NUM_POSITIONS, NUM_TOKENS = 96, 80


@torch.inference_mode()
def texts(decoder: Decoder, pair: Pair, *, number: int) -> list[list[int]]:
    """New ids of some samples."""
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
        rounds = captured.rounds
        if device.type == "cuda" and not (isinstance(rounds, CapturedRounds) and not rounds.graphs.failed):
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


@torch.inference_mode()
def far_from_fp32(device: torch.device, name: str) -> list[str]:
    """What is wrong with the probabilities of one of FORMATS."""

    def probs(dtype: Dtype, quantization: Quantization) -> Tensor:
        pair = load_pair(TARGET, None, dtype=dtype, device=device, quantization=quantization)
        target = pair.models.target
        target.allocate(batch_size=1, capacity=NUM_POSITIONS)
        ids_1T = torch.tensor([prompt(pair, NUM_POSITIONS)], device=device)
        positions_1T = torch.arange(NUM_POSITIONS, device=device)[None]
        logits_1TV = target.forward(ids_1T, positions_1T, bucket=NUM_POSITIONS)
        return torch.softmax(logits_1TV[0].double(), dim=-1)

    dtype, quantization, limit = FORMATS[name]
    difference_TV = probs(dtype, quantization) - probs(Dtype.fp32, Quantization.none)
    variation = float(0.5 * difference_TV.abs().sum(-1).mean())
    return [] if variation <= limit else [f"{name}: total variation {variation:.4f} from fp32, at most {limit}"]


def waits_in_a_round(device: torch.device, *, cuda_graphs: bool) -> list[str]:
    """Faults of rounds during which torch refuses whatever waits for the device; nothing to see on a CPU."""
    pair = load_pair(TARGET, DRAFT, dtype=Dtype.fp16, device=device)
    faults = []
    for speculative in (False, True):
        decoder = make_decoder(pair, speculative=speculative, batch_size=2, cuda_graphs=cuda_graphs)
        texts(decoder, pair, number=2)
        advance = decoder.rounds.advance
        decoder.rounds.advance = _watched(advance)  # type: ignore[method-assign]
        try:
            texts(decoder, pair, number=2)
        except RuntimeError as error:
            faults.append(f"a round waits for the device: {error}")
    return faults


def _watched(advance: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def watched(*args: object, **kwargs: object) -> Tensor:
        with _no_waits():
            return advance(*args, **kwargs)

    return watched


@contextmanager
def _no_waits() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def all_faults(device: torch.device) -> dict[str, list[str]]:
    """Every check with what it found, in the order of their importance."""
    found = {}
    for dtype in (Dtype.fp32, Dtype.fp16):
        for batch_size, temperature in ((1, 0.0), (3, 0.8)):
            name = f"graphs against eager, {dtype.name}, batch {batch_size}, temperature {temperature:g}"
            found[name] = same_with_graphs(device, dtype=dtype, batch_size=batch_size, temperature=temperature)
    found["greedy text, speculative against plain"] = greedy_text_is_plain_text(device)
    for name in FORMATS:
        found[f"{name} against fp32"] = far_from_fp32(device, name)
    for cuda_graphs in (False, True):
        found[f"waits in a round, {'replayed' if cuda_graphs else 'eager'}"] = waits_in_a_round(
            device, cuda_graphs=cuda_graphs
        )
    return found
