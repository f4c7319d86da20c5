"""Holds stages of layers to a whole model: its logits, and the bytes that a plan counts on each rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import joined
from llama_ssp.architectures.stages import stage_layers
from llama_ssp.catalogue import Dtype, ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.weights import model_bytes, of_stage, shares
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.extensions import module_of
from tests.helpers.held import held_bytes
from tests.helpers.lanes import grid, sample
from tests.helpers.models import FAMILIES, VOCAB_SIZE, build_checkpoint
from tests.helpers.stages import loadings, on_stages

SPLITS = [(2, 1), (3, 1), (4, 1), (2, 2)]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "mistral": {},
    "gpt_neox": {},
    "gemma2": {},
    "qwen3_moe": {"head_dim": 32},
}
"""Models whose layers are alike."""
LIBRARY = [
    *sample(
        (name for name in FAMILIES if not name.startswith("gemma4")),
        every=6,
        always=("gpt_neo", "gpt_oss", "qwen3_next, dense", "falcon_h1", "bamba", "deepseek_v3", "gemma3_text"),
    )
]
"""Of transformers' modules: windows, layers in tuples, states of recurrences, latents, experts."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(kind: str) -> Path:
        folder, changes = tmp_path_factory.mktemp("stages"), KINDS.get(kind, {})
        build_checkpoint(folder, kind if kind in FAMILIES else kind.partition(",")[0], num_hidden_layers=4, **changes)
        return folder

    return saved


def read_in_two(runner: Runner, ids_BT: torch.Tensor) -> torch.Tensor:
    """The logits of texts that are read in two pieces, as a prompt and a round."""
    batch_size, length = ids_BT.shape
    runner.allocate(batch_size=batch_size, capacity=16)
    places_BT = torch.arange(length).repeat(batch_size, 1)
    pieces = zip(ids_BT.split(8, 1), places_BT.split(8, 1), strict=True)
    return torch.cat([runner.forward(ids, places, bucket=16) for ids, places in pieces], 1)


def check_logits(folder: Path, num_stages: int, tp_size: int) -> None:
    origin = inspect(folder)
    ids_BT = torch.randint(0, VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(1))
    wanted_BTV = read_in_two(load_model(Loading(origin)), ids_BT)
    runners = [load_model(loading) for loading in loadings(origin, num_stages, tp_size)]
    *before, last = on_stages(len(runners), lambda rank: read_in_two(runners[rank], ids_BT))
    torch.testing.assert_close(last, wanted_BTV, rtol=0, atol=1e-5 if tp_size > 1 else 0)
    assert {found.shape for found in before[: len(before) + 1 - tp_size]} == {(3, 12, 0)}
    assert len({runner.is_recurrent for runner in runners}) == 1


@pytest.mark.seconds
@grid(kind=[*KINDS], split=SPLITS)
def test_the_last_stage_has_the_logits_of_a_whole_model(
    folders: Callable[[str], Path], kind: str, split: tuple[int, int]
) -> None:
    check_logits(folders(kind), *split)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", LIBRARY)
def test_stages_of_a_family_have_the_logits_of_a_whole_model(folders: Callable[[str], Path], kind: str) -> None:
    check_logits(folders(kind), 3, 1)


def test_a_family_whose_layers_read_more_than_hidden_states_is_refused(folders: Callable[[str], Path]) -> None:
    loading, _ = loadings(inspect(folders("llama")), 2, 1)
    origin = inspect(folders("gemma4_text"))
    with pytest.raises(PlacementError, match="gemma4_text models read more: leave it out, and all ranks share"):
        stage_layers(origin.shape, 2)
    with pytest.raises(PlacementError, match="those of gemma4_text models read more"):
        load_model(replace(loading, origin=origin))


@grid(kind=[*KINDS], split=SPLITS)
def test_each_rank_holds_the_weights_that_a_plan_counts(
    folders: Callable[[str], Path], kind: str, split: tuple[int, int]
) -> None:
    origin, (num_stages, tp_size) = inspect(folders(kind)), split
    model = PlannedModel(name=kind, shape=origin.shape, dtype=Dtype.fp32, quantization="none")
    stages, of_ranks = stage_layers(origin.shape, num_stages), shares(origin.shape, num_ranks=tp_size)
    planned = [held for number in range(num_stages) for held in of_stage(of_ranks, stages, number)]
    for held, loading in zip(planned, loadings(origin, num_stages, tp_size), strict=True):
        runner: Any = load_model(loading)
        parts: list[object] = [vars(runner).get(name) for name in ("_layers", "_norm", "_head", "_embedding_VE")]
        constants: list[object] = []
        if not isinstance(runner, LeanRunner):
            parts, constants = [runner._model], [*runner._model.buffers()]
        assert held_bytes(parts) - held_bytes(constants) == model_bytes(held, model, device="cuda").total_bytes


