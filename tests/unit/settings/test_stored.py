"""The formats that a config.json describes: bits, scales, and which matrices they leave out."""

from typing import Any

import pytest
import yaml

from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.settings.schema import DrafterConfig, ModelConfig, RunConfig, TaskConfig, to_yaml
from llama_ssp.settings.stored import StoredFormat, stored_format

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_LAYERS = 4
NUM_ROWS, NUM_COLUMNS = 384, 512
WEIGHTS = NUM_ROWS * NUM_COLUMNS


def found(described: object, **content: object) -> StoredFormat:
    """The format of a checkpoint of four layers."""
    read = stored_format({"quantization_config": described} | content, modules=MODULES, num_layers=NUM_LAYERS)
    assert read
    return read


def size_of(stored: StoredFormat, num_rows: int = NUM_ROWS, num_columns: int = NUM_COLUMNS) -> int:
    return stored.matrix_bytes("q_proj", num_rows, num_columns, unquantized=2 * num_rows * num_columns)


def compressed(form: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int"} | weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"group_0": group}
    }  # fmt: skip


def gptq(**changes: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True} | changes


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": None}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GROUPS = WEIGHTS // 128
CASES = {
    "fp8, blocks": (FP8 | {"weight_block_size": [128, 128]}, "fp8", WEIGHTS + 4 * 3 * 4),
    "fp8, whole": (FP8, "fp8", WEIGHTS + 4),
    "fp8, outputs": ({"quant_method": "fbgemm_fp8"}, "fbgemm fp8", WEIGHTS + 4 * NUM_ROWS),
    "float, whole": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "compressed-tensors fp8", WEIGHTS + 2,
    ),
    "float, outputs": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "compressed-tensors fp8", WEIGHTS + 2 * NUM_ROWS,
    ),
    "float, blocks": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        "compressed-tensors fp8", WEIGHTS + 2 * 3 * 4,
    ),
    "int8": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        "compressed-tensors int8", WEIGHTS + 2 * NUM_ROWS,
    ),
    "int8, packed": (
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        "compressed-tensors int8", WEIGHTS + 2 * NUM_ROWS,
    ),
    "int4": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
        "compressed-tensors int4", WEIGHTS // 2 + 2 * GROUPS,
    ),
    "int4, zeros": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        "compressed-tensors int4", WEIGHTS // 2 + 5 * WEIGHTS // 128,
    ),
    "int4, a byte each": (
        compressed("int-quantized", num_bits=4, strategy="channel"),
        "compressed-tensors int4", WEIGHTS + 2 * NUM_ROWS,
    ),
    "int4, sorted": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="group"),
        "compressed-tensors int4", WEIGHTS // 2 + 2 * GROUPS + 4 * NUM_COLUMNS,
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "compressed-tensors fp4", WEIGHTS // 2 + WEIGHTS // 16,
    ),
    "awq": (AWQ, "awq int4", WEIGHTS // 2 + 5 * GROUPS // 2),
    "awq without zeros": (AWQ | {"zero_point": False}, "awq int4", WEIGHTS // 2 + 2 * GROUPS),
    "gptq": (gptq(), "gptq int4", WEIGHTS // 2 + 5 * GROUPS // 2 + 4 * NUM_COLUMNS),
    "gptq int8": (gptq(bits=8, desc_act=True), "gptq int8", WEIGHTS + 3 * GROUPS + 4 * NUM_COLUMNS),
    "gptq, one group": (gptq(group_size=-1), "gptq int4", WEIGHTS // 2 + 5 * NUM_ROWS // 2 + 4 * NUM_COLUMNS),
    "nf4": (NF4, "bitsandbytes nf4", WEIGHTS // 2 + 4 * WEIGHTS // 64),
    "nf4, double": (
        NF4 | {"bnb_4bit_use_double_quant": True},
        "bitsandbytes nf4", WEIGHTS // 2 + WEIGHTS // 64 + 4 * WEIGHTS // 64 // 256,
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        "bitsandbytes int8", WEIGHTS + 4 * NUM_ROWS,
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4", 2 * WEIGHTS),
}  # fmt: skip


@pytest.mark.parametrize(("described", "name", "size"), CASES.values(), ids=CASES)
def test_a_matrix_has_the_bytes_of_its_weights_and_scales(described: object, name: str, size: int) -> None:
    """Of mxfp4 only experts have 4 bits, and a dense model has none."""
    stored = found(described)
    assert (stored.name, size_of(stored)) == (name, size)


def test_blocks_at_the_edges_of_a_slice_have_whole_scales() -> None:
    stored = found(FP8 | {"weight_block_size": [128, 128]})
    assert size_of(stored, 130, 192) == 130 * 192 + 4 * 2 * 2


UNKNOWN = {
    "another method": {"quant_method": "quip", "bits": 2},
    "no method": {"bits": 4},
    "a list": [4],
    "null": None,
    "a method that is no name": {"quant_method": ["fp8"]},
    "a block of one side": FP8 | {"weight_block_size": [128]},
    "a block that is no size": FP8 | {"weight_block_size": [128, -1]},
    "awq without bits": {"quant_method": "awq", "group_size": 128},
    "a group of nothing": AWQ | {"group_size": 0},
    "gptq with rules of its own": gptq(bits=8, dynamic={"-:.*": {}}),
    "bitsandbytes without bits": {"quant_method": "bitsandbytes"},
    "no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "groups that are a list": {"quant_method": "compressed-tensors", "config_groups": [4]},
    "another form": compressed("marlin-24", num_bits=4, strategy="group", group_size=128),
    "no strategy": compressed("pack-quantized", num_bits=4),
    "sparse": compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "two formats": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {
            str(bits): {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}
            for bits in (4, 8)
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("described", UNKNOWN.values(), ids=UNKNOWN)
def test_a_format_that_no_plan_knows_has_no_bits_and_is_said_to_be_unreadable(described: object) -> None:
    stored = found(described)
    assert stored.bits is None
    assert stored.problem


def test_without_a_description_nothing_is_quantized() -> None:
    assert stored_format({"text_config": {"hidden_size": 8}}, modules=MODULES, num_layers=2) is None


def test_the_text_part_may_have_the_description() -> None:
    content = {"model_type": "picture", "text_config": {"quantization_config": AWQ}}
    read = stored_format(content, modules=MODULES, num_layers=2)
    assert read
    assert read.name == "awq int4"


READ = {
    "compressed-tensors": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=128), "int4"),
    "whole rows": (compressed("pack-quantized", num_bits=4, strategy="channel"), "int4"),
    "awq": (AWQ, "int4"),
    "two groups of 128": (gptq(group_size=256), "int4"),
    "groups of 64": (AWQ | {"group_size": 64}, "int4_64"),
    "three groups of 64": (gptq(group_size=192), "int4_64"),
    "groups of 32": (gptq(group_size=32), "int4_32"),
    "three groups of 32": (gptq(group_size=96), "int4_32"),
    "outputs": (compressed("int-quantized", num_bits=8, strategy="channel"), "int8"),
    "one scale": (compressed("int-quantized", num_bits=8, strategy="tensor"), "int8"),
    "packed bytes": (compressed("pack-quantized", num_bits=8, strategy="channel"), "int8"),
    "fp8": (FP8, "fp8"),
    "fp8, blocks": (FP8 | {"weight_block_size": [128, 128]}, "fp8"),
    "fp8, outputs": ({"quant_method": "fbgemm_fp8"}, "fp8"),
    "floats": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "fp8"),
    "nf4": (NF4, "nf4"),
    "nf4, double": (NF4 | {"bnb_4bit_use_double_quant": True}, "nf4"),
    "its other name": (compressed("naive-quantized", num_bits=8, strategy="tensor"), "int8"),
}


@pytest.mark.parametrize(("described", "short"), READ.values(), ids=READ)
def test_what_runs_read_is_kept_in_the_largest_groups_that_it_consists_of(described: object, short: str) -> None:
    stored, (bits, *group) = found(described), short.split("_")
    storage = short if short == "nf4" else "_".join([f"{bits}_weight_only", *group])
    assert (stored.storage, stored.problem) == (storage, None)
    for quantization in ("none", stored.storage):
        assert stored.kept_format(str(quantization), where="here") == stored.storage


def test_what_runs_do_not_read_and_another_quantization_are_a_sentence_each() -> None:
    with pytest.raises(
        CheckpointError, match=r"^here describes .* cannot be read \(desc_act true\): unquantized weights"
    ):
        found(gptq(desc_act=True)).kept_format("none", where="here")
    with pytest.raises(CheckpointError, match=r"\(a quantized output head\)"):
        found(gptq(lm_head=True)).kept_format("none", where="here")
    with pytest.raises(ConfigError, match=r"^here holds int4_weight_only weights, .*quantization=nf4 was given: leave"):
        found(gptq()).kept_format("nf4", where="here")


KEPT = {
    "one module": (["model.layers.1.self_attn.q_proj"], {"q_proj": 0.25}),
    "a layer": (["model.layers.3"], dict.fromkeys(MODULES, 0.25)),
    "two layers": (["layers.1", "model.layers.2.mlp"], dict.fromkeys(MODULES, 0.25) | dict.fromkeys(MODULES[4:], 0.5)),
    "a part": (["self_attn"], dict.fromkeys(MODULES[:4], 1.0)),
    "a name": (["down_proj", "lm_head"], {"down_proj": 1.0}),
    "a star": (["model.layers.*.mlp"], dict.fromkeys(MODULES[4:], 1.0)),
    "an expression": ([r"re:.*layers\.[01]\..*o_proj$"], {"o_proj": 0.5}),
    "a fused module": (["model.layers.0.self_attn.qkv_proj"], dict.fromkeys(MODULES[:3], 0.25)),
    "a text part": (["model.language_model.layers.0.mlp.up_proj"], {"up_proj": 0.25}),
    "another part": (["vision_tower.layers.0.self_attn.q_proj", "re:.*vision.*", "mlp.gate", "q_pro"], {}),
    "a faulty expression": (["re:(", 4, None, "", "layers"], dict.fromkeys(MODULES, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("field", ["ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers"])
@pytest.mark.parametrize(("patterns", "shares"), KEPT.values(), ids=KEPT)
def test_modules_that_are_left_out_stay_as_they_are(
    field: str, patterns: list[object], shares: dict[str, float]
) -> None:
    assert dict(found(FP8 | {field: patterns}).kept_shares) == shares


def test_a_matrix_that_some_layers_keep_has_the_mean_of_both() -> None:
    stored = found(FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]})
    assert size_of(stored) == (2 * WEIGHTS + 3 * (WEIGHTS + 4)) // 4


def test_modules_that_are_listed_are_quantized_alone() -> None:
    listed = gptq(modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]])
    assert {name for name, _ in found(listed).kept_shares} == {"v_proj", "o_proj", "gate_proj", "up_proj"}
    described = compressed("int-quantized", num_bits=8, strategy="channel")
    described["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\..*"]
    assert dict(found(described).kept_shares) == dict.fromkeys(MODULES[:4], 1.0)


def test_a_head_is_quantized_only_where_the_file_says_so() -> None:
    int8 = compressed("int-quantized", num_bits=8, strategy="channel")
    assert not found(int8).has_head
    assert found(int8 | {"ignore": []}).has_head
    assert found(gptq(lm_head=True)).has_head
    assert not any(found(described).has_head for described in (gptq(), AWQ, NF4, FP8))


def test_the_settings_of_a_run_do_not_have_what_only_its_files_say() -> None:
    entry = ModelConfig(name="local", stored_format=found(AWQ))
    config = RunConfig(task=TaskConfig(name="generate"), model=entry, draft=DrafterConfig())
    written = yaml.safe_load(to_yaml(config))
    assert written["model"]["name"] == "local"
    assert "stored_format" not in written["model"]
