"""Config files as they are published: plan, dry run, run and library decide alike, with one sentence."""

import json
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_CLASSES

from llama_ssp.architectures import family, reading
from llama_ssp.architectures.matrices import split_blocks, vocabulary_parts
from llama_ssp.architectures.reading import check_readable, read_config, read_stored_format
from llama_ssp.catalogue import CONFIG_FILE, Dtype, ModelConfig
from llama_ssp.errors import CheckpointError, PlacementError
from llama_ssp.extensions.modules.experts import can_be_own, experts_of
from llama_ssp.machines import hardware
from llama_ssp.models import loading
from llama_ssp.models.weights import Matched
from llama_ssp.planning.memory import memory
from llama_ssp.planning.model import planned_model
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.edits import edit_config, edit_tensors
from tests.helpers.extensions import need
from tests.helpers.library_kinds import every_kind, may_run
from tests.helpers.models import build_checkpoint, refusal, tiny_model
from tests.helpers.packed_checkpoints import pack_checkpoint
from tests.helpers.planning import make_spec

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
MROPE = {
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 28,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2},
}
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "kimi_k2",
    **SIZES,
    **LATENT,
    **EXPERTS,
}
PART = 'has a text model of kind "{}" inside a {} model, and transformers has no causal language model for this part'


def inside(model_type: str, text: str, **more: object) -> dict[str, Any]:
    part = {**SIZES, "model_type": text, **more}
    return {"architectures": ["XForConditionalGeneration"], "model_type": model_type, "text_config": part}


def omni(model_type: str) -> dict[str, Any]:
    thinker = inside(f"{model_type}_thinker", f"{model_type}_text")
    return {"architectures": ["QwenOmniModel"], "model_type": model_type, "thinker_config": thinker}


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen2-VL": ({"model_type": "qwen2_vl", **SIZES, **MROPE}, ""),
    "Qwen2.5-VL": ({"model_type": "qwen2_5_vl", **SIZES, **MROPE}, ""),
    "other frequencies": (
        {"model_type": "qwen2", **SIZES, "rope_scaling": {"type": "mrope"}},
        "this qwen2 model has rope_type 'mrope': default, dynamic, linear, llama3, longrope, proportional, yarn is",
    ),
    "SmolVLM": (inside("smolvlm", "llama"), ""),
    "Kimi K2": (KIMI, ""),
    "Kimi K2.5": (inside("kimi_k25", "kimi_k2", **LATENT, **EXPERTS), ""),
    "Qwen3-VL-MoE": (inside("qwen3_vl_moe", "qwen3_vl_moe_text"), ""),
    "GLM-4V": (inside("glm4v", "glm4v_text"), ""),
    "Mistral 4": (inside("mistral3", "mistral4", **LATENT), ""),
    "Qwen2.5 Omni": (omni("qwen2_5_omni"), ""),
    "Qwen3 Omni": (omni("qwen3_omni_moe"), "a qwen3_omni_moe_thinker model, whose text part is not compared"),
    "Voxtral Realtime": (
        inside("voxtral_realtime", "voxtral_realtime_text"),
        "a voxtral_realtime model, whose text part is not compared",
    ),
    "an unknown text part": (inside("future_vl", "future_text"), PART.format("future_text", "future_vl")),
    "T5": (
        {"model_type": "t5", **SIZES, "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
        "t5 models (T5ForConditionalGeneration) do not continue a text token by token: a decoder is required",
    ),
    "RoBERTa": ({"model_type": "roberta", **SIZES}, "roberta models do not run with the static cache"),
    "RoFormer": ({"model_type": "roformer", **SIZES, "is_decoder": True}, "they take no positions of tokens"),
    "Kimi K3": (
        inside("kimi_k3", "kimi_linear", hidden_act="situ", routed_expert_hidden_size=48, attn_res_block_size=12),
        "has routed_expert_hidden_size 48, attn_res_block_size 12, which transformers' kimi_linear models lack: one of",
    ),
    "an unknown activation": (
        {"model_type": "kimi_linear", **SIZES, "hidden_act": "situ"},
        "this kimi_linear model has hidden_act 'situ': gelu, gelu_10,",
    ),
    "null as quantization": ({"model_type": "llama", **SIZES, "quantization_config": None}, ""),
    "empty quantization": ({"model_type": "llama", **SIZES, "quantization_config": {}}, ""),
}


