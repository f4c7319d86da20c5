"""Replays read what Python would read: every drafter, kind of target and way of decoding."""

import json
from pathlib import Path

import pytest

from tests.helpers.gpu_faults import steps
from tests.stub_gpu.build import Stub, end
from tests.stub_gpu.replay_settings import KINDS, Kind

pytestmark = pytest.mark.gpu_stub


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_replays_read_what_python_would_read_and_wait_for_nothing(stub: Stub, kind: Kind, tmp_path: Path) -> None:
    out, settings = tmp_path / "left.json", steps() if kind.num_ranks > 1 else [{}]
    said = [tmp_path / str(rank) for rank in range(kind.num_ranks)]
    ranks = [
        stub.start("-m", "tests.stub_gpu.replays", out, kind.name, output=output, STUB_GPU_COUNT=kind.num_ranks, **step)
        for output, step in zip(said, settings, strict=True)
    ]
    try:
        assert [rank.wait(600) for rank in ranks] == [0] * kind.num_ranks, [file.read_text()[-5000:] for file in said]
    finally:
        for rank in ranks:
            end(rank)
    assert json.loads(out.read_text()) == {way.name: [] for way in kind.ways}
