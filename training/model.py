"""The two Llamas of the pair, as transformers has them.

What it does: holds their sizes, makes them with random weights, and scores rows with them.
What it does not do: save or load.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from training.tokenizer import BOS_ID, CONTEXT, EOS_ID, PAD_ID, VOCABULARY

# Token ids of shape (B, T) to logits of shape (B, T, V).
Scorer = Callable[[Tensor], Tensor]


def llama_config(**sizes: Any) -> LlamaConfig:
    """Returns a configuration with the vocabulary of the pair, unless `sizes` have another one."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return LlamaConfig(**common | sizes)


TARGET = llama_config(
    hidden_size=256, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024
)
DRAFT = llama_config(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    tie_word_embeddings=True,
)


def new_llama(config: LlamaConfig) -> LlamaForCausalLM:
    """Makes a model with normal weights; those that write to the residual stream shrink with its depth."""
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=0.02 / (2 * config.num_hidden_layers) ** 0.5)
    return model


def scorer(model: nn.Module, *, compiles: bool = False) -> Scorer:
    """Returns what scores rows with a model, compiled for a speed-up of a fifth if there is a C++ compiler."""
    called: Any = torch.compile(model) if compiles else model
    return lambda ids_BT: called(ids_BT, use_cache=False).logits
