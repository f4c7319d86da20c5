"""Models of quantized checkpoints: the text of the numbers that they stand for, over ranks, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.model import PlannedModel, planned_model
from llama_ssp.planning.weights import model_bytes, rank_shares, shares
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import Checkpoint, inspect
from llama_ssp.weights.source import storage_of
from tests.helpers.edits import edit_config
from tests.helpers.extensions import module_of
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.held import held_bytes
from tests.helpers.lanes import first, heavy, pairs, sample, slow
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, load_modules, module_runner
from tests.helpers.packed_checkpoints import LAYOUTS, MXFP4, pack_checkpoint
from tests.unit.weights.test_packed import edited

pytestmark = of_all_formats
CPU = torch.device("cpu")
NUM_NEW_TOKENS = 10
GPT_OSS: dict[str, Any] = {"intermediate_size": 96, "head_dim": 64}
Made = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A packed checkpoint of a family, and the numbers that it stands for; read only."""

    @cache
    def make(family: str, layout: str, **changes: Any) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("packed")
        sizes: dict[str, Any] = {
            "hidden_size": 384,
            "intermediate_size": 384,
            "head_dim": 128,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        }
        (folder / "origin").mkdir()
        build_checkpoint(folder / "origin", family, **sizes | changes)
        pack_checkpoint(folder / "origin", folder / "packed", folder / "numbers", layout)
        return folder / "packed", folder / "numbers"

    return make


@torch.inference_mode()
def greedy(runner: Any, comm: Comm | None = None) -> tuple[list[int], Tensor]:
    """The ids that follow a prompt, and the logits of all positions."""
    if isinstance(runner, PreTrainedModel):
        runner = module_runner(runner, comm=comm)
    ids = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    runner.allocate(batch_size=1, capacity=64)
    logits = [runner.forward(torch.tensor([ids]), torch.arange(len(ids))[None], bucket=64)[0]]
    for position in range(len(ids), len(ids) + NUM_NEW_TOKENS):
        ids.append(int(logits[-1][-1].argmax()))
        logits.append(runner.forward(torch.tensor([ids[-1:]]), torch.tensor([[position]]), bucket=64)[0])
    return ids, torch.cat(logits)


def spread(folder: Path) -> Checkpoint:
    """A checkpoint whose experts are spread over ranks."""
    origin = inspect(folder)
    return replace(origin, shape=replace(origin.shape, spreads_experts=True))


def load(folder: Path, comm: Comm, precision: Precision | None = None, *, spreads: bool = False) -> Runner:
    """In the precision of the files, unless another is given; modules of families that all ranks compare at a time."""
    origin = spread(folder) if spreads else inspect(folder)
    storage = storage_of(origin)
    precision = precision or Precision(quantization=storage or "none", is_stored=storage is not None)
    make: Any = load_model if record_of(origin.shape.model_type).is_written else load_modules
    loaded: Runner = make(Loading(origin, dtype=torch.float32, device=CPU, comm=comm, precision=precision))
    return loaded


def assert_same_text(packed: Path, plain: Path, *, num_ranks: int, spreads: bool = False) -> None:
    ids, logits = greedy(load(plain, Comm.single()))
    check_model(inspect(packed), num_ranks=num_ranks, quantization=str(storage_of(inspect(packed))))
    comms = thread_comms(num_ranks)
    runners = [load(packed, comm, spreads=spreads) for comm in comms]
    for found_ids, found in on_ranks(comms, lambda comm: greedy(runners[comm.rank], comm)):
        assert found_ids == ids
        assert (found - logits).abs().max() < 1e-4 * logits.abs().max()


@pytest.mark.seconds
@pytest.mark.parametrize("num_ranks", [slow(1), slow(2), 3])
@pytest.mark.parametrize("layout", sample(LAYOUTS, always={*LAYOUTS[:1]}, every=2))
def test_greedy_text_is_that_of_the_numbers_that_the_checkpoint_stands_for(
    made: Made, layout: str, num_ranks: int
) -> None:
    assert_same_text(*made("llama", layout), num_ranks=num_ranks)