def save(folder: Path, content: dict[str, Any]) -> Path:
    (folder / CONFIG_FILE).write_text(json.dumps(content))
    return folder


@pytest.mark.seconds
@pytest.mark.parametrize("form", FORMS)
def test_plan_dry_run_and_run_have_one_verdict(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, wanted = FORMS[form]
    save(tmp_path, content)
    monkeypatch.setattr(Matched, "_found", lambda *_args, **_options: {})  # the files are not here
    said = refusal(lambda: loading.check_model(inspect(tmp_path, config_alone=True), num_ranks=1))
    assert (wanted in said, bool(wanted)) == (True, bool(said)), said
    assert refusal(partial(check_readable, tmp_path, "none")) == said
    monkeypatch.setattr(
        reading, "library_of", lambda _kind: SimpleNamespace(describe="no_such_module:describe")
    )  # a plan without the library
    found: list[str] = []
    found.append(refusal(lambda: found.append(read_config(tmp_path)[0].refusal)))
    assert "".join(found) == said


def test_kimi_k2_has_the_sizes_of_a_deepseek_v3(tmp_path: Path) -> None:
    found = read_config(save(tmp_path, KIMI))
    assert found == read_config(save(tmp_path, {**KIMI, "model_type": "deepseek_v3"}))
    assert found[0].model_type == "deepseek_v3"


def test_the_known_frequencies_are_those_of_transformers() -> None:
    assert {*ROPE_INIT_FUNCTIONS} | {"default"} == {*family._ROPE_TYPES} - {"ntk_alpha", "su", "xdrope"}


def test_the_known_activations_are_those_of_transformers() -> None:
    assert {*ACT2FN} == {*family._ACTIVATIONS}


@pytest.mark.parametrize("field", family._LACKED)
def test_fields_that_add_parts_are_lacked_by_the_kinds_whose_configuration_does_not_have_them(field: str) -> None:
    kinds = {kind for kind in family.kinds() if hasattr(CONFIG_MAPPING[kind], field)}
    assert kinds == {*family._LACKED[field]}


@pytest.mark.seconds
def test_kinds_that_run_take_the_positions_of_tokens() -> None:
    """Else their tokens would have the positions of a text's first ones, since no forward knows how long rows are."""
    kinds = [kind for kind in every_kind() if may_run(kind) and kind in CAUSAL_CLASSES]
    assert {kind for kind in kinds if not takes_positions(kind)} == {"mpt"}  # whose scores have a bias by slots


def takes_positions(kind: str) -> bool:
    module = import_module(getattr(transformers, CAUSAL_CLASSES[kind]).__module__)
    models = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    return any("position_ids" in signature(one.forward).parameters for one in models)


def test_text_models_beside_other_parts_have_the_names_of_a_text_model(tmp_path: Path) -> None:
    """As SmolVLM and Idefics 2 and 3 name them."""
    build_checkpoint(tmp_path, "llama")
    wanted = {*inspect(tmp_path).tensors}
    content = json.loads((tmp_path / CONFIG_FILE).read_text())
    save(tmp_path, {"model_type": "smolvlm", "text_config": content})

    def rename(found: dict[str, torch.Tensor]) -> None:
        inner = {name.replace("model.", "model.text_model.", 1): each for name, each in found.items()}
        found.clear()
        found.update(inner)

    edit_tensors(tmp_path / "model.safetensors", rename)
    assert {*inspect(tmp_path).tensors} == wanted
    loading.check_model(inspect(tmp_path), num_ranks=2)


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
OLD_NAME = {
    "compression_config": {
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "quantization_status": "frozen",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOATS, "input_activations": None}},
    }
}
LONE_FILE = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True}


@pytest.mark.parametrize(("content", "file", "method"), [(OLD_NAME, {}, "compressed-tensors"), ({}, LONE_FILE, "gptq")])
def test_a_quantization_in_another_place_is_found(
    content: dict[str, Any], file: dict[str, Any], method: str, tmp_path: Path
) -> None:
    need("four_bits")
    need("eight_bits")
    save(tmp_path, {"model_type": "llama", **SIZES, **content})
    if file:
        (tmp_path / "quantize_config.json").write_text(json.dumps(file))
    found = read_stored_format(tmp_path, read_config(tmp_path)[0])
    assert found
    assert method in found.name
    other = inspect(tmp_path, config_alone=True)
    assert other.config.model_type == "llama"


