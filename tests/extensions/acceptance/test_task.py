"""`task=acceptance`: what it forecasts is what rounds then do, whatever reads the texts; other texts are refused."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp.catalogue import load
from llama_ssp.extensions.acceptance import reading, task
from llama_ssp.extensions.acceptance.arithmetic import least_cost
from llama_ssp.extensions.acceptance.rows import rows_of
from llama_ssp.extensions.acceptance.simulation import auto_seconds
from llama_ssp.extensions.acceptance.trace import Trace
from llama_ssp.extensions.reports import command as report
from llama_ssp.models.prefill import read_prompts
from llama_ssp.settings.drafters import DRAFTERS
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.weights import hub
from tests.helpers.extensions import module_of
from tests.helpers.in_process import Ended, call, launch
from tests.helpers.lanes import heavy
from tests.helpers.plugins import in_this_process, with_law

READ = ("task=acceptance", "quiet=true", "device=cpu", "batch_size=8")
SAMPLED = ("max_new_tokens=24", "num_samples=4")


def read(tmp_path: Path, *words: str, name: str = "run") -> tuple[Ended, Trace]:
    sampled = () if any(word.startswith("task.texts=") for word in words) else SAMPLED
    ended = launch(*READ, *sampled, *words, f"run_dir={tmp_path}/{name}").well()
    return ended, Trace.read(tmp_path / name, asked="trace")


def rounds_and_forecast(ended: Ended, trace: Trace, draft: str, rule: str, number: int) -> tuple[int, float, float]:
    """Rounds of a run's own texts, and by the trace their mean and standard deviation."""
    measured = {(line["index"], line["sample"]): line["num_rounds"] for line in ended.lines}
    texts = trace.texts(0)
    keys = zip(trace.arrays["text_index"][texts], trace.arrays["text_sample"][texts], strict=True)
    is_tree = rule.startswith("tree=")
    replay = trace.replay_tree(f"{draft}/{rule}", 0) if is_tree else trace.replay(draft, 0, rule, 8)
    found = replay.rounds(number)
    total = sum(measured[int(index), int(sample)] for index, sample in keys)
    return total, float(found.mean_B.sum()), float(found.variance_B.sum() ** 0.5)


CELLS = [
    ("tiny-draft", "speculative", 4, 0.8),
    heavy("tiny-draft", "block", 4, 1.0),
    heavy("tiny-draft", "coupled", 2, 0.5),
    heavy("tiny-draft", "speculative", 1, 1.0),
    heavy("tiny-draft", "block", 8, 0.5),
    heavy("tiny-eagle", "speculative", 2, 1.0),
    heavy("tiny-eagle", "block", 4, 0.8),
    heavy("tiny-eagle", "coupled", 8, 0.8),
]


@pytest.mark.seconds
@pytest.mark.parametrize(("draft", "rule", "number", "temperature"), CELLS)
def test_the_rounds_of_texts_are_those_that_their_trace_expects(
    tmp_path: Path, draft: str, rule: str, number: int, temperature: float
) -> None:
    """A false alarm at 4 standard deviations is 1 in 16,000."""
    words = (f"draft={draft}", f"verification={rule}", f"speculation.num_draft_tokens={number}", "num_samples=16")
    ended, trace = read(tmp_path, *words, f"sampling.temperature={temperature}", "max_new_tokens=48")
    measured, mean, deviation = rounds_and_forecast(ended, trace, draft, rule, number)
    assert abs(measured - mean) < 4 * deviation
    if rule != "coupled":  # target and draft are swapped
        ratios = trace.arrays[f"{draft}/log_q"] - reading_ahead(trace, draft)
        swapped = {f"{draft}/log_q": np.where(np.isfinite(ratios), reading_ahead(trace, draft) - ratios, -np.inf)}
        measured, mean, deviation = rounds_and_forecast(
            ended, Trace(trace.about, {**trace.arrays, **swapped}), draft, rule, number
        )
        assert abs(measured - mean) > 4 * deviation


