"""The first hour finds what is planted, names it, leaves the other steps alone, and carries no secret away."""

import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.decoding import make_decoder
from benchmarks.first_hour import __main__ as command
from benchmarks.first_hour import engine, kernels, runner, shared_gpu
from benchmarks.first_hour.runner import FAIL, HANG, PASS, SKIP, SKIPPED, Step
from benchmarks.first_hour.step import Where
from llama_ssp.catalogue import Dtype
from llama_ssp.kernels.parts import Sequences
from llama_ssp.models.llama.decoder import LeanRunner

CPU = Where(torch.device("cpu"), is_small=True)
Attend = Callable[..., Tensor]


def python(name: str, program: str, **settings: float) -> Step:
    return Step(name=name, command=[sys.executable, "-c", program], **settings)  # type: ignore[arg-type]


def contents_of(folder: Path) -> dict[str, str]:
    """The files of a tar."""
    with tarfile.open(f"{folder}.tar.gz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file}


HANGS = """
import subprocess, time
print('{"doing": "the third case"}', flush=True)
subprocess.Popen(["sleep", "SECONDS"], start_new_session=True)
time.sleep(654)
"""


@pytest.mark.seconds
def test_every_end_of_a_step_is_named_and_no_other_step_is_harmed(tmp_path: Path) -> None:
    seconds = f"654.{os.getpid()}"  # other checkouts may run this test at the same time
    steps = [
        python("crash", 'import os; print(\'{"doing": "5 rows"}\', flush=True); os.abort()'),
        python("hang", HANGS.replace("SECONDS", seconds), limit_s=3.0),
        python("fault", 'print(\'{"fault": "1 row is off"}\'); raise SystemExit(1)'),
        python("error", "raise ValueError('at https://me:planted-6@host/simple')"),
        python("skipped", f'print(\'{{"skip": "no such thing"}}\'); raise SystemExit({SKIPPED})'),
        Step(name="absent", command=[], modules=("no_such_package",)),
        Step(name="two", command=[], num_gpus=2),
        python("good", 'print(\'{"us": 1.5, "from": "https://host/simple"}\')'),
    ]
    rows = runner.run(steps, tmp_path / "hour", num_gpus=1)
    assert [(row["result"], row["reason"]) for row in rows] == [
        (FAIL, "signal SIGABRT, at: 5 rows"),
        (HANG, "stopped after 3 s, at: the third case"),
        (FAIL, "1 row is off"),
        (FAIL, "exit code 1: ValueError: at URL"),
        (SKIP, "no such thing"),
        (SKIP, "no_such_package cannot be imported"),
        (SKIP, "it needs 2 GPUs, and 1 can be used"),
        (PASS, None),
    ]
    assert rows[-1]["figures"] == [{"us": 1.5, "from": "URL"}]
    assert "planted-" not in "".join(contents_of(tmp_path / "hour").values())
    running = [file for file in Path("/proc").glob("[0-9]*/cmdline") if file.parent.name != str(os.getpid())]
    assert not [file for file in running if file.exists() and seconds in file.read_text(errors="replace")]


@pytest.mark.heavy
def test_the_command_says_each_step_packs_what_it_wrote_and_carries_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PIP_INDEX_URL", "NCCL_PASSWORD", "SOMETHING"
    for name in names:
        monkeypatch.setenv(name, f"https://me:planted-{name}@host")
    folder, wanted = tmp_path / "hour", {"facts-machine": PASS, "messages": SKIP}
    monkeypatch.setattr(sys, "argv", ["first_hour", "--folder", str(folder), "--only", *wanted])
    monkeypatch.setattr(command, "count_gpus", lambda: 0)
    with pytest.raises(SystemExit, match="False"):
        command.main()
    said, contents = capsys.readouterr().out, contents_of(folder)
    assert all(f"{name}: {result}" in said for name, result in wanted.items())
    assert contents.keys() == {"hour/facts-machine.txt", "hour/results.jsonl"}
    rows = [*map(json.loads, contents["hour/results.jsonl"].splitlines())]
    assert {row["name"]: row["result"] for row in rows} == wanted
    assert rows[1]["reason"] == "it needs 2 GPUs, and none can be used"
    assert "planted-" not in "".join(contents.values()) + said
    [environment] = [each["environment"] for each in rows[0]["figures"] if "environment" in each]
    assert environment["PATH"] == os.environ["PATH"]


def test_no_step_outlives_the_minutes_and_an_earlier_hour_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "hour"
    runner.run([python("early", "")], folder, num_gpus=0)
    steps = [python("long", "import time; time.sleep(600)"), python("late", "")]
    long, late = runner.run(steps, folder, num_gpus=0, minutes=0.01)
    assert (long["result"], long["reason"]) == (SKIP, "stopped after 1 s, because the minutes are over")
    assert (late["result"], late["reason"]) == (SKIP, "0.01 minutes are over")
    names = [json.loads(line)["name"] for line in (folder / "results.jsonl").read_text().splitlines()]
    assert names == ["early", "long", "late"]


def wrong(change: Callable[[Sequences], Sequences]) -> Attend:
    """An attention that reads other rows than it should."""
    return lambda *operands, **options: kernels.in_fp64(None)(*operands[:3], change(operands[3]), **options)


def wrong_in_one_shape(*operands: Any, **options: Any) -> Tensor:
    is_grouped = operands[0].shape[1] != operands[1].shape[1]
    factor: int = 1 + (operands[3].most_queries == 5 and is_grouped)
    return kernels.in_fp64(None)(*operands, **options).mul(factor)


READS_TOO_FAR = wrong(lambda rows: rows._replace(used_C=rows.used_C + 1))
MISSES_THE_LAST_KEY = wrong(lambda rows: rows._replace(used_C=(rows.used_C - 1).clamp(min=rows.most_queries)))
TAKES_ROWS_IN_ORDER = wrong(
    lambda rows: rows._replace(
        first_slot_C1=torch.cat([rows.first_slot_C1[:-1].sort().values, rows.first_slot_C1[-1:]])
    )
)


@pytest.mark.parametrize("attend", [READS_TOO_FAR, MISSES_THE_LAST_KEY, TAKES_ROWS_IN_ORDER, wrong_in_one_shape])
def test_an_attention_that_is_wrong_is_named_by_its_shapes(attend: Attend) -> None:
    assert [*kernels.attention(kernels.in_fp64(None), CPU)] == []
    faults = [*kernels.attention(attend, CPU)]
    assert faults
    if attend is wrong_in_one_shape:
        assert all("5 positions, 4 over 2 heads" in fault for fault in faults)


@pytest.mark.parametrize("name", ["rotary", "products", "int8", "int4", "draws"])
def test_torchs_operators_are_near_fp64(name: str) -> None:
    assert [*kernels.CHECKS[name](CPU)] == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "graphs-fp32-batch-3",
        "rounds-head-2x2x1-fp32",
        "greedy-text",
        "near-fp32-int8_weight_only",
        "no-waits-replayed",
        "equal-bits-bf16",
    ],
)
def test_the_engine_is_without_fault_on_a_cpu(name: str) -> None:
    with torch.inference_mode():
        assert [*engine.CHECKS[name](CPU)] == []