def test_a_file_with_one_dense_matrix_of_a_product_is_refused_by_plans_too(tmp_path: Path) -> None:
    need("eight_bits")
    dense = ["lm_head", "model.layers.1.self_attn.k_proj"]
    save(
        tmp_path,
        {
            "model_type": "llama",
            **SIZES,
            "quantization_config": {
                **OLD_NAME["compression_config"],
                "quant_method": "compressed-tensors",
                "ignore": dense,
            },
        },
    )
    found = read_stored_format(tmp_path, read_config(tmp_path)[0])
    assert found
    assert found.problem == "some of q_proj, k_proj, v_proj alone, in layer 1"
    assert "some of q_proj, k_proj, v_proj alone, in layer 1" in refusal(lambda: check_readable(tmp_path, "none"))


def test_packed_experts_without_a_gate_are_refused_by_plans_too(tmp_path: Path) -> None:
    """As of Nemotron 3 Nano in FP8: runs find it in the tensors."""
    need("eight_bits")
    build_checkpoint(tmp_path / "origin", "nemotron_h, experts")
    pack_checkpoint(tmp_path / "origin", tmp_path / "packed", tmp_path / "plain", "float, one scale")
    with pytest.raises(CheckpointError, match=r"not so for .*experts\.down_proj, .*: use an unquantized checkpoint"):
        loading.check_model(inspect(tmp_path / "packed"), num_ranks=1, quantization="fp8_weight_only")
    said = refusal(lambda: check_readable(tmp_path / "packed", "none"))
    assert "quantized weights that cannot be read (experts without a gate): unquantized weights are required" in said
    described = json.loads((tmp_path / "packed" / CONFIG_FILE).read_text())["quantization_config"]
    edit_config(tmp_path / "packed", quantization_config=described | {"ignore": ["lm_head", "re:.*experts.*"]})
    assert not refusal(lambda: check_readable(tmp_path / "packed", "none"))


def test_experts_that_formats_keep_are_those_of_the_library_with_a_gate() -> None:
    model = tiny_model("nemotron_h, experts")
    assert [can_be_own(module) for _, module in experts_of(model)] == [False]
    assert [name for name, record in family.families().items() if not record.gates_experts] == ["nemotron_h"]


def test_too_many_ranks_are_told_what_is_shared() -> None:
    with pytest.raises(PlacementError, match=r"^2 units of an MLP cannot be shared by 3 ranks: use at most 2 ranks"):
        split_blocks(2, 3, what="units of an MLP")
    with pytest.raises(PlacementError, match=r"^2 tokens of the vocabulary cannot be shared by 3 ranks"):
        vocabulary_parts(2, 3)


def test_experts_that_a_gpu_cannot_multiply_are_refused_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows of torch's grouped products, of multiples of 16 bytes."""
    build_checkpoint(tmp_path, "mixtral")
    edit_config(tmp_path, intermediate_size=12)
    origin = inspect(tmp_path, config_alone=True)
    monkeypatch.setattr(Matched, "_found", lambda *_args, **_options: {})
    loading.check_model(origin, num_ranks=2)
    sentence = "experts of 12 units have 6 on one of 2 ranks, and GPUs multiply by multiples of 8: use another number"
    with pytest.raises(PlacementError, match=sentence):
        loading.check_model(origin, num_ranks=2, grouped_bytes=2)
    model = planned_model(ModelConfig(name="mine", path=str(tmp_path), dtype=Dtype.bf16), device="cuda")
    with pytest.raises(PlacementError, match=sentence):
        memory(make_spec(model, num_ranks=2), hardware.load("h100"))


def test_a_conversion_of_pickles_fills_no_matrix_at_random(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path / "model.safetensors", lambda found: found.pop("model.norm.weight"))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    said = refusal(lambda: inspect(tmp_path))
    program = said.partition('python -c "')[2].removesuffix('"')
    with pytest.raises(SystemExit, match=r"model\.norm\.weight"):
        exec(program, {})
    assert not (tmp_path / "model.safetensors").exists()
