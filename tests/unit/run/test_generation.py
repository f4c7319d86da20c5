"""What generation_config.json asks for, forced lengths, and log-probabilities, as outputs and plans say them."""

import csv
import json
import os
import re
import shutil
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp import catalogue, load
from llama_ssp.errors import ConfigError
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.records import LogProbLine
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.rules import ForcedLengths
from llama_ssp.text.log_probs import TokenLogprob, TopLogprob
from llama_ssp.weights import hub
from tests.helpers.commands import run
from tests.helpers.decoders import complete, make_decoder, requests
from tests.helpers.disturbed import lines
from tests.helpers.in_process import launch, planned
from tests.helpers.lanes import slow
from tests.helpers.log_probs import check_completion
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.reports import report, without_reports

ASKED: dict[str, Any] = {
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": False,
    "repetition_penalty": 1.3,
    "max_new_tokens": 9,
    "suppress_tokens": [5],
}
PROMPT = "def main():\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped draft, as a checkpoint that asks for a penalty."""
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(ASKED))
    return folder


def text_of(folder: Path, *settings: str) -> tuple[str, str]:
    """The text of a run, and its standard error."""
    common = ("task=generate", "draft=none", f"prompt={PROMPT}", "max_new_tokens=24", "format=jsonl")
    ended = launch(*common, f"model={folder}", f"run_dir={folder}/run{len([*folder.glob('run*')])}", *settings)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)["text"], ended.err


@pytest.mark.seconds
def test_a_run_says_what_it_does_not_follow_and_follows_it_on_request(folder: Path) -> None:
    greedy, said = text_of(folder, "sampling=greedy")
    assert "asks for sampling.repetition_penalty=1.3, which this text does not follow: sampling=model takes" in said
    assert "and for suppress_tokens, which no setting follows" in said
    assert "max_new_tokens" not in said
    by_hand, said = text_of(folder, "sampling=greedy", "sampling.repetition_penalty=1.3")
    assert "repetition_penalty" not in said
    followed, said = text_of(folder, "sampling=model")
    assert (followed, "repetition_penalty" in said) == (by_hand, False)
    assert followed != greedy
    assert text_of(folder, "sampling=model", "sampling.repetition_penalty=1.0")[0] == greedy, "what is given wins"


def test_the_library_follows_it_as_transformers_does(folder: Path) -> None:
    pair = load(folder)
    with pytest.warns(UserWarning, match=r"asks for repetition_penalty=1.3, which .*: sampling='model' takes all"):
        (greedy,) = pair.generate(PROMPT, max_new_tokens=24, temperature=0)
    with pytest.warns(UserWarning, match="suppress_tokens"):
        (found,) = pair.generate(PROMPT, max_new_tokens=24, sampling="model")
    assert (found.text, found.text == greedy.text) == (text_of(folder, "sampling=model")[0], False)
    with pytest.raises(ConfigError, match="sampling='greedy' must be 'model', which takes"):
        pair.generate(PROMPT, sampling="greedy")


@pytest.mark.seconds
def test_fields_that_are_absent_have_the_defaults_of_transformers(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "top_p": 0.9}))
    given = ("sampling.temperature=1.0", "sampling.top_k=50", "sampling.top_p=0.9")
    assert text_of(folder, "sampling=model")[0] == text_of(folder, *given)[0]
    file.unlink()
    ended = launch(
        "task=generate", "draft=none", f"model={folder}", "prompt=a", "sampling=model", f"run_dir={folder}/r"
    )
    assert (ended.code, "sampling=model needs generation_config.json, which the model lacks" in ended.err) == (2, True)


LENGTHS = [3, 0, 2]


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_row_accepts_the_lengths_in_turn(temperature: float, traced: bool, batch_size: int) -> None:
    target, draft = PrefixRunner(sharpness=1.0), PrefixRunner(seed=1, sharpness=1.0)
    made = make_decoder(target, draft, temperature=temperature, batch_size=batch_size, replay=traced)
    made.round.verifier.forced = ForcedLengths(LENGTHS, torch.device("cpu"))
    for done in complete(made, requests(40)):
        *whole, last = done.accepted_lengths
        assert whole == (LENGTHS * 40)[: len(whole)]
        assert last <= (LENGTHS * 40)[len(whole)], "the limit of a row cuts its last round"
        assert len(done.token_ids) == done.request.max_new_tokens


@pytest.mark.heavy
def test_every_output_says_that_the_text_is_not_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llama_ssp.run.results._disturbance", lambda *_, **__: (None, None))
    caveat = "not lossless: speculation.forced_lengths=[3, 0, 2] says what rounds accept"
    folders = [tmp_path / name for name in ("forced", "free")]
    words = ["prompt=import os", "max_new_tokens=20", "sampling=greedy"]
    ended, free = (
        launch(*words, *more, f"run_dir={folder}")
        for folder, more in zip(folders, (["speculation.forced_lengths=[3,0,2]"], []), strict=True)
    )
    assert (ended.code, free.code) == (0, 0), ended.err
    assert "prompt 1 of 1, speculative, not lossless" in ended.out
    assert f"‡ {caveat}" in ended.out
    assert caveat in ended.err
    assert "lossless" not in free.out + free.err
    assert [line["is_lossless"] for line in ended.lines] == [True, False]
    assert ended.summary["forced_lengths"] == LENGTHS
    assert sum(ended.summary["speculative"]["accepted_histogram"][1:]) > 0
    assert caveat in (folders[0] / "run.log").read_text()
    assert "lossless" not in (folders[1] / "run.log").read_text()
    both = [str(folder) for folder in folders]
    for form, mark in (("markdown", "| 1 ‡ |"), ("latex", r"1 $\ddagger$ &")):
        assert report([*both, f"--table={form}"]) == 0
        table = capsys.readouterr().out
        assert mark in table
        assert "Not lossless: speculation.forced" in table.replace("\\", "")
    assert report([*both, f"--output={tmp_path}/both"]) == 0
    with (tmp_path / "both" / "runs.csv").open(newline="") as stream:
        assert [row["not_lossless"] for row in csv.DictReader(stream)] == [caveat, ""]
    for folder, said in zip((tmp_path / "both", *folders), (True, True, False), strict=True):
        assert (f"‡</b> {caveat}" in (folder / "report.html").read_text()) is said


