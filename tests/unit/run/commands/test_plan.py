"""launch/plan.py as a user calls it: exit codes, what it prints, what it imports, how long it takes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llama_ssp.run.commands import plan as entry
from llama_ssp.run.tasks import dry_run
from tests.helpers import in_process
from tests.helpers.in_process import Ended, planned
from tests.helpers.lanes import heavy

pytestmark = pytest.mark.seconds

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = ROOT / "launch" / "plan.py"
# Packages that an engineer without a GPU need not have; None makes their import fail.
BLOCKED = ("torch", "transformers", "numpy", "rich", "matplotlib", "accelerate", "safetensors", "scipy", "psutil")


def call(*settings: str) -> Ended:
    return in_process.call(entry.main, [*settings])


def start(*settings: str, before: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, after some Python."""
    program = (
        f"import runpy, sys; {before}; sys.argv = ['plan.py', *{list(settings)!r}]; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=cwd)


def test_json_needs_nothing_beyond_hydra_and_imports_no_torch_and_nothing_that_only_sweeps_need() -> None:
    absent = f"sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    tell = "import atexit; atexit.register(lambda: print([n for n in sys.modules if sys.modules[n]], file=sys.stderr))"
    finished = start("model=30B", "draft=7B", "format=json", before=f"{absent}; {tell}")
    assert finished.returncode == 0, finished.stderr
    imported = set(json.loads(finished.stderr.replace("'", '"')))
    assert not {name.partition(".")[0] for name in imported} & set(BLOCKED)
    assert not imported & {"llama_ssp.run.commands.slurm", "llama_ssp.run.commands.points", "importlib.metadata"}


@pytest.mark.parametrize(
    ("package", "setting"),
    [("rich", "format=table"), heavy("rich", "search=true"), heavy("rich", "figure=plan.png"),
     ("matplotlib", "figure=plan.png")],
)  # fmt: skip
def test_a_missing_package_is_named_with_what_installs_it(package: str, setting: str, tmp_path: Path) -> None:
    other = ["format=json"] if setting.startswith("figure") else []
    finished = start("model=7B", setting, *other, before=f"sys.modules[{package!r}] = None", cwd=tmp_path)
    assert finished.returncode == 2
    assert f"needs {package}: pip install {package}" in finished.stderr


@pytest.mark.parametrize("asked", ["search=false", "search=true", "hardware=all"])
def test_a_figure_without_a_folder_is_refused_before_anything_is_searched_or_printed(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "search", None)
    monkeypatch.setattr(dry_run, "compare", None)
    ended = call("model=7B", "hardware=1xl4", asked, "figure=/missing/plan.png")
    assert (ended.code, ended.out) == (2, "")
    assert "figure=/missing/plan.png: create the folder /missing first, or name another file" in ended.err


def test_it_runs_in_any_folder_within_a_second_of_processor_time(tmp_path: Path) -> None:
    """The fastest of three counts: tests that run at the same time slow this one down, and never speed it up."""
    words = ["model=30B", "draft=7B", "hardware=p4d_24xlarge", "format=json"]
    for _ in range(3):
        before, started = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, str(SCRIPT), *words], capture_output=True, check=True, cwd=tmp_path,
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        after, took_s = os.times(), time.perf_counter() - started
        spent_s = after.children_user + after.children_system - before.children_user - before.children_system
        if min(spent_s, took_s) < 1.0:
            return
    pytest.fail(f"a plan took {spent_s:.2f} s")


def test_a_plan_that_does_not_fit_exits_with_3_and_its_change_fits() -> None:
    asked = ["model=65B", "draft=7B", "hardware=g5_12xlarge"]
    ended = call(*asked, "format=json")
    assert ended.code == 3
    content = json.loads(ended.out)
    assert ended.err.strip() == content["shortage"]
    for change in content["changes"]:
        replaced = {setting.partition("=")[0] for setting in change["settings"]}
        kept = [setting for setting in asked if setting.partition("=")[0] not in replaced]
        changed = planned(*kept, *change["settings"])
        assert changed["fits"]
        assert max(rank["needed_bytes"] for rank in changed["memory"]) == change["needed_bytes"]


def test_every_setting_of_the_search_can_be_planned() -> None:
    found = planned("model=13B", "hardware=g5_12xlarge", "search=true")["search"]
    best = next(choice for choice in found if choice["draft"])
    content = planned("hardware=g5_12xlarge", *best["settings"])
    assert content["time"]["speculative_ms_per_token"] == pytest.approx(best["ms_per_token"], rel=1e-3)


def test_the_default_draft_is_that_of_the_model_entry_and_none_is_none() -> None:
    assert planned("model=65B")["draft"]["name"] == "7B"
    assert planned("model=65B", "draft=none")["draft"] is None
    assert planned("model=tinyllama_1B")["draft"] is None


def test_the_planners_choice_is_planned_and_told() -> None:
    content = planned("model=13B", "draft=7B", "placement=auto", "hardware=8xa100_80gb", "hardware.num_gpus=2")
    assert len(content["memory"]) == 2
    assert content["draft"]["kind"] == "sharded", "a draft on one rank takes longer"
    note, *_ = content["notes"]
    assert note.startswith("placement=auto: the target on ranks 0 1 and the draft on ranks 0 1 (sharded), forecast at ")


def test_a_local_folder_is_planned_from_its_config_file_alone(tmp_path: Path) -> None:
    sizes = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4,
        "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 512, "dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    content = planned("model=local", f"model.path={tmp_path}", "draft=none", "hardware=laptop_cpu")
    layer = 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert content["target"]["num_parameters"] == 3 * layer + 2 * 512 * 128 + 128
    assert (content["target"]["dtype"], content["target"]["matrix_dtype"]) == ("fp32", "fp16")
    asked = planned("model=local", f"model.path={tmp_path}", "draft=none", "hardware=laptop_cpu", "model.dtype=bf16")
    assert (asked["target"]["dtype"], asked["target"]["matrix_dtype"]) == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["model=8B"], "unknown model '8B'"),
        (["model.quantisation=int8"], "did you mean model.quantization"),
        (["batch_size=many"], "could not be converted to Integer"),
        (["placement.target.tp_size=16"], "tp_size=16 must be between 1 and the number of ranks, here 8"),
        (["model=local", "draft=none"], "model.path=DIR"),
        (["search=true", "model=local", "model.path=nowhere", "draft=none"], "config.json cannot be read"),
    ],
)
def test_a_wrong_setting_exits_with_2_and_one_sentence(settings: list[str], complaint: str) -> None:
    ended = call(*settings)
    assert (ended.code, ended.err.count("\n"), ended.out) == (2, 1, "")
    assert complaint in ended.err


def test_a_pair_with_two_tokenizers_is_planned_where_they_may_differ() -> None:
    pair = ["model=gpt_neox_20B", "draft=gpt_neo_1.3B"]
    refused = call(*pair)
    assert refused.code == 2
    assert "drafts that fit: none in the catalogue; draft.tokenizer=own allows any" in refused.err
    for way in ("intersection", "text"):
        assert planned(*pair, "draft.tokenizer=own", f"draft.matching={way}")["time"]["speculative_ms_per_token"] > 0
