"""Ranks of the program itself: how many there are, what is refused, and how they end."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.commands import own_ranks
from llama_ssp.run.commands.agent import exit_code_of
from llama_ssp.run.commands.own_ranks import Start, num_gpus, read_start
from tests.helpers.extensions import need
from tests.helpers.hub import shipped
from tests.helpers.starters import run_program

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
KILLED, STOPPED = -signal.SIGKILL, -signal.SIGTERM
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}


def read(*words: str, environ: dict[str, str] | None = None, default: int | None = None) -> Start:
    return read_start(words, environ or {}, default=default)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of 4 cores without GPUs, and a torch for GPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(own_ranks, "version", lambda _package: "2.13.0")
    monkeypatch.setattr(own_ranks, "_DEVICES", tmp_path)
    monkeypatch.setattr(own_ranks, "_AMD_NODES", tmp_path)


@pytest.mark.parametrize(
    ("words", "gpus", "num_ranks", "sentence"),
    [
        ([], 0, 1, "starting 1 rank, since no GPU was found (ranks=N starts another number)…"),
        ([], 1, 1, "starting 1 rank, one for each GPU (ranks=N starts another number)…"),
        ([], 8, 8, "starting 8 ranks, one for each GPU (ranks=N starts another number)…"),
        (["ranks=2"], 8, 2, "starting 2 ranks…"),
        (["device=cpu"], 8, 1, "starting 1 rank (ranks=N starts more)…"),
    ],
)
def test_without_a_number_there_is_a_rank_for_each_gpu_and_that_is_said(
    words: list[str], gpus: int, num_ranks: int, sentence: str, tmp_path: Path
) -> None:
    for index in range(gpus):
        (tmp_path / f"nvidia{index}").touch()
    (tmp_path / "nvidiactl").touch()
    others = [word for word in words if not word.startswith("ranks=")]
    assert read("model=30B", *words) == Start(words=["model=30B", *others], num_ranks=num_ranks, sentence=sentence)


@pytest.mark.parametrize("num_tasks", ["1", "2"])
def test_a_shell_of_srun_starts_the_ranks_that_it_asks_for(num_tasks: str) -> None:
    """`srun --pty bash` in an allocation of two tasks has two, of which one has the terminal."""
    environ = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": num_tasks, "SLURM_PTY_PORT": "40000"}
    assert read("ranks=2", environ=environ).num_ranks == 2
    if num_tasks == "2":
        with pytest.raises(ConfigError, match="srun has started 2 already"):  # a rank alone would wait for the other
            read("ranks=1", environ=environ)


@pytest.mark.parametrize("environ", [TORCHRUN, {**STEP, "SLURM_STEP_NUM_TASKS": "2"}], ids=["torchrun", "srun"])
def test_ranks_that_exist_already_stay_as_they_are(environ: dict[str, str]) -> None:
    assert read("model=7B", environ=environ) == Start(words=["model=7B"], num_ranks=None)
    assert read("ranks=2", environ=environ).num_ranks is None
    with pytest.raises(ConfigError, match=r"ranks=4: (torchrun|srun) has started 2 already, so leave ranks= out"):
        read("ranks=4", environ=environ)
    assert read("ranks=4", environ={**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).num_ranks == 4, (
        "a shell on a node"
    )


def test_a_file_of_the_checkout_starts_one_rank() -> None:
    assert read(default=1) == Start(words=[], num_ranks=1)
    assert read("ranks=2", default=1).num_ranks == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ranks=0"], r"ranks=0 must be one whole number from 1 on, of the processes on this machine, such as ranks=2"),
        (["ranks=1,2"], r"ranks=1,2 must be one whole number"),
        (["ranks=2x8"], r"; several nodes are started by sbatch launch/slurm.sbatch, or by torchrun --nnodes"),
        (["ranks=33"], r"ranks=33 must be at most 32 on this machine, which has 4 cores; several nodes are started by"),
        (["ranks=2", "ranks=4"], r"ranks=2 ranks=4: give ranks= once"),
    ],
)
def test_what_is_no_number_of_ranks_of_this_machine_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(*words)


def test_gpus_are_counted_without_those_that_are_hidden_and_without_amds_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, units in (("0", 0), ("1", 304), ("2", 304)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\n")
    assert num_gpus({}) == 2
    for visible, count in (("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-a, GPU-b,MIG-c", 3)):
        for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            assert num_gpus({variable: visible}) == count
    monkeypatch.setattr(own_ranks, "version", lambda _package: "2.13.0+cpu")
    assert num_gpus({}) == 0, "torch sees none"


@pytest.mark.parametrize(
    ("described", "words", "sentence"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 128, "sym": True}, [], "cannot be read (bits 5"),
        ({"quant_method": "fbgemm_fp8"}, ["model.quantization=nf4"], "holds fp8_weight_only weights, "),
    ],
)
def test_a_checkpoint_that_runs_do_not_read_is_refused_before_a_rank_starts(
    described: object, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extension in ("bitsandbytes", "eight_bits", "four_bits"):
        need(extension)
    sizes = json.loads((shipped("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"quantization_config": described}))
    asked = ["task=generate", "prompt=x", "model=local", f"model.path={tmp_path}", *words, "ranks=2"]
    assert own_ranks.main(asked, num_ranks=None) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "starting" not in said


@pytest.mark.parametrize(
    ("codes", "exit_code", "said"),
    [
        ({1: 4, 0: 3}, 3, ""),
        ({0: KILLED, 1: 1}, 1, ""),
        ({1: KILLED, 0: 4}, 1, "rank 1 was ended by SIGKILL (the kernel does that when memory is exhausted); "),
        ({0: STOPPED}, 1, "rank 0 was ended by SIGTERM; run the same command with the same run_dir to resume"),
    ],
)
def test_the_code_is_that_of_the_lowest_rank_and_a_loss_that_no_rank_has_reported_is_named(
    codes: dict[int, int], exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: Any = {rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()}
    assert exit_code_of(failures) == exit_code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert bool(err) == bool(said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--script"], "--script needs a file: llama-ssp run ranks=2 --script study.py ARGUMENT ..."),
        (["ranks=2", "--script", "gone.py"], "--script gone.py: there is no such file"),
        (["model=7B", "--script", __file__], "model=7B has no effect on a script, which gives its settings to load()"),
        (["ranks=x", "--script", __file__], "ranks=x must be one whole number from 1 on"),
    ],
)
def test_a_script_that_cannot_run_gets_its_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_ranks.main(words, num_ranks=None) == 2
    assert capsys.readouterr().err.startswith(sentence)


@pytest.mark.seconds
def test_a_script_on_one_rank_has_its_arguments_and_its_folder_and_ends_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("")
    (tmp_path / "study.py").write_text("import sys, other\nprint(sys.argv[1:], __name__)\nsys.exit('no: $5')\n")
    ended = run_program("run", "--script", str(tmp_path / "study.py"), "ranks=3", "--help")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "['ranks=3', '--help'] __main__\n", "no: $5\n")
