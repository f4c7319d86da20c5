"""Ours against transformers, plain and speculative, on the shipped pair: `python benchmarks/peers.py`.

With `--peers` it measures ours, llama.cpp and OpenVINO GenAI by number format instead (`by_format`).

One process, fp32, batch 1. Both sides get the same prompts, the same sampling, the same number of drafted tokens with a
constant schedule, and no end-of-sequence token. Beside the ratios stand the bounds of a round (`bound`): its forwards
timed alone, and its weights read once from memory.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.bound import CPU, Passes, forwards_alone_s
from benchmarks.by_format import lines, turns
from benchmarks.by_format.checkpoints import RANDOM, RANDOM_DRAFT
from benchmarks.timing import Goal, print_goals, store
from llama_ssp import Pair, load
from llama_ssp.architectures.family import inventory
from llama_ssp.calibration.interleave import interleave
from llama_ssp.config import catalogue
from llama_ssp.config.schema import Dtype, SamplingConfig, SpeculationConfig
from llama_ssp.distributed.comms import Comm
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import Request
from llama_ssp.errors import ConfigError
from llama_ssp.models.build import load_modules
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.planning.spec import planned_model, step_bytes
from llama_ssp.session.loading import build_decoder
from llama_ssp.session.peers import Peers, load_peer
from llama_ssp.session.prompts import encode
from llama_ssp.tasks.benchmark import Ours
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect

PROMPTS = (
    "def factorial(n):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main(argv):\n",
    '    """Return the number of items in the list.',
)
NUM_NEW_TOKENS = 64


@torch.inference_mode()
def ms_at_context(decoder: Decoder, num_prompt_tokens: int, repetition: int) -> float:
    """Milliseconds per token of the rounds behind a long prompt, without its prefill."""
    decoder.seed = repetition + 1
    ids = tuple(int(token) for token in torch.arange(num_prompt_tokens) % 512 + 64)
    request = Request(index=0, prompt_ids=ids, max_new_tokens=NUM_NEW_TOKENS)
    completion = None
    for updates in decoder.run([request]):
        completion = updates[0].completion
    assert completion
    return 1e3 * sum(completion.part_s.values()) / (len(completion.token_ids) - 1)


def over_modules(pair: Pair, arguments: argparse.Namespace) -> Pair:
    """The same pair over the library's own modules, the reference of the lean decoder."""
    comm = Comm.single()
    folders = [hub.resolve(catalogue.load(name)) for name in (arguments.target, arguments.draft)]
    models = [load_modules(inspect(folder), dtype=torch.float32, device=CPU, comm=comm) for folder in folders]
    target, draft = (ModuleRunner(model, comm=comm) for model in models)
    return replace(pair, models=replace(pair.models, target=target, draft=draft))


