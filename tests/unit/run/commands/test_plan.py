"""`llama-ssp plan` as a user calls it: exit codes, what it prints, what it imports, how long it takes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.run.commands import plan as entry
from tests.helpers import in_process
from tests.helpers.hub import put
from tests.helpers.in_process import Ended, planned
from tests.helpers.own_conf import MACHINE, OwnConf
from tests.helpers.repository import ROOT
from tests.helpers.starters import run_file

# Packages that an engineer without a GPU need not have; None makes their import fail.
BLOCKED = ("torch", "transformers", "numpy", "rich", "matplotlib", "accelerate", "safetensors", "scipy", "psutil")
LIST = "hardware=8xh100,g5_12xlarge"


def call(*settings: str) -> Ended:
    return in_process.call(entry.main, [*settings])


@pytest.mark.seconds
def test_json_needs_nothing_beyond_hydra_and_imports_no_torch_and_nothing_that_only_sweeps_need() -> None:
    tell = "import atexit; atexit.register(lambda: print([n for n in sys.modules if sys.modules[n]], file=sys.stderr))"
    finished = run_file("plan.py", "model=30B", "draft=7B", "format=json", before=tell, without=BLOCKED)
    assert finished.returncode == 0, finished.stderr
    imported = set(json.loads(finished.stderr.replace("'", '"')))
    assert not {name.partition(".")[0] for name in imported} & set(BLOCKED)
    assert not imported & {"llama_ssp.run.commands.points", "importlib.metadata"}


@pytest.mark.seconds
def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path) -> None:
    finished = run_file("plan.py", "model=7B", "format=table", without=["rich"], cwd=tmp_path)
    assert finished.returncode == 2
    assert "needs rich: pip install rich" in finished.stderr


@pytest.mark.seconds
def test_it_runs_in_any_folder_within_two_seconds_of_processor_time(tmp_path: Path) -> None:
    """The fastest of three counts: tests that run at the same time slow this one down, and never speed it up."""
    words = ["model=30B", "draft=7B", "hardware=p4d_24xlarge", "format=json"]
    path = {"PATH": os.environ["PATH"]}
    for _ in range(3):
        before, started = os.times(), time.perf_counter()
        command = [sys.executable, str(ROOT / "launch" / "plan.py"), *words]
        subprocess.run(command, capture_output=True, check=True, cwd=tmp_path, env=path)
        after, took_s = os.times(), time.perf_counter() - started
        spent_s = after.children_user + after.children_system - before.children_user - before.children_system
        if min(spent_s, took_s) < 2.0:
            return
    pytest.fail(f"a plan took {spent_s:.2f} s")


@pytest.mark.seconds
def test_a_plan_that_does_not_fit_exits_with_3() -> None:
    ended = call("model=65B", "draft=7B", "hardware=g5_12xlarge", "format=json")
    assert (ended.code, ended.err.strip()) == (3, json.loads(ended.out)["shortage"])


@pytest.mark.seconds
def test_the_default_draft_is_that_of_the_model_entry_and_the_planners_choice_is_told() -> None:
    assert planned("model=65B")["draft"]["name"] == "7B"
    assert planned("model=65B", "draft=none")["draft"] is None
    chosen = planned("model=13B", "draft=7B", "placement=auto", "hardware=8xa100_80gb", "hardware.num_gpus=2")
    assert len(chosen["memory"]) == 2
    assert chosen["notes"][0].startswith(
        "placement=auto: the target on ranks 0 1 and the draft on ranks 0 1 (sharded), forecast at "
    )


def test_a_local_folder_is_planned_from_its_config_file_alone(tmp_path: Path) -> None:
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked = ("model=local", f"model.path={tmp_path}", "draft=none", "hardware=laptop_cpu")
    target = planned(*asked)["target"]
    assert target["num_parameters"] == 3 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 2 * 512 * 128 + 128
    assert (target["dtype"], target["matrix_dtype"]) == ("fp32", "fp16")
    target = planned(*asked, "model.dtype=bf16")["target"]
    assert (target["dtype"], target["matrix_dtype"]) == ("bf16", "bf16")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("model.quantisation=int8", "did you mean model.quantization"),
        ("placement.target.tp_size=16", "tp_size=16 must be between 1 and the number of ranks, here 8"),
        ("model=local draft=none", "model.path=DIR"),
        ("model=local model.path=nowhere draft=none", "config.json cannot be read"),
        ("hardware=8xh100,dgx", "unknown hardware 'dgx'"),
        ("hardware=8xh100 hardware.usd_per_hour=-1", "usd_per_hour=-1 must be above 0"),
        (f"{LIST} hardware.memory_bytes=-1", "2. g5_12xlarge: hardware.memory_bytes=-1 must be"),
        ("hardware=8xh100,1xl4 hardware.num_nodes=2", "1xl4: hardware.num_nodes=2 needs hardware.network"),
        ("hardware=8xh100,4xl40s placement.draft.tp_size=8 placement.draft.kind=sharded", "here 4"),
        ("hardware=4xa100", "did you mean hardware=4xa100_40gb?"),
        ("model=65B hardware=1xl4,1xh100 format=json", "none of the 2 machines has room; on 1xh100, rank 0 needs"),
    ],
)
def test_a_mistake_is_a_sentence(settings: str, complaint: str) -> None:
    ended = call("model=7B", *settings.split())
    assert ended.code == (3 if "has room" in complaint else 2)
    assert complaint in ended.err


@pytest.mark.seconds
def test_several_machines_are_a_table_of_their_plans_in_the_order_given(own_conf: OwnConf) -> None:
    own_conf("hardware/mybox.yaml", MACHINE)
    asked = ("model=7B", "draft=tinyllama_1B", "placement=auto", "hardware.usd_per_hour=3")
    names = ["mybox", "4xl40s", "1xh100"]
    found = planned(*asked, f"hardware={','.join(names)}")
    assert found["plan_version"] == 5
    assert found["plans"] == [planned(*asked, f"hardware={name}") for name in names]
    said = call(*asked, f"hardware={','.join(names)}").out
    assert said.index("mybox") < said.index("4xl40s") < said.index("1xh100")
    for plan in found["plans"]:
        assert f"{plan['time']['speculative_ms_per_token']:.2f}" in said
        assert f"{plan['usd_per_million_tokens']:.2f}" in said


@pytest.mark.seconds
def test_a_price_that_the_user_gives_is_that_of_a_million_tokens() -> None:
    asked = ("model=13B", "draft=7B", "hardware=8xa100_80gb", "placement=sharded", "batch_size=4")
    assert planned(*asked)["usd_per_million_tokens"] is None
    plan = planned(*asked, "hardware.usd_per_hour=16")
    time = plan["time"]
    rate = time[f"{'speculative' if time['speedup'] > 1 else 'plain'}_run_tokens_per_s"]
    assert plan["usd_per_million_tokens"] == pytest.approx(16 * 1e6 / 3600 / rate)
    said = " ".join(call(*asked, "hardware.usd_per_hour=16").out.split())
    assert said.count(f"{plan['usd_per_million_tokens']:.2f} USD per million tokens") == 1


def _folder(place: Path, name: str) -> str:
    shape = catalogue.read(catalogue.conf_dir() / "model" / f"{name}.yaml")["shape"]
    place.mkdir()
    (place / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    return str(place)


@pytest.mark.parametrize("name", catalogue.names("workload"))
def test_a_workload_has_lengths_and_a_source_and_the_user_has_the_last_word(name: str) -> None:
    file = catalogue.find("workload", name)
    assert file
    assert "arXiv:" in file.read_text()
    words = ("model=llama3_8B", "draft=none", "hardware=1xh100", f"workload={name}", "max_new_tokens=7")
    job = planned(*words)["job"]
    assert (job["prompt_tokens"], job["max_new_tokens"]) == (catalogue.read(file)["prompt_tokens"], 7)


@pytest.mark.seconds
def test_figures_are_changed_in_all_machines() -> None:
    found = planned("model=7B", LIST, "hardware.memory_bytes=40000000000")
    assert {rank["capacity_bytes"] for plan in found["plans"] for rank in plan["memory"]} == {40000000000}


@pytest.mark.seconds
def test_a_model_of_the_hub_is_planned_by_its_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "model_type": "exaone",
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
    for name, changes in (("large", {"model_type": "qwen2"}), ("other", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes | changes))
        put(tmp_path / "hub", f"acme/{name}", [tmp_path / name / "config.json"])
    found = planned("model=acme/large", "draft=qwen2.5_0.5B", "hardware=8xh100")
    assert (found["target"]["name"], found["draft"]["name"]) == ("acme/large", "qwen2.5_0.5B")
    other = ("model=acme/other", "draft=none", "format=json")
    in_process.call(entry.main, [*other, "hardware=8xh100", "search=true"]).check_refusal("runs refuse acme/other")
    ended = [in_process.call(entry.main, [*other, machines]) for machines in (LIST, "hardware=8xh100")]
    assert [one.code for one in ended] == [2, 2], "no library here runs it"
    listed, alone = (json.loads(one.out) for one in ended)
    for found in (*listed["plans"], alone):
        assert "unknown to transformers" in found["refusals"][0]
        assert any(note.startswith("acme/other is planned as a Llama of its sizes") for note in found["notes"])


def test_a_tree_of_one_level_is_planned() -> None:
    assert planned("model=7B", "draft=tinyllama_1B", "speculation.tree=3", "hardware=h100")["fits"]
