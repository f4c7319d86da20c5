"""`search=true` as a user calls it."""

import json
import shlex
from pathlib import Path

import pytest

from llama_ssp.run.commands import plan as entry
from tests.helpers import in_process
from tests.helpers.extensions import need
from tests.helpers.hub import put
from tests.helpers.in_process import Ended, planned
from tests.helpers.lanes import heavy, slow
from tests.unit.run.commands.test_control_characters import HOSTILE, assert_harmless
from tests.unit.run.commands.test_plan import LIST, _folder


def call(*settings: str) -> Ended:
    return in_process.call(entry.main, [*settings])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("search=true model=local model.path=nowhere draft=none", "config.json cannot be read"),
        (f"{LIST} search=true", "search=true takes one machine, and hardware= names 2: give one of them"),
    ],
)
def test_a_mistake_is_a_sentence(settings: str, complaint: str) -> None:
    call("model=7B", *settings.split()).check_refusal(complaint)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        (("model={target}", "draft={draft}", "model.cache_dtype=int8"), {"d", None}),
        heavy(
            ("model=local", 'model.path="{target}"', "draft=local", 'draft.model.path="{draft}"', "batch_size=2"),
            {"d", None},
        ),
        heavy(("model=llama3_8B", "draft=none", "speculation.acceptance=0.7"), {None}),
        heavy(("model=llama3_8B", "draft=ngram"), {None}),
        slow(("model=llama3_8B", "draft=llama3_3B", "draft.model.quantization=int8_weight_only"), {"llama3_3B", None}),
        slow(("model=llama3_8B", "model.dtype=fp16", "placement=sharded"), {"llama3_1B", "llama3_3B", None}),
        heavy(
            ("model=llama3_8B", "speculation.num_draft_tokens=3", "model.quantization=int8_weight_only"), {"llama3_1B"}
        ),
        heavy(("model=qwen3_8B", "draft=eagle3_qwen3_8B", "speculation.tree=2x2x1"), {"eagle3_qwen3_8B", None}),
        (("model=13B", "draft=tinyllama_1B", "placement=own_gpu", "speculation.overlap=true"), {"tinyllama_1B", None}),
        heavy(("model=qwen3_8B", "verification=block"), {"qwen3_0.6B", "eagle3_qwen3_8B", None}),
    ],
)
def test_what_a_search_prints_runs_byte_for_byte_and_keeps_what_was_given(
    given: tuple[str, ...], drafts: set[str | None], tmp_path: Path
) -> None:
    for word, extension in {"draft=ngram": "copies", "draft=eagle3_qwen3_8B": "heads"}.items():
        if word in given:
            need(extension)
    folders = {"target": _folder(tmp_path / "it's a model", "llama3_8B"), "draft": _folder(tmp_path / "d", "llama3_1B")}
    settings = [setting.format_map(folders) for setting in (*given, "hardware=8xh100", "hardware.num_gpus=2")]
    shown, rows = call(*settings, "search=true").well().out, planned(*settings, "search=true")["search"]
    lines = [line.split(maxsplit=1) for line in shown.splitlines() if "  llama-ssp plan " in line]
    assert lines
    for rank, command in lines:
        row, words = rows[int(rank) - 1], shlex.split(command)
        plan = planned(*words[2:])
        assert max(one["needed_bytes"] for one in plan["memory"]) == row["needed_bytes"]
        mode = "speculative" if row["draft"] else "plain"
        assert plan["time"][f"{mode}_ms_per_token"] == pytest.approx(row["ms_per_token"], rel=1e-3)
        assert (plan["draft"] and plan["draft"]["name"]) in drafts
        assert plan["job"]["num_draft_tokens"] == row["num_draft_tokens"]
        kept = {"model.dtype=fp16", "model.quantization=int8_weight_only", "speculation.num_draft_tokens=3"}
        assert {*settings} & kept <= {*words}


@pytest.mark.heavy
def test_what_a_search_prints_holds_no_control_characters() -> None:
    name = f"'[bold]:smile:{HOSTILE}'"
    settings = [f"hardware.name={name}", f"hardware.gpu={name}", "format=json", "search=true"]
    assert_harmless(call("model=7B", "draft=none", "hardware=g5_12xlarge", *settings).well())


@pytest.mark.seconds
def test_a_model_of_the_hub_is_searched_by_its_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "model_type": "qwen2",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    put(tmp_path / "hub", "acme/large", [tmp_path / "config.json"])
    found = planned("model=acme/large", "draft=qwen2.5_0.5B", "hardware=8xh100", "search=true")["search"]
    assert {choice["target"] for choice in found} == {"acme/large"}
    assert {choice["draft"] for choice in found} == {"qwen2.5_0.5B", None}