def test_a_plan_counts_what_is_accepted() -> None:
    words = ["model=7B", "draft=tinyllama_1B", "hardware=a100_80gb", "speculation.forced_lengths=[3,0,2,4]"]
    assert planned(*words)["time"]["tokens_per_round"] == pytest.approx(3.25, abs=0.01)


SETTINGS = ("max_new_tokens=5", "seed=3", "sampling.temperature=0.6")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["import os", "def add(first, second):\n", "x"]
    file.write_text("".join(json.dumps({"prompt": text, "id": number}) + "\n" for number, text in enumerate(texts)))
    return f"prompts={file}"


def lines_of(folder: Path) -> dict[tuple[int, str, int], LogProbLine]:
    read = [LogProbLine.from_json(line) for line in (folder / "logprobs.jsonl").read_bytes().splitlines()]
    return {line.key: line for line in read}


def check(folder: Path, *, num_texts: int) -> None:
    """Compare the figures of a run with transformers'."""
    source, drawn = hub.resolve(catalogue.load("tiny")), SamplingConfig(temperature=0.6)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    figures = lines_of(folder)
    assert len(figures) == num_texts
    for text in lines(folder):
        found = figures[text["index"], text["mode"], text["sample"]]
        check_completion(found, model, tokenizer(text["prompt"]).input_ids, text["token_ids"], drawn, num_top=2)


@pytest.mark.heavy
def test_figures_are_printed_and_recorded_and_a_run_that_was_stopped_goes_on_with_them(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_reports(monkeypatch)
    append, file = RunFolder.append_log_probs, tmp_path / "run" / "logprobs.jsonl"

    def interrupt(folder: RunFolder, found: list[LogProbLine]) -> None:
        append(folder, found)
        os.kill(os.getpid(), signal.SIGTERM)

    words = ["task=generate", "format=jsonl", prompts, *SETTINGS, "logprobs=2", f"run_dir={tmp_path}/run"]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_log_probs", interrupt)
        stopped = launch(*words)
    assert (stopped.code, len(lines_of(tmp_path / "run"))) == (4, 2)
    with file.open("ab") as stream:
        stream.write(b'{"index": 1, "mo')
    resumed = launch(*words)
    assert resumed.code == 0, resumed.err
    check(tmp_path / "run", num_texts=3)
    printed = [json.loads(line) for line in (stopped.out + resumed.out).splitlines()]
    assert sorted(line["id"] for line in printed) == [0, 1, 2]
    for line in printed:
        assert line["logprobs"] == asdict(lines_of(tmp_path / "run")[line["index"], "speculative", 0])["logprobs"]


def test_a_folder_with_fewer_figures_than_are_asked_now_is_refused(tmp_path: Path) -> None:
    top = [TopLogprob(token=5, logprob=-1.0), TopLogprob(token=7, logprob=-2.0)]
    figures = [TokenLogprob(token=5, logprob=-1.0, top=top)]
    line = LogProbLine(index=0, mode="plain", sample=0, logprobs=figures, drawn_logprobs=None, prompt_logprobs=None)
    with RunFolder(tmp_path / "run", "seed: 0\n") as folder:
        folder.append_log_probs([line])
    with RunFolder(tmp_path / "run", "seed: 0\n") as folder:
        folder.check_log_probs(2, None)
        folder.check_log_probs(None, None)
        for asked in ((3, None), (2, 0)):
            with pytest.raises(ConfigError, match=r"logprobs\.jsonl holds fewer log-probabilities than .* remove the"):
                folder.check_log_probs(*asked)


@pytest.mark.distributed(2)
@pytest.mark.parametrize("placement", [slow("own_gpu"), slow("sharded"), slow("replicas")])
def test_two_ranks_have_the_figures_of_transformers(placement: str, prompts: str, tmp_path: Path) -> None:
    done = run(
        [prompts, *SETTINGS, "batch_size=2", "logprobs=2", f"placement={placement}", f"run_dir={tmp_path}/run"],
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path / "run", num_texts=6)


def test_a_plan_counts_the_memory_and_the_time_of_scoring() -> None:
    words = ["model=7B", "draft=none", "hardware=a100_80gb", "prompt_tokens=1000", "max_new_tokens=24"]
    without, scored = planned(*words), planned(*words, "logprobs=5")
    grown = [plan["memory"][0]["logits_bytes"] for plan in (without, scored)]
    assert grown[1] - grown[0] >= 511 * 32000 * 4, "positions of a forward, in fp32"
    (note,) = set(scored["notes"]) - set(without["notes"])
    ms = float(re.search(r"log-probabilities: .* ([\d.]+) ms at the end", note)[1])  # type: ignore[index]
    # Two forwards of 512 tokens of 6.7 billion parameters, at 312 TFLOP/s and less.
    assert 44 < ms < 150
