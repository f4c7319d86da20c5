"""Admitting prompts, and rounds, queue work for the device and wait for nothing but the result of a round."""

import json
from pathlib import Path

import pytest

from tests.stub_gpu.process import Stub

CHECK = """
import torch
from benchmarks.first_hour import engine
from benchmarks.first_hour.step import Where
with torch.inference_mode():
    print([*engine.waits_in_a_round(Where(torch.device("cuda", 0), is_small=True), cuda_graphs={})])
"""


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "captured"])
def test_neither_rounds_nor_admissions_wait_for_the_device(stub: Stub, cuda_graphs: bool) -> None:
    assert stub.run("-c", CHECK.format(cuda_graphs)).splitlines()[-1] == "[]"


def test_a_step_of_the_first_hour_runs_after_one_that_lost_the_device(stub: Stub, tmp_path: Path) -> None:
    process = stub.start(
        "-m", "benchmarks.first_hour", "--small", "--folder", tmp_path / "hour", "--only", "kernels-int8",
        "engine-no-waits-eager", STUB_GPU_ILLEGAL="_product",
    )  # fmt: skip
    output, _ = process.communicate(timeout=300)
    lost, later = map(json.loads, (tmp_path / "hour" / "results.jsonl").read_text().splitlines())
    assert (lost["name"], lost["result"]) == ("kernels-int8", "FAIL"), output
    assert "illegal memory access" in lost["reason"]
    assert (later["result"], later["reason"]) == ("PASS", None)
