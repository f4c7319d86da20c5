"""What is read of a checkpoint before its weights: ends of texts, number formats on a CPU, 8 bits by name."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from llama_ssp import catalogue, load
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import CheckpointError
from llama_ssp.kernels.linear import HalfLinear, can_halve
from llama_ssp.machines import hardware
from llama_ssp.models.loading import check_model
from llama_ssp.planning.plan import document
from llama_ssp.ranks.world import start
from llama_ssp.reports.plan_tables import headline
from llama_ssp.run.checkpoints import find_eos_ids, find_sources, with_number_formats
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.tasks.dry_run import plan_of_run
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.settings.schema import MODEL_DRAFT, DeviceKind, DrafterConfig, DraftLayout, RunConfig
from llama_ssp.speculate.engine.state import Request
from tests.helpers import one_pass_heads
from tests.helpers.composed import compose_run
from tests.helpers.draft_heads import make_tensors, save_speculator
from tests.helpers.extensions import need
from tests.helpers.held import weights
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer


def as_tuple(given: Any) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, list) else () if given is None else (given,)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, whose tokenizer ends a text by token 1."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build_checkpoint(folder, "llama")
    save_tokenizer(folder, 97)
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({}, None, ()),  # the default of the class in transformers, 2, is not read
        ({"eos_token_id": 7}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 7}, {"bos_token_id": 0}, ()),
    ],
)
def test_a_checkpoint_ends_texts_as_in_transformers(
    checkpoint: Path, config: dict[str, Any], generation: dict[str, Any] | None, wanted: tuple[int, ...]
) -> None:
    file, old = checkpoint / "generation_config.json", json.loads((checkpoint / "config.json").read_text())
    old.pop("eos_token_id", None)
    (checkpoint / "config.json").write_text(json.dumps(old | config))
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert as_tuple(model.generation_config.eos_token_id) == wanted
    assert load(checkpoint).models.eos_ids == wanted
    assert load(model).models.eos_ids == wanted, "also of a loaded model"


@pytest.mark.parametrize(
    "inner",
    [
        {"text_config": {"eos_token_id": 9}},
        {"decoder": {"eos_token_id": [5, 6]}, "text_config": {"eos_token_id": 9}},
        {"decoder": {}, "generator": None, "text_config": {"eos_token_id": 9}},
        {"eos_token_id": 7, "text_config": {"eos_token_id": 9}},
        {"text_config": "a"},
        {"decoder": {"eos_token_id": "</s>"}},
    ],
)
def test_the_inner_config_speaks_where_the_outer_is_silent(tmp_path: Path, inner: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(inner))
    if "a" in inner.values() or "</s>" in str(inner):
        with pytest.raises(CheckpointError, match="an object, with token ids as special tokens, is required"):
            find_eos_ids(tmp_path, None)
        return
    given = GenerationConfig.from_model_config(json.loads(json.dumps(inner))).eos_token_id
    assert find_eos_ids(tmp_path, None) == as_tuple(given)


BLOCK = 512


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of few layers in 16 bits."""
    path = tmp_path_factory.mktemp(request.param)
    build_checkpoint(path, "llama", dtype=getattr(torch, request.param))
    save_tokenizer(path, VOCAB_SIZE)
    return path


