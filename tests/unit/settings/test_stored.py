"""The formats that a config.json describes: in which runs read them, and which matrices they leave out."""

import pytest
import yaml

from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.reports.reading import to_yaml
from llama_ssp.settings.schema import DrafterConfig, RunConfig, TaskConfig
from llama_ssp.storage.stored import StoredFormat, kept_format, stored_format
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.packed_checkpoints import LAYOUTS, MXFP4, WEIGHTS, changed, quantization_config

pytestmark = of_all_formats
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_LAYERS = 4
LAYERS = [
    [f"model.layers.{number}.{'mlp' if name in MODULES[4:] else 'self_attn'}.{name}" for name in MODULES]
    for number in range(NUM_LAYERS)
]


def found(described: object, **content: object) -> StoredFormat:
    """The format of a checkpoint of four layers."""
    read = stored_format({"quantization_config": described} | content, layers=LAYERS, head="lm_head")
    assert read
    return read


def shares(described: object) -> dict[str, float]:
    """The share of the layers in which a module is not quantized, of modules that have any."""
    kept = [name.rpartition(".")[2] for name in found(described).kept]
    return {name: kept.count(name) / NUM_LAYERS for name in MODULES if name in kept}


AWQ, FP8, GPTQ, NF4 = map(quantization_config, ("awq", "fp8", "gptq", "nf4"))
COMPRESSED = "compressed-tensors"
REFUSED: dict[str, tuple[object, str]] = {
    "another method": ({"quant_method": "hqq", "bits": 4}, 'quant_method "hqq"'),
    "awq's other kernels": (changed("awq", version="gemv"), r'\(version "gemv"\)'),
    "awq without zeros": (changed("awq", zero_point=False), r"\(zero_point false\)"),
    "a list": ([4], "quant_method null"),
    "3 bits": (changed("gptq", bits=3), r"\(bits 3\)"),
    "8 bits with zeros": (changed("gptq, bytes", sym=False), r"\(sym false\)"),
    "8 bits that are sorted": (changed("gptq, bytes", desc_act=True), r"\(desc_act true\)"),
    "8 bits in odd groups": (changed("gptq, bytes", group_size=20), r"\(group_size 20\)"),
    "another packing": (changed("auto-round", packing_format="auto_round:tritonv2"), r"\(packing_format"),
    "layers of other bits": (changed("auto-round", extra_config={"model.layers.0.mlp": {"bits": 8}}), "extra_config"),
    "small groups": (changed("gptq", group_size=16), r"\(group_size 16\)"),
    "odd groups": (changed("awq", group_size=200), r"\(group_size 200\)"),
    "no size": (changed("awq", group_size=None), r"\(group_size null\)"),
    "rules of its own": (changed("gptq", dynamic={"-:.*gate": {}, "+:.*down": {"bits": 8}}), r"\(dynamic {"),
    "marlin": (changed("gptq", checkpoint_format="marlin"), r'\(checkpoint_format "marlin"\)'),
    "another format": (changed(COMPRESSED, format="marlin-24"), r'\(format "marlin-24"\)'),
    "a format of other bits": (changed(COMPRESSED, format="int-quantized"), r"\(num_bits 4; strategy"),
    "no groups": (changed(COMPRESSED, config_groups={}), r"\(no config_groups\)"),
    "per matrix": (changed(COMPRESSED, *WEIGHTS, strategy="tensor"), r'\(strategy "tensor"'),
    "sparse": (changed(COMPRESSED, sparsity_config={"format": "sparse-24-bitmask"}), r"\(sparse weights\)"),
    "two formats": (
        changed(COMPRESSED, "config_groups", group_1={"weights": {"num_bits": 8}}),
        r"\(several config_groups\)",
    ),
    "floats": (changed(COMPRESSED, *WEIGHTS, type="float"), r'\(type "float"\)'),
    "bytes with zeros": (changed("int8", *WEIGHTS, symmetric=False), r"\(symmetric false\)"),
    "another float": (changed("nf4", bnb_4bit_quant_type="af4"), r'\(bnb_4bit_quant_type "af4"\)'),
    "no bits of bitsandbytes": (changed("nf4", load_in_4bit=False), r"\(load_in_4bit false\)"),
    "both bits of bitsandbytes": (changed("nf4", load_in_8bit=True), r"\(load_in_4bit true\)"),
    "wide words": (changed("nf4", bnb_4bit_quant_storage="bfloat16"), r'\(bnb_4bit_quant_storage "bfloat16"\)'),
    "wide blocks": (changed("float, blocks", *WEIGHTS, block_structure=[128, 192]), r"\(blocks of 192 inputs\)"),
    "no blocks": (changed("fp8", weight_block_size=[128]), r"\(blocks of null inputs\)"),
    "groups of bytes": (changed("int8", *WEIGHTS, strategy="group", group_size=128), r'\(strategy "group"\)'),
    "an order that is no name": (changed(COMPRESSED, *WEIGHTS, actorder={}), r"\(actorder {}\)"),
    "a version that is no name": (changed("gptq", checkpoint_format=["gptq"]), r'\(checkpoint_format \["gptq"\]\)'),
    "rotations": (changed(COMPRESSED, transform_config={"config_groups": {}}), r"\(transform_config {"),
    "no method": ({"bits": 4}, "quant_method null"),
    "null": (None, "quant_method null"),
    "a method that is no name": ({"quant_method": ["fp8"]}, r'quant_method \["fp8"\]'),
    "a block that is no size": (FP8 | {"weight_block_size": [128, -1]}, "blocks of null inputs"),
    "awq without bits": ({"quant_method": "awq", "group_size": 128}, "bits null; zero_point null"),
    "a group of nothing": (AWQ | {"group_size": 0}, "group_size 0"),
    "an order of 1": (changed("gptq", desc_act=1), r"\(desc_act 1\)"),
    "bitsandbytes without bits": ({"quant_method": "bitsandbytes"}, "load_in_4bit null"),
    "groups that are a list": ({"quant_method": "compressed-tensors", "config_groups": [4]}, "no config_groups"),
    "floats in other groups": (changed("nvfp4-pack-quantized", *WEIGHTS, group_size=32), r"\(group_size 32\)"),
    "another algorithm": (changed("nvfp4 of modelopt", quant_algo="W4A8"), r'\(quant_algo "W4A8"'),
    "groups of two kinds": (
        changed("nvfp4 of modelopt", "config_groups", group_1={"weights": {}}),
        r"with 2 config_groups\)",
    ),
    "no strategy": (changed(COMPRESSED, *WEIGHTS, strategy=None), "strategy null"),
}


