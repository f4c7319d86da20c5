"""Plans of checkpoints whose files are quantized, by config.json alone: bytes, times, and what is said of runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.architectures.family import inventory
from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.machines import hardware
from llama_ssp.planning.advice import changes_that_fit
from llama_ssp.planning.memory import fits, model_bytes, rank_shares
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.search import compare, search
from llama_ssp.planning.spec import (
    PlannedModel,
    check_readable,
    job_of_plan,
    planned_model,
    resolve_shapes,
)
from llama_ssp.planning.timing import ModelPlacement, bandwidth, forward_time
from llama_ssp.settings.formats import READ_SLOWDOWN
from llama_ssp.settings.schema import (
    NO_DRAFT,
    DrafterConfig,
    Dtype,
    ModelConfig,
    PlanConfig,
    SyntheticConfig,
    TargetKind,
    WeightsKind,
)
from tests.helpers.packed_checkpoints import MXFP4, WEIGHTS, changed, quantization_config
from tests.helpers.planning import measured_machine

H100 = hardware.load("1xh100")
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64
}  # fmt: skip
MISTRAL_7B = LLAMA_8B | {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768}
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_14B = QWEN_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
QWEN_72B = QWEN_14B | {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64
}  # fmt: skip
QWEN3_32B = QWEN_14B | {
    "model_type": "qwen3", "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
PHI_4 = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17920,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
    "max_position_embeddings": 16384, "torch_dtype": "bfloat16",
}  # fmt: skip


FP8, W8A8, W4A16, FP8_BLOCKS, AWQ, GPTQ, NF4, NF4_TWICE, EXPERTS = map(
    quantization_config,
    ("float, one scale", "int8", "compressed-tensors", "fp8", "awq", "gptq", "nf4", "nf4, twice", MXFP4),
)
W8A8_ZEROS = changed("int8", *WEIGHTS, symmetric=False)
"""What runs do not read."""

MOE = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "dtype": "bfloat16"}
MIXTRAL = MOE | {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_30B = MOE | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = {name: value for name, value in MOE.items() if name != "dtype"} | {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
DEEPSEEK_V3 = MOE | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
}  # fmt: skip
GLM_45 = MOE | {
    "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "num_attention_heads": 96, "head_dim": 128, "vocab_size": 151552, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
}  # fmt: skip
SCOUT = MOE | {
    "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "head_dim": 128, "vocab_size": 202048, "num_local_experts": 16,
    "num_experts_per_tok": 1,
}  # fmt: skip
GEMMA3_27B = MOE | {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
}  # fmt: skip
WIDER = {id(AWQ): 1.5 / 128, id(GPTQ): 1.5 / 128, id(FP8_BLOCKS): 4 / 128, id(NF4_TWICE): 3 / 64}
"""Bytes that a run keeps of each weight in addition: its scales are wider than in the files, or of fewer weights."""

PAGES = {  # GB
    # The sums of the safetensors files that the pages of the hub list under "Files".
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": (LLAMA_8B, FP8, 5.00 + 4.08),
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (LLAMA_8B, GPTQ, 5.74),
    "TheBloke/Mistral-7B-v0.1-AWQ": (MISTRAL_7B, AWQ, 4.15),
    "neuralmagic-ent/Qwen2.5-14B-quantized.w8a8": (QWEN_14B, W8A8, 5.00 + 4.96 + 4.82 + 1.56),
    "OPEA/Qwen2.5-72B-Instruct-int4-sym-inc": (QWEN_72B, GPTQ, 41.5),
    "RichardErkhov/Qwen_-_Qwen2.5-7B-Instruct-4bits": (QWEN_7B, NF4, 4.76 + 1.09),
    "RedHatAI/phi-4-quantized.w8a8": (PHI_4, W8A8, 15.7),
    # As users report them.
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8": (LLAMA_70B, FP8, 72.7),
    "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4": (LLAMA_70B, AWQ, 39.77),
    "Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4": (QWEN_72B, GPTQ, 41.6),
    "unsloth/Meta-Llama-3.1-8B-bnb-4bit": (LLAMA_8B, NF4_TWICE, 5.7),
    "Qwen/Qwen3-32B-FP8": (QWEN3_32B, FP8_BLOCKS, 34.3),
    # `total_size` of model.safetensors.index.json.
    "mistralai/Mixtral-8x7B-v0.1": (MIXTRAL, None, 93.405585408),
    "mistralai/Mixtral-8x22B-v0.1": (
        MIXTRAL | {
            "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48
        }, None, 281.241268224,
    ),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B, None, 61.064245248),
    # The same, less a layer that runs do not read (MTP): 14 billion parameters, those of embedding and head in 16 bits.
    "deepseek-ai/DeepSeek-V3": (DEEPSEEK_V3, FP8_BLOCKS, 688.586727753 - 14 - 1.9),
    # "Checkpoint size" in arXiv:2508.10925, table 1.
    "openai/gpt-oss-20b": (GPT_OSS, EXPERTS, 12.8 * 2**30 / 1e9),
    "openai/gpt-oss-120b": (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, EXPERTS, 60.8 * 2**30 / 1e9),
    # Two bytes of each parameter that the models' pages and reports have.
    "zai-org/GLM-4.5, without MTP": (GLM_45, None, 2 * 355),
    "meta-llama/Llama-4-Scout-17B-16E, without its vision": (SCOUT, None, 2 * 107.8),
    "google/gemma-3-27b-it, without its vision": (GEMMA3_27B, None, 2 * 27.0),
}  # fmt: skip


def config_of(folder: Path, sizes: dict[str, Any], described: object, **changes: Any) -> PlanConfig:  # noqa: ANN401 - any field
    """The config of a plan of a folder with nothing but a config.json, as `llama-ssp plan` resolves it."""
    quantized = {} if described is None else {"quantization_config": described}
    (folder / "config.json").write_text(json.dumps(sizes | quantized))
    entry = ModelConfig(name="local", path=str(folder), quantization=changes.pop("quantization", "none"))
    config = PlanConfig(model=entry, draft=DrafterConfig(kind=NO_DRAFT), hardware={}, **changes)
    resolve_shapes(config)
    return config


def planned(folder: Path, sizes: dict[str, Any], described: object, quantization: str = "none") -> PlannedModel:
    return planned_model(config_of(folder, sizes, described, quantization=quantization).model, device="cuda")


def total(model: PlannedModel) -> int:
    return model_bytes(inventory(model.shape), model, device="cuda").total_bytes


@pytest.mark.parametrize(("sizes", "described", "size_gb"), PAGES.values(), ids=PAGES)
def test_public_checkpoints_are_planned_within_a_percent_of_the_sizes_that_their_pages_state(
    sizes: dict[str, Any], described: object, size_gb: float, tmp_path: Path
) -> None:
    model = planned(tmp_path, sizes, described)
    whole = inventory(model.shape)
    num_weights = whole.num_layers * sum(matrix.num_elements for matrix in whole.layer)
    assert total(model) == pytest.approx(size_gb * 1e9 + WIDER.get(id(described), 0) * num_weights, rel=0.01)


def test_a_70b_in_fp8_fits_on_one_h100(tmp_path: Path) -> None:
    plan = make_plan(job_of_plan(config_of(tmp_path, LLAMA_70B, FP8), H100), H100)
    assert plan.fits
    assert document(plan)["target"]["stored_format"] == "compressed-tensors fp8"
    plain = make_plan(job_of_plan(config_of(tmp_path, LLAMA_70B, {}), H100), H100)
    assert not plain.fits


SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
ATTENTION, MLP, HEAD = 2 * 512 * 512 + 2 * 256 * 512, 3 * 1024 * 512, 1000 * 512
VECTORS = 3 * 2 * 512 + 512
OUTPUTS = 2 * 512 + 2 * 256 + 2 * 1024 + 512


def test_weights_scales_and_what_stays_add_up(tmp_path: Path) -> None:
    rest = 2 * (2 * HEAD + VECTORS)
    assert total(planned(tmp_path, SMALL, W8A8)) == rest + 3 * (ATTENTION + MLP + 4 * OUTPUTS)
    kept = FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "self_attn"]}
    blocks = 2 * MLP + 2 * 4 * MLP // 128
    assert total(planned(tmp_path, SMALL, kept)) == pytest.approx(rest + 2 * (3 * ATTENTION + MLP) + blocks, abs=9)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_tied_head_is_that_of_the_embedding_even_where_no_module_is_left_out(device: str, tmp_path: Path) -> None:
    """A CPU keeps a copy of it in 16 bits beside the embedding in fp32."""
    left_out, quantized = (
        planned(tmp_path, SMALL | {"tie_word_embeddings": True}, W8A8 | {"ignore": names})
        for names in (["lm_head"], [])
    )
    sizes = [
        model_bytes(
            inventory(model.shape), replace(model, dtype=Dtype.fp32) if device == "cpu" else model, device=device
        )
        for model in (left_out, quantized)
    ]
    assert sizes[0] == sizes[1]


def test_a_quantization_that_is_given_has_precedence(tmp_path: Path) -> None:
    model = planned(tmp_path, SMALL, AWQ, quantization="int8_weight_only")
    plain = replace(model, stored_format=None)
    assert total(model) == total(plain)
    assert model.weights_name == "int8_weight_only"


def test_a_forward_reads_the_stored_bytes_and_those_of_layers_that_stay(tmp_path: Path) -> None:
    model = planned(tmp_path, LLAMA_8B, W8A8)

    def matrices_s(of: PlannedModel, rows: int) -> float:
        placement = ModelPlacement(
            model=of, kind=TargetKind.tensor, ranks=(0,), cuda_graphs=True, num_active=1, target_ranks=(0,)
        )
        forward = forward_time(placement, H100, batch_size=rows, num_positions=1, num_scored=1, bucket=128)
        return forward.matrices_s

    head, layers = 2 * 128256 * 4096, 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert matrices_s(model, 1) == pytest.approx((READ_SLOWDOWN[8] * layers + head) / bandwidth(H100))
    kept = planned(tmp_path, LLAMA_8B, W8A8 | {"ignore": ["lm_head", "model.layers.0"]})
    of_layer = layers / 32 * (2 - READ_SLOWDOWN[8]) / bandwidth(H100)
    assert matrices_s(kept, 1) == pytest.approx(matrices_s(model, 1) + of_layer)


def notes(folder: Path, described: object, quantization: str = "none") -> list[str]:
    config = config_of(folder, SMALL, described, quantization=quantization)
    return [note for note in make_plan(job_of_plan(config, H100), H100).notes if not note.startswith("not measured")]


@pytest.mark.parametrize(
    ("described", "quantization", "counted", "reason"),
    [
        (W8A8_ZEROS, "none", "int8_weight_only", "symmetric false"),
        (W8A8_ZEROS, "int4_weight_only", "int4_weight_only", "symmetric false"),
        (changed("awq", version="gemv"), "none", "int4_weight_only", 'version "gemv"'),
        (changed("gptq", lm_head=True), "none", "int4_weight_only", "a quantized output head"),
        (changed("nvfp4 of modelopt", ignore=[]), "none", "nvfp4", "a quantized output head"),
        (changed("gptq", bits=3), "none", "bf16", "bits 3"),
    ],
)
def test_a_plan_counts_what_runs_refuse_and_says_so(
    described: object, quantization: str, counted: str, reason: str, tmp_path: Path
) -> None:
    (said,) = notes(tmp_path, described, quantization=quantization)
    reason = f"local describes quantized weights that cannot be read ({reason})"
    assert said.startswith(f"runs refuse this model, whose matrices are counted as {counted}: {reason}: unquantized")
    model = planned(tmp_path, SMALL, described, quantization)
    assert total(model) == total(replace(model, stored_format=None))
    with pytest.raises(CheckpointError, match="that cannot be read"):
        check_readable(tmp_path, quantization)


def test_plan_and_run_take_the_stored_format_unless_another_is_given(tmp_path: Path) -> None:
    for quantization in ("none", "int4_weight_only"):
        assert notes(tmp_path, W4A16, quantization=quantization) == []
        assert planned(tmp_path, SMALL, W4A16, quantization).quantization == "int4_weight_only"
        check_readable(tmp_path, quantization)
    (said,) = notes(tmp_path, GPTQ, quantization="int8_weight_only")
    assert said.startswith("runs refuse this model: local holds int4_weight_only weights, ")
    with pytest.raises(ConfigError, match=r"holds int4_weight_only weights, .*leave it out"):
        check_readable(tmp_path, "int8_weight_only")


def test_no_change_quantizes_files_again_or_lets_their_layers_wait(tmp_path: Path) -> None:
    """With 60 GB int4_weight_only would have room, and layers in host memory on any machine."""
    machine = replace(H100, memory_bytes=60 * 10**9)
    job = job_of_plan(config_of(tmp_path, LLAMA_70B, FP8), machine)
    assert fits(replace(job, target=job.target.quantized("int4_weight_only")), machine)
    found = changes_that_fit(job, machine)
    assert found
    settings = " ".join(setting for change in found for setting in change.settings)
    assert "quantization" not in settings
    assert "offload" not in settings


def test_searches_and_comparisons_name_no_format_that_a_run_would_refuse(tmp_path: Path) -> None:
    for described, name in ((W8A8_ZEROS, "int8_weight_only"), (AWQ, "int4_weight_only")):
        config = config_of(tmp_path, LLAMA_70B, described)
        rows = search(job_of_plan(config, H100), H100)
        assert {row["quantization"] for row in rows} == {name}
        assert not any(setting.startswith("model.quantization") for row in rows for setting in row["settings"])
        choices = compare(replace(config, search=True), [H100])
        assert {each.quantization for each in choices} == {name}
        assert not any(setting.startswith("model.quantization") for each in choices for setting in each.settings)


def test_a_calibrated_machine_has_not_measured_the_format(tmp_path: Path) -> None:
    machine = measured_machine(hardware.load("laptop_cpu"))
    job = job_of_plan(config_of(tmp_path, SMALL, AWQ), machine)
    said = "the times are those of unquantized layers: quantized layers were not measured on this machine"
    assert said in make_plan(job, machine).notes
    plain = replace(job.target, stored_format=None, quantization="none")
    assert said not in make_plan(replace(job, target=plain), machine).notes


def test_synthetic_weights_have_only_the_sizes_of_a_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, AWQ, weights=WeightsKind.synthetic, synthetic=SyntheticConfig())
    target = job_of_plan(config, H100).target
    assert (target.stored_format, target.quantization) == (None, "none")


def test_groups_are_left_to_the_run_where_a_plan_does_not_know_the_matrices(tmp_path: Path) -> None:
    """Eight ranks have 64 inputs of attention's output each, and AWQ shares scales among 128."""
    asked: dict[str, Any] = {"num_ranks": 8, "kind": TargetKind.tensor}
    with pytest.raises(PlacementError, match="packs 128 inputs at a time, and o_proj has 64 on one of 8 ranks"):
        rank_shares(planned(tmp_path, SMALL | {"num_key_value_heads": 8}, AWQ), **asked)
    rank_shares(planned(tmp_path, SMALL | {"num_key_value_heads": 8, "model_type": "nanochat"}, AWQ), **asked)


def test_an_entry_with_sizes_of_its_own_is_still_stored_as_its_folder_says(tmp_path: Path) -> None:
    entry = replace(config_of(tmp_path, SMALL, AWQ).model, stored_format=None)
    assert entry.shape
    stored = planned_model(entry, device="cuda").stored_format
    assert stored
    assert stored.name == "awq int4"