def weights_bytes(arguments: argparse.Namespace) -> tuple[int, int]:
    """Bytes that a forward of the target and one of the draft read, as ours hold them."""
    entries = [replace(catalogue.load(name), dtype=Dtype.fp32) for name in (arguments.target, arguments.draft)]
    if arguments.modules:  # which keep the weights of 16-bit files in 32
        entries = [replace(entry, stored_dtype=Dtype.fp32) for entry in entries]
    models = [planned_model(entry, device="cpu") for entry in entries]
    target, draft = (step_bytes(inventory(model.shape), model, device="cpu") for model in models)
    return target, draft


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """As the pages have it, whose readers see both medians."""
    return statistics.median(numerators) / statistics.median(denominators)


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    """Run everything once and return the figures."""
    num_draft_tokens, temperature = arguments.num_draft_tokens, arguments.temperature
    pair = load(arguments.target, arguments.draft, dtype=Dtype.fp32)
    if arguments.modules:
        pair = over_modules(pair, arguments)
    config = replace(
        pair.config,
        sampling=SamplingConfig(temperature=temperature),
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
        ignore_eos=True,
    )
    plain = build_decoder(pair.models, config, speculative=False)
    fast = build_decoder(pair.models, config, speculative=True)
    prompts = [encode(prompt, pair.models.tokenizer, chat=False) for prompt in PROMPTS]
    ours, ours_plain = (Ours(decoder=each, prompts=prompts, num_new_tokens=NUM_NEW_TOKENS) for each in (fast, plain))
    folders = [hub.resolve(catalogue.load(name)) for name in (arguments.target, arguments.draft)]
    target, draft = (load_peer(folder, dtype=torch.float32, device=CPU) for folder in folders)
    peers = partial(
        Peers(target=target, draft=draft).ms_per_token,
        prompts,
        num_new_tokens=NUM_NEW_TOKENS,
        sampling=config.sampling,
    )

    alone: list[tuple[float, float]] = []
    passes = Passes()
    target_bytes, draft_bytes = weights_bytes(arguments)
    contexts = [len(prompts[0]) + num_new for num_new in range(1, NUM_NEW_TOKENS)]

    def forwards_ms(_repetition: int) -> float:
        alone.append(forwards_alone_s(fast, contexts=contexts))
        verify_s, draft_s = alone[-1]
        return 1e3 * float(verify_s + num_draft_tokens * draft_s)

    def cold_forwards_ms(_repetition: int) -> float:
        verify_s, draft_s = forwards_alone_s(fast, contexts=contexts[::9], between=passes.fill_caches)
        return 1e3 * float(verify_s + num_draft_tokens * draft_s)

    def weights_ms(_repetition: int) -> float:
        return 1e3 * float(target_bytes + num_draft_tokens * draft_bytes) / passes.bytes_per_s()

    with console.status("timing"):
        ms = interleave(
            {
                "cold": cold_forwards_ms,
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
    forwards, cold, weights = (ms.pop(name) for name in ("forwards", "cold", "weights"))
    assert ours.tokens_per_round
    bounds_ms = [round_ms / ours.tokens_per_round for round_ms in forwards]
    verify_s, draft_s = (statistics.median(times) for times in zip(*alone, strict=True))
    return {
        "target": arguments.target,
        "draft": arguments.draft,
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "implementation": "modules" if arguments.modules else "lean",
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
        "cold_forwards_to_weights": ratio_of_medians(cold, weights),
        "speculative_to_bound": ratio_of_medians(ms["ours, speculative"], bounds_ms),
        "rounds_to_bound": ratio_of_medians(ours.rounds_ms, forwards),
        "other_share": statistics.median(ours.shares("other")),
        "at_context_ms": {name: statistics.median(values) for name, values in at_context.items()},
        "plain_1500_to_100": ratio_of_medians(at_context["plain, 1500"], at_context["plain, 100"]),
        "speculative_1500_to_100": ratio_of_medians(at_context["speculative, 1500"], at_context["speculative, 100"]),
    }


def show(row: dict[str, object], console: Console) -> None:
    """Print the table and the goals."""
    table = Table(title=f"{row['target']} with {row['draft']}", title_justify="left", show_edge=False)
    table.add_column("")
    table.add_column("ms/token", justify="right")
    for group in ("ms_per_token", "at_context_ms"):
        figures = row[group]
        assert isinstance(figures, dict)
        for name, value in figures.items():
            table.add_row(name if group == "ms_per_token" else f"behind a prompt, {name} tokens", f"{value:.2f}")
    table.add_row(f"bound: verification {row['verify_ms']:.2f} + K x {row['draft_step_ms']:.2f} ms over "
                  f"{row['tokens_per_round']:.2f} tokens per round", f"{row['bound_ms_per_token']:.2f}")  # fmt: skip
    read = f"weights of a round read once at {float(str(row['memory_bytes_per_s'])) / 1e9:.1f} GB/s"
    table.add_row(f"the bound's forwards over the {read}", f"{row['forwards_to_weights']:.2f}")
    table.add_row("the same forwards out of cold caches", f"{row['cold_forwards_to_weights']:.2f}")
    table.add_row("ours, speculative, over that bound, prefill included", f"{row['speculative_to_bound']:.2f}")
    console.print(table)
    goals = {
        "ours, speculative / transformers, assisted": ("speculative_to_assisted", 0.35),
        "ours, plain / transformers, generate": ("plain_to_generate", 0.45),
        "bound / its weights read once from memory": ("forwards_to_weights", 1.5),
        "rounds / bound (without prefill)": ("rounds_to_bound", 1.08),
        "other_s / round": ("other_share", 0.05),
        "plain, 1500 / 100 tokens of context": ("plain_1500_to_100", 1.6),
        "speculative, 1500 / 100 tokens of context": ("speculative_1500_to_100", 1.6),
    }
    print_goals(
        console,
        [Goal(name=name, measured=float(str(row[key])), at_most=limit) for name, (key, limit) in goals.items()],
    )


def pythons(named: Sequence[str]) -> dict[str, Path]:
    """The interpreters of the libraries; ConfigError if one is not `NAME=PYTHON`."""
    found = dict(each.partition("=")[::2] for each in named)
    wrong = [f"{name}={file}" for name, file in found.items() if name not in lines.ADAPTERS or not Path(file).is_file()]
    if wrong:
        known = " or ".join(f"{name}=PYTHON" for name in lines.ADAPTERS)
        raise ConfigError(f"--peers {' '.join(wrong)}: {known} is required, with the path of an interpreter")
    return {name: Path(file).absolute() for name, file in found.items()}


def compare_formats(arguments: argparse.Namespace, console: Console) -> None:
    """Measure ours and the libraries that `--peers` names, print, store."""
    setting = turns.Setting(
        models=[RANDOM, RANDOM_DRAFT] if arguments.random else [arguments.target, arguments.draft],
        prompts=PROMPTS[:1] if arguments.random else PROMPTS,
        num_new_tokens=NUM_NEW_TOKENS,
        num_draft_tokens=arguments.num_draft_tokens,
        temperature=arguments.temperature,
    )
    row = turns.measure(setting, pythons(arguments.peers), num_repetitions=arguments.repetitions)
    lines.show(row, console)
    if arguments.store:
        console.print(f"stored in {store('by_format', row)}")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="tiny-draft")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--modules", action="store_true", help="ours over the library's modules, not the lean decoder")
    parser.add_argument("--peers", nargs="*", metavar="NAME=PYTHON", help="by number format, with these libraries: "
                        "llama.cpp and openvino, each with the interpreter that it is installed for")  # fmt: skip
    parser.add_argument("--random", action="store_true", help="with --peers: random Llamas of 300 M and 10 M")
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/peers.jsonl")
    arguments = parser.parse_args()
    console = Console()
    transformers.utils.logging.set_verbosity_error()
    if arguments.peers is not None:
        compare_formats(arguments, console)
        return
    row = measure(arguments, console)
    show(row, console)
    if arguments.store:
        console.print(f"stored in {store('peers', row)}")


if __name__ == "__main__":
    main()
