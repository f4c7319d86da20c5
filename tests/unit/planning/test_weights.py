"""Bytes of weights: equal to published sizes, and to what the loader makes."""

from itertools import product
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import WholeParts
from llama_ssp.catalogue import Dtype
from llama_ssp.models.tensor_parallel import shard
from llama_ssp.planning.memory import shares, weight_bytes
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import shape_of
from tests.helpers.planning import small_model

INT8_GB = {"7B": 7.006, "13B": 13.352, "30B": 32.972, "65B": 65.838}


@pytest.mark.parametrize("name", INT8_GB)
def test_int8_has_the_published_size_and_every_rank_has_the_row_scales(name: str) -> None:
    shape = catalogue.load(name).shape
    assert shape
    held = [weight_bytes(share, dtype=Dtype.fp16, quantization="int8") for share in shares(shape, num_ranks=8)]
    once = sum(share.sharded_bytes for share in held) + held[0].repeated_bytes
    assert once / 1e9 == pytest.approx(INT8_GB[name], rel=2e-3)
    row_parallel_rows = 2 * shape.hidden_size * shape.num_hidden_layers
    whole = weight_bytes(shares(shape, num_ranks=8)[0], dtype=Dtype.fp16, quantization="none")
    assert {share.repeated_bytes - whole.repeated_bytes for share in held} == {4 * row_parallel_rows}


def _config(model_type: str, **sizes: Any) -> PretrainedConfig:  # noqa: ANN401 - the sizes of a config.json
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return CONFIG_MAPPING[model_type](**sizes, **ids)


_LLAMA = {
    "hidden_size": 64, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 320,
}  # fmt: skip
_GPT_NEO = {
    "hidden_size": 64, "intermediate_size": None, "num_layers": 2, "num_heads": 4, "vocab_size": 320,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA | {"num_key_value_heads": 4}),
    "llama, tied": ("llama", _LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral": ("mistral", _LLAMA | {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", _LLAMA | {"num_key_value_heads": 4}),
    "qwen3": ("qwen3", _LLAMA | {"num_key_value_heads": 4, "head_dim": 16}),
    "gpt_neox": ("gpt_neox", _LLAMA),
    "gpt_neo": ("gpt_neo", _GPT_NEO),
    "gpt_neo, untied": ("gpt_neo", _GPT_NEO | {"tie_word_embeddings": False}),
    "phi": ("phi", _LLAMA | {"num_key_value_heads": 4}),
    "gemma": ("gemma", _LLAMA | {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("gemma2", _LLAMA | {"num_key_value_heads": 4, "head_dim": 16}),
    "gemma3_text": ("gemma3_text", _LLAMA | {"num_key_value_heads": 4, "head_dim": 16}),
}


@pytest.mark.parametrize(
    ("name", "num_ranks", "whole"),
    [(name, num_ranks, WholeParts.none) for name, num_ranks in product(CONFIGS, (1, 2, 3))]
    + [(name, 2, whole) for name, whole in product(CONFIGS, (WholeParts.embedding, WholeParts.attention))],
)
def test_each_rank_is_planned_exactly_what_the_loader_gives_it(name: str, num_ranks: int, whole: WholeParts) -> None:
    import torch

    model_type, sizes = CONFIGS[name]
    config = _config(model_type, **sizes)
    shape = shape_of(config)
    planned = [
        weight_bytes(share, dtype=Dtype.bf16, quantization="none").total_bytes
        for share in shares(shape, num_ranks=num_ranks, whole=whole)
    ]
    for rank, expected in enumerate(planned):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shard(model, shape, Comm(rank=rank, size=num_ranks), whole=whole)
        if shape.tie_word_embeddings and model.lm_head.weight.shape == model.get_input_embeddings().weight.shape:
            model.lm_head.weight = model.get_input_embeddings().weight
        assert 2 * sum(parameter.numel() for parameter in model.parameters()) == expected


def test_halved_matrices_are_kept_in_whole_blocks_of_inputs() -> None:
    def matrices_bytes(hidden_size: int) -> int:
        model = small_model(hidden_size=hidden_size, intermediate_size=1024, vocab_size=4096)
        held, form = inventory(model.shape), "none"
        halved = weight_bytes(held, dtype=Dtype.fp32, quantization=form, matrix_dtype=Dtype.fp16).total_bytes
        beside = 4 * (4096 * hidden_size + held.num_layers * held.layer_vectors + held.final_vectors)
        return halved - beside

    # 64 columns for o_proj; hidden_size for q, k, v, gate, up and the head; 1024 for down.
    def kept(hidden_size: int, *, columns: int, of_output: int) -> int:
        layer = hidden_size * of_output + columns * (64 + 32 + 32 + 2 * 1024) + hidden_size * 1024
        return 2 * (2 * layer + columns * 4096)

    assert matrices_bytes(256) == kept(256, columns=256, of_output=64)
    # No whole blocks of 16: FBGEMM's kernel keeps blocks of 512 inputs.
    assert matrices_bytes(264) == kept(264, columns=512, of_output=512)
