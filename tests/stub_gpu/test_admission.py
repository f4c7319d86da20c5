"""Admitting prompts, and rounds, queue work for the device and wait for nothing; reading a result polls once."""

import json

import pytest

from tests.stub_gpu.process import Stub

CHECK = """
import torch
from benchmarks import gpu_checks
print(gpu_checks.waits_in_a_round(torch.device("cuda", 0), cuda_graphs={}))
"""

COUNT = """
import json, torch
from collections import Counter
from benchmarks.gpu_engine import load_pair, make_decoder
from llama_ssp.config.schema import Dtype
from llama_ssp.engine.state import Request
from tests.stub_gpu import device
pair = load_pair("tiny", "tiny-draft", dtype=Dtype.fp16, device=torch.device("cuda", 0))
decoder = make_decoder(pair, speculative=True, batch_size=1, cuda_graphs=True)
counts = []
runs = [[Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=number)] for number in (40, 40, 80)]
with torch.inference_mode():
    decoder.make_room(runs[-1])
    for requests in runs:
        device.reset()
        for _ in decoder.run(requests, to_length=True):
            pass
        counts.append(Counter(record.kind for record in device.log()))
print(json.dumps({kind: counts[2][kind] - counts[1][kind] for kind in ("wait", "poll", "replay", "copy")}))
"""


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "captured"])
def test_neither_rounds_nor_admissions_wait_for_the_device(stub: Stub, cuda_graphs: bool) -> None:
    assert stub.run("-c", CHECK.format(cuda_graphs)).splitlines()[-1] == "[]"


def test_a_round_is_two_replays_one_copy_and_one_poll_for_its_result(stub: Stub) -> None:
    """Forty more rounds, of one token each; the clock polls twice more."""
    assert json.loads(stub.run("-c", COUNT).splitlines()[-1]) == {"wait": 0, "poll": 120, "replay": 80, "copy": 40}
