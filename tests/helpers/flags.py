"""Logits of ranks against the uncut model of transformers, with each flag of a configuration turned or filled."""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.models.loading import check_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.models import VOCAB_SIZE, WINDOW, build_checkpoint, load_ranks, refusal, tiny_config, tiny_model

Flags = dict[str, dict[str, Any]]
"""Changes of a configuration by name."""
EQUAL, ON_ONE, REFUSED, NO_EFFECT, NOT_BUILT = "equal", "one rank", "refused", "no effect", "not built by transformers"
APART = 1e-4
"""Relative difference of logits in fp32 that counts as another model."""
NUM_POSITIONS, _FIRST = 14, 9
_IDS_1T = torch.randint(2, VOCAB_SIZE, (1, NUM_POSITIONS), generator=torch.Generator().manual_seed(4))
_FILLED: dict[str, Any] = {
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
    "attn_layer_indices": [0],
    "attn_logit_softcapping": 2.0,
    "clip_qkv": 0.05,
    "final_logit_softcapping": 3.0,
    "full_attn_idxs": [0],
    "hidden_size_per_layer_input": 8,
    "intermediate_size": [160, 96, 160, 160],
    "layer_rope_theta": [1e4, 1e2],
    "mlp_multipliers": [0.5, 2.0],
    "mlp_only_layers": [1],
    "moe_latent_size": 24,
    "n_shared_experts": 2,
    "no_rope_layers": [0, 1],
    "num_attention_heads_per_layer": [8, 4],
    "num_kv_shared_layers": 2,
    "q_lora_rank": 24,
    "sliding_window": WINDOW,
    "ssm_multipliers": [0.5, 1.5, 2.0, 0.7, 1.2],
    "time_step_limit": [0.01, 0.5],
}
"""Values for lists, and for fields that are empty, of which a graph depends."""
_TURNED = ("layer_types", "mlp_layer_types")
_OF_NO_GRAPH = {field.name for field in fields(PretrainedConfig)} | {"use_cache"}


def flags_of(kind: str, sizes: dict[str, Any]) -> Flags:
    """The changes of a kind of checkpoint: no change first."""
    config = tiny_config(kind, **sizes)
    found: Flags = {"": {}}
    for field in fields(config):
        name, value = field.name, vars(config).get(field.name)
        if name in _OF_NO_GRAPH:
            continue
        if "bool" in str(field.type) and (value is None or isinstance(value, bool)):
            found[f"{name}={str(not value).lower()}"] = {name: not value}
        elif name in _TURNED and value and value != value[::-1]:
            found[f"{name} reversed"] = {name: value[::-1]}
        elif name in _FILLED and (not value or isinstance(value, list | tuple)):
            found[name] = {name: _FILLED[name]}
    return found


def outcome(kind: str, sizes: dict[str, Any], changes: dict[str, Any], folder: Path) -> str:
    """How a changed kind runs on 1, 2 and 3 ranks; AssertionError if one of them has other logits."""
    try:
        model = build_checkpoint(folder, kind, **sizes | changes)
        wanted_TV = uncut(model)
    except Exception:  # noqa: BLE001 - of any family's code
        return NOT_BUILT
    if changes and torch.equal(wanted_TV, uncut(tiny_model(kind, **sizes))):
        return NO_EFFECT
    refused = [bool(refusal(partial(compare, folder, wanted_TV, num_ranks))) for num_ranks in (1, 2, 3)]
    return REFUSED if refused[0] else ON_ONE if any(refused) else EQUAL


@torch.inference_mode()
def uncut(model: PreTrainedModel) -> Tensor:
    """The logits (T, V) of the library's own model."""
    logits_1TV: Tensor = model(input_ids=_IDS_1T, use_cache=False).logits
    return logits_1TV[0].float()


def compare(folder: Path, wanted_TV: Tensor, num_ranks: int) -> None:
    """Assert that ranks have logits, in two pieces; SspError if the check before they start, or loading, refuses."""
    check_model(inspect(folder), num_ranks=num_ranks)
    comms = thread_comms(num_ranks)
    runners = load_ranks(folder, comms)
    positions_1T = torch.arange(_IDS_1T.shape[1])[None]

    def logits(comm: Comm) -> Tensor:
        runner = runners[comm.rank]
        runner.allocate(batch_size=1, capacity=16)
        pieces = [slice(0, _FIRST), slice(_FIRST, None)]
        found = [runner.forward(_IDS_1T[:, piece], positions_1T[:, piece], bucket=16) for piece in pieces]
        return torch.cat(found, 1)[0]

    for found_TV in on_ranks(comms, logits):
        apart = float((found_TV - wanted_TV).norm() / wanted_TV.norm())
        assert apart < APART, f"logits on {num_ranks} ranks are {apart:.1%} apart from those of the uncut model"
