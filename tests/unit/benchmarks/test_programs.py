"""The programs of `benchmarks` still run, with their smallest settings; nothing is asserted about speed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import decoding, lengths, placements, short_calls
from benchmarks.placement_cells import ALONE, DEEPSPEED, DEEPSPEED_ALONE, FP32, LAYERWISE, ONE_RANK, cells
from llama_ssp import load
from llama_ssp.config.schema import Dtype
from llama_ssp.engine.executors.traced_cpu import TracedExecutor
from llama_ssp.engine.round import Block
from llama_ssp.engine.state import BatchState
from llama_ssp.models.huggingface import auto_tp

pytestmark = pytest.mark.seconds

CPU = torch.device("cpu")


@pytest.mark.slow
def test_lengths_have_a_point_for_each_context_each_window_and_each_pause() -> None:
    sizes = lengths.Sizes(
        contexts=(16, 24, 32, 40), num_new_tokens=9, num_windows=4, pauses_ms=(0, 1, 2, 150), paused_context=16
    )
    row = lengths.measure(sizes, num_draft_tokens=2, num_repetitions=1)
    series = row["series"]
    assert isinstance(series, dict)
    assert series["context, speculative"]["places"] == [20.5, 28.5, 36.5, 44.5]
    assert series["text, plain"]["places"] == series["text, all slots read, plain"]["places"] == [48, 112, 176, 240]
    assert series["pause, plain"]["places"] == [0, 1, 2, 150]
    assert max(series["pause, plain"]["round_ms"]) < 150  # a pause is not part of its round
    assert series["text, plain"]["tokens_per_round"] == [1] * 4
    assert all(1 <= tokens <= 3 for tokens in series["text, speculative"]["tokens_per_round"])
    assert all(len(each["ms_per_token"]) == 4 for each in series.values())


@pytest.mark.heavy
@torch.inference_mode()
def test_a_control_reads_all_slots_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = load("tiny", "tiny-draft")
    widths: set[int] = set()
    verify = TracedExecutor.verify

    def noted(executor: TracedExecutor, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        widths.add(bucket)
        return verify(executor, state, block, bucket=bucket)

    monkeypatch.setattr(TracedExecutor, "verify", noted)
    lengths.rounds_of(lengths.decoder_of(pair, "plain", 2), (2, 3), num_new_tokens=200, seed=0)
    assert widths == {64, 128, 192, 208}
    widths.clear()
    lengths.rounds_of(lengths.decoder_of(pair, "plain", 2, all_read=True), (2, 3), num_new_tokens=200, seed=0)
    assert widths == {208}


@pytest.mark.slow
def test_placements_measure_a_line_of_the_target_alone_and_one_with_a_draft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placements, "NEW_TOKENS", 9)
    placements.measure_group(tmp_path / "f.json", ["bf16", "draft int8"], num_draft_tokens=2, num_repetitions=1)
    found = {(each["place"], each["form"]): each for each in json.loads((tmp_path / "f.json").read_text())}
    batch = f"{ONE_RANK}, batch 8"
    assert list(found) == [
        (ALONE, "bf16"), (ONE_RANK, "bf16"), (ONE_RANK, "draft int8"), (batch, "bf16"), (batch, "draft int8"),
        (LAYERWISE, "bf16"), (LAYERWISE, "draft int8"),
    ]  # fmt: skip
    assert not [each["refused"] for each in found.values() if each["refused"]]
    assert found[ALONE, "bf16"]["tokens_per_round"] == 1
    assert found[ONE_RANK, "bf16"]["tokens_per_round"] > 1
    assert found[ONE_RANK, "bf16"]["speedup"] > 0
    assert found[ONE_RANK, "draft int8"]["speedup"] is None, "the target alone was not measured in fp32"


def test_placements_without_deepspeed_say_what_would_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = [cell for cell in cells(1, [FP32]) if cell.place.name in (DEEPSPEED, DEEPSPEED_ALONE)]
    monkeypatch.setattr(placements, "cells", lambda _num_ranks, _names: named)
    monkeypatch.setattr(auto_tp, "find_spec", lambda _name: None)
    placements.measure_group(tmp_path / "f.json", [FP32], num_draft_tokens=2, num_repetitions=1)
    found = [placements.Figures(**each) for each in json.loads((tmp_path / "f.json").read_text())]
    assert [each.place for each in found] == [DEEPSPEED_ALONE, DEEPSPEED]
    console = Console(width=1000)
    with console.capture() as shown:
        placements.show(found, console)
    assert shown.get().count("./machine-install.sh --deepspeed") == 1
    assert f"{DEEPSPEED_ALONE} ({FP32}); {DEEPSPEED} ({FP32})" in shown.get()


@pytest.mark.heavy
def test_a_decoded_batch_counts_the_rounds_behind_its_prefill() -> None:
    pair = decoding.load_pair(decoding.config_of("tiny", "tiny-draft", dtype=Dtype.fp32, device=CPU))
    wanted = decoding.requests(pair, number=2, prompt_tokens=5, new_tokens=7)
    decoder = decoding.make_decoder(pair, speculative=False, batch_size=2)
    _, num_rounds, completions = decoding.decode_once(decoder, wanted, seed=0)
    assert num_rounds == 6
    assert [decoding.tokens_per_round(each) for each in completions] == [1.0, 1.0]


def test_short_and_long_calls_are_compared_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is ten times slower in one turn of three: the ratio of medians would be 1."""
    speeds = iter([9.0, 9.0, 1.0, 2.0, 10.0, 20.0, 4.0, 4.0])
    monkeypatch.setattr(short_calls, "PROMPTS", ("import os\n",))
    monkeypatch.setattr(
        short_calls, "call", lambda *_, **__: short_calls.Calls(ms_per_token=next(speeds), parts={"prefill": 1.0})
    )
    pair: Any = None
    assert short_calls.measure(pair, num_repetitions=3).ratio == 2.0


@pytest.mark.heavy
def test_the_parts_of_short_and_long_calls_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_calls, "LONG", 24)
    monkeypatch.setattr(short_calls, "NUM_CALLS", 2)
    console = Console(record=True, quiet=True)
    found = short_calls.measure(load("tiny", "tiny-draft"), num_repetitions=1)
    short_calls.show(found, console)
    for calls in found.calls.values():
        assert all(part > 0 for part in calls.parts.values())
    one = short_calls.call(load("tiny", "tiny-draft"), "import os\n", num_new=8, seeds=[0])
    assert sum(one.parts.values()) == pytest.approx(one.ms_per_token)
