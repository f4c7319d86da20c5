"""Admitting prompts, and rounds, queue work for the device and wait for nothing but the result of a round."""

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
