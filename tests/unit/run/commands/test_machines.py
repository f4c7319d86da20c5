"""`llama-ssp plan hardware=all` as a user calls it: what it prints, and what it refuses."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.machines import hardware
from llama_ssp.run.commands import plan as entry
from llama_ssp.settings import catalogue
from tests.helpers.hub import put
from tests.helpers.in_process import call, planned
from tests.helpers.lanes import heavy
from tests.helpers.own_conf import MACHINE, OwnConf

pytestmark = pytest.mark.seconds

LIST = "hardware=8xh100,g5_12xlarge"


def test_all_machines_are_compared_with_those_of_the_user(own_conf: OwnConf) -> None:
    own_conf("hardware/mybox.yaml", MACHINE)
    found = planned("model=7B", "draft=none", "hardware=all")
    names = {row["machine"] for row in found["machines"]}
    assert "mybox" in names == set(hardware.names())
    assert found["plan_version"] == 4
    assert [row["rank"] for row in found["machines"]] == list(range(1, len(found["machines"]) + 1))


@pytest.mark.parametrize(
    "settings",
    [
        ("hardware=4xl40s", "objective=latency"),
        heavy((LIST, "objective=price")),
        heavy((LIST, "search=true", "objective=throughput")),
    ],
)
def test_every_row_can_be_planned_and_takes_as_long(settings: tuple[str, ...]) -> None:
    """One machine with an objective has its numbers of GPUs compared."""
    asked = ("model=llama3_8B", "batch_size=4")
    rows = [row for row in planned(*asked, "draft=llama3_1B", *settings)["machines"] if row["reason"] is None]
    assert {row["num_gpus"] for row in rows} >= {1, 2, 4}
    for row in rows:
        time = planned(*asked, *row["settings"])["time"]
        ms = time["speculative_ms_per_token"] if row["draft"] else time["plain_ms_per_token"]
        assert ms == pytest.approx(row["ms_per_token"], rel=1e-3), row  # a cache has slots for K


def test_the_command_plans_the_first_choice_with_its_rows_and_times() -> None:
    asked = ("model=llama3_8B", "workload=chat", "hardware=8xh100,4xl40s", "speculation.acceptance=0.7")
    limits = ("concurrency=24", "objective=price", "search=true", "max_first_token_ms=3000", "max_price=20")
    found = planned(*asked, *limits)
    best, words = found["machines"][0], shlex.split(found["command"])
    assert words[:2] == ["llama-ssp", "plan"]
    assert not {word.partition("=")[0] for word in words} & {word.partition("=")[0] for word in limits}
    plan = planned(*words[2:])
    job, time = plan["job"], plan["time"]
    assert (job["prompt_tokens"], job["max_new_tokens"]) == (1020, 129)
    assert (job["batch_size"], job["num_replicas"]) == (best["batch_size"], best["num_replicas"])
    mode = "speculative" if best["draft"] else "plain"
    for name, of_row in ((f"{mode}_ms_per_token", "ms_per_token"), ("first_token_ms", "first_token_ms"),
                         (f"{mode}_ms_per_token_range", "ms_per_token_range")):  # fmt: skip
        assert time[name] == pytest.approx(best[of_row], rel=1e-3)
    assert plan["usd_per_hour"] == best["usd_per_hour"]


@pytest.mark.parametrize("name", catalogue.names("workload"))
def test_a_workload_has_lengths_and_a_source_and_the_user_has_the_last_word(name: str) -> None:
    file = catalogue.find("workload", name)
    assert file
    assert "arXiv:" in file.read_text()
    words = ("model=llama3_8B", "draft=none", "hardware=1xh100", f"workload={name}", "max_new_tokens=7")
    job = planned(*words)["job"]
    assert (job["prompt_tokens"], job["max_new_tokens"]) == (catalogue.read(file)["prompt_tokens"], 7)


def test_figures_and_prices_are_changed_in_all_machines() -> None:
    found = planned("model=7B", LIST, "hardware.memory_bytes=40000000000", "prices={8xh100:10}")
    assert {row["capacity_bytes"] for row in found["machines"]} == {40000000000}
    own, given = found["prices"]["g5_12xlarge"], found["prices"]["8xh100"]["usd_per_hour"]
    assert given == {"8": 10}
    assert (own["usd_per_hour"]["4"], own["vendor"], bool(own["date"])) == (5.672, "AWS", True)
    one = planned("model=7B", LIST, "hardware.price.usd_per_hour={2:3}")
    assert {row["usd_per_hour"] for row in one["machines"] if row["num_gpus"] * row["num_replicas"] == 2} == {3.0}


@pytest.mark.parametrize(
    ("settings", "code", "complaint"),
    [
        (["hardware=8xh100,dgx"], 2, "unknown hardware 'dgx'"),
        ([LIST, "placement=sharded"], 2, "placement=sharded has no effect on a comparison of machines"),
        ([LIST, "figure=no/such/folder/a.png"], 2, "create the folder no/such/folder first"),
        (["hardware=mi250,1xrtx3090", "draft=none", "figure=a.svg"], 2, "nothing that is left has one: prices="),
        ([LIST, "max_price=-1"], 2, "max_price=-1.0 must be above 0"),
        ([LIST, "prices={dgx:3}"], 2, "unknown machine in prices 'dgx'"),
        ([LIST, "hardware.memory_bytes=-1"], 2, "memory_bytes=-1 must be above 0"),
        ([LIST, "max_ms_per_token=0.01"], 3, "nothing is left of 2 machines; the closest is "),
    ],
)
def test_a_mistake_is_one_sentence(settings: list[str], code: int, complaint: str) -> None:
    ended = call(entry.main, ["model=7B", *settings, "format=json"])
    assert ended.code == code
    assert complaint in ended.err


def test_the_table_has_a_row_for_each_machine_says_what_is_left_out_and_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "machines.svg"
    words = ["model=llama3_70B", "draft=none", "hardware=8xh100,1xl4,4xl40s", f"figure={file}"]
    said = call(entry.main, words).out
    for part in (
        "llama3_70B, batch 1, 128 + 64 tokens: the fastest first", "Lambda", "2026-09", "31.92",
        "hardware=8xh100 draft=none", "left out: 1xl4 (1 x L4): rank 0 needs", "USD/M: of new tokens, prompts included",
    ):  # fmt: skip
        assert part in said
    assert "8xh100" in file.read_text()


def test_the_number_of_gpus_is_a_setting_where_it_is_not_the_machines_own() -> None:
    asked = ("model=llama3_70B", "draft=none", "hardware=8xh100,4xl40s")
    rows = [row for row in planned(*asked)["machines"] if row["num_replicas"] == 1]
    numbers = {(row["machine"], row["num_gpus"]): _num_gpus_of(row) for row in rows}
    assert (numbers["8xh100", 8], numbers["4xl40s", 4], numbers["4xl40s", 2]) == (None, None, "hardware.num_gpus=2")
    four = planned(*asked, "hardware.num_gpus=4")["machines"]
    found = {_num_gpus_of(row) for row in four if row["machine"] == "8xh100" and row["num_gpus"] == 4}
    assert found == {"hardware.num_gpus=4"}


def _num_gpus_of(row: dict[str, Any]) -> str | None:
    return next((setting for setting in row["settings"] if setting.startswith("hardware.num_gpus=")), None)


def test_a_model_of_the_hub_is_searched_and_compared_by_its_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "model_type": "qwen2", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064, "max_position_embeddings": 32768,
        "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    for name, changes in (("acme/large", {}), ("acme/other", {"model_type": "exaone"})):
        file = tmp_path / name / "config.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(sizes | changes))
        put(tmp_path / "hub", name, [file])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = planned("model=acme/large", "draft=qwen2.5_0.5B", "hardware=8xh100", "search=true")["search"]
    assert {choice["target"] for choice in found} == {"acme/large"}
    assert {"qwen2.5_0.5B", "qwen2.5_7B"} <= {choice["draft"] for choice in found}
    for machines in (LIST, "hardware=8xh100"):
        notes = planned("model=acme/other", "draft=none", machines)["notes"]
        assert any(note.startswith("acme/other is planned as a Llama of its sizes") for note in notes)
    refused = call(entry.main, ["model=acme/other", "draft=qwen2.5_0.5B", "hardware=8xh100"])
    assert (refused.code, "the draft must have the target's vocabulary" in refused.err) == (2, True)