def reading_ahead(trace: Trace, draft: str) -> Any:
    """The target's numbers of the tokens that each entry of a draft is of."""
    width = trace.drafts[draft]["width"]
    log_p = np.append(trace.arrays["log_p"], np.zeros(width))
    return np.stack([log_p[ahead : len(log_p) - width + ahead] for ahead in range(width)], axis=-1)


TREES = [heavy("tiny-draft", "2x2x1", 0.8), heavy("tiny-eagle", "3x2", 1.0), heavy("tiny-draft", "4x1", 0.5)]


@pytest.mark.parametrize(("draft", "tree", "temperature"), TREES)
def test_the_rounds_of_trees_are_those_that_their_trace_expects(
    tmp_path: Path, draft: str, tree: str, temperature: float
) -> None:
    """A false alarm at 4 standard deviations is 1 in 16,000; a chain of that depth has other rounds."""
    words = (f"draft={draft}", f"speculation.tree={tree}", f"sampling.temperature={temperature}", "num_samples=8")
    ended, trace = read(tmp_path, *words, "max_new_tokens=32")
    depth = len(tree.split("x"))
    measured, mean, deviation = rounds_and_forecast(ended, trace, draft, f"tree={tree}", depth)
    assert abs(measured - mean) < 4 * deviation
    measured, mean, deviation = rounds_and_forecast(ended, trace, draft, "block", depth)
    assert abs(measured - mean) > 4 * deviation


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "draft", "tree"),
    [
        (("draft=ngram",), "ngram", "3x2"),
        heavy((), "tiny-draft", "dynamic-10x3x4"),
        heavy(("draft=tiny-eagle",), "tiny-eagle", "dynamic-10x3x4"),
        heavy(("sampling=greedy", "num_samples=1"), "tiny-draft", "2x2x1"),
        heavy(("draft.greedy=true",), "tiny-draft", "2x2x1"),
    ],
    ids=["copies", "dynamic", "a dynamic head", "greedy", "a greedy draft"],
)
def test_of_trees_of_certain_children_every_round_is_known(
    tmp_path: Path, words: Sequence[str], draft: str, tree: str
) -> None:
    ended, trace = read(tmp_path, "num_samples=2", f"speculation.tree={tree}", *words)
    (shape,) = trace.trees(draft).values()
    measured, mean, deviation = rounds_and_forecast(ended, trace, draft, f"tree={tree}", shape.depth)
    assert measured == pytest.approx(mean, abs=1e-9)
    assert deviation == pytest.approx(0, abs=1e-6)
    assert measured < sum(len(line["token_ids"]) - 1 for line in ended.lines), "some tokens are accepted"


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "draft", "rule"),
    [
        (("draft=ngram", "draft.history=0"), "ngram", "speculative"),
        (("sampling=greedy", "num_samples=1"), "tiny-draft", "greedy"),
        heavy(("draft=tiny-eagle", "sampling=greedy", "num_samples=1"), "tiny-eagle", "greedy"),
        heavy(("draft.greedy=true",), "tiny-draft", "speculative"),
    ],
    ids=["copies", "greedy", "a head", "a greedy draft"],
)
def test_of_certain_drafts_every_round_is_known(tmp_path: Path, words: Sequence[str], draft: str, rule: str) -> None:
    ended, trace = read(tmp_path, *words)
    measured, mean, deviation = rounds_and_forecast(ended, trace, draft, rule, 4)
    assert measured == pytest.approx(mean, abs=1e-9)
    assert deviation == pytest.approx(0, abs=1e-6)


