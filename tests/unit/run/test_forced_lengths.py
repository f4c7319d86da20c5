"""`speculation.forced_lengths`: rounds accept what is given, whatever the target says, and every output says so."""

import csv
from pathlib import Path

import pytest
import torch

from llama_ssp.run.commands import report
from llama_ssp.speculate.sampling.rules import ForcedLengths
from tests.helpers.decoders import complete, make_decoder, requests
from tests.helpers.in_process import launch, planned
from tests.helpers.prefix_runner import PrefixRunner

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
    for name in ("run.log", "report.html"):
        assert caveat in (folders[0] / name).read_text()
        assert "lossless" not in (folders[1] / name).read_text()
    both = [str(folder) for folder in folders]
    for form, mark in (("markdown", "| 1 ‡ |"), ("latex", r"1 $\ddagger$ &")):
        assert report.main([*both, f"--table={form}"]) == 0
        table = capsys.readouterr().out
        assert mark in table
        assert "Not lossless: speculation.forced" in table.replace("\\", "")
    assert report.main([*both, f"--output={tmp_path}/both"]) == 0
    with (tmp_path / "both" / "runs.csv").open(newline="") as stream:
        assert [row["not_lossless"] for row in csv.DictReader(stream)] == [caveat, ""]
    assert f"‡</b> {caveat}" in (tmp_path / "both" / "report.html").read_text()


def test_a_plan_counts_what_is_accepted() -> None:
    words = ["model=7B", "draft=tinyllama_1B", "hardware=a100_80gb", "speculation.forced_lengths=[3,0,2,4]"]
    assert planned(*words)["time"]["tokens_per_round"] == pytest.approx(3.25, abs=0.01)
