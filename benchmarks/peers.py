"""Ours against transformers, plain and speculative, on the shipped pair: `python -m benchmarks.peers`.

One process, fp32, batch 1. Both sides get the same prompts, the same sampling, the same number of drafted tokens with a
constant schedule, and no end-of-sequence token. A round has two bounds. The first is the time of its forwards when
nothing else happens. The second knows no operators: the target's matrices once and the draft's K times, at the fastest
pass over memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import transformers
from torch import Tensor

from benchmarks.decoding import CPU, peers_of
from benchmarks.measured import Goal, Row, store, table_of_goals
from benchmarks.readme import peers_text, round_text
from llama_ssp import catalogue, load
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.extensions.benchmark.benchmark import Ours
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.weights import step_bytes
from llama_ssp.reports.provenance import processor, versions
from llama_ssp.run.calibration import copy_bytes_per_s, interleave, seconds_per_call
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.requests import encode
from llama_ssp.settings.schema import SamplingConfig, SpeculationConfig
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import BatchState, Request
from llama_ssp.weights import hub
from tests.helpers.decoders import complete

PROMPTS = (
    "def factorial(n):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main(argv):\n",
    '    """Return the number of items in the list.',
)
NUM_NEW_TOKENS = 64
PASS_BYTES = 2**28
"""Of a buffer that is read or copied: more than the caches of most processors hold."""
_TURNS_TO_RECORD = 2


