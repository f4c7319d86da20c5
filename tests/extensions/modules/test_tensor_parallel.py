"""Holds the ranks of a group together to the whole model's logits, and each of them to its own slice."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from llama_ssp.architectures.matrices import WholeParts, split_model
from llama_ssp.errors import PlacementError
from llama_ssp.extensions.modules.building import load_modules
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.extensions.modules.tensor_parallel import shard
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm, best_of
from llama_ssp.weights.checkpoint import Checkpoint, inspect, shape_of
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.lanes import slow
from tests.helpers.models import VOCAB_SIZE, library_logits, tiny_config
from tests.unit.models.conftest import Saved

SavedModels = Callable[[str], Saved]
FAMILIES = (
    "llama",
    "gpt_neox",
    "qwen2",
    "qwen3",
    "phi",
    "gemma",
    "mistral",
    "qwen2, windows",
    "gemma2",
    "gemma3_text",
    "gpt_neo",
)


NONE, EMBEDDING, ATTENTION = WholeParts


_WHOLE = (("gemma", EMBEDDING), ("gpt_neox", ATTENTION), ("qwen2", ATTENTION))
"""Those of the default tests: an embedding of the family's own, tied; a fused matrix; biases."""


def load_ranks(folder: Path, comms: list[Comm], whole: WholeParts = NONE) -> list[ModuleRunner]:
    """One rank after the other, because accelerate's empty weights patch torch for the whole process."""
    models = [load_modules(Loading(inspect(folder), comm=comm, whole=whole)) for comm in comms]
    return [ModuleRunner(model, comm=comm) for model, comm in zip(models, comms, strict=True)]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "num_ranks", "whole"),
    [
        (family, num_ranks, NONE) if num_ranks == (3, 8)[place % 2] else slow(family, num_ranks, NONE)
        for place, family in enumerate(FAMILIES)
        for num_ranks in (1, 2, 3, 4, 8)
    ]
    + [
        (family, 3, whole) if (family, whole) in _WHOLE else slow(family, 3, whole)
        for family in FAMILIES
        for whole in (EMBEDDING, ATTENTION)
    ],
)
def test_every_rank_gets_the_whole_model_s_logits(
    saved: SavedModels, family: str, num_ranks: int, whole: WholeParts
) -> None:
    """8 heads over 2 or 4 key-value heads: 3 ranks hold uneven heads, 8 ranks hold copies of key-value heads."""
    folder, model = saved(family)
    comms = thread_comms(num_ranks)
    runners = load_ranks(folder, [*comms], whole)
    ids_BT = torch.randint(0, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(2))
    positions_BT = torch.arange(12).expand(2, -1)

    def two_forwards(comm: Comm) -> torch.Tensor:
        runner = runners[comm.rank]
        runner.allocate(batch_size=2, capacity=16)
        head = runner.forward(ids_BT[:, :8], positions_BT[:, :8], bucket=8)
        tail = runner.forward(ids_BT[:, 8:], positions_BT[:, 8:], bucket=16)
        return torch.cat([head, tail], dim=1)

    wanted = torch.stack([library_logits(model, ids_T) for ids_T in ids_BT])
    for logits_BTV in on_ranks(comms, two_forwards):
        torch.testing.assert_close(logits_BTV, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        (
            "gpt_oss",
            {"self_attn.sinks": (4,), "mlp.experts.gate_up_proj_bias": (4, 160), "self_attn.q_proj.bias": (64,)},
        ),
        ("deepseek_v2", {"self_attn.kv_b_proj.weight": (4 * 32, 16), "self_attn.kv_a_proj_with_mqa.weight": (24, 64)}),
        ("deepseek_v3", {"self_attn.q_b_proj.weight": (4 * 24, 24), "self_attn.o_proj.weight": (64, 4 * 16)}),
    ],
)
def test_sinks_biases_of_experts_and_heads_of_latents_are_cut(
    saved: SavedModels, family: str, parts: dict[str, tuple[int, ...]]
) -> None:
    """Columns of gate and up take turns in GPT-OSS; heads have widths of their own in DeepSeek's attention."""
    folder, model = saved(family)
    comms = thread_comms(2)
    modules = [load_modules(Loading(inspect(folder), comm=comm)) for comm in comms]
    found = dict(modules[0].named_parameters())
    assert {name: tuple(found[f"model.layers.1.{name}"].shape) for name in parts} == parts
    ids_BT, positions_BT = torch.arange(3, 15)[None], torch.arange(12)[None]

    def forward(comm: Comm) -> torch.Tensor:
        runner = ModuleRunner(modules[comm.rank], comm=comm)
        runner.allocate(batch_size=1, capacity=16)
        return runner.forward(ids_BT, positions_BT, bucket=16)[0]

    for logits_TV in on_ranks(comms, forward):
        torch.testing.assert_close(logits_TV, library_logits(model, ids_BT[0]), atol=1e-5, rtol=0)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "quantization", "load"),
    [
        ("mixtral", "none", load_model),
        ("mixtral", "none", load_modules),
        ("gpt_oss", "none", load_modules),
        ("gpt_oss", "int8_weight_only", load_modules),
        ("deepseek_v3", "int8_weight_only", load_modules),
    ],
)
def test_experts_that_are_spread_compute_what_cut_ones_do(
    saved: SavedModels, family: str, quantization: str, load: Callable[..., Any]
) -> None:
    """In our products and in the library's modules; the experts that tokens choose are counted alike."""
    cut = inspect(saved(family)[0])
    spread, precision = (
        replace(cut, shape=replace(cut.shape, spreads_experts=True)),
        Precision(quantization=quantization),
    )
    ids_BT, positions_BT = torch.arange(3, 15)[None], torch.arange(12)[None]

    def outcomes(origin: Checkpoint) -> list[tuple[torch.Tensor, torch.Tensor]]:
        comms = thread_comms(2)
        loaded = [load(Loading(origin, comm=comm, precision=precision)) for comm in comms]

        def forward(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
            runner: Any = loaded[comm.rank]
            runner = ModuleRunner(runner, comm=comm) if load is load_modules else runner
            runner.allocate(batch_size=1, capacity=16)
            return runner.forward(ids_BT, positions_BT, bucket=16)[0], runner.experts_read_3

        return on_ranks(comms, forward)

    wanted_TV, wanted_3 = outcomes(cut)[0]
    for logits_TV, read_3 in outcomes(spread):
        # Slices have scales of their own.
        apart = float((logits_TV - wanted_TV).norm() / wanted_TV.norm())
        assert apart < (1e-5 if quantization == "none" else 0.03)
        torch.testing.assert_close(read_3, wanted_3)


def test_experts_that_are_no_multiple_of_the_ranks_are_not_spread(saved: SavedModels) -> None:
    for family in ("mixtral", "llama"):
        shape = replace(inspect(saved(family)[0]).shape, spreads_experts=True)
        with pytest.raises(PlacementError, match=r"spread gives each of 3 ranks as many whole experts"):
            split_model(shape, num_ranks=3)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mpt", {}, "mpt has no tensor-parallel plan: run it on one rank, not on 2"),
        ("flex_olmo", {"num_experts": 4}, r"self_attn.q_proj \(Linear\) by colwise_gather_output"),
    ],
)
def test_a_plan_that_is_not_understood_is_refused_by_name(family: str, changes: dict[str, object], reason: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    shape = shape_of(model.config)
    with pytest.raises(PlacementError, match=reason):
        shard(model, shape, Comm(rank=0, size=2), own=split_model(shape, num_ranks=2)[0])


def test_a_matrix_of_another_size_than_the_config_says_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.model.layers[1].self_attn.q_proj = nn.Linear(64, 96)
    shape = shape_of(model.config)
    with pytest.raises(PlacementError, match=r"layers.1.self_attn.q_proj has 96 features where the config says 64"):
        shard(model, shape, Comm(rank=0, size=2), own=split_model(shape, num_ranks=2)[0])


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 5, 1), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_find_the_token_that_the_whole_logits_have_as_their_best(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Every row of seven logits of three values, with all its ties, and a NaN or infinities in each place."""
    ties = torch.tensor([*product((-1.0, 0.0, 2.0), repeat=7)])
    odd = torch.cat([torch.zeros(7, 7).fill_diagonal_(value) for value in (math.nan, math.inf, -math.inf)])
    logits_NV = torch.cat([ties, odd, odd + ties[: len(odd)], torch.full((1, 7), -math.inf)]).to(dtype)
    firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def best(comm: Comm) -> torch.Tensor:
        first = firsts[comm.rank]
        return best_of(logits_NV[:, first : first + sizes[comm.rank]], first=first, comm=comm)

    wanted_N = logits_NV.argmax(-1)
    for found_N2 in on_ranks(thread_comms(len(sizes)), best):
        assert found_N2[:, 1].long().tolist() == wanted_N.tolist()
        largest_N = logits_NV.gather(1, wanted_N[:, None])[:, 0].float()
        assert torch.equal(found_N2[:, 0].nan_to_num(9.0), largest_N.nan_to_num(9.0))
