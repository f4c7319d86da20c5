"""Models of quantized checkpoints: the text of the numbers that they stand for, over ranks, and what is refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.planning.memory import model_bytes, shares
from llama_ssp.planning.spec import planned_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import ModelConfig
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.source import storage_of
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.lanes import heavy
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.packed_checkpoints import LAYOUTS, pack_checkpoint
from tests.unit.models.test_quantized_models import tensors_of

pytestmark = pytest.mark.seconds

CPU = torch.device("cpu")
NUM_NEW_TOKENS = 24
Made = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A packed checkpoint of a family, and the numbers that it stands for; read only."""

    @cache
    def make(family: str, layout: str, **changes: Any) -> tuple[Path, Path]:  # noqa: ANN401
        folder = tmp_path_factory.mktemp("packed")
        sizes: dict[str, Any] = {
            "hidden_size": 384, "intermediate_size": 384, "head_dim": 128, "num_attention_heads": 3,
            "num_key_value_heads": 3,
        }  # fmt: skip
        (folder / "origin").mkdir()
        build_checkpoint(folder / "origin", family, **sizes | changes)
        pack_checkpoint(folder / "origin", folder / "packed", folder / "numbers", layout)
        return folder / "packed", folder / "numbers"

    return make


@torch.inference_mode()
def greedy(runner: Runner) -> tuple[list[int], Tensor]:
    """The ids that follow a prompt, and the logits of all positions."""
    ids = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    runner.allocate(batch_size=1, capacity=64)
    logits = [runner.forward(torch.tensor([ids]), torch.arange(len(ids))[None], bucket=64)[0]]
    for position in range(len(ids), len(ids) + NUM_NEW_TOKENS):
        ids.append(int(logits[-1][-1].argmax()))
        logits.append(runner.forward(torch.tensor([ids[-1:]]), torch.tensor([[position]]), bucket=64)[0])
    return ids, torch.cat(logits)


def load(folder: Path, comm: Comm, precision: Precision | None = None) -> Runner:
    """In the precision of the files, unless another is given."""
    origin = inspect(folder)
    precision = precision or Precision(quantization=storage_of(origin) or "none")
    return load_model(origin, dtype=torch.float32, device=CPU, comm=comm, precision=precision)


@pytest.mark.parametrize("num_ranks", [heavy(1), 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_text_is_that_of_the_numbers_that_the_checkpoint_stands_for(
    made: Made, layout: str, num_ranks: int
) -> None:
    packed, plain = made("llama", layout)
    ids, logits = greedy(load(plain, Comm.single()))
    check_model(inspect(packed), num_ranks=num_ranks, quantization=str(storage_of(inspect(packed))))
    comms = thread_comms(num_ranks)
    runners = [load(packed, comm) for comm in comms]
    for found_ids, found in on_ranks(comms, lambda comm: greedy(runners[comm.rank])):
        assert found_ids == ids
        assert (found - logits).abs().max() < 1e-4 * logits.abs().max()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_counts_the_bytes_that_are_loaded(made: Made, layout: str, num_ranks: int) -> None:
    packed, _ = made("llama", layout, vocab_size=208)  # whole blocks, whose bytes a layer tells
    model = planned_model(ModelConfig(name="local", path=str(packed)), device="cpu")
    for rank, held in enumerate(shares(model.shape, num_ranks=num_ranks, quantization=model.quantization)):
        runner: Any = load(packed, Comm(rank=rank, size=num_ranks))
        parts = [runner._layers, runner._norm, runner._head, runner._embed]
        loaded = sum(tensor.nbytes for tensor in tensors_of(parts, {}) if tensor.numel() > 1)
        assert loaded == model_bytes(held, model, device="cpu").total_bytes


@pytest.mark.parametrize("family", ["gpt_neox", "qwen2"])
def test_other_families_read_them_too(made: Made, family: str) -> None:
    """By the library's modules, and with biases."""
    packed, plain = made(family, "gptq")
    ids, logits = greedy(load(plain, Comm.single()))
    found_ids, found = greedy(load(packed, Comm.single()))
    assert found_ids == ids
    assert (found - logits).abs().max() < 1e-4 * logits.abs().max()


def test_weights_are_not_quantized_again(made: Made) -> None:
    packed, plain = made("llama", "gptq")
    other = "int8_weight_only"
    sentence = rf"holds int4_weight_only weights, .* and model.quantization={other} was given: leave it out"
    with pytest.raises(ConfigError, match=sentence):
        check_model(inspect(packed), num_ranks=1, quantization=other)
    with pytest.raises(ConfigError, match=sentence):
        load(packed, Comm.single(), Precision(quantization=other))
    check_model(inspect(plain), num_ranks=1, quantization=other)


def test_layers_that_were_left_out_are_refused(made: Made, tmp_path: Path) -> None:
    """Otherwise they would be rounded without a word."""
    from tests.unit.weights.test_packed import edited

    packed, plain = made("llama", "compressed-tensors")
    name = "model.layers.0.mlp.down_proj"

    def leave_out(tensors: dict[str, Tensor]) -> None:
        for leaf in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{name}.{leaf}"]
        tensors[f"{name}.weight"] = inspect(plain).read(f"{name}.weight")

    with pytest.raises(CheckpointError, match=rf"for all linear layers .* not so for {name}.weight"):
        check_model(inspect(edited(packed, tmp_path, leave_out)), num_ranks=1, quantization="int4_weight_only")


def test_a_cut_through_a_group_is_refused(made: Made) -> None:
    """384 MLP units are three groups; of 256 inputs of the attention's output, four ranks would have 64 each."""
    packed, _ = made("llama", "gptq", hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    with pytest.raises(PlacementError, match=r"packs 128 inputs at a time, and .*o_proj has 64 on one of 4 ranks"):
        check_model(inspect(packed), num_ranks=4, quantization="int4_weight_only")
