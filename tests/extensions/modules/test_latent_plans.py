"""DeepSeek V3 in FP8 on eight H200: the arithmetic of docs/design/latents.md, and the figures of plans."""

import json
from dataclasses import replace

import pytest
import yaml

from llama_ssp.architectures import engine
from llama_ssp.architectures.matrices import Inventory
from llama_ssp.catalogue import CONFIG_FILE, Dtype, ModelConfig
from llama_ssp.machines import hardware
from llama_ssp.planning.forwards import ModelPlacement, forward_time
from llama_ssp.planning.memory import GIB, memory
from llama_ssp.planning.model import PlannedModel, planned_model
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.weights import model_bytes, rank_shares
from llama_ssp.weights.checkpoint import shape_of
from tests.helpers.models import tiny_config
from tests.helpers.planning import make_spec
from tests.helpers.repository import ROOT

PAGE = ROOT / "docs" / "design" / "latents.md"
CONFIGS = ROOT / "tests" / "extensions" / "modules" / "configs.yaml"
ROWS = {"1 x 32k": (1, 2**15), "64 x 1k": (64, 2**10), "4 x 128k": (4, 2**17)}
NUM_RANKS = 8
FP8_BYTES, BF16_BYTES = 1 + 4 / 128, 2
MACHINE = hardware.load("8xh200")


def lines() -> dict[tuple[str, int], list[str]]:
    """The cells of a line by its name, and by how many lines of this name come before."""
    found: dict[tuple[str, int], list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found[name, sum(name == before for before, _ in found)] = cells
    return found


def value(cell: str) -> float:
    """What an expression of the page comes to."""
    return float(eval(cell.replace(" x ", " * "), {"__builtins__": {}}))


def spec_of(model: PlannedModel, num_rows: int, context: int) -> PlanSpec:
    return make_spec(
        model,
        num_ranks=NUM_RANKS,
        batch_size=num_rows,
        prompt_tokens=context - 64,
        max_new_tokens=64,
        acceptance=None,
        num_draft_tokens=0,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    folder = tmp_path_factory.mktemp("v3")
    configs = yaml.safe_load(CONFIGS.read_text())
    config = next(each["config"] for each in configs if each["name"] == "deepseek-ai/DeepSeek-V3")
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return planned_model(ModelConfig(name="v3", path=str(folder), dtype=Dtype.bf16), device="cuda")


def read_bytes(model: PlannedModel, num_rows: int) -> float:
    """The bytes of a rank's weights that a step of so many rows reads, by the plan's inventory."""
    held = rank_shares(model, num_ranks=NUM_RANKS)[0]

    def used(layer: Inventory) -> Inventory:
        return replace(layer, layer=tuple(replace(each, copies=each.num_used(num_rows)) for each in layer.layer))

    read = replace(used(held), each=tuple(map(used, held.each)), embeddings=())
    return model_bytes(read, model, device="cuda").total_bytes


@pytest.mark.heavy
def test_the_memory_of_a_rank_is_that_on_the_page(model: PlannedModel) -> None:
    weights_bytes, page = 0.0, lines()
    for (part, _), (numbers, *printed) in page.items():
        if part not in ROWS and printed and numbers[:1].isdigit():
            size = value(numbers) * (BF16_BYTES if "bf16" in part else FP8_BYTES)
            assert size / 1e9 == pytest.approx(float(printed[0]), abs=0.0006), part
            weights_bytes += size
    for name, (num_rows, context) in ROWS.items():
        rank = memory(spec_of(model, num_rows, context), MACHINE)[0]
        assert rank.target_weights_bytes == pytest.approx(weights_bytes, rel=0.001)
        assert rank.target_weights_bytes / 1e9 == pytest.approx(float(page["all, with norms", 0][1]), abs=0.01)
        by_hand = value(page[name, 0][0])
        assert rank.target_cache_bytes == pytest.approx(by_hand, rel=0.01)
        assert by_hand / GIB == pytest.approx(float(page[name, 0][1]), abs=0.005)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ROWS)
def test_the_time_of_a_step_is_that_on_the_page(name: str, model: PlannedModel) -> None:
    num_rows, context = ROWS[name]
    placement = ModelPlacement(model=model, ranks=tuple(range(NUM_RANKS)), cuda_graphs=True)
    found = forward_time(placement, MACHINE, batch_size=num_rows, num_positions=1, num_scored=1, bucket=context)
    (attention_bytes, attention_ms), (weights_gb, weights_ms) = (lines()[name, place] for place in (1, 2))
    assert value(attention_bytes) / MACHINE.read_bytes_per_s * 1e3 == pytest.approx(float(attention_ms), rel=0.005)
    assert found.attention_s * 1e3 == pytest.approx(float(attention_ms), rel=0.02)
    weights_bytes = 1e9 * value(weights_gb)
    assert read_bytes(model, num_rows) == pytest.approx(weights_bytes, rel=0.005)
    assert weights_bytes / MACHINE.read_bytes_per_s * 1e3 == pytest.approx(float(weights_ms), rel=0.005)
    assert 1.13 < found.matrices_s * 1e3 / float(weights_ms) < 1.34


def test_a_gpu_has_sums_of_latents_for_the_last_tokens_of_prompts_and_not_of_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a chunk 21 tokens read latents: 64 x 32 / (2 x 64 - 32); more tokens expand them."""
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    shape = shape_of(tiny_config("deepseek_v3", **sizes, max_position_embeddings=8192))
    model = PlannedModel(name="mine", shape=shape, dtype=Dtype.bf16, quantization="none", by_library=True)
    spec = make_spec(model, batch_size=32, prompt_tokens=4000, max_new_tokens=64, acceptance=None, num_draft_tokens=0)
    of_position, planned = 4 * shape.num_attention_heads * engine.latent_parts(4096) * (64 + 1), []
    for most in (40, 100, 10**6):
        monkeypatch.setattr(engine, "LATENT_SUMS_BYTES", most * of_position)
        spec = replace(spec, max_new_tokens=spec.max_new_tokens + 1)  # known specs are not computed again
        planned.append(memory(spec, MACHINE)[0].activations_bytes)
    assert [planned[1] - planned[0], planned[2] - planned[1]] == [60 * of_position, (32 * 21 - 100) * of_position]
