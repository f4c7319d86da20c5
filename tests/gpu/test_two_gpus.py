"""On two GPUs: graphs that hold NCCL's kernels give the text of eager rounds, and do not outlive a lost peer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.disturbed import lines, wait_for
from tests.helpers.gpu_faults import AT_MOST_S, CELLS, FULL, KILLED, Cell, arguments, check_sentence, steps
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.gpu(2)


def test_captured_collectives_give_the_text_of_eager_ones(tmp_path: Path) -> None:
    texts = []
    for cuda_graphs in ("true", "false"):
        run_dir = tmp_path / cuda_graphs
        settings = ["task=generate", "device=cuda", "prompt=import os", "max_new_tokens=64", "sampling.temperature=0"]
        ended = run([*settings, f"cuda_graphs={cuda_graphs}", f"run_dir={run_dir}"], num_ranks=2)
        assert ended.returncode == 0, ended.stderr
        texts.append([line["token_ids"] for line in lines(run_dir)])
    assert texts[0] == texts[1] != []


@pytest.mark.parametrize("verification", ["speculative", "coupled"])
def test_rounds_that_overlap_give_the_text_of_the_target_alone(verification: str, tmp_path: Path) -> None:
    """In fp32, greedily and coupled: the text of the target on one GPU, replayed and launched from Python."""
    temperature = 0.8 if verification == "coupled" else 0.0
    common = [
        "task=generate", "device=cuda", "prompt=import os", "max_new_tokens=64", "model.dtype=fp32",
        f"verification={verification}", f"sampling.temperature={temperature}", "ignore_eos=true",
    ]  # fmt: skip
    apart = ["placement=own_gpu", "speculation.overlap=true", "draft.model.dtype=fp32"]
    texts = []
    for name, settings, num_ranks in (
        ("plain", ["draft=none"], 1),
        ("replayed", apart, 2),
        ("eager", [*apart, "cuda_graphs=false"], 2),
    ):
        ended = run([*common, *settings, f"run_dir={tmp_path / name}"], num_ranks=num_ranks)
        assert ended.returncode == 0, ended.stderr
        assert "continuing without CUDA graphs" not in ended.stderr
        texts.append([line["token_ids"] for line in lines(tmp_path / name)])
    assert texts[0] == texts[1] == texts[2] != []


def test_overlapping_is_measured() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "benchmarks.gpu_overlap", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "messages behind the forward" in ended.stdout


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.fault != FULL], ids=str)
def test_a_lost_peer_ends_the_run_in_time_with_sentence_and_status(cell: Cell, tmp_path: Path) -> None:
    outputs, ranks = [tmp_path / f"{rank}.txt" for rank in (0, 1)], []
    for output, step in zip(outputs, steps(), strict=True):
        with output.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, *arguments(cell, tmp_path)], cwd=ROOT, env={**os.environ, **step},
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            )  # fmt: skip
        ranks.append(process)
    try:
        wait_for(
            lambda: len(lines(tmp_path / "run")) > 1 or any(each.poll() is not None for each in ranks), at_most_s=300
        )
        ranks[cell.rank].send_signal(signal.SIGKILL if cell.fault == KILLED else signal.SIGSTOP)
        assert ranks[1 - cell.rank].wait(AT_MOST_S[cell.fault]) == 1
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    check_sentence(cell, tmp_path / "run", [line for file in outputs for line in file.read_text().splitlines()])
