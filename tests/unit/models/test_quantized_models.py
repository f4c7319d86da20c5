"""Quantized models as a whole: both implementations, all ranks, rounds, bytes, and what is refused."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import catalogue
from llama_ssp import load as load_pair
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import ConfigError, PlacementError
from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.loading import check_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.weights import model_bytes, shares
from llama_ssp.ranks.comms import Comm
from llama_ssp.registry import operators
from llama_ssp.registry.operators import OPERATORS, DeviceOperator
from llama_ssp.storage.formats import StorageFormat, format_of, formats
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.extensions import module_of
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.held import held_bytes
from tests.helpers.lanes import pairs
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, load_lean, load_modules, module_runner

pytestmark = of_all_formats
CPU = torch.device("cpu")
# Wide enough for groups of 128 inputs on two ranks.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
FORMS = [form.name for form in formats().values() if form.is_quantized and not form.is_stored_alone]
IMPLEMENTATIONS = [
    ("llama", "lean"),
    ("llama", "modules"),
    ("qwen2", "lean"),
    ("gpt_neox", "modules"),
    ("gpt_neo", "modules"),
    ("gemma2", "modules"),
]
every_form = pytest.mark.parametrize("form", FORMS)
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with a random model of a family."""

    @cache
    def build(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        build_checkpoint(folder, family, **WIDE | ({"head_dim": 32} if family == "gemma2" else {}))
        return folder

    return build


def load(
    folder: Path,
    implementation: str,
    precision: Precision,
    *,
    comm: Comm | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    comm = comm or Comm.single()
    if implementation == "lean":
        # The head's kernel is named, since a packed one does not tell its bytes.
        return load_lean(folder, dtype=dtype, comm=comm, precision=precision, kernel=PlainLinear)
    return module_runner(load_modules(Loading(inspect(folder), dtype=dtype, comm=comm, precision=precision)), comm=comm)


@torch.inference_mode()
def logits_of(runner: Runner, *, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Logits of a prefill and a ragged round over two rows."""
    ids_BT = torch.randint(0, vocab_size, (2, 12), generator=torch.Generator().manual_seed(2))
    runner.allocate(batch_size=2, capacity=16)
    head = runner.forward(ids_BT[:, :8], torch.arange(8).expand(2, -1), bucket=8)
    tail = runner.forward(ids_BT[:, 8:], torch.tensor([[8], [6]]) + torch.arange(4), bucket=16)
    return torch.cat([head, tail], dim=1)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.seconds
@pairs(num_ranks=[1, 2], form=FORMS, implemented=IMPLEMENTATIONS)
def test_ranks_come_within_the_error_of_the_precision_itself(
    saved: Saved, implemented: tuple[str, str], num_ranks: int, form: str
) -> None:
    """And that error is seen: a layer that was left as it is would show none."""
    family, implementation = implemented
    folder, precision = saved(family), Precision(quantization=form)
    exact = logits_of(load(folder, implementation, Precision()))
    alone = logits_of(load(folder, implementation, precision))
    error = rms(alone - exact)
    most = {"fp8_weight_only": 0.2, "nf4": 0.5, "fp4": 0.7, "int4_weight_only": 0.5}
    assert 1e-3 * rms(exact) < error < most.get(form, 0.1) * rms(exact)
    comms = thread_comms(num_ranks)
    runners = [load(folder, implementation, precision, comm=comm) for comm in comms]
    for found in on_ranks(comms, lambda comm: logits_of(runners[comm.rank])):
        assert rms(found - alone) <= error


@every_form
def test_both_implementations_quantize_alike(saved: Saved, form: str) -> None:
    """What is left is rounding, which int8 takes to another step of an input now and then."""
    folder, precision = saved("llama"), Precision(quantization=form)
    lean, modules = (logits_of(load(folder, name, precision)) for name in ("lean", "modules"))
    assert (lean - modules).abs().max() < (2e-2 if form == "int8" else 1e-4) * lean.abs().max()


@torch.inference_mode()
def round_difference(runner: Runner) -> float:
    """Largest difference between five rows at once and one after the other, over twenty rounds of the shipped model."""
    runner.allocate(batch_size=1, capacity=256)
    ids_BT = torch.randint(5, 4000, (1, 164), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(164)[None]

    def read(start: int, stop: int) -> Tensor:
        return runner.forward(ids_BT[:, start:stop], positions_BT[:, start:stop], bucket=256)

    read(0, 64)
    differences = []
    for start in range(64, 164, 5):
        joint = read(start, start + 5)
        alone = torch.cat([read(position, position + 1) for position in range(start, start + 5)], dim=1)
        differences.append(float((joint - alone).abs().max()))
    return max(differences)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["lean", "modules"])
def test_a_round_is_decoding_one_by_one_as_closely_as_in_fp32(implementation: str) -> None:
    """At most ten times as far."""
    folder = hub.resolve(catalogue.load("tiny"))
    exact = round_difference(load(folder, implementation, Precision()))
    for form in FORMS:
        assert round_difference(load(folder, implementation, Precision(quantization=form))) <= 10 * exact, form


@pairs(num_ranks=[1, 2], implemented=IMPLEMENTATIONS, form=["none", *FORMS], dtype=[Dtype.fp32, Dtype.bf16])
def test_the_planned_bytes_are_those_of_the_tensors(
    saved: Saved, implemented: tuple[str, str], *, num_ranks: int, form: str, dtype: Dtype
) -> None:
    assert_planned(saved, implemented, num_ranks=num_ranks, form=form, dtype=dtype)


@pytest.mark.seconds
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_slices_of_fewer_inputs_have_smaller_groups(saved: Saved, num_ranks: int) -> None:
    """64 and 32 of the output of attention, in words of their own."""
    check_model(inspect(saved("llama")), num_ranks=num_ranks, quantization="int4_weight_only")
    assert_planned(saved, ("llama", "lean"), num_ranks=num_ranks, form="int4_weight_only", dtype=Dtype.fp32)
    whole = logits_of(load(saved("llama"), "lean", Precision(quantization="int4_weight_only")))
    comms = thread_comms(num_ranks)
    runners = [load(saved("llama"), "lean", Precision(quantization="int4_weight_only"), comm=comm) for comm in comms]
    for found in on_ranks(comms, lambda comm: logits_of(runners[comm.rank])):
        assert rms(found - whole) < 0.5 * rms(whole)


def assert_planned(saved: Saved, implemented: tuple[str, str], *, num_ranks: int, form: str, dtype: Dtype) -> None:
    family, implementation = implemented
    folder = saved(family)
    model = PlannedModel(name=family, shape=inspect(folder).shape, dtype=dtype, quantization=form)
    for rank, share in enumerate(shares(model.shape, num_ranks=num_ranks, quantization=form)):
        comm = Comm(rank=rank, size=num_ranks)
        runner = load(
            folder, implementation, Precision(quantization=form), comm=comm, dtype=getattr(torch, dtype.value)
        )
        if implementation == "lean":
            parts = [runner._layers, runner._norm, runner._head, runner._embedding_VE]
        else:
            kind, model_of = module_of("modules.building").OwnLinear, runner._model
            parts = [[*model_of.parameters()], [each for each in model_of.modules() if type(each) is kind]]
        is_short = implementation == "lean" and dtype is Dtype.bf16  # norms are in fp32 on CPUs
        assert held_bytes(parts) == model_bytes(share, model, device="cpu" if is_short else "cuda").total_bytes


@pytest.mark.parametrize(
    ("family", "num_ranks", "form", "sentence"),
    [
        ("llama", 8, "nf4", "nf4 packs 64 inputs at a time, and model.layers.0.self_attn.o_proj has 32 on one"),
        ("gpt_neox", 8, "nf4", "attention.dense has 32 on one of 8 ranks: use another number of ranks, or"),
        ("llama", 4, "fp8_weight_only", "packs 128 inputs at a time, and .*o_proj has 64 on one of 4"),
    ],
)
def test_a_slice_that_fills_no_group_is_refused_with_what_would_work(
    saved: Saved, family: str, num_ranks: int, form: str, sentence: str
) -> None:
    checkpoint = inspect(saved(family))
    check_model(checkpoint, num_ranks=2, quantization=form)
    check_model(checkpoint, num_ranks=num_ranks, quantization="int8_weight_only")
    with pytest.raises(PlacementError, match=sentence):
        check_model(checkpoint, num_ranks=num_ranks, quantization=form)


def test_a_whole_layer_that_fills_no_group_is_refused_too(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama")
    with pytest.raises(PlacementError, match=r"mlp.down_proj has 160: use quantization=int8_weight_only"):
        check_model(inspect(tmp_path), num_ranks=1, quantization="nf4")


def blocks_of_16(storage: StorageFormat) -> int | None:
    """Sizes of layers that an operator of CPUs takes."""
    return 16 if storage.compiled else None


def no_blocks(_storage: StorageFormat) -> None:
    """No operator."""


def _have_products(monkeypatch: pytest.MonkeyPatch, make: Callable[..., int | None]) -> None:
    record = DeviceOperator(operation="packed_block", device="cpu", make=f"{__name__}:{make.__name__}")
    monkeypatch.setitem(OPERATORS.records, record.name, record)


@pairs(num_ranks=[1, 2], compiles=[True, False], has_product=[True, False])
def test_int8_needs_its_package_only_where_no_compiled_product_serves(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, *, num_ranks: int, compiles: bool, has_product: bool
) -> None:
    monkeypatch.setattr("llama_ssp.models.loading.find_spec", lambda _name: None)
    _have_products(monkeypatch, blocks_of_16 if has_product else no_blocks)
    checkpoint = inspect(saved("llama"))
    if compiles and has_product:
        check_model(checkpoint, num_ranks=num_ranks, quantization="int8", compiles=compiles)
    else:
        with pytest.raises(ConfigError, match=r"int8 needs the package bitsandbytes: .* -m pip install"):
            check_model(checkpoint, num_ranks=num_ranks, quantization="int8", compiles=compiles)
    with pytest.raises(
        ConfigError, match=r"nf4 needs the package bitsandbytes: .* -m pip install -e '\.\[.*weight_only"
    ):
        check_model(checkpoint, num_ranks=1, quantization="nf4", compiles=compiles)
    check_model(checkpoint, num_ranks=1, quantization="int8_weight_only")


def test_layers_that_compiled_products_do_not_fit_are_named_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_ssp.models.loading.find_spec", lambda _name: None)
    _have_products(monkeypatch, blocks_of_16)
    build_checkpoint(tmp_path, "llama", head_dim=8, num_key_value_heads=8)
    check_model(inspect(tmp_path), num_ranks=2, quantization="int8", compiles=True)
    sentence = r"needs the package bitsandbytes for .*0.self_attn.q_proj.* no multiples of 16: .* -m pip install"
    with pytest.raises(ConfigError, match=sentence):  # 3 of 8 heads of 8 are 24 outputs
        check_model(inspect(tmp_path), num_ranks=3, quantization="int8", compiles=True)


def test_int8_decodes_on_a_cpu_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if not operators.made("packed_block", "cpu", format_of("int8")):
        pytest.skip("this CPU has no integer products")

    def refuse() -> None:
        raise AssertionError("bitsandbytes is asked for")

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("llama_ssp.extensions.bitsandbytes.linear.bitsandbytes", refuse)
    pair = load_pair("tiny", "tiny-draft", quantization="int8", device="cpu")
    [completion] = pair.generate("import os", max_new_tokens=4, temperature=0)
    assert len(completion.token_ids) == 4