UNLIKE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe": {"first_k_dense_replace": 2},
    "kimi_linear": {},
    "lfm2_moe": {},
    "nemotron_h": {},
    "qwen3_next": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "bamba": {"attn_layer_indices": [3]},
}
"""Layers that differ: dense ones before experts, recurrences and attention, and stages without either."""


@pytest.mark.seconds
@pytest.mark.parametrize("layers", [None, [1, 1, 2]])
@pytest.mark.parametrize("kind", UNLIKE)
def test_each_stage_of_unlike_layers_holds_the_bytes_that_a_plan_counts(
    kind: str, layers: list[int] | None, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path, kind, num_hidden_layers=4, **UNLIKE[kind])
    origin = module_of("modules.described").with_modules(inspect(tmp_path))
    model = PlannedModel(name=kind, shape=origin.shape, dtype=Dtype.fp32, quantization="none")
    stages, whole = stage_layers(origin.shape, 3, layers), shares(origin.shape, num_ranks=1)
    planned = [of_stage(whole, stages, number)[0] for number in range(3)]
    runners: list[Any] = [load_model(loading) for loading in loadings(origin, 3, 1, layers=layers)]
    for runner in runners:
        runner.allocate(batch_size=3, capacity=24, num_rolled_back=4)
    ids_BT, places_BT = torch.ones(3, 2, dtype=torch.int64), torch.arange(2).repeat(3, 1)
    on_stages(3, lambda rank: runners[rank].forward(ids_BT, places_BT, bucket=24))
    weights = []
    for held, runner in zip(planned, runners, strict=True):
        weights.append(held_bytes([runner._model], least=2) - held_bytes([*runner._model.buffers()], least=2))
        assert weights[-1] == model_bytes(held, model, device="cuda").total_bytes
        states = runner._states
        kept = [*states.inputs.values(), *states.states.values()] if states else []
        cached = sum(each.nbytes for each in (*runner.cache.in_rows(), *kept))
        of_row = 24 * model.slot_bytes(origin.shape.num_key_value_heads, held) + model.state_bytes(5, held=held)
        assert cached == 3 * of_row
    assert len({*weights}) == 3, "or equal means would do"


def test_models_with_the_same_layers_in_another_order_are_others() -> None:
    """Or what is remembered of one would be told of the other."""
    layer = inventory(shape_of(2, 16)).by_layer(0)
    both = [layer, replace(layer, layer_vectors=7)]
    assert joined(both, embeddings=(), head=None) != joined(both[::-1], embeddings=(), head=None)


def test_layers_that_differ_are_shared_out_by_what_each_of_them_holds(tmp_path: Path) -> None:
    """Two dense layers before six of experts, each as large as four of them."""
    sizes: dict[str, Any] = {"first_k_dense_replace": 2, "intermediate_size": 48, "tie_word_embeddings": True}
    build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=8, vocab_size=32, **sizes)
    stages = stage_layers(module_of("modules.described").with_modules(inspect(tmp_path)).shape, 2)
    assert [len(stage) for stage in stages] == [5, 3]


def shape_of(num_layers: int, vocab_size: int) -> ModelShape:
    return ModelShape(
        model_type="llama",
        num_hidden_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=128,
        vocab_size=vocab_size,
        max_position_embeddings=128,
    )


@pytest.mark.parametrize(
    ("vocab_size", "num_stages", "wanted"),
    [
        (16, 1, [12]),
        (16, 2, [6, 6]),
        (16, 5, [2, 2, 3, 3, 2]),
        # An output as large as two layers: the last stage has as many layers fewer.
        (2 * 40960 // 64, 2, [7, 5]),
        (2 * 40960 // 64, 3, [4, 5, 3]),
        (16, 12, [1] * 12),
    ],
)
def test_no_stage_reads_more_than_it_must(vocab_size: int, num_stages: int, wanted: list[int]) -> None:
    stages = stage_layers(shape_of(12, vocab_size), num_stages)
    assert [len(stage) for stage in stages] == wanted
    assert [number for stage in stages for number in stage] == [*range(12)]


def test_stages_take_the_layers_that_are_given_and_are_no_more_than_there_are() -> None:
    assert stage_layers(shape_of(12, 16), 2, [5, 7]) == (range(5), range(5, 12))
    with pytest.raises(PlacementError, match="12 layers cannot be shared by 13 stages: use at most 12"):
        stage_layers(shape_of(12, 16), 13)
