"""Int4 layers: the nearest weights, products of packed checkpoints over ranks, and what is refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.quantization.weight_only import int4_weight_only_linear
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights import int4_rows
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.lanes import heavy
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.packed_checkpoints import LAYOUTS, pack_checkpoint

pytestmark = pytest.mark.seconds

CPU = torch.device("cpu")
INT4 = Precision(quantization="int4_weight_only")
NUM_NEW_TOKENS = 24
Made = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A packed checkpoint of a family, and the numbers that it stands for; read only."""

    @cache
    def make(family: str, layout: str, **changes: Any) -> tuple[Path, Path]:  # noqa: ANN401
        folder = tmp_path_factory.mktemp("packed")
        sizes = {"hidden_size": 256, "intermediate_size": 384} | changes
        (folder / "origin").mkdir()
        build_checkpoint(folder / "origin", family, **sizes)
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


def load(folder: Path, precision: Precision, comm: Comm) -> Runner:
    return load_model(inspect(folder), dtype=torch.float32, device=CPU, comm=comm, precision=precision)


@pytest.mark.parametrize("num_ranks", [heavy(1), 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_text_is_that_of_the_numbers_that_the_checkpoint_stands_for(
    made: Made, layout: str, num_ranks: int
) -> None:
    packed, plain = made("llama", layout)
    ids, logits = greedy(load(plain, UNQUANTIZED, Comm.single()))
    check_model(inspect(packed), num_ranks=num_ranks, quantization="int4_weight_only")
    comms = thread_comms(num_ranks)
    runners = [load(packed, INT4, comm) for comm in comms]
    for found_ids, found in on_ranks(comms, lambda comm: greedy(runners[comm.rank])):
        assert found_ids == ids
        assert (found - logits).abs().max() < 1e-4 * logits.abs().max()


@pytest.mark.parametrize("family", ["gpt_neox", "qwen2"])
def test_other_families_read_them_too(made: Made, family: str) -> None:
    """By the library's modules, and with biases."""
    packed, plain = made(family, "gptq")
    ids, logits = greedy(load(plain, UNQUANTIZED, Comm.single()))
    found_ids, found = greedy(load(packed, INT4, Comm.single()))
    assert found_ids == ids
    assert (found - logits).abs().max() < 1e-4 * logits.abs().max()


def test_a_packed_checkpoint_needs_its_format(made: Made) -> None:
    packed, plain = made("llama", "gptq")
    for quantization in ("none", "int8_weight_only"):
        with pytest.raises(
            ConfigError, match=rf"4 bits, and model.quantization={quantization} was .*=int4_weight_only"
        ):
            check_model(inspect(packed), num_ranks=1, quantization=quantization)
        with pytest.raises(ConfigError, match="holds weights of 4 bits"):
            load(packed, Precision(quantization=quantization), Comm.single())
    check_model(inspect(plain), num_ranks=1, quantization="int4_weight_only")


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
    packed, _ = made("llama", "gptq")
    with pytest.raises(PlacementError, match=r"packs 128 inputs at a time, and .*o_proj has 64 on one of 4 ranks"):
        check_model(inspect(packed), num_ranks=4, quantization="int4_weight_only")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_weight_is_rounded_once(dtype: torch.dtype, num_rows: int) -> None:
    """Products are those of scale * (code - zero), computed in fp32 and rounded to the dtype."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (33, 256), generator=generator, dtype=torch.uint8)
    scales = torch.rand(33, 2, generator=generator).half().float()
    zeros = torch.randint(0, 17, (33, 2), generator=generator)
    weight = ((codes.unflatten(1, (2, 128)) - zeros[..., None]) * scales[..., None]).flatten(1).to(dtype)
    x = torch.randn(num_rows, 256, generator=generator).to(dtype)
    linear = int4_weight_only_linear(int4_rows.pack(codes, scales, zeros), None)
    assert torch.equal(linear(torch.eye(256, dtype=dtype)).t(), weight)
    wanted = x.double() @ weight.double().t()
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    assert (linear(x) - wanted).abs().max() < 2 * tolerance * wanted.abs().max()


def test_no_group_is_further_off_than_half_a_step() -> None:
    weight = torch.randn(48, 384, generator=torch.Generator().manual_seed(1))
    weight[:, 128:256] += 3  # all positive, so that the least step is zero
    found = int4_weight_only_linear(weight, None)(torch.eye(384)).t()
    groups = weight.unflatten(1, (-1, 128))
    steps = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    errors = (found - weight).unflatten(1, (-1, 128)).abs().amax(2)
    assert (errors <= 0.501 * steps + 1e-6).all()
    assert (errors > 0.3 * steps).all()
