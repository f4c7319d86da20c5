"""A rank that compiles for longer than others wait for their devices is waited for: it says that it is at work."""

from pathlib import Path

import pytest

from tests.stub_gpu.process import Stub

DECODE_S, WORK_S = 6, 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_host_is_at_work_does_not_end_the_run(stub: Stub, rank: int, tmp_path: Path) -> None:
    output = stub.run(
        "-m", "tests.stub_gpu.late_peer", rank, WORK_S, "task=generate", "device=cuda", "prompt=import os",
        "max_new_tokens=8", "num_samples=2", "ignore_eos=true", f"timeouts.decode_s={DECODE_S}",
        f"run_dir={tmp_path / 'run'}", ranks=2,
    )  # fmt: skip
    assert (tmp_path / "run" / "status").read_text().startswith("done"), output
    assert len((tmp_path / "run" / "run.jsonl").read_text().splitlines()) == 2
