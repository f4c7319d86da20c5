"""The kernels that a run has chosen by their times are in its folder, and a resumed run keeps to them."""

import json
from pathlib import Path

from tests.stub_gpu.process import Stub


def test_a_resumed_run_chooses_no_kernel_again(stub: Stub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (
        "launch/run.py", "task=generate", "device=cuda", "model.dtype=fp16", "draft=none", "prompt=import os",
        "max_new_tokens=4", "num_samples=2", "ignore_eos=true", f"run_dir={run}",
    )  # fmt: skip
    stub.run(*words)
    chosen = json.loads((run / "kernels.json").read_text())
    names = {key.split(": ")[1].split(",")[0] for key in chosen}
    assert names == {"qkv", "output", "gate_up", "down", "head", "attention"}
    ours = {key: [16] if ": attention, " in key else [64, 64, 4] for key in chosen}
    other = {key: [] if tile else ours[key] for key, tile in chosen.items()}
    (run / "kernels.json").write_text(json.dumps(other))
    first, _ = (run / "run.jsonl").read_text().splitlines()
    (run / "run.jsonl").write_text(first + "\n")
    stub.run(*words)
    assert len((run / "run.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "kernels.json").read_text()) == other
