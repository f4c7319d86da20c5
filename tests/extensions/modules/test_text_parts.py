"""The text part of checkpoints that read images or audio too: one verdict of all doors, and the library's texts."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from llama_ssp import load, plan
from llama_ssp.architectures import reading
from llama_ssp.architectures.family import inventory, kinds
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.catalogue import CONFIG_FILE
from llama_ssp.extensions.modules.texts import causal_class
from llama_ssp.models.loading import check_model
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.edits import edit_tensors
from tests.helpers.lanes import heavy
from tests.helpers.library_kinds import EQUAL, text_kinds
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, refusal
from tests.helpers.text_parts import (
    BY_TEXT_MODEL,
    LAYOUTS,
    NUM_TOKENS,
    PROMPTS,
    compare_texts,
    save_kind,
    save_layout,
)
from tests.helpers.texts import part_at_a_near_tie, read_greedy
from tests.helpers.tokenizers import save_tokenizer

QUICK = ("Qwen2-VL", "Qwen3-VL-MoE", "Mistral 3", "InternVL, llm_config")


def compare_library(folder: Path, model: Any) -> None:
    save_tokenizer(folder, VOCAB_SIZE)
    planned = plan(folder, hardware="8xh200", num_gpus=1, dtype="fp32", prompt_tokens=32, max_new_tokens=NUM_TOKENS)
    assert not planned.refusals
    found = load(folder, dtype="fp32").generate(PROMPTS, max_new_tokens=NUM_TOKENS, temperature=0)
    for prompt, done in zip(PROMPTS, found, strict=True):
        own = read_greedy(model, prompt, num_tokens=NUM_TOKENS)
        part_at_a_near_tie(model, prompt, own[: len(done.token_ids)], done.token_ids)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [*((name, 2) if name in QUICK else heavy(name, 2) for name in LAYOUTS), *(heavy(name, 4) for name in LAYOUTS)],
)
def test_a_published_layout_has_one_verdict_and_the_texts_of_the_whole_model(
    name: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks, with rejected and accepted drafts, and by `load`; a plan without transformers has the run's sizes."""
    model = save_layout(tmp_path, LAYOUTS[name])
    assert not refusal(partial(check_readable, tmp_path, "none", num_ranks=num_ranks))
    planned = read_config(tmp_path)[0]
    assert not planned.refusal
    monkeypatch.setattr(reading, "library_of", lambda _kind: SimpleNamespace(describe="no_such_module:describe"))
    assert read_config(tmp_path)[0].refusal == ""
    monkeypatch.undo()
    found = inspect(tmp_path).shape
    for field in ("model_type", "hidden_size", "num_experts", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(planned, field) == getattr(found, field), field
    compare_texts(tmp_path, model, num_ranks=num_ranks)
    if num_ranks == 2:
        compare_library(tmp_path, model)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", BY_TEXT_MODEL)
def test_a_gemma_has_the_texts_of_its_text_model(kind: str, tmp_path: Path) -> None:
    model = save_kind(tmp_path, kind)
    assert not refusal(partial(check_readable, tmp_path, "none"))
    compare_texts(tmp_path, model, num_ranks=1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_is_tied_if_none_is_stored_whatever_both_configs_say(is_tied: bool, tmp_path: Path) -> None:
    """The library goes by the outer config, whose default is not that of older files."""
    build_checkpoint(tmp_path, "llama", tie_word_embeddings=is_tied)
    text = json.loads((tmp_path / CONFIG_FILE).read_text())
    content = {"model_type": "llava", "tie_word_embeddings": not is_tied, "text_config": text}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(content))
    found = inspect(tmp_path)
    assert found.shape.tie_word_embeddings == found.config.tie_word_embeddings == is_tied
    check_model(found, num_ranks=1)


def test_the_outer_config_says_whether_a_plan_counts_a_head(tmp_path: Path) -> None:
    text = {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 90,
    }
    for outer, is_tied in ({}, False), ({"tie_word_embeddings": True}, True):
        (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_type": "mistral3", "text_config": text} | outer))
        assert (inventory(read_config(tmp_path)[0]).head is None) == is_tied


def test_a_text_part_without_a_kind_has_the_one_that_transformers_gives_it(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "gemma3_text")
    text = json.loads((tmp_path / CONFIG_FILE).read_text())
    del text["model_type"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert inspect(tmp_path).config.model_type == read_config(tmp_path)[0].model_type == "gemma3_text"


def test_experts_that_are_stored_the_other_way_round_are_read_in_parts(tmp_path: Path) -> None:
    save_layout(tmp_path, LAYOUTS["Qwen3-VL-MoE"])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = inspect(tmp_path)
    stored = found.tensors[name]
    whole = stored.read()
    assert [*whole.shape] == [*stored.shape] == [4, 2 * 48, 64]
    for dim, part in (0, range(1, 3)), (1, range(10, 30)), (2, range(5, 9)):
        assert torch.equal(stored.read(dim=dim, parts=[part]), whole.narrow(dim, part.start, len(part)))


def test_a_folder_of_images_alone_is_refused_by_a_sentence(tmp_path: Path) -> None:
    save_layout(tmp_path, LAYOUTS["LLaVA"])
    edit_tensors(
        tmp_path / "model.safetensors",
        lambda found: [found.pop(name) for name in list(found) if "language_model" in name],
    )
    said = refusal(lambda: check_model(inspect(tmp_path), num_ranks=1))
    assert "lacks" in said
    assert "tensors that its config.json calls for" in said
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"]}')
    said = refusal(partial(check_readable, tmp_path, "none"))
    assert "do not continue a text token by token" in said
    assert refusal(lambda: inspect(tmp_path)) == said


@pytest.mark.parametrize("kind", ["muse_spark", "paligemma"])
def test_kinds_whose_text_was_not_seen_equal_have_one_refusal(kind: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama")
    text = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_type": kind, "text_config": text}))
    said = refusal(partial(check_readable, tmp_path, "none"))
    assert f"a {kind} model, whose text part is not compared with transformers'" in said
    assert refusal(lambda: inspect(tmp_path)) == said


@pytest.mark.heavy
def test_text_parts_are_those_of_the_installed_transformers() -> None:
    """Each that runs has a class that continues texts."""
    texts = text_kinds()
    assert {*EQUAL} == {kind for kind in texts if kinds().get(kind, {}).get("text")}
    for kind in EQUAL:
        assert kinds()[kind]["text"] == texts[kind]
        assert causal_class(CONFIG_MAPPING[texts[kind]])


_ELSEWHERE = {*BY_TEXT_MODEL, "qwen3_5", "qwen3_5_moe", *(layout.kind for layout in LAYOUTS.values())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*EQUAL} - _ELSEWHERE))
def test_a_kind_that_runs_has_the_texts_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = save_kind(tmp_path, kind)
    assert not refusal(partial(check_readable, tmp_path, "none"))
    compare_texts(tmp_path, model, num_ranks=1)
