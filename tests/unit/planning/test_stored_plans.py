"""Plans of checkpoints whose files are quantized, by config.json alone: bytes, times, and what is said of runs."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp import plan as api_plan
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.reading import check_readable
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.machines import hardware
from llama_ssp.planning.forwards import ModelPlacement, forward_time
from llama_ssp.planning.model import PlannedModel, planned_model, resolved
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.spec import spec_of_plan
from llama_ssp.planning.weights import model_bytes, rank_shares
from llama_ssp.run.commands import plan
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import NO_DRAFT, DrafterConfig, PlacementConfig, PlanConfig, TargetPlacement
from llama_ssp.storage.formats import READ_SLOWDOWN
from tests.helpers.extensions import need
from tests.helpers.in_process import call
from tests.helpers.packed_checkpoints import WEIGHTS, changed, quantization_config

H100 = hardware.load("1xh100")
FP8, W8A8, W4A16, AWQ, GPTQ = map(
    quantization_config, ("float, one scale", "int8", "compressed-tensors", "awq", "gptq")
)
W8A8_ZEROS = changed("int8", *WEIGHTS, symmetric=False)
"""What runs do not read."""
CHECKPOINTS = yaml.safe_load(Path(__file__).with_name("checkpoints.yaml").read_text())
LLAMA_8B, LLAMA_70B = CHECKPOINTS[0]["sizes"], CHECKPOINTS[7]["sizes"]
SMALL = LLAMA_8B | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


@pytest.fixture(autouse=True)
def _formats_of_files() -> None:
    need("eight_bits")
    need("four_bits")


def config_of(folder: Path, sizes: dict[str, Any], described: object, **changes: Any) -> PlanConfig:
    """The config of a plan of a folder with nothing but a config.json, as `llama-ssp plan` resolves it."""
    quantized = {} if described is None else {"quantization_config": described}
    common = {"max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(common | sizes | quantized))
    entry = ModelConfig(name="local", path=str(folder), quantization=changes.pop("quantization", "none"))
    return resolved(whole(PlanConfig)(model=entry, draft=DrafterConfig(kind=NO_DRAFT), hardware={}, **changes))


def planned(folder: Path, sizes: dict[str, Any], described: object, quantization: str = "none") -> PlannedModel:
    return planned_model(config_of(folder, sizes, described, quantization=quantization).model, device="cuda")


def total(model: PlannedModel) -> int:
    return model_bytes(inventory(model.shape), model, device="cuda").total_bytes


@pytest.mark.seconds
@pytest.mark.parametrize(
    "one",
    [pytest.param(one, id=one["name"], marks=pytest.mark.heavy if one.get("heavy") else ()) for one in CHECKPOINTS],
)
def test_public_checkpoints_are_planned_within_a_percent_of_the_sizes_that_their_pages_state(
    one: dict[str, Any], tmp_path: Path
) -> None:
    need("bitsandbytes")
    stored = one.get("stored")
    model = planned(tmp_path, one["sizes"], stored and quantization_config(stored))
    whole = inventory(model.shape)
    num_weights = whole.num_layers * sum(matrix.num_elements for matrix in whole.layer)
    assert total(model) == pytest.approx(one["gb"] * 1e9 + one.get("kept", 0) * num_weights, rel=0.01)


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


def test_a_forward_reads_the_stored_bytes_and_those_of_layers_that_stay(tmp_path: Path) -> None:
    model = planned(tmp_path, LLAMA_8B, W8A8)

    def matrices_s(of: PlannedModel, rows: int) -> float:
        placement = ModelPlacement(model=of, ranks=(0,), cuda_graphs=True)
        forward = forward_time(placement, H100, batch_size=rows, num_positions=1, num_scored=1, bucket=128)
        return forward.matrices_s

    head, layers = 2 * 128256 * 4096, 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert matrices_s(model, 1) == pytest.approx((READ_SLOWDOWN[8] * layers + head) / H100.read_bytes_per_s, rel=1e-3)
    kept = planned(tmp_path, LLAMA_8B, W8A8 | {"ignore": ["lm_head", r"re:model\.layers\.0\..*"]})
    of_layer = layers / 32 * (2 - READ_SLOWDOWN[8]) / H100.read_bytes_per_s
    assert matrices_s(kept, 1) == pytest.approx(matrices_s(model, 1) + of_layer, rel=1e-3)


def test_experts_that_ranks_cannot_share_in_groups_are_to_be_spread(tmp_path: Path) -> None:
    need("modules")
    (sizes,) = (one["sizes"] for one in CHECKPOINTS if one["sizes"].get("model_type") == "qwen3_moe")
    config_of(tmp_path, sizes, quantization_config("fp8"))
    with pytest.raises(
        PlacementError, match=r"has 96 on one of 8 ranks: use placement\.target\.experts=spread, another"
    ):
        api_plan(tmp_path, hardware="8xh100")
    parts: Any = "spread"
    made = api_plan(tmp_path, hardware="8xh100", placement=PlacementConfig(target=TargetPlacement(experts=parts)))
    assert made.fits


def refusals(folder: Path, described: object, quantization: str = "none") -> list[str]:
    config = config_of(folder, SMALL, described, quantization=quantization)
    made = make_plan(spec_of_plan(config, H100), H100)
    assert not made.notes
    return [*made.refusals]


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
    (said,) = refusals(tmp_path, described, quantization=quantization)
    reason = f"{tmp_path.name} describes quantized weights that cannot be read ({reason})"
    assert said.startswith(f"runs refuse this model, whose matrices are counted as {counted}: {reason}: unquantized")
    model = planned(tmp_path, SMALL, described, quantization)
    assert total(model) == total(replace(model, stored_format=None))
    with pytest.raises(CheckpointError, match="that cannot be read"):
        check_readable(tmp_path, quantization)


@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize("machines", ["1xh100", "1xh100,1xh200"])
def test_the_refusal_of_a_run_is_the_first_thing_that_a_plan_says_and_a_wrong_setting(
    machines: str, form: str, tmp_path: Path
) -> None:
    config_of(tmp_path, SMALL, W8A8_ZEROS)
    words = [f"model={tmp_path}", "draft=none", f"hardware={machines}", f"format={form}"]
    ended = call(plan.main, words)
    assert ended.code == 2
    assert "symmetric false" in ended.err
    if form == "table":
        assert ended.out.lstrip().startswith("runs refuse this model, whose matrices are counted as int8_weight_only")
        return
    content = json.loads(ended.out)
    assert all("symmetric false" in one["refusals"][0] for one in content.get("plans", [content]))


def test_plan_and_run_take_the_stored_format_unless_another_is_given(tmp_path: Path) -> None:
    given = planned(tmp_path, SMALL, AWQ, quantization="int8_weight_only")
    assert total(given) == total(replace(given, stored_format=None))
    for quantization in ("none", "int4_weight_only"):
        assert refusals(tmp_path, W4A16, quantization=quantization) == []
        assert planned(tmp_path, SMALL, W4A16, quantization).quantization == "int4_weight_only"
        check_readable(tmp_path, quantization)
    (said,) = refusals(tmp_path, GPTQ, quantization="int8_weight_only")
    assert said.startswith(f"runs refuse this model: {tmp_path.name} holds int4_weight_only weights, ")
    with pytest.raises(ConfigError, match=r"holds int4_weight_only weights, .*leave it out"):
        check_readable(tmp_path, "int8_weight_only")


def test_synthetic_weights_have_only_the_sizes_of_a_checkpoint(tmp_path: Path) -> None:
    need("synthetic")
    config = config_of(tmp_path, SMALL, AWQ, weights="synthetic")
    target = spec_of_plan(config, H100).target
    assert (target.stored_format, target.quantization) == (None, "none")


def test_groups_are_left_to_the_run_where_a_plan_does_not_know_the_matrices(tmp_path: Path) -> None:
    """Eight ranks have 64 inputs of attention's output each, and AWQ shares scales among 128."""
    for model_type, is_known in ("llama", True), ("nanochat", False):
        model = planned(tmp_path, SMALL | {"num_key_value_heads": 8, "model_type": model_type}, AWQ)
        with pytest.raises(PlacementError, match="o_proj has 64 on one of 8") if is_known else nullcontext():
            rank_shares(model, num_ranks=8)


def test_a_70b_in_fp8_fits_on_one_h100(tmp_path: Path) -> None:
    packed = make_plan(spec_of_plan(config_of(tmp_path, LLAMA_70B, FP8), H100), H100)
    assert packed.fits
    assert document(packed)["target"]["stored_format"] == "compressed-tensors fp8"
    plain = make_plan(spec_of_plan(config_of(tmp_path, LLAMA_70B, {}), H100), H100)
    assert not plain.fits