@pytest.mark.parametrize("layout", sample(LAYOUTS, always={*LAYOUTS[:2]}, every=2))  # the others
def test_a_plan_counts_the_bytes_that_are_loaded(made: Made, layout: str) -> None:
    assert_planned(made("llama", layout, vocab_size=208)[0])  # whole blocks, whose bytes a layer tells


def assert_planned(packed: Path, *, num_rounded: int = 0) -> None:
    """The bytes that each of two ranks loads are the planned ones, up to so many."""
    model = planned_of(packed)
    for rank, held in enumerate(shares(model.shape, num_ranks=2, quantization=model.quantization)):
        runner: Any = load(packed, Comm(rank=rank, size=2))
        loaded = held_bytes([runner._layers, runner._norm, runner._head, runner._embedding_VE])
        assert abs(loaded - model_bytes(held, model, device="cpu").total_bytes) <= num_rounded


def planned_of(packed: Path) -> PlannedModel:
    return planned_model(ModelConfig(name="local", path=str(packed)), device="cpu")


@pytest.mark.seconds
@pairs(layout=["gptq", "gptq, sorted"], family=["gpt_neox", "qwen2"])
def test_other_families_read_them_too(made: Made, family: str, layout: str) -> None:
    """By the library's modules, and with biases."""
    assert_same_text(*made(family, layout), num_ranks=2)


@pytest.mark.seconds
def test_layers_with_one_input_may_have_orders_of_their_own(made: Made, tmp_path: Path) -> None:
    """Where groups are scattered, keys and values among others of the same file."""
    packed, plain = made("llama", "gptq, sorted")

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("k_proj.g_idx")]:
            turned = {leaf: name.replace("g_idx", leaf) for leaf in ("scales", "qzeros")}
            tensors[name] = (tensors[name] + 1) % 3
            tensors |= {each: tensors[each].roll(1, 0) for each in turned.values()}

    assert_same_text(edited(packed, tmp_path, turn), plain, num_ranks=2)


@pytest.mark.seconds
@pytest.mark.parametrize(("num_ranks", "spreads"), [slow(1, False), heavy(2, False), (2, True)])
@pytest.mark.parametrize("layout", first(["compressed-tensors", "awq", "gptq, sorted", "int8", "fp8", MXFP4]))
def test_experts_are_read_as_they_are_stored(made: Made, layout: str, num_ranks: int, *, spreads: bool) -> None:
    family, sizes = ("gpt_oss", GPT_OSS) if layout == MXFP4 else ("qwen3_moe", {"moe_intermediate_size": 256})
    assert_same_text(*made(family, layout, **sizes), num_ranks=num_ranks, spreads=spreads)


@pytest.mark.seconds
@pytest.mark.parametrize(("num_ranks", "spreads"), [heavy(1, False), heavy(2, False), (2, True)])
def test_a_plan_counts_the_experts_in_mxfp4_that_ranks_hold(made: Made, num_ranks: int, *, spreads: bool) -> None:
    packed, _ = made("gpt_oss", MXFP4, **GPT_OSS)
    model = planned_of(packed)
    assert model.stored_format
    assert {name.rpartition(".")[2] for name in model.stored_format.kept} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    held = shares(replace(model.shape, spreads_experts=spreads), num_ranks=num_ranks, quantization=model.quantization)
    for rank, whole in enumerate(held):
        runner: Any = load(packed, Comm(rank=rank, size=num_ranks), spreads=spreads)
        own_experts = module_of("modules.experts").OwnExperts
        experts = [vars(module) for module in runner.modules() if type(module) is own_experts]
        biases = 2 * 4 * sum(matrix.num_rows for matrix in whole.experts)  # no plan counts them; experts share memory
        without = replace(whole, layer=tuple(each for each in whole.layer if not each.num_chosen))
        counted = [model_bytes(each, model, device="cpu").total_bytes for each in (whole, without)]
        assert held_bytes(experts) - biases == counted[0] - counted[1]


