"""`logprobs=N` of a run: what is recorded and printed, what is resumed, and what the plan says of it."""

import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.log_probs import LogProbs
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.records import LogProbLine
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.weights import hub
from tests.helpers.commands import run
from tests.helpers.disturbed import lines
from tests.helpers.in_process import launch, planned
from tests.helpers.lanes import slow
from tests.helpers.log_probs import check_completion

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


def test_figures_are_printed_and_recorded_and_a_run_that_was_stopped_goes_on_with_them(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_ssp.reports.html.report", lambda _: "")  # figures take seconds
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
    figures = LogProbs(log_probs=[-1.0], top_ids=[[5, 7]], top_log_probs=[[-1.0, -2.0]])
    line = LogProbLine(
        index=0, mode="plain", sample=0, logprobs=figures, drawn_logprobs=None, prompt_logprobs=None
    )  # fmt: skip
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
