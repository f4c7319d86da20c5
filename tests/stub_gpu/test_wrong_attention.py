"""A kernel that is wrong takes no other with it."""

import json

from tests.stub_gpu.process import Stub


def test_where_attention_is_wrong_layers_keep_our_other_kernels(stub: Stub) -> None:
    *said, last = stub.run("-m", "tests.stub_gpu.wrong_attention").splitlines()
    assert [line for line in said if line.endswith("attention by lengths does not work on cuda:0: wrong values")]
    found = json.loads(last)
    assert not found["by_length"]
    assert found["is_fused"]
    assert len(found["nodes"]) <= 9
    assert "rotate_write_kernel" in found["nodes"]
