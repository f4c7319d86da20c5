"""Prompts of several lengths are read packed: a token is computed once, and no padding is."""

import json
from typing import Any

import pytest

from tests.stub_gpu.prefills import LENGTHS
from tests.stub_gpu.process import Stub


@pytest.fixture(scope="module")
def found(stub: Stub) -> dict[str, dict[str, Any]]:
    """What `prefills` prints."""
    read: dict[str, dict[str, Any]] = json.loads(stub.run("-m", "tests.stub_gpu.prefills").splitlines()[-1])
    return read


def test_every_token_of_a_packed_prompt_is_computed_once_and_nothing_else_is(found: dict[str, dict[str, Any]]) -> None:
    layers = len(found["packed"]["turned"])
    assert layers > 0
    assert set(found["packed"]["turned"]) == {sum(LENGTHS)}
    # Padded, 600 tokens are two chunks: one of 512 and one of 88, for every prompt.
    assert sum(found["padded"]["turned"]) == layers * max(LENGTHS) * len(LENGTHS)


def test_packed_prompts_need_fewer_kernels(found: dict[str, dict[str, Any]]) -> None:
    assert 2 * len(found["packed"]["turned"]) == len(found["padded"]["turned"])
    assert found["packed"]["launches"] < 0.7 * found["padded"]["launches"]
    assert found["packed"]["faults"] == found["padded"]["faults"] == []