def num_bytes(weight: Tensor | HalfLinear) -> int:
    """What a weight takes; FBGEMM fills the last block of inputs."""
    if isinstance(weight, Tensor):
        return weight.numel() * weight.element_size()
    num_outputs, num_inputs = torch.ops.quantized.linear_unpack_fp16(weight._packed)[0].shape
    return 2 * int(num_outputs) * BLOCK * -(-int(num_inputs) // BLOCK)


def runner_bytes(*runners: object) -> int:
    """The weights of some models, each once."""
    names = "_layers", "_norm", "_head", "_embedding_VE", "_fc", "_context_norm", "_markov", "_mask_11E", "_confidence"
    parts = [vars(runner)[name] for runner in runners for name in names if name in vars(runner)]
    return sum(num_bytes(weight) for weight in weights(parts) if isinstance(weight, HalfLinear) or weight.ndim)


@pytest.mark.skipif(not can_halve(), reason="this processor has no product with a weight in fp16")
@pytest.mark.parametrize("asked", [None, Dtype.bf16, Dtype.fp16])
def test_a_cpu_computes_in_fp32_on_16_bit_weights_or_as_is_asked_for_and_holds_what_was_planned(
    folder: Path, asked: Dtype | None
) -> None:
    need("cpu")
    pair = load(folder, dtype=asked or Dtype.auto, device="cpu")
    target, computed = pair.models.target, asked or Dtype.fp32
    assert vars(target)["dtype"] is getattr(torch, computed.value)
    plan = plan_of_run(pair.config, world_size=1, machine=hardware.load("laptop_cpu"), lengths=[8])
    assert plan.spec.target.dtype is computed
    assert runner_bytes(target) == plan.ranks[0].target_weights_bytes
    assert ("fp32 with 16-bit weights" in headline(plan)) is (asked is None)


def with_head(kind: str, folder: Path) -> RunConfig:
    """A run of the shipped model with a head of its own, or of a random one with a head of one pass."""
    model, draft = catalogue.load("tiny"), catalogue.load("tiny-eagle")
    if kind in {"in a folder", "with its own"}:
        embedding = torch.randn(4096, 256) if kind == "with its own" else None
        head = save_speculator(folder / "head", make_tensors(), embedding)
        draft = ModelConfig(name="local", path=str(head), dtype=Dtype.fp32)
    elif kind == "in another format":
        draft = replace(draft, dtype=Dtype.bf16)
    elif kind != "shipped":
        one_pass_heads.save_pair(folder, kind)
        save_tokenizer(folder / "target", one_pass_heads.VOCABULARY)
        model, draft = (ModelConfig(name="local", path=str(folder / part)) for part in ("target", "head"))
    return RunConfig(task=GenerateConfig(), model=model, draft=DrafterConfig(kind=MODEL_DRAFT, model=draft))


@pytest.mark.seconds
@pytest.mark.skipif(not can_halve(), reason="this processor has no product with a weight in fp16")
@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("shipped", True),
        ("in a folder", True),
        ("with its own", False),
        ("in another format", False),
        ("peagle", False),
        ("dflash of its authors", True),
        ("dspark", False),
    ],
)
def test_a_head_holds_what_was_planned_and_without_an_embedding_that_of_its_target(
    kind: str, is_shared: bool, tmp_path: Path
) -> None:
    need("cpu")
    given = with_head(kind, tmp_path)
    with start(device=DeviceKind.cpu, timeout_s=60) as world:
        sources = find_sources(given, world)
        config, models = with_number_formats(given, sources), load_models(given, world, sources)
    target, head = (vars(runner) for runner in (models.target, models.draft))
    assert (head["_embedding_VE"] is target["_embedding_VE"]) is is_shared
    plan = plan_of_run(config, world_size=1, machine=hardware.load("laptop_cpu"), lengths=[8])
    target_bytes = runner_bytes(models.target)
    assert plan.ranks[0].target_weights_bytes == target_bytes
    assert plan.ranks[0].draft_weights_bytes == runner_bytes(models.target, models.draft) - target_bytes
    assert document(plan)["draft"]["repeated_bytes"] == 0


def test_a_head_on_ranks_of_its_own_has_a_copy_of_the_embedding(tmp_path: Path) -> None:
    config = with_head("shipped", tmp_path)
    [beside] = plan_of_run(config, world_size=1, machine=hardware.load("laptop_cpu"), lengths=[8]).ranks
    config.placement.draft.kind = DraftLayout.own_gpu
    apart = plan_of_run(config, world_size=2, machine=hardware.load("laptop_cpu"), lengths=[8]).ranks
    assert apart[1].draft_weights_bytes - beside.draft_weights_bytes == 4 * 4096 * 256


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["7B_8bit", "65B_8bit"])
def test_a_model_in_8_bits_runs_without_bitsandbytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller shape of it, whose weights are synthetic."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it fails, and finding it finds nothing
    config, _ = compose_run("task=generate", f"model={name}", "draft=none", "weights=synthetic", "sampling=greedy")
    tiny = catalogue.load("tiny").shape
    assert tiny
    entry = config.model = replace(config.model, shape=replace(tiny, num_hidden_layers=tiny.num_hidden_layers + 1))
    with start(device=DeviceKind.cpu, timeout_s=60) as world, torch.inference_mode():
        sources = find_sources(config, world)
        check_model(sources[0].origin, num_ranks=2, quantization=entry.quantization)  # as on GPUs
        models = load_models(config, world, sources)
        decoder = build_decoder(models, config, speculative=False)
        request = Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=4)
        [done] = [u.completion for updates in decoder.run([request]) for u in updates if u.completion.finish_reason]
    assert len(done.token_ids) == 4
