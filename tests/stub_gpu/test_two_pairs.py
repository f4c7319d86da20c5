"""Pairs on two devices of one process do not get in each other's way."""

import json

from tests.stub_gpu.process import Stub


def test_each_pair_is_captured_on_its_own_device(stub: Stub) -> None:
    found = json.loads(stub.run("-m", "tests.stub_gpu.two_pairs", STUB_GPU_COUNT=2).splitlines()[-1])
    assert found == {"captured": 4, "faults": []}
