"""Times steps of a small DeepSeek V3 after texts of two lengths, with attention that reads latents or expands them.

    .venv/bin/python -m benchmarks.latents           prints milliseconds and the ratio of the lengths
    .venv/bin/python -m benchmarks.latents --store   and stores them in benchmarks/results/latents.jsonl

Both attentions and both lengths take turns.
"""

import argparse
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.measured import Goal, store, table_of_goals
from llama_ssp.extensions.modules.latents import use_latents
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.calibration import interleave, median_ratio

_SHORT, _LONG, _AT_MOST = 100, 1800, 2.5
_SLOTS = {_SHORT: 128, _LONG: 1856}
"""Tokens before the step, and the slots that it reads."""
_NUM_STEPS, _REPETITIONS = 3, 25
_READ, _EXPANDED = "latents are read", "latents are expanded"


def runner_of(*, is_absorbed: bool) -> ModuleRunner:
    """A random model in fp32, and a cache of one row."""
    kind: Any = CONFIG_MAPPING["deepseek_v3"]
    config = kind(
        vocab_size=200,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=32,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(requires_grad=False)
    if is_absorbed:
        use_latents(model)
    runner = ModuleRunner(model, comm=Comm.single())
    runner.allocate(batch_size=1, capacity=2048)
    return runner


@torch.inference_mode()
def step_s(runner: ModuleRunner, length: int, _repetition: int) -> float:
    """The median time of some steps after a text of this length."""
    ids, times = torch.full((1, 1), length), []
    for _ in range(_NUM_STEPS):
        start = perf_counter()
        runner.forward(ids % 200, ids, bucket=_SLOTS[length])
        times.append(perf_counter() - start)
    return median(times)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="keep the figures")
    arguments = parser.parse_args()
    runners = {_EXPANDED: runner_of(is_absorbed=False), _READ: runner_of(is_absorbed=True)}
    turns = {
        f"{how}, {length} tokens": partial(step_s, runner, length)
        for how, runner in runners.items()
        for length in _SLOTS
    }
    seconds = interleave(turns, num_repetitions=_REPETITIONS)
    ratios = {
        how: median_ratio(seconds[f"{how}, {_LONG} tokens"], seconds[f"{how}, {_SHORT} tokens"]) for how in runners
    }
    medians_ms = {name: 1e3 * median(values) for name, values in seconds.items()}
    print("\n".join(f"{name}: {value:.2f} ms" for name, value in medians_ms.items()))
    print(f"{_EXPANDED}: {ratios[_EXPANDED]:.2f} times as long after {_LONG} tokens as after {_SHORT}")
    print(table_of_goals([Goal(f"{_READ}, {_LONG} tokens / {_SHORT}", ratios[_READ], _AT_MOST)]))
    if arguments.store:
        store("latents", {"ratios": ratios, "step_ms": medians_ms, "num_threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
