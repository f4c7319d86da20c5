"""Times steps of a small DeepSeek V3 after texts of two lengths, with attention that reads latents or expands them.

python -m benchmarks.latents
"""

from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llama_ssp.models.huggingface.latents import use_latents
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.ranks.comms import Comm

_LENGTHS = {100: 128, 1800: 1856}
"""Tokens before the step, and the slots that it reads."""
_NUM_STEPS = 25


def main() -> None:
    """Print milliseconds of a step by attention and length, and the ratio of the lengths."""
    kind: Any = CONFIG_MAPPING["deepseek_v3"]
    config = kind(
        vocab_size=200, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=32, kv_lora_rank=64, q_lora_rank=96, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=4096, pad_token_id=None,
    )  # fmt: skip
    for is_absorbed in (False, True):
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(requires_grad=False)
        if is_absorbed:
            use_latents(model)
        runner = ModuleRunner(model, comm=Comm.single())
        runner.allocate(batch_size=1, capacity=2048)
        times = {length: median(_steps(runner, length)) for length in _LENGTHS}
        short, long = times.values()
        print(
            f"{'latents are read' if is_absorbed else 'latents are expanded'}: "
            f"{', '.join(f'{1e3 * seconds:.2f} ms after {length}' for length, seconds in times.items())}, "
            f"{long / short:.2f} times"
        )


@torch.inference_mode()
def _steps(runner: ModuleRunner, length: int) -> list[float]:
    ids, times = torch.full((1, 1), length), []
    for _ in range(_NUM_STEPS):
        start = perf_counter()
        runner.forward(ids % 200, ids, bucket=_LENGTHS[length])
        times.append(perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
