"""Writes docs/benchmarks/experts.md: verifications by a random model with experts on this CPU, and their plans."""

import argparse
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from benchmarks.measured import markdown, page_of, show
from benchmarks.published import implied_acceptance
from llama_ssp.architectures.matrices import distinct
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import Dtype
from llama_ssp.machines.hardware import Speed
from llama_ssp.machines.machine import detect_hardware
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.planning.acceptance import constant, tokens_per_round
from llama_ssp.planning.spec import PlannedModel
from llama_ssp.planning.timing import ModelPlacement, forward_time
from llama_ssp.run.calibration.operators import cpu_speeds
from llama_ssp.settings.schema import TargetKind
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.words import counted

MIXTRAL = MixtralConfig(
    vocab_size=4096, hidden_size=768, intermediate_size=1792, num_hidden_layers=8, num_attention_heads=12,
    num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=1024,
)  # fmt: skip
SLOTS, FILLED, LENGTHS = 256, 200, range(9)


@torch.inference_mode()
def page(folder: Path, num_turns: int, num_threads: int) -> str:
    """Measure, plan, and write both down."""
    torch.set_num_threads(num_threads)
    AutoModelForCausalLM.from_config(MIXTRAL).to(torch.bfloat16).save_pretrained(folder)
    runner = load_model(Loading(inspect(folder), dtype=torch.float32))
    runner.allocate(batch_size=1, capacity=SLOTS)
    counted_3: Any = runner.experts_read_3
    took, num_read, speeds = dict.fromkeys(LENGTHS, 1e9), dict.fromkeys(LENGTHS, 0.0), []
    for turn in range(num_turns):
        if turn % 10 == 0:
            speeds.append(cpu_speeds()["fp16"])
        for number in LENGTHS:
            ids_BT, positions_BT = torch.randint(MIXTRAL.vocab_size, (1, number + 1)), FILLED + torch.arange(number + 1)
            before, started = float(counted_3[0]), time.perf_counter()
            runner.forward(ids_BT, positions_BT[None], bucket=SLOTS)
            took[number] = min(took[number], time.perf_counter() - started)
            num_read[number] += (float(counted_3[0]) - before) / MIXTRAL.num_hidden_layers / num_turns
    machine, (shape, stored) = detect_hardware(on_cpu=True), read_config(folder)
    bandwidth, flops = (max(found) for found in zip(*(vars(each).values() for each in speeds), strict=True))
    speed = Speed(bytes_per_s=bandwidth, flops_per_s=flops)
    machine = replace(machine, copy_bytes_per_s=bandwidth, products={"fp16": speed})
    model = PlannedModel(name="experts", shape=shape, dtype=Dtype.fp32, quantization="none", stored=stored)
    seat = ModelPlacement(model=model, kind=TargetKind.tensor, ranks=(0,), cuda_graphs=False)
    of = partial(forward_time, seat, machine, batch_size=1, bucket=SLOTS)
    planned = [of(num_positions=number + 1, num_scored=number + 1).total_s for number in LENGTHS]
    rows, best = [], []
    for number in LENGTHS:
        pays = [implied_acceptance(each[number] / each[0], number) if number else 0.0 for each in (took, planned)]
        experts = f"{num_read[number]:.1f}" if number else "2.0", f"{distinct(8, 2, number + 1):.1f}"
        ms = *(f"{1e3 * each[number]:.1f}" for each in (took, planned)), f"{took[number] / planned[number]:.2f}"
        rows.append([number, *experts, *ms, *(f"{each:.2f}" for each in pays)])
    for rate in (0.6, 0.7, 0.8, 0.9):
        per_token = [
            [each[number] / tokens_per_round(constant(rate, number)) for number in LENGTHS] for each in (took, planned)
        ]
        best.append([rate, *(each.index(min(each)) for each in per_token)])
    load = max(os.getloadavg()[0] - num_threads, 0.0)
    return page_of(
        "experts", threads=counted(num_threads, "thread"), turns=num_turns, load=load, bandwidth=bandwidth / 1e9,
        flops=flops / 1e9, best=markdown(["acceptance", "best K", "plan"], best),
        table=markdown(["K", "experts", "plan", "ms", "plan", "ms / plan", "pays from", "plan"], rows),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/experts.md")
    arguments = parser.parse_args()
    with TemporaryDirectory() as place:
        show(page(Path(place), arguments.turns, arguments.threads), page="experts.md", is_written=arguments.write)