def test_blocks_of_experts_without_scales_are_refused(made: Made, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    folder = edited(made("gpt_oss", MXFP4, **GPT_OSS)[0], tmp_path, lambda tensors: tensors.pop(f"{name}_scales"))
    with pytest.raises(CheckpointError, match=f"no mxfp4 weight for {name}, though"):
        inspect(folder)


def test_experts_whose_units_are_no_whole_groups_are_refused_unless_they_are_spread(made: Made) -> None:
    packed, _ = made("qwen3_moe", "compressed-tensors", moe_intermediate_size=128)
    assert_refused(packed, 2, r"and .*experts\S* has 64 on one of 2 ranks: use placement\.target\.experts=spread, an")
    check_model(spread(packed), num_ranks=2, quantization="int4_weight_only")


def test_weights_are_not_quantized_again(made: Made) -> None:
    packed, plain = made("llama", "gptq")
    other = "int8_weight_only"
    sentence = rf"holds int4_weight_only weights, .* and model.quantization={other} was given: leave it out"
    with pytest.raises(ConfigError, match=sentence):
        check_model(inspect(packed), num_ranks=1, quantization=other)
    with pytest.raises(ConfigError, match=sentence):
        load(packed, Comm.single(), Precision(quantization=other))
    check_model(inspect(plain), num_ranks=1, quantization=other)


def left_out(made: Made, tmp_path: Path, layout: str, *modules: str) -> Path:
    """A packed checkpoint of 16 bits, with numbers in place of the parts of some modules."""
    packed, plain = made("llama", layout, vocab_size=208)

    def leave_out(tensors: dict[str, Tensor]) -> None:
        for module in modules:
            for name in [name for name in tensors if name.startswith(f"{module}.")]:
                del tensors[name]
            tensors[f"{module}.weight"] = inspect(plain).read(f"{module}.weight")

    folder = edited(packed, tmp_path, leave_out)
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    key = "ignore" if layout.startswith("compressed") else "modules_to_not_convert"
    edit_config(folder, quantization_config=described | {key: ["lm_head", *modules]})
    return folder


MIXED = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"] + ["model.layers.1.mlp.down_proj"]


@pytest.mark.seconds
@pytest.mark.parametrize("layout", first(["compressed-tensors", "fp8"]))
def test_layers_that_were_left_out_stay_as_they_are(made: Made, tmp_path: Path, layout: str) -> None:
    folder = left_out(made, tmp_path, layout, *MIXED)
    assert_same_text(folder, made("llama", layout, vocab_size=208)[1], num_ranks=2)
    assert_planned(folder, num_rounded=32)  # a mean over the layers


def test_a_part_of_the_layers_with_one_input_is_refused(made: Made, tmp_path: Path) -> None:
    folder = left_out(made, tmp_path, "compressed-tensors", MIXED[0], "model.layers.1.mlp.up_proj")
    sentence = (
        r"all or none of those with one input, .* not so for model.layers.0.self_attn.qkv, model.layers.1.mlp.gate_up: "
        "use an unquantized checkpoint$"
    )
    with pytest.raises(CheckpointError, match=sentence):
        check_model(inspect(folder), num_ranks=1, quantization="int4_weight_only")


def test_sizes_that_contradict_a_packed_weight_are_refused(made: Made, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    folder = edited(
        made("llama", "compressed-tensors")[0],
        tmp_path,
        lambda found: found.update({f"{name}.weight_shape": found[f"{name}.weight_shape"] - 1}),
    )
    with pytest.raises(CheckpointError, match=rf"weights of {name}.weight with sizes .*, and its weight_shape says"):
        inspect(folder)


def test_a_cut_through_a_group_is_refused(made: Made) -> None:
    """384 MLP units are three groups; of 256 inputs of the attention's output, four ranks would have 64 each."""
    packed, _ = made("llama", "gptq", hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    assert_refused(packed, 4, r"packs 128 .* has 64 on one of 4 ranks: .* or an unquantized checkpoint")
    sizes = {"hidden_size": 256, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 4}
    scattered, _ = made("llama", "gptq, sorted", **sizes)
    assert_refused(scattered, 32, r"packs 8 inputs at a time, and .*o_proj has 4 on one of 32 ranks")


def assert_refused(packed: Path, num_ranks: int, sentence: str) -> None:
    """By a run and by a plan."""
    with pytest.raises(PlacementError, match=sentence):
        check_model(inspect(packed), num_ranks=num_ranks, quantization="int4_weight_only")
    with pytest.raises(PlacementError, match=sentence):
        rank_shares(planned_of(packed), num_ranks=num_ranks)