@pytest.mark.heavy
def test_bits_that_depend_on_the_number_of_rows_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROWS", 5)
    monkeypatch.setattr(engine, "POSITIONS", 1)
    forward = LeanRunner.forward

    def changed(runner: LeanRunner, ids_BT: Tensor, *others: Tensor, **how: Any) -> Tensor:
        return forward(runner, ids_BT, *others, **how) * (1 + 2**-20 * (len(ids_BT) > 4))

    monkeypatch.setattr(LeanRunner, "forward", changed)
    with torch.inference_mode():
        faults = [*engine.CHECKS["equal-bits-bf16"](CPU)]
    other = "have other bits than single positions"
    assert faults == [f"5 rows of 1 positions {other}", f"prompts of 24 tokens {other}"]


@pytest.mark.heavy
def test_another_path_than_expected_is_a_fault() -> None:
    pair = engine.pair_of(CPU, Dtype.fp32)
    decoder = make_decoder(pair, speculative=True)
    gpu = Where(torch.device("cuda"), is_small=True)
    assert [*engine.path_faults(CPU, pair, decoder)] == []
    assert [*engine.path_faults(gpu, pair, decoder)] == [
        "attention: compiled, expected masks",
        "rounds: no graphs, expected graphs",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("step", command.all_steps(is_small=True, num_gpus=0), ids=lambda step: step.name)
def test_on_a_cpu_a_step_passes_or_says_why_it_cannot_run(step: Step, tmp_path: Path) -> None:
    [row] = runner.run([step], tmp_path / "hour", num_gpus=0)
    assert (row["result"], row["reason"]) in {
        (PASS, None),
        (SKIP, "our attention is for GPUs"),
        (SKIP, "rounds in 16 bits are for GPUs"),
        (SKIP, "it needs 2 GPUs, and none can be used"),
        (SKIP, "it needs 3 GPUs, and none can be used"),
        (SKIP, "it needs 4 GPUs, and none can be used"),
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_share_a_gpu_only_if_they_are_told_to(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of its own for each rank, or what newer libraries have for it."""
    monkeypatch.setenv(runner.SHARES, str(num_ranks))
    [sums] = [step for step in command.all_steps(is_small=True, num_gpus=num_ranks) if step.name == "messages"]
    launcher = ["-m", "benchmarks.first_hour.shared_gpu"] if num_ranks > 1 else ["-m"]
    assert sums.command[-len(launcher) - 1 :] == [*launcher, "benchmarks.first_hour.messages"]
    assert runner.SHARES in runner.allowed(os.environ)
    hosts = [shared_gpu.variables(rank, (2, 28, 9))["NCCL_HOSTID"] for rank in "01"]
    assert len({*hosts}) == len(hosts)
    assert "NCCL_HOSTID" not in shared_gpu.variables("0", (2, 30, 7))
