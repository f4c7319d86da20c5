"""What a plan's config leaves open is decided; a folder's config.json is read without its library."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.notes import notes_on_families
from llama_ssp.planning.spec import PlanSpec, spec_of_plan
from llama_ssp.planning.weights import model_bytes
from llama_ssp.settings.backends import backends
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DrafterConfig,
    DraftPlacement,
    PlacementConfig,
    PlanConfig,
    TargetPlacement,
)

A100 = hardware.load("p4d_24xlarge")


def _job(target: TargetPlacement, draft: DraftPlacement, machine: HardwareConfig = A100) -> PlanSpec:
    config = PlanConfig(
        model=catalogue.load("13B"),
        draft=DrafterConfig(kind=MODEL_DRAFT, model=catalogue.load("7B")),
        hardware={},
        placement=PlacementConfig(target=target, draft=draft),
    )
    return spec_of_plan(config, machine)


@pytest.mark.parametrize(
    ("name", "stored", "on_gpu"),
    [
        ("7B", Dtype.fp16, Dtype.fp16),
        ("gpt_neox_20B", Dtype.fp16, Dtype.fp16),
        ("llama3_8B", Dtype.bf16, Dtype.bf16),
        ("tinyllama_1B", Dtype.fp32, Dtype.bf16),
        ("gemma2_2B", Dtype.fp32, Dtype.bf16),
        ("gpt_neo_1.3B", Dtype.fp32, Dtype.fp16),
        ("tiny", Dtype.bf16, Dtype.fp32),
    ],
)
def test_a_cpu_computes_in_fp32_unless_told_otherwise_and_a_gpu_in_what_the_entry_says(
    name: str, stored: Dtype, on_gpu: Dtype
) -> None:
    entry = catalogue.load(name)
    on_cpu = planned_model(entry, device="cpu")
    assert (on_cpu.dtype, on_cpu.stored, planned_model(entry, device="cuda").dtype) == (Dtype.fp32, stored, on_gpu)
    for device in ("cpu", "cuda"):
        assert planned_model(replace(entry, dtype=Dtype.bf16), device=device).dtype is Dtype.bf16


@pytest.mark.parametrize(
    ("quantization", "on_cpu"),
    [("int8_weight_only", Dtype.fp32), ("int8", Dtype.fp32), ("nf4", Dtype.bf16), ("int4_weight_only", Dtype.fp32)],
)
def test_a_quantized_model_computes_on_a_cpu_in_what_its_kernel_computes_in(quantization: str, on_cpu: Dtype) -> None:
    entry = replace(catalogue.load("llama3_8B"), quantization=quantization)
    for device, dtype in (("cpu", on_cpu), ("cuda", Dtype.bf16)):
        planned = planned_model(entry, device=device)
        assert planned.dtype is dtype
        unquantized = planned_model(replace(entry, quantization="none"), device=device)
        assert unquantized.quantized(quantization) == planned
    asked = planned_model(replace(entry, dtype=Dtype.bf16), device="cpu")
    assert asked.dtype is Dtype.bf16


def test_a_cpu_keeps_the_linear_layers_of_16_bit_files_in_16_bits() -> None:
    target, draft = (planned_model(catalogue.load(name), device="cpu") for name in ("tiny", "tiny-draft"))
    for model, has_head in ((target, True), (draft, False)):
        held = inventory(model.shape)
        linear = held.num_layers * sum(matrix.num_elements for matrix in held.layer) + held.output.num_elements
        embedding = held.embeddings[0].num_elements
        vectors = held.num_layers * held.layer_vectors + held.final_vectors
        assert model_bytes(held, model, device="cpu").total_bytes == 2 * linear + 4 * (embedding + vectors)
        untied = linear if has_head else linear - embedding
        assert model_bytes(held, model, device="cuda").total_bytes == 4 * (untied + embedding + vectors)
    assert replace(target, stored=Dtype.fp32).matrix_dtype("cpu") is Dtype.fp32
    assert replace(target, dtype=Dtype.bf16).matrix_dtype("cpu") is Dtype.bf16


def test_a_target_that_a_library_places_runs_in_its_modules_and_without_graphs() -> None:
    for kind in backends():
        spec = _job(TargetPlacement(kind=kind), DraftPlacement())
        assert spec.target.is_lean == spec.cuda_graphs == (kind == "tensor")
        assert spec.draft
        assert spec.draft.is_lean


SIZES = {
    "model_type": "exaone",
    "architectures": ["ExaoneForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


def _folder(folder: Path, **changes: Any) -> Path:
    content = {key: value for key, value in (SIZES | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_family_without_a_record_is_planned_as_a_llama(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    shape, stored = read_config(folder)
    assert (shape.model_type, shape.head_dim, stored) == ("exaone", 32, Dtype.bf16)
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256
    assert sum(matrix.num_elements for matrix in inventory(shape).layer) == layer
    (note,) = notes_on_families(ModelConfig(name="acme/exaone", shape=shape), ModelConfig(name="unknown"))
    assert 'has model_type "exaone", unknown to transformers' in shape.refusal
    assert note.startswith("acme/exaone is planned as a Llama of its sizes, so bytes and times are estimates")


def test_the_sizes_of_the_text_part_are_read(tmp_path: Path) -> None:
    text = {key: SIZES[key] for key in SIZES if key not in {"model_type", "architectures", "torch_dtype"}}
    names = ["PictureForConditionalGeneration"]
    picture = {"model_type": "picture", "architectures": names, "text_config": text, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(picture))
    shape, stored = read_config(tmp_path)
    assert (shape.model_type, shape.hidden_size, stored) == ("picture", 128, Dtype.bf16)


SIZE = "no plan for exaone models: .* does not give {}, "


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, SIZE),
        ({"num_hidden_layers": None}, SIZE),
        ({"num_attention_heads": None}, SIZE),
        ({"intermediate_size": None}, SIZE),
        ({"vocab_size": None}, SIZE),
        ({"is_encoder_decoder": True}, "do not continue a text"),
        ({"architectures": ["ExaoneForMaskedLM"]}, r"exaone models \(ExaoneForMaskedLM\) do not continue a text"),
    ],
)
def test_a_family_without_a_record_gives_every_size_and_continues_texts(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(PlacementError, match=complaint.format(*changes)):
        read_config(_folder(tmp_path, **changes))