@pytest.mark.seconds
def test_a_plugins_law_is_read_as_a_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a function of the token before, which the trace has exactly; 4 standard deviations of its rounds."""
    in_this_process(with_law(tmp_path), monkeypatch)
    words = ("--config-dir", f"{tmp_path}/conf", "draft=near", "sampling.temperature=0.5", "model.dtype=fp32")
    ended, trace = read(tmp_path, *words, "num_samples=8")
    shape = load("tiny").shape
    assert shape
    assert (trace.drafts["near"]["is_certain"], trace.drafts["near"]["width"]) == (False, 1)
    assert trace.rules("near", 0) == ("speculative", "block", "coupled")
    found, wanted = trace.arrays["near/log_q"][:, 0], list[float]()
    for line in sorted(ended.lines, key=lambda line: (line["index"], line["sample"])):
        before = torch.tensor(line["token_ids"][:-1])
        laws = ((torch.arange(shape.vocab_size) - before[:, None]).abs() * -0.02).log_softmax(-1)
        wanted += [-np.inf, *laws.gather(1, torch.tensor(line["token_ids"][1:])[:, None])[:, 0].tolist()]
    assert found == pytest.approx(np.array(wanted), rel=1e-3)
    measured, mean, deviation = rounds_and_forecast(ended, trace, "near", "speculative", 4)
    assert abs(measured - mean) < 4 * deviation


def test_a_law_that_its_record_does_not_declare_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(with_law(tmp_path), monkeypatch)
    monkeypatch.setitem(DRAFTERS.records, "near", replace(DRAFTERS.of("near"), draws=False))
    words = ("--config-dir", f"{tmp_path}/conf", "draft=near", "max_new_tokens=4", f"run_dir={tmp_path}/run")
    ended = launch(*READ, *words)
    assert ended.code == 2
    assert "the draft draws from a law, and its DrafterRecord does not say so: give it draws=True\n" in ended.err


@pytest.mark.heavy
def test_a_run_names_what_it_found_by_draft_rule_temperature_and_length(tmp_path: Path) -> None:
    words = ("task.drafts=[tiny-draft,ngram]", "task.temperatures=[0.8,0.0]", "task.longest=3", "num_samples=1")
    ended, trace = read(tmp_path, *words, "task.trees=[2x1]")
    rows = ended.summary["cells"]
    rules = {0.8: {"tiny-draft": ["speculative", "block", "coupled"], "ngram": ["speculative"]}}
    rules[0.0] = {"tiny-draft": ["greedy"], "ngram": ["greedy"]}
    wanted = {
        (draft, rule, temperature, number)
        for temperature, by_draft in rules.items()
        for draft, names in by_draft.items()
        for rule in names
        for number in (1, 2, 3)
    }
    of_trees = [row for row in rows if row["tree"]]
    of_chains = [row for row in rows if not row["tree"]]
    assert {(row["draft"], row["rule"], row["temperature"], row["num_draft_tokens"]) for row in of_chains} == wanted
    assert {(row["draft"], row["rule"], row["temperature"]) for row in of_trees} == {
        (draft, names[0], temperature) for temperature, by_draft in rules.items() for draft, names in by_draft.items()
    }
    assert {(row["tree"], row["num_draft_tokens"], len(row["by_position"])) for row in of_trees} == {("2x1", 4, 2)}
    for row in rows:
        assert 1 <= row["low"] <= row["tokens_per_round"] <= row["high"] <= row["num_draft_tokens"] + 1
        assert row["by_position"] == sorted(row["by_position"], reverse=True)
        assert (row["num_prompts"], 0 < row["share_of_best"] <= 1, row["headroom"] >= 0) == (4, True, True)
    costs = {"tiny-draft": {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}}
    lengths: Any = {"tiny-draft": (1, 2, 3)}
    two = partial(auto_seconds, make=lambda *_, **__: FixedLength(2), lengths=lengths, num_texts=99)
    rows = [row for row in rows_of(trace, costs, auto=two) if row.rule != "block" and not row.tree]
    left = {(row.draft, row.temperature): row.headroom for row in rows}
    assert left["tiny-draft", 0.8] > 0.01
    assert left["ngram", 0.8] == 0, "without costs"
    drawn = call(report.main, [str(ended.run_dir), f"figure={tmp_path}/figure.svg"])
    assert drawn.code == 0, drawn.err
    said = (tmp_path / "figure.svg").read_text()
    wanted_words = ["round, T = 0.8", "round, T = 0<", "tiny-draft, block", "ngram, greedy", "tiny-draft, tree 2x1"]
    assert [one for one in wanted_words if one not in said] == []
    assert trace.about["target"]["name"] == "tiny"
    assert "tokens/round" in ended.out or ended.out == ""
    assert {one["sample"] for one in ended.lines} == {0, 1}, "one set of texts for each temperature"


@pytest.mark.heavy
def test_a_run_that_chooses_takes_the_time_that_is_simulated(tmp_path: Path) -> None:
    """By the same costs; 4 standard deviations of what its 24 texts take are 15 %."""
    lengths, adaptive = module_of("adaptive.records").LENGTHS, module_of("adaptive.costs")
    costs = {0: 1.0} | {number: 1.2 + 0.15 * number for number in lengths}
    kept = [{"num_tokens": number, "source": 0, "seconds": seconds} for number, seconds in costs.items()]
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / adaptive.COSTS_FILE).write_text(json.dumps({"rounds": kept, "catch_up_seconds": [0.0]}))
    words = ("task=generate", "prompt=for i in range(", "speculation.num_draft_tokens=auto", "num_samples=24")
    ended = launch(*words, "device=cpu", "quiet=true", "max_new_tokens=48", f"run_dir={tmp_path}/auto").well()
    took = sum(costs[number] for line in ended.lines for number in line["draft_lengths"])
    trace = read(tmp_path, f"task.texts={tmp_path}/auto", name="read")[1]
    replay = trace.replay("tiny-draft", 0, "speculative", 8)
    simulated = auto_seconds("x", [replay], [costs], make=adaptive.of_costs, lengths={"x": lengths}, num_texts=99)
    assert simulated == pytest.approx(took, rel=0.15)
    assert simulated >= least_cost(replay.reach_BTD, replay.lengths_B, costs).sum()
    worse = auto_seconds("x", [replay], [costs], make=adaptive.of_costs, lengths={"x": [1]}, num_texts=99)
    assert worse > 1.05 * simulated


@pytest.mark.heavy
def test_finished_texts_of_any_run_are_read(tmp_path: Path) -> None:
    """Their figures are those of the run that sampled them."""
    ended, own = read(tmp_path)
    _, again = read(tmp_path, f"task.texts={ended.run_dir}", name="again")
    lines = [json.dumps({"prompt": line["prompt"], "completion": line["token_ids"]}) for line in ended.lines]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    _, foreign = read(tmp_path, f"task.texts={tmp_path}/texts.jsonl", name="foreign")
    order = np.lexsort([again.arrays["text_sample"], again.arrays["text_index"]])
    assert (order == np.arange(len(order))).all()
    for name in ("token_id", "log_p", "tiny-draft/log_q", "tiny-draft/log_race"):
        assert again.arrays[name] == pytest.approx(own.arrays[name], abs=1e-4)
        assert np.sort(foreign.arrays[name], axis=0) == pytest.approx(np.sort(own.arrays[name], axis=0), abs=1e-4)


@pytest.mark.heavy
def test_the_answers_to_a_batch_file_are_read(tmp_path: Path) -> None:
    """By ids where an engine gives them, else by the texts, which lack the token that ended them."""
    ended, own = read(tmp_path)
    requests, answers = tmp_path / "batch.jsonl", tmp_path / "texts.jsonl"
    lines = [
        json.dumps({"custom_id": str(place), "body": {"prompt": one["prompt"], "temperature": 0.8}})
        for place, one in enumerate(ended.lines)
    ]
    requests.write_text("\n".join(lines))

    def foreign(name: str, **of_choices: Any) -> Trace:
        choices = [
            {"text": one["text"], **{key: one[value] for key, value in of_choices.items()}} for one in ended.lines
        ]
        answered = [
            {"custom_id": str(place), "response": {"status_code": 200, "body": {"choices": [choice]}}}
            for place, choice in enumerate(choices)
        ]
        given = write_lines(tmp_path, *answered, {"custom_id": "0", "response": {"status_code": 500, "body": {}}})
        return read(tmp_path, given, f"prompts={requests}", name=name)[1]

    by_ids = foreign("ids", token_ids="token_ids")
    for name in ("token_id", "log_p", "tiny-draft/log_q"):
        assert np.sort(by_ids.arrays[name], axis=0) == pytest.approx(np.sort(own.arrays[name], axis=0), abs=1e-4)
    by_text = foreign("text")
    assert abs(len(by_text.arrays["token_id"]) - len(own.arrays["token_id"])) < len(ended.lines)
    choice = {"message": {"content": "x = 1\n"}, "finish_reason": "stop"}
    given = write_lines(tmp_path, {"custom_id": "0", "response": {"status_code": 200, "body": {"choices": [choice]}}})
    assert read(tmp_path, given, f"prompts={requests}", name="ended")[1].arrays["token_id"][-1] == 1, "<eos>"

    def refused(name: str, *words: str) -> str:
        return launch(*READ, f"task.texts={answers}", *words, f"run_dir={tmp_path}/{name}").err

    assert "answers custom_id=0: give the batch file with this request as prompts=" in refused("a")
    assert "was drawn with temperature=0.8, and texts" in refused("b", f"prompts={requests}", "sampling.temperature=1")
    write_lines(tmp_path, {"prompt": "x", "completion": "y"})
    assert "has no effect:" in refused("c", f"prompts={requests}")


@pytest.mark.heavy
def test_texts_of_transformers_have_the_figures_of_own_ones(tmp_path: Path) -> None:
    """Within 3 % (4 standard errors are 2.4 %), and in one another's intervals over prompts."""
    ended, _ = read(tmp_path, "num_samples=48")
    folder = hub.resolve(load("tiny"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    lines = []
    for prompt in dict.fromkeys(line["prompt"] for line in ended.lines):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        how: dict[str, Any] = {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 0,
            "max_new_tokens": 24,
            "num_return_sequences": 48,
        }
        for row in model.generate(ids, **how)[:, ids.shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else None
            lines.append({"prompt": ids[0].tolist(), "completion": row[:end]})
    foreign, _ = read(tmp_path, write_lines(tmp_path, *lines), name="foreign")
    for own, other in zip(ended.summary["cells"], foreign.summary["cells"], strict=True):
        assert own["tokens_per_round"] == pytest.approx(other["tokens_per_round"], rel=0.03)
        assert own["low"] < other["tokens_per_round"] < own["high"]
        assert own["num_prompts"] == other["num_prompts"] == 4


@pytest.mark.heavy
def test_a_draft_that_proposes_along_the_text_has_the_law_of_one_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As drafts do whose ranks have no target, or that have tokens of their own."""
    ended, whole = read(tmp_path)
    monkeypatch.setattr(reading, "SAME", object())
    _, steps = read(tmp_path, f"task.texts={ended.run_dir}", name="steps")
    for name in ("log_q", "log_race"):
        first = whole.arrays["text_length"].cumsum() - whole.arrays["text_length"]
        found = (np.delete(trace.arrays[f"tiny-draft/{name}"], first, axis=0) for trace in (steps, whole))
        assert next(found) == pytest.approx(next(found), abs=1e-4)


@pytest.mark.heavy
def test_one_pass_of_the_target_serves_two_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the numbers of one that reads alone."""
    words = ("num_samples=2", "max_new_tokens=12", "task.longest=2")
    ended, _ = read(tmp_path, *words, name="own")
    texts, folder = f"task.texts={ended.run_dir}", hub.resolve(load("tiny-eagle"))
    passes = mock.Mock(wraps=read_prompts)
    monkeypatch.setattr(reading, "read_prompts", passes)
    _, alone = read(tmp_path, texts, "task.longest=2", "draft=tiny-eagle", name="alone")
    num_alone = passes.call_count
    local = ("draft=local", f"draft.model.path={folder}", "task.drafts=[tiny-eagle]")
    _, both = read(tmp_path, texts, "task.longest=2", *local, name="both")
    assert passes.call_count == 2 * num_alone > 0, "as many passes"
    for name, number in product(("tiny-eagle", "local"), ("log_q", "log_race")):
        assert both.arrays[f"{name}/{number}"] == pytest.approx(alone.arrays[f"tiny-eagle/{number}"], abs=1e-4)


@pytest.mark.heavy
def test_an_interrupted_reading_is_resumed_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, _ = read(tmp_path, name="whole")
    write = task._write

    def stopping(file: Path, content: bytes) -> None:
        write(file, content)
        os.kill(os.getpid(), signal.SIGTERM)

    words = [*READ, f"task.texts={ended.run_dir}"]
    with monkeypatch.context() as patch:
        patch.setattr(task, "_write", stopping)
        assert launch(*words, f"run_dir={tmp_path}/cut").code == 4
    parts = [*(tmp_path / "cut" / task.PARTS).iterdir()]
    assert len(parts) == 1
    launch(*words, f"run_dir={tmp_path}/cut").well()
    launch(*words, f"run_dir={tmp_path}/straight").well()
    files = [(tmp_path / name / "acceptance.npz").read_bytes() for name in ("cut", "straight")]
    assert files[0] == files[1]


@pytest.mark.heavy
def test_a_reading_is_resumed_with_the_same_texts_alone(tmp_path: Path) -> None:
    ended, _ = read(tmp_path, name="whole")
    folder = Path(ended.run_dir)
    lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
    own, words = tmp_path / "own", [*READ, f"task.texts={tmp_path}/own", f"run_dir={tmp_path}/read"]
    own.mkdir()
    (own / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    (own / "run.jsonl").write_text("".join(lines[:-1]))
    launch(*words).well()
    (own / "run.jsonl").write_text("".join(lines))
    again = launch(*words)
    assert (again.code, "has readings of other texts" in again.err) == (2, True), again.err


def write_lines(tmp_path: Path, *records: dict[str, Any]) -> str:
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return f"task.texts={tmp_path}/texts.jsonl"


@pytest.mark.heavy
def test_texts_that_the_target_cannot_have_made_are_refused(tmp_path: Path) -> None:
    def refused(name: str, *words: str) -> str:
        ended = launch(*READ, *words, f"run_dir={tmp_path}/{name}")
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        return ended.err

    ended, _ = read(tmp_path, "sampling.temperature=1.0", "max_new_tokens=48")
    own = f"task.texts={ended.run_dir}"
    assert "was drawn with sampling.temperature=1.0, and texts of one law" in refused(
        "a", own, "sampling.temperature=0.5"
    )
    settings = Path(ended.run_dir, "config.yaml")
    settings.write_text(settings.read_text().replace("\nsampling:\n", "\nsampling:\n  unheard_of: [1]\n"))
    assert "was drawn with sampling.unheard_of=[1]," in refused("j", own, "sampling.temperature=1.0")
    lines = [{"prompt": line["prompt"], "completion": line["token_ids"]} for line in ended.lines]
    given = write_lines(tmp_path, *lines)
    assert "less probable than its own by" in refused("b", given, "sampling.temperature=0.5")
    assert "more probable than its own by" in refused("c", given, "sampling.temperature=2.5")
    assert "it never writes" in refused("d", given, "sampling=greedy")
    given = write_lines(tmp_path, {"prompt": "x", "completion": [5, 10**6]})
    assert "these are texts of another tokenizer" in refused("e", given)
    assert 'line 1 needs "prompt" and "completion"' in refused("f", write_lines(tmp_path, {"prompt": "x"}))
    assert "completion of line 1 must be" in refused("g", write_lines(tmp_path, {"prompt": "x", "completion": 3}))
    assert "has no finished text" in refused("h", write_lines(tmp_path, {"prompt": "x", "completion": [5]}))
    assert "does not exist" in refused("i", "task.texts=nowhere")