@pytest.mark.parametrize(("described", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_forms_are_refused_with_what_is_different(described: object, reason: str) -> None:
    stored = found(described)
    assert (stored.storage, stored.kept) == (None, frozenset())
    with pytest.raises(CheckpointError, match=rf"quantized weights that cannot be read .*{reason}.*groups of 32"):
        stored.kept_format("none", where="here")


def test_without_a_description_nothing_is_quantized() -> None:
    assert stored_format({"text_config": {"hidden_size": 8}}, layers=LAYERS) is None


def test_the_text_part_may_have_the_description() -> None:
    content = {"model_type": "picture", "text_config": {"quantization_config": AWQ}}
    read = stored_format(content, layers=LAYERS)
    assert read
    assert read.name == "awq int4"


INT4, INT8, FLOATS = "int4_weight_only", "int8_weight_only", "fp8_weight_only"
KEPT_IN = {
    "compressed-tensors": (INT4, 128),
    "compressed-tensors, asymmetric": (INT4, 64),
    "compressed-tensors, whole rows": (INT4, 128),
    "compressed-tensors, sorted": (INT4, 64),
    "gptq": (INT4, 128),
    "gptq, asymmetric": (INT4, 32),
    "gptq_v2": (INT4, 32),
    "gptq, sorted": (INT4, 128),
    "awq": (INT4, 128),
    "awq, small": (INT4, 64),
    "auto-round": (INT4, 128),
    "gptq, bytes": ("int8_groups", 128),
    "gptq, bytes of rows": (INT8, 0),
    "gptq_v2, bytes": ("int8_groups", 64),
    "int8": (INT8, 0),
    "int8, packed": (INT8, 0),
    "int8, one scale": (INT8, 0),
    "int8 of bitsandbytes": (INT8, 0),
    "fp8": (FLOATS, 128),
    "fp8, one scale": (FLOATS, 0),
    "fbgemm_fp8": (FLOATS, 0),
    "float": (FLOATS, 0),
    "float, blocks": (FLOATS, 128),
    "float, one scale": (FLOATS, 0),
    "nf4": ("nf4", 64),
    "nf4, twice": ("nf4", 64),
    "fp4, twice": ("fp4", 64),
    "mxfp4-pack-quantized": ("mxfp4", 32),
    "nvfp4-pack-quantized": ("nvfp4", 32),
    "nvfp4 of modelopt": ("nvfp4", 32),
}
READ = {layout: (quantization_config(layout), *KEPT_IN[layout]) for layout in LAYOUTS} | {
    "two groups of 128": (changed("gptq", group_size=256), INT4, 128),
    "three groups of 64": (changed("gptq", group_size=192), INT4, 64),
    "bitsandbytes without a type": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4", 64),
    "bytes alone": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, INT8, 0),
    "its other name": (changed("int8", format="naive-quantized"), INT8, 0),
    "layers left out": (changed("gptq", dynamic={"-:lm_head": {}}), INT4, 128),
    "experts alone": (quantization_config(MXFP4), "mxfp4", 32),
    "modelopt's bytes": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, FLOATS, 0),
}


@pytest.mark.parametrize(("described", "storage", "group"), READ.values(), ids=READ)
def test_what_runs_read_is_kept_in_the_largest_groups_that_it_consists_of(
    described: object, storage: str, group: int
) -> None:
    stored = found(described)
    assert (stored.storage, stored.problem) == (storage, None)
    assert stored.layout
    assert stored.layout.group == group
    for quantization in ("none", storage):
        assert stored.kept_format(quantization, where="here") == storage


