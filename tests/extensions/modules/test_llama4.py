"""Llama 4's text over the borders of chunks: laws, trees, masks, and the experts and temperatures of the library."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_chunked_causal_mask

from llama_ssp.architectures.family import Chunk
from llama_ssp.extensions.modules import llama4
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.models import runner
from llama_ssp.models.cache import Masks
from llama_ssp.models.runner import nearest
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.state import Request
from tests.helpers import rolled_back
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.lanes import heavy
from tests.helpers.models import tiny_config, tiny_model
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.text_parts import CHUNKS

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "intermediate_size_mlp": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 2,
    "floor_scale": 2,
    "attn_scale": 0.7,
}
SIZES: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 4, **CHUNKS}
FAULTS = "no chunks", "chunks from the first position", "one temperature", "outputs weighted"


def of_library() -> rolled_back.OfLibrary:
    def adapt(model: PreTrainedModel) -> None:
        llama4.adapt(model)
        config: Any = model.config
        config._experts_implementation = "batched_mm"  # which takes fp64

    return rolled_back.OfLibrary("llama4_text", adapt, **SMALL)


def plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    """Put one of FAULTS into what is adapted afterwards."""
    rows, of_tree, scales = Masks.rows, runner.nearest, llama4._with_scales
    if fault == "no chunks":
        patch.setattr(Masks, "rows", lambda *given, **how: dict.fromkeys(found := rows(*given, **how), found[None]))
        patch.setattr(runner, "nearest", lambda seen, _: seen)
    elif fault == "chunks from the first position":
        patch.setattr(
            Masks,
            "rows",
            lambda self, places, bucket: {
                window: mask if window is None else rows(self, places * 0 + places[:, :1], bucket=bucket)[window]
                for window, mask in rows(self, places, bucket=bucket).items()
            },
        )
        patch.setattr(runner, "nearest", lambda seen, window: of_tree(seen, window and int(window)))
    elif fault == "one temperature":
        patch.setattr(
            llama4,
            "_with_scales",
            lambda attention, layer, args, options: scales(
                attention, layer, args, options | {"position_ids": options["position_ids"] * 0}
            ),
        )
    elif fault == "outputs weighted":
        patch.setattr(llama4, "_mix", outputs_weighted)


def outputs_weighted(mlp: Any, x_BTE: Tensor) -> tuple[Tensor, Tensor]:
    """As most kinds of experts are mixed."""
    x_ME = x_BTE.reshape(-1, x_BTE.shape[-1])
    _, logits_MX = mlp.router(x_ME)
    top_MK, chosen_MK = logits_MX.topk(mlp.top_k, dim=1)
    return mlp.shared_expert(x_ME) + mlp.experts(x_ME, chosen_MK, top_MK.sigmoid()), logits_MX


@pytest.mark.seconds
@torch.inference_mode()
@pytest.mark.parametrize("fault", ["", *map(heavy, FAULTS)])
@pytest.mark.parametrize("law", [rolled_back.text_law, rolled_back.overlap_law])
def test_a_text_that_rolls_back_over_chunks_has_the_law_of_the_library(
    law: Callable[..., Tensor], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all courses of rounds, and not with a fault; the model is not compared first."""
    monkeypatch.setattr(ModuleRunner, "_compare", lambda _: None)
    plant(fault, monkeypatch)
    model = of_library()
    apart = float((law(model) - rolled_back.wanted_law(model)).abs().max())
    assert apart > 1e-6 if fault else apart < 1e-12


@pytest.mark.seconds
@torch.inference_mode()
@pytest.mark.parametrize("fault", ["", *map(heavy, FAULTS)])
def test_trees_over_chunks_have_the_logits_of_the_library(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of norms and turns, which are in fp32."""
    monkeypatch.setattr(ModuleRunner, "_compare", lambda _: None)
    plant(fault, monkeypatch)
    apart = rolled_back.apart_on_trees(of_library())
    assert apart > 1e-3 if fault else apart < 1e-6


@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_masks_of_chunks_are_those_of_the_library(size: int) -> None:
    """Also as a tree sees slots, of a chain."""
    masks = Masks([None, Chunk(size)], capacity=24, dtype=torch.float32, device=torch.device("cpu"))
    places_BT = torch.tensor([[3, 4, 5], [0, 1, 2], [13, 14, 15]])
    found = masks.rows(places_BT, bucket=16)[Chunk(size)]
    config = tiny_config("llama4_text", **SIZES | {"attention_chunk_size": size})
    config._attn_implementation = "sdpa"
    x_1TE = torch.zeros(1, 16, config.hidden_size)
    ones_BT, row_1T = torch.ones(1, 16, dtype=torch.long), torch.arange(16)[None]
    wanted_SS: Any = create_chunked_causal_mask(config, x_1TE, ones_BT, None, row_1T)
    seen_SS = torch.ones(16, 16).tril().bool() if wanted_SS is None else wanted_SS[0, 0]
    assert torch.equal(found[:, 0] == 0, seen_SS[places_BT])
    causal = torch.ones(16, 16).tril().bool()
    assert torch.equal(nearest(causal, Chunk(size)), seen_SS)


def texts(requests: Sequence[Request], make: Callable[[], Any]) -> list[list[int]]:
    return [done.token_ids for done in complete(make(), requests)]


@pytest.mark.heavy
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 9])
def test_one_text_per_seed_whatever_is_drafted_over_chunks(num_draft_tokens: int) -> None:
    """Chains within and beyond a chunk, overlapped ones, and greedy trees."""
    target, draft = (tiny_model("llama4_text", **SIZES, num_hidden_layers=number) for number in (2, 1))
    for model in target, draft:
        llama4.adapt(model)
    runners = [ModuleRunner(model, comm=Comm.single()) for model in (target, draft)]
    requests = [Request(index=n, prompt_ids=tuple(range(5, 5 + n)), max_new_tokens=14) for n in (1, 4, 5, 11)]
    how: dict[str, Any] = {"temperature": 1.0, "rule_name": "coupled", "batch_size": 4}
    plain = texts(requests, partial(make_decoder, runners[0], None, **how))
    how["num_draft_tokens"] = num_draft_tokens
    assert texts(requests, partial(make_decoder, *runners, **how)) == plain
    assert texts(requests, partial(overlapped_decoder, *runners, **how)) == plain
    greedy = texts(requests, partial(make_decoder, runners[0], None, batch_size=4))
    assert texts(requests, partial(make_decoder, *runners, batch_size=4, tree="2x2x1")) == greedy