def forwards_alone_s(decoder: Decoder, *, contexts: Sequence[int]) -> tuple[float, float]:
    """Seconds of one verification with its processors, and of one draft step with its draw.

    They take turns as in a round, so that each finds the processor's caches as a round leaves them, and nothing else of
    a round happens in between. Both are recorded where those of a round are.

    Args:
        decoder: a speculative one, of one row.
        contexts: tokens before each turn. The means over all turns count, since rounds are compared by their means.
    """
    round_ = decoder.round
    [choice] = decoder.length.choices
    num_draft_tokens = choice.num_tokens
    buckets = [-(-(context + num_draft_tokens + 1) // 64) * 64 for context in contexts]
    round_.allocate(batch_size=1, num_slots=max(buckets))
    state = BatchState.empty(1, num_slots=max(buckets), num_rounds=1, table=round_.uniforms)
    state.tokens_BS.fill_(1)
    state.uniforms_BMN.fill_(0.5)
    reads = (round_.target, round_.verifier, round_.last_and_drafted_W)
    from llama_ssp.extensions.cpu.tracing import Traced

    def scored(*tensors: Tensor) -> Tensor:
        logits_BWV = round_.score(BatchState(*tensors), num_drafted=num_draft_tokens, bucket=bucket)
        return round_.verifier.process(logits_BWV)

    score = Traced[Tensor](reads=reads)

    def draft() -> object:
        drafting = round_.make_stages(choice, (False, False), None, False, bucket).draft
        assert drafting, "a speculative decoder"
        return decoder.executor.run(drafting, state)

    def verify() -> object:
        if not round_.target.repeats_operators:
            return scored(*state)
        return score(scored, 0, *state, bucket=bucket, version=round_.num_allocations)

    seconds: dict[Callable[[], object], list[float]] = {draft: [], verify: []}
    with torch.inference_mode():
        for turn in range(-_TURNS_TO_RECORD, len(contexts)):
            context, bucket = contexts[max(turn, 0)], buckets[max(turn, 0)]
            state.lengths_B.fill_(context)
            state.first_round_B.fill_(-context)
            for part, times in seconds.items():
                began = time.perf_counter()
                part()
                if turn >= 0:
                    times.append(time.perf_counter() - began)
    return statistics.fmean(seconds[verify]), statistics.fmean(seconds[draft]) / num_draft_tokens


def pass_bytes_per_s(values: Tensor) -> float:
    """The faster of reading a buffer and copying it, with as many threads as torch has now."""
    return max(values.nbytes / seconds_per_call(values.sum), copy_bytes_per_s(CPU, values.nbytes))


def ms_at_context(decoder: Decoder, num_prompt_tokens: int, repetition: int) -> float:
    """Milliseconds per token of the rounds behind a long prompt, without its prefill."""
    ids = tuple(int(token) for token in torch.arange(num_prompt_tokens) % 512 + 64)
    request = Request(index=0, prompt_ids=ids, max_new_tokens=NUM_NEW_TOKENS)
    [completion] = complete(decoder, [request], seed=repetition + 1)
    return 1e3 * sum(completion.part_s.values()) / (len(completion.token_ids) - 1)


def weights_bytes(entry: ModelConfig, *, device: str) -> int:
    """Bytes that a forward of a model reads, as ours hold it."""
    model = planned_model(entry, device=device)
    return step_bytes(inventory(model.shape), model, device=device)


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """As the pages have it, whose readers see both medians."""
    return statistics.median(numerators) / statistics.median(denominators)


def measure(arguments: argparse.Namespace) -> Row:
    """Run everything once and return the figures."""
    num_draft_tokens, temperature = arguments.num_draft_tokens, arguments.temperature
    pair = load(arguments.target, arguments.draft, dtype=Dtype.fp32)
    config = replace(
        pair.config,
        sampling=SamplingConfig(temperature=temperature),
        ignore_eos=True,
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
    )
    plain, fast = (build_decoder(pair.models, config, speculative=speculative) for speculative in (False, True))
    prompts = [encode(prompt, pair.models.tokenizer) for prompt in PROMPTS]
    ours, ours_plain = (Ours(decoder=each, prompts=prompts, num_new_tokens=NUM_NEW_TOKENS) for each in (fast, plain))
    folders = [hub.resolve(catalogue.load(name)) for name in (arguments.target, arguments.draft)]
    peers = partial(
        peers_of(folders, torch.float32).ms_per_token, prompts, num_new_tokens=NUM_NEW_TOKENS, sampling=config.sampling
    )

    alone: list[tuple[float, float]] = []
    buffer = torch.ones(PASS_BYTES // 4)
    entries = [replace(catalogue.load(name), dtype=Dtype.fp32) for name in (arguments.target, arguments.draft)]
    target_bytes, draft_bytes = (weights_bytes(entry, device="cpu") for entry in entries)
    contexts = [len(prompts[0]) + num_new for num_new in range(1, NUM_NEW_TOKENS)]

    def forwards_ms(_repetition: int) -> float:
        alone.append(forwards_alone_s(fast, contexts=contexts))
        verify_s, draft_s = alone[-1]
        return 1e3 * float(verify_s + num_draft_tokens * draft_s)

    def weights_ms(_repetition: int) -> float:
        return 1e3 * float(target_bytes + num_draft_tokens * draft_bytes) / pass_bytes_per_s(buffer)

    ms = interleave(
        {
            "weights": weights_ms,
            "forwards": forwards_ms,
            "ours, speculative": ours.ms_per_token,
            "transformers, assisted": lambda _: peers(num_draft_tokens=num_draft_tokens),
            "ours, plain": ours_plain.ms_per_token,
            "transformers, generate": lambda _: peers(num_draft_tokens=None),
        },
        num_repetitions=arguments.repetitions,
    )
    at_context = interleave(
        {
            f"{mode}, {length}": partial(ms_at_context, decoder, length)
            for mode, decoder in (("plain", plain), ("speculative", fast))
            for length in (100, 1500)
        },
        num_repetitions=arguments.repetitions,
    )
    forwards, weights = (ms.pop(name) for name in ("forwards", "weights"))
    assert ours.tokens_per_round
    bounds_ms = [round_ms / ours.tokens_per_round for round_ms in forwards]
    verify_s, draft_s = (statistics.median(times) for times in zip(*alone, strict=True))
    return {
        "target": arguments.target,
        "draft": arguments.draft,
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "num_threads": torch.get_num_threads(),
        "ms_per_token": {name: statistics.median(values) for name, values in ms.items()},
        "speculative_to_assisted": ratio_of_medians(ms["ours, speculative"], ms["transformers, assisted"]),
        "plain_to_generate": ratio_of_medians(ms["ours, plain"], ms["transformers, generate"]),
        "tokens_per_round": ours.tokens_per_round,
        "verify_ms": 1e3 * verify_s,
        "draft_step_ms": 1e3 * draft_s,
        "bound_ms_per_token": statistics.median(bounds_ms),
        "target_bytes": target_bytes,
        "draft_bytes": draft_bytes,
        "memory_bytes_per_s": 1e3 * (target_bytes + num_draft_tokens * draft_bytes) / statistics.median(weights),
        "forwards_to_weights": ratio_of_medians(forwards, weights),
        "speculative_to_bound": ratio_of_medians(ms["ours, speculative"], bounds_ms),
        "rounds_to_bound": ratio_of_medians(ours.rounds_ms, forwards),
        "other_share": statistics.median(ours.shares("other")),
        "at_context_ms": {name: statistics.median(values) for name, values in at_context.items()},
        "plain_1500_to_100": ratio_of_medians(at_context["plain, 1500"], at_context["plain, 100"]),
        "speculative_1500_to_100": ratio_of_medians(at_context["speculative, 1500"], at_context["speculative, 100"]),
    }


GOALS = {
    "ours, speculative / transformers, assisted": ("speculative_to_assisted", 0.35),
    "ours, plain / transformers, generate": ("plain_to_generate", 0.45),
    "bound / its weights read once from memory": ("forwards_to_weights", 1.5),
    "rounds / bound (without prefill)": ("rounds_to_bound", 1.08),
    "other_s / round": ("other_share", 0.05),
    "plain, 1500 / 100 tokens of context": ("plain_1500_to_100", 1.6),
    "speculative, 1500 / 100 tokens of context": ("speculative_1500_to_100", 1.6),
}


def show(row: Row) -> None:
    """Print the texts of the pages, and the goals."""
    row |= {"processor": processor(), "versions": versions()}
    goals = table_of_goals(Goal(name, row[key], at_most) for name, (key, at_most) in GOALS.items())
    print(peers_text(row), round_text(row), goals, sep="\n\n")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="tiny-draft")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/peers.jsonl")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    row = measure(arguments)
    show({**row})
    if arguments.store:
        store("peers", row)


if __name__ == "__main__":
    main()