def test_what_runs_do_not_read_and_another_quantization_are_a_sentence_each() -> None:
    with pytest.raises(CheckpointError, match=r"^here describes .* cannot be read \(bits 3\): unquantized weights"):
        found(changed("gptq", bits=3)).kept_format("none", where="here")
    with pytest.raises(CheckpointError, match=r"\(a quantized output head\)"):
        found(changed("gptq", lm_head=True)).kept_format("none", where="here")
    with pytest.raises(ConfigError, match=r"^here holds int4_weight_only weights, .*quantization=nf4 was given: leave"):
        found(GPTQ).kept_format("nf4", where="here")


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
    "names that are none": ([4, None, "", "layers"], dict.fromkeys(MODULES, 1.0)),
}


@pytest.mark.parametrize(
    "field", ["ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "exclude_modules"]
)
@pytest.mark.parametrize(("patterns", "wanted"), KEPT.values(), ids=KEPT)
def test_modules_that_are_left_out_stay_as_they_are(
    field: str, patterns: list[object], wanted: dict[str, float]
) -> None:
    assert shares(FP8 | {field: patterns}) == wanted


HOSTILE = {
    "faulty": "re:(",
    "too many": "re:a{99999999999999}",
    "too deep": "re:" + "(" * 20_000 + ")" * 20_000,
    "of another kind": r"re:(?<!mlp)\.q_proj",
}


@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
def test_patterns_of_other_kinds_are_a_sentence(pattern: str) -> None:
    for described in (FP8 | {"ignore": [pattern]}, changed("int8", *WEIGHTS[:2], targets=[pattern])):
        with pytest.raises(CheckpointError, match=r"\(the pattern of modules '.*' is no pattern of the kind that is"):
            found(described).kept_format("none", where="here")


@pytest.mark.parametrize(
    "pattern", ["re:" + "(.*)*" * 12 + "x$", "re:" + "(.|.)" * 40 + "x$", "re:" + ".*" * 50 + "x$"]
)
def test_patterns_that_could_match_in_many_ways_are_tried_in_no_time(pattern: str) -> None:
    assert shares(FP8 | {"ignore": [pattern]}) == {}


def test_layers_that_gptq_and_auto_round_leave_out_stay_as_they_are() -> None:
    described = changed("gptq", dynamic={r"-:.*\.mlp\.(gate|up)_proj": {}})
    assert shares(described) == {"gate_proj": 1.0, "up_proj": 1.0}
    described = changed("auto-round", extra_config={"model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"}})
    assert shares(described) == {"down_proj": 0.25}


def test_modules_that_are_listed_are_quantized_alone() -> None:
    listed = changed("gptq", modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]])
    assert shares(listed).keys() == {"v_proj", "o_proj", "gate_proj", "up_proj"}
    described = changed("int8", *WEIGHTS[:2], targets=[r"re:.*mlp\..*"])
    assert shares(described) == dict.fromkeys(MODULES[:4], 1.0)


def test_compressed_tensors_leaves_out_whole_names_alone() -> None:
    """Its lists have the modules around quantized ones too."""
    described = changed("int8", ignore=["lm_head", "model.layers.0.mlp", "self_attn", "model.layers.1.mlp.down_proj"])
    assert shares(described) == {"down_proj": 0.25}


@pytest.mark.parametrize("layout", ["nvfp4 of modelopt", "nvfp4-pack-quantized", "float, one scale"])
@pytest.mark.parametrize("name", ["lm_head", "language_model.lm_head", "re:.*lm_head", "*lm_head*", "thinker.lm_head"])
def test_a_head_is_left_out_by_any_of_its_names(layout: str, name: str) -> None:
    assert found(changed(layout, ignore=[name])).problem is None
    assert found(changed(layout, ignore=[f"other_{name}"])).problem == "a quantized output head"


def test_a_head_is_quantized_only_where_the_file_says_so() -> None:
    for described in (changed("int8", ignore=[]), changed("gptq", lm_head=True)):
        assert found(described).problem == "a quantized output head"
    content = {"quantization_config": changed("int8", ignore=[])}
    tied = stored_format(content, layers=LAYERS)
    for stored in (tied, *map(found, (quantization_config("int8"), GPTQ, AWQ))):
        assert stored
        assert stored.problem is None


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_groups"])
def test_weights_are_not_quantized_to_what_checkpoints_alone_are_stored_in(name: str) -> None:
    assert kept_format("none", name, where="here") == name
    with pytest.raises(ConfigError, match=f"here holds no {name} weights, and .* is for checkpoints that do: use int4"):
        kept_format(name, None, where="here")


def test_the_settings_of_a_run_do_not_have_what_only_its_files_say() -> None:
    entry = ModelConfig(name="local", stored_format=found(AWQ))
    config = RunConfig(task=TaskConfig(name="generate"), model=entry, draft=DrafterConfig())
    written = yaml.safe_load(to_yaml(config))
    assert written["model"]["name"] == "local"
    assert "stored_format" not in written["model"]
