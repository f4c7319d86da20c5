"""Plans and runs that replay a trace: acceptance of each K and rule, refusals, and what fresh texts then do."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llama_ssp.catalogue import load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.acceptance import known, trace
from llama_ssp.extensions.acceptance.records import stored_file
from llama_ssp.extensions.acceptance.rows import rows_of
from llama_ssp.extensions.acceptance.trace import Trace, law_of
from llama_ssp.machines import hardware
from llama_ssp.planning.plan import make_plan
from llama_ssp.planning.spec import PlannedPair
from llama_ssp.run.commands import plan
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.weights import hub
from llama_ssp.weights.hashes import fingerprint
from tests.helpers.composed import compose_run
from tests.helpers.extensions import module_of
from tests.helpers.in_process import call, launch, planned
from tests.helpers.own_conf import OwnConf
from tests.helpers.planning import make_spec

PLAN = ("plan", "model=tiny", "draft=tiny-draft", "hardware=laptop_cpu")


def made(folder: Path, *, num_texts: int = 40, length: int = 33, ratio: float = -0.3, **law: object) -> Path:
    """A trace of texts whose tokens all have one ratio of draft to target."""
    num_tokens = num_texts * length
    generator = np.random.default_rng(1)
    log_p = generator.uniform(-2, 0, num_tokens).astype(np.float32)

    def files(name: str) -> dict[str, str]:
        return fingerprint(hub.resolve(load(name)))

    about = {
        "version": 1,
        "longest": 8,
        "laws": [law_of(SamplingConfig()) | law],
        "target": {"name": "tiny", "files": files("tiny")},
        "drafts": {"tiny-draft": {"files": files("tiny-draft"), "is_certain": False, "width": 1}},
    }
    texts = np.arange(num_texts)
    arrays = {
        "text_index": texts,
        "text_sample": 0 * texts,
        "text_law": 0 * texts,
        "text_length": 0 * texts + length,
        "text_category": np.array([""] * num_texts),
        "token_id": np.zeros(num_tokens, dtype=np.int32),
        "log_p": log_p,
        "expected_log_p": log_p,
        "variance_log_p": np.ones_like(log_p),
        "tiny-draft/log_q": (log_p + ratio)[:, None],
        "tiny-draft/log_race": np.full((num_tokens, 1), 2 * ratio),
    }
    folder.mkdir()
    (folder / "acceptance.npz").write_bytes(Trace(about, arrays).to_bytes())
    return folder


def test_rows_name_the_tokens_at_which_rounds_end(tmp_path: Path) -> None:
    content = Trace.read(made(tmp_path / "trace"), asked="")
    numbers = np.arange(len(content.arrays["token_id"]))
    is_bad = numbers % 11 == 5
    log_q = content.arrays["tiny-draft/log_q"] - np.where(is_bad, 6.0, 0.0)[:, None]
    more = {"tiny-draft/proposed": np.where(is_bad, 9, 3)[:, None], "tiny-draft/log_q": log_q}
    bad = Trace(content.about, {**content.arrays, "token_id": np.where(is_bad, 7, numbers % 3), **more})
    rows = [*rows_of(bad, {}, decode=lambda ids: " ".join(map(str, ids)))]
    (shown,) = [row for row in rows if row.lost]
    assert shown.share_of_best == 1
    first = shown.lost[0]
    assert (first.wanted, first.proposed, first.num_places) == ("7", "9", is_bad.sum())
    assert first.accepted < 0.01
    assert 0.2 < first.share < 1
    assert first.before.split()[-3:] in (["0", "1", "2"], ["1", "2", "0"], ["2", "0", "1"])


def test_texts_have_the_rounds_that_they_have_in_other_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = Trace.read(made(tmp_path / "trace", num_texts=9), asked="")
    lengths = np.array([33, 2, 7, 1, 30, 12, 33, 4, 9])
    arrays = {name: values[: lengths.sum()] for name, values in content.arrays.items()} | {"text_length": lengths}
    generator = np.random.default_rng(0)
    arrays["tiny-draft/log_q"] = arrays["log_p"][:, None] + generator.normal(-0.3, 1.0, (int(lengths.sum()), 1))
    found = []
    for number in (2, 512):
        monkeypatch.setattr(trace, "_NUM_AT_ONCE", number)
        found.append(Trace(content.about, arrays).replay("tiny-draft", 0, "block", 4).rounds(4))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def tokens(acceptance: float, number: int) -> float:
    return sum(acceptance**power for power in range(number + 1))


@pytest.mark.parametrize(("rule", "ratio"), [("speculative", -0.3), ("block", -0.3), ("coupled", -0.6)])
def test_a_plan_has_the_tokens_per_round_of_every_length_and_rule(tmp_path: Path, rule: str, ratio: float) -> None:
    folder = made(tmp_path / "trace")
    words = [*PLAN[1:], f"trace={folder}", f"verification={rule}"]
    timed = planned(*words, "speculation.num_draft_tokens=3")["time"]
    assert timed["tokens_per_round"] == pytest.approx(tokens(np.exp(ratio), 3), rel=1e-4)
    assert timed["acceptance"] == pytest.approx(np.exp(ratio), abs=1e-3)
    assert (timed["acceptance_is_forecast"], "trace=" in timed["acceptance_source"]) == (False, True)
    longer = planned(*words, "speculation.num_draft_tokens=6")["time"]
    assert longer["tokens_per_round"] == pytest.approx(tokens(np.exp(ratio), 6), rel=1e-4)
    by_k = timed["speculative_ms_per_token_by_k"]
    assert timed["best_num_draft_tokens"] == 1 + int(np.argmin(by_k))


@pytest.mark.seconds
def test_a_plan_of_a_tree_has_what_was_read_of_it(tmp_path: Path) -> None:
    """By any writing of its shape; of another tree nothing is said but for a search, which follows from chains."""
    folder = made(tmp_path / "trace")
    content = Trace.read(folder, asked="")
    of_tree = np.full((len(content.arrays["token_id"]), 6), np.log(0.5), dtype=np.float32)
    more = {"tiny-draft/tree=dynamic": of_tree, "tiny-draft/tree=2x1": of_tree[:, :2] / 2}
    (folder / "acceptance.npz").write_bytes(Trace(content.about, {**content.arrays, **more}).to_bytes())
    words = [*PLAN[1:], f"trace={folder}"]
    for shape in ("dynamic", "dynamic-60x6x10"):
        timed = planned(*words, f"speculation.tree={shape}")["time"]
        assert timed["tokens_per_round"] == pytest.approx(tokens(0.5, 6), rel=1e-6)
    timed = planned(*words, "speculation.tree=2x1")["time"]
    assert timed["tokens_per_round"] == pytest.approx(tokens(0.5**0.5, 2), rel=1e-6)
    low, high = timed["tokens_per_round_range"]
    assert 1 < low <= timed["tokens_per_round"] <= high
    ended = call(plan.main, [*words, "speculation.tree=3x1"])
    assert (ended.code, "has no tree 3x1 of draft=tiny-draft: it has dynamic, 2x1; read" in ended.err) == (2, True)
    ended = call(plan.main, [PLAN[1], PLAN[2], PLAN[3], f"trace={made(tmp_path / 'chains')}", "speculation.tree=3x1"])
    assert "it has chains alone" in ended.err


def test_a_search_tries_the_trees_of_a_trace(tmp_path: Path) -> None:
    folder = made(tmp_path / "trace", ratio=-2.0)
    content = Trace.read(folder, asked="")
    whole = np.zeros((len(content.arrays["token_id"]), 3), dtype=np.float32)
    arrays = {**content.arrays, "tiny-draft/tree=2x1x1": whole}
    (folder / "acceptance.npz").write_bytes(Trace(content.about, arrays).to_bytes())
    ended = call(plan.main, [*PLAN[1:], f"trace={folder}", "search=true", "format=json"])
    assert ended.code == 0, ended.err
    assert '"tree": "2x1x1"' in ended.out
    assert '"tree": "2x2x1"' not in ended.out


@pytest.mark.seconds
def test_a_search_and_a_run_that_chooses_ask_the_trace(tmp_path: Path) -> None:
    folder = made(tmp_path / "trace", ratio=-2.0)
    words = ("task=generate", "prompt=x", f"trace={folder}", "speculation.num_draft_tokens=auto")
    config, _ = compose_run(*words)
    expected_acceptance = module_of("adaptive.costs").expected_acceptance
    assert expected_acceptance(config) == pytest.approx([np.exp(-2.0)], abs=1e-3)
    ended = call(plan.main, [*PLAN[1:], f"trace={folder}", "search=true"])
    assert ended.code == 0, ended.err
    without, _ = compose_run(*words[:2], words[3])
    assert expected_acceptance(without)[0] > 0.5


@pytest.mark.seconds
def test_a_trace_of_something_else_is_refused(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "trace"), made(tmp_path / "other", temperature=1.0)
    content = Trace.read(folder, asked="")

    def refused(*words: str) -> str:
        ended = call(plan.main, [*PLAN[1:], *words])
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        return ended.err

    assert "has no acceptance.npz" in refused(f"trace={tmp_path}")
    assert "texts of temperature 1, and texts of one law say nothing of temperature 0.8" in refused(f"trace={other}")
    assert "has texts of model=tiny" in refused(f"trace={folder}", "model=7B", "draft=tinyllama_1B")
    assert "has no draft=tiny-eagle: it has tiny-draft" in refused(f"trace={folder}", "draft=tiny-eagle")
    assert "say nothing of top_k=5" in refused(f"trace={folder}", "sampling.top_k=5")
    about = dict(content.about) | {"target": {"name": "tiny", "files": {"config.json": "0"}}}
    (folder / "acceptance.npz").write_bytes(Trace(about, content.arrays).to_bytes())
    assert "was read with other files than the folder of tiny has" in refused(f"trace={folder}")
    assert "say nothing of unheard_of" in refused(f"trace={made(tmp_path / 'unheard', unheard_of=1)}")
    (folder / "acceptance.npz").write_bytes(b"PK nothing")
    assert "is no trace of task=acceptance" in refused(f"trace={folder}")


def test_another_pair_of_a_search_is_not_in_the_trace(tmp_path: Path) -> None:
    config, _ = compose_run("task=generate", "prompt=x", f"trace={made(tmp_path / 'trace')}")
    find = known.of_run(config)
    assert find(PlannedPair("tiny", "tiny-draft", 0.8, "speculative"))
    assert find(PlannedPair("tiny", "other", 0.8, "speculative")) is None
    assert find(PlannedPair("other", "tiny-draft", 0.8, "speculative")) is None


@pytest.mark.heavy
def test_a_run_shows_what_its_trace_promised(tmp_path: Path) -> None:
    words = ("device=cpu", "max_new_tokens=24", "num_samples=3", "batch_size=8")
    launch("task=acceptance", "quiet=true", *words, f"run_dir={tmp_path}/read").well()
    ended = launch(
        "task=latency", "task.num_warmup=0", *words, f"trace={tmp_path}/read", f"run_dir={tmp_path}/run"
    ).well()
    forecast = ended.summary["forecast"]
    low, high = forecast["tokens_per_round_range"]
    assert low < forecast["tokens_per_round"] < high
    said = f"by the trace {forecast['tokens_per_round']:.2f} ({low:.2f} to {high:.2f})"
    assert said in ended.out
    ended = launch("task=generate", "prompt=x", *words, f"run_dir={tmp_path}/other").well()
    assert ended.summary["forecast"]["tokens_per_round"] is None


@pytest.mark.seconds
def test_a_plan_without_a_trace_imports_nothing_for_one() -> None:
    words = ["model=tiny", "draft=tiny-draft", "hardware=laptop_cpu", "format=json"]
    code = f"import sys; from llama_ssp.run.commands import plan; plan.main({words}); print('numpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.heavy
def test_what_a_reading_stores_plans_of_the_pair_take(own_conf: OwnConf, tmp_path: Path) -> None:
    """Not those of another temperature, rule that it does not know, draft or files."""
    own_conf("pairs.yaml", "pairs: []\n")
    words = ("task=acceptance", "quiet=true", "device=cpu", "max_new_tokens=16", "batch_size=8", "num_samples=2")
    ended = launch(*words, "task.store=true", f"run_dir={tmp_path}/run").well()
    file = stored_file("tiny", "tiny-draft")
    assert f"stored in {file}: plans of tiny with tiny-draft now take it" in ended.err
    assert file.read_bytes() == (tmp_path / "run" / "acceptance.npz").read_bytes()
    (row,) = [row for row in ended.summary["cells"] if (row["rule"], row["num_draft_tokens"]) == ("block", 4)]
    timed = planned(*PLAN[1:], "verification=block")["time"]
    assert timed["acceptance_source"].endswith("4 prompts, temperature 0.8, block")
    assert timed["tokens_per_round"] == pytest.approx(1 + sum(row["by_position"]), rel=1e-6)
    for other in ("sampling.temperature=1.0", "sampling.top_k=9", "draft=tiny-eagle"):
        assert "traces" not in planned(*PLAN[1:], other)["time"]["acceptance_source"]
    trace = Trace.read(file, asked="")
    changed = dict(trace.about) | {"target": {"name": "tiny", "files": {}}}
    trace.about["drafts"]["tiny-draft"]["files"]["config.json"] = "0"
    file.write_bytes(Trace(changed, trace.arrays).to_bytes())
    assert "traces" not in planned(*PLAN[1:])["time"]["acceptance_source"]


def test_a_plan_of_a_pair_that_nobody_measured_says_how_to_measure_it() -> None:
    spec = make_spec("llama3_70B", "llama3_1B", num_ranks=8, acceptance=None)
    notes = "\n".join(make_plan(spec, hardware.load("8xa100_80gb")).notes)
    assert "llama-ssp run task=acceptance task.store=true model=llama3_70B draft=llama3_1B" in notes


@pytest.fixture
def prompts(tmp_path: Path) -> list[Path]:
    """Two files of prompts of one kind: pieces of the package."""
    generator, files = np.random.default_rng(2), sorted((Path(known.__file__).parents[2]).rglob("*.py"))
    texts = [file.read_text() for file in files if file.stat().st_size > 600]
    found = []
    for name in ("one", "two"):
        chosen = generator.permutation(len(texts))[:60]
        pieces = [texts[number][int(generator.integers(len(texts[number]) - 400)) :][:120] for number in chosen]
        found.append(tmp_path / f"{name}.txt")
        found[-1].write_text("\n".join(piece.replace("\n", " ") for piece in pieces) + "\n")
    return found


@pytest.mark.heavy
def test_fresh_prompts_of_one_kind_have_the_tokens_per_round_that_were_read(
    prompts: list[Path], tmp_path: Path
) -> None:
    """Within 6 %, and the intervals of the two readings meet."""
    words = ("task=acceptance", "quiet=true", "device=cpu", "max_new_tokens=48", "batch_size=30", "task.longest=4")
    rows = [
        launch(*words, f"prompts={file}", f"run_dir={tmp_path}/{file.stem}").well().summary["cells"] for file in prompts
    ]
    for one, two in zip(*rows, strict=True):
        assert one["tokens_per_round"] == pytest.approx(two["tokens_per_round"], rel=0.06)
        assert one["low"] < two["high"]
        assert two["low"] < one["high"]


def test_a_refusal_names_what_was_given() -> None:
    with pytest.raises(ConfigError, match=r"trace=nowhere has no acceptance.npz: give the folder of a finished run"):
        Trace.read(Path("nowhere"), asked="trace=nowhere")
