"""The programs of `benchmarks` still run, with their smallest settings; nothing is asserted about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import decoding, placements
from llama_ssp.settings.schema import Dtype
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("peers --repetitions 1", "rounds / bound (without prefill)"),
        ("overlap --lengths 4 --repetitions 1 --draft-layers 2", "The gain at each K"),
        ("batches --only tiny --rows 2 --prompts 16 --turns 1", "K=auto: plain rounds in the second half"),
    ],
)
def test_a_program_runs_and_prints_its_table(arguments: str, shown: str) -> None:
    command = [sys.executable, "-m", *f"benchmarks.{arguments}".split()]
    assert shown in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_placements_measure_a_line_of_the_target_alone_and_one_with_a_draft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placements, "NEW_TOKENS", 9)
    placements.measure_group(tmp_path / "f.json", ["bf16", "draft int8"], num_repetitions=1)
    found = {(each["place"], each["form"]): each for each in json.loads((tmp_path / "f.json").read_text())}
    one_rank = [name for name, place in placements.PLACES.items() if place.num_ranks == 1]
    assert [*found] == [(placements.ALONE, "bf16")] + [
        (name, form) for name in one_rank[1:] for form in ("bf16", "draft int8")
    ]
    assert not [each["refused"] for each in found.values() if each["refused"]]
    assert found[placements.ALONE, "bf16"]["tokens_per_round"] == 1
    assert found[placements.ONE_RANK, "bf16"]["tokens_per_round"] > 1


@pytest.mark.heavy
def test_a_decoded_batch_counts_the_rounds_behind_its_prefill() -> None:
    config = decoding.config_of("tiny", "tiny-draft", dtype=Dtype.fp32, device=torch.device("cpu"))
    pair = decoding.load_pair(config)
    wanted = decoding.requests(pair, number=2, prompt_tokens=5, new_tokens=7)
    decoder = decoding.make_decoder(pair, speculative=False, batch_size=2)
    _, num_rounds, completions = decoding.decode_once(decoder, wanted, seed=0)
    assert num_rounds == 6
    assert [decoding.tokens_per_round(each) for each in completions] == [1.0, 1.0]
