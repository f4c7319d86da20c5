"""The first hour finds what is planted, names it, leaves the other steps alone, and carries no secret away."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.decoding import make_decoder
from benchmarks.first_hour import engine, kernels, runner
from benchmarks.first_hour.__main__ import all_steps
from benchmarks.first_hour.runner import FAIL, HANG, PASS, SKIP, SKIPPED, Step
from benchmarks.first_hour.step import Where
from llama_ssp.settings.schema import Dtype
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds

CPU = Where(torch.device("cpu"), is_small=True)
Attend = Callable[..., Tensor]


def python(name: str, program: str, **settings: float) -> Step:
    return Step(name=name, command=[sys.executable, "-c", program], **settings)  # type: ignore[arg-type]


PLANTED = """
import os, sys, time
step = sys.orig_argv[-2:]
if "benchmarks.first_hour.kernels" in sys.orig_argv and "norms" in step:
    from llama_ssp.kernels.between import RmsNorm
    right = RmsNorm.__call__
    RmsNorm.__call__ = lambda self, x: right(self, x) * (1 + (x.shape[-1] == 6656))
elif "benchmarks.first_hour.kernels" in sys.orig_argv and "draws" in step:
    print('{"doing": "5 rows"}', flush=True)
    os.abort()
elif "benchmarks.first_hour.engine" in sys.orig_argv:
    import subprocess
    print('{"doing": "the third case"}', flush=True)
    subprocess.Popen(["sleep", "PLANTED_SECONDS"], start_new_session=True)
    time.sleep(654)
"""


def test_the_whole_command_names_a_planted_crash_hang_and_wrong_kernel_and_carries_no_secret(tmp_path: Path) -> None:
    """They are planted in the processes of steps as Python starts them; the other steps are unharmed."""
    seconds = f"654.{os.getpid()}"  # other checkouts may run this test at the same time
    (tmp_path / "sitecustomize.py").write_text(PLANTED.replace("PLANTED_SECONDS", seconds))
    secrets = {
        "HF_TOKEN": "hf-planted-1", "AWS_SECRET_ACCESS_KEY": "aws-planted-2", "PIP_INDEX_URL": "https://me:planted-3@host",
        "NCCL_PASSWORD": "planted-4", "SOMETHING": "planted-5",
    }  # fmt: skip
    names = ["facts-machine", "kernels-rotary", "kernels-norms", "kernels-draws", "engine-greedy-text", "all-reduce"]
    folder = tmp_path / "hour"
    settings = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_hour", "--limit", "30", "--folder", folder, "--only", *names],
        cwd=ROOT, env=os.environ | secrets | settings,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    rows = {row["name"]: row for row in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}
    assert {name: row["result"] for name, row in rows.items()} == {
        "facts-machine": PASS, "kernels-rotary": PASS, "kernels-norms": FAIL, "kernels-draws": FAIL,
        "engine-greedy-text": HANG, "all-reduce": SKIP,
    }  # fmt: skip
    assert all(f"{name}: {row['result']}" in ended.stdout for name, row in rows.items())
    assert rows["kernels-norms"]["reason"].startswith("1 rows of 6656: off by 1 of the largest value")
    assert rows["kernels-norms"]["reason"].count("rows of") == 3
    assert rows["kernels-draws"]["reason"] == "signal SIGABRT, at: 5 rows"
    assert rows["engine-greedy-text"]["reason"] == "stopped after 30 s, at: the third case"
    assert rows["all-reduce"]["reason"] == "it needs 2 GPUs, and none can be used"
    assert rows["kernels-rotary"]["figures"]
    assert f"sleep\x00{seconds}" not in processes()
    contents = contents_of(folder)
    assert contents.keys() == {f"hour/{name}.txt" for name in names if name != "all-reduce"} | {"hour/results.jsonl"}
    assert [*map(json.loads, contents["hour/results.jsonl"].splitlines())] == [*rows.values()]
    assert "planted-" not in "".join(contents.values()) + ended.stdout
    [environment] = [each["environment"] for each in rows["facts-machine"]["figures"] if "environment" in each]
    assert environment["PATH"] == os.environ["PATH"]


def contents_of(folder: Path) -> dict[str, str]:
    """The files of a tar."""
    with tarfile.open(f"{folder}.tar.gz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file}


def test_a_step_that_fails_or_cannot_run_says_why_without_addresses(tmp_path: Path) -> None:
    steps = [
        python("error", "raise ValueError('at https://me:planted-6@host/simple')"),
        python("skipped", f'print(\'{{"skip": "no such thing"}}\'); raise SystemExit({SKIPPED})'),
        Step(name="absent", command=[], modules=("no_such_package",)),
        python("good", 'print(\'{"us": 1.5, "from": "https://host/simple"}\')'),
    ]
    error, skipped, absent, good = runner.run(steps, tmp_path / "hour", num_gpus=1)
    assert (error["result"], error["reason"]) == (FAIL, "exit code 1: ValueError: at URL")
    assert (skipped["result"], skipped["reason"]) == (SKIP, "no such thing")
    assert (absent["result"], absent["reason"]) == (SKIP, "no_such_package cannot be imported")
    assert (good["result"], good["figures"]) == (PASS, [{"us": 1.5, "from": "URL"}])
    assert "planted-" not in "".join(contents_of(tmp_path / "hour").values())


def processes() -> str:
    """The command lines of all processes but this one."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        if file.parent.name != str(os.getpid()):
            try:
                found.append(file.read_text(errors="replace"))
            except OSError:
                continue
    return "\n".join(found)


def test_no_step_outlives_the_minutes_and_an_earlier_hour_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "hour"
    runner.run([python("early", "")], folder, num_gpus=0)
    steps = [python("long", "import time; time.sleep(600)"), python("late", "")]
    long, late = runner.run(steps, folder, num_gpus=0, minutes=0.03)
    assert (long["result"], long["reason"]) == (SKIP, "stopped after 2 s, because the minutes are over")
    assert (late["result"], late["reason"]) == (SKIP, "0.03 minutes are over")
    names = [json.loads(line)["name"] for line in (folder / "results.jsonl").read_text().splitlines()]
    assert names == ["early", "long", "late"]


def right(*operands: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as `VarlenAttention`
    return kernels.in_fp64(None)(*operands, **options)


def reads_too_far(*operands: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as `VarlenAttention`
    return right(*operands[:3], operands[3]._replace(used_C=operands[3].used_C + 1), **options)


def misses_the_last_key(*operands: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as `VarlenAttention`
    less_C = (operands[3].used_C - 1).clamp(min=operands[3].most_queries)
    return right(*operands[:3], operands[3]._replace(used_C=less_C), **options)


def takes_rows_in_order(*operands: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as `VarlenAttention`
    in_order_C1 = torch.cat([operands[3].first_slot_C1[:-1].sort().values, operands[3].first_slot_C1[-1:]])
    return right(*operands[:3], operands[3]._replace(first_slot_C1=in_order_C1), **options)


def wrong_in_one_shape(*operands: Any, **options: Any) -> Tensor:  # noqa: ANN401 - as `VarlenAttention`
    is_grouped = operands[0].shape[1] != operands[1].shape[1]
    return (
        2 * right(*operands, **options) if operands[3].most_queries == 5 and is_grouped else right(*operands, **options)
    )


@pytest.mark.parametrize("wrong", [reads_too_far, misses_the_last_key, takes_rows_in_order, wrong_in_one_shape])
def test_an_attention_that_is_wrong_is_named_by_its_shapes(wrong: Attend) -> None:
    assert [*kernels.attention(right, CPU)] == []
    faults = [*kernels.attention(wrong, CPU)]
    assert faults
    if wrong is wrong_in_one_shape:
        assert all("5 positions, 4 over 2 heads" in fault for fault in faults)


def test_numbers_that_are_none_are_a_fault() -> None:
    wanted = torch.ones(2, 2, dtype=torch.float64)
    assert [*kernels.judge("x", [lambda: torch.full((2, 2), float("nan"))], wanted, CPU)] != []


@pytest.mark.parametrize("name", ["rotary", "products", "int8", "int4", "draws"])
def test_torchs_operators_are_near_fp64(name: str) -> None:
    assert [*kernels.CHECKS[name](CPU)] == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["graphs-fp32-batch-3", "greedy-text", "near-fp32-int8_weight_only", "no-waits-replayed"]
)
def test_the_engine_is_without_fault_on_a_cpu(name: str) -> None:
    with torch.inference_mode():
        assert [*engine.CHECKS[name](CPU)] == []


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


@pytest.mark.parametrize(
    ("amd", "capability", "dtype", "attention"),
    [
        (None, (8, 0), torch.float16, "lengths"),
        (None, (7, 5), torch.float16, "masks"),
        (None, (9, 0), torch.float32, "masks"),
        ("7.2", (9, 4), torch.float16, "masks"),
    ],
)
def test_the_path_that_is_expected_is_the_one_that_the_engine_takes_on_such_a_gpu(
    amd: str | None, capability: tuple[int, int], dtype: torch.dtype, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", amd)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    expected = engine.path_expected(Where(torch.device("cuda", 0), is_small=True), dtype, has_graphs=True)
    assert expected["attention"] == attention


@pytest.mark.slow
@pytest.mark.parametrize("step", all_steps(is_small=True, num_gpus=0), ids=lambda step: step.name)
def test_on_a_cpu_a_step_passes_or_says_why_it_cannot_run(step: Step, tmp_path: Path) -> None:
    [row] = runner.run([step], tmp_path / "hour", num_gpus=0)
    assert (row["result"], row["reason"]) in {
        (PASS, None), (SKIP, "our attention is for GPUs"),
        (SKIP, "rounds in 16 bits are for GPUs"), (SKIP, "it needs 2 GPUs, and none can be used"),
        (SKIP, "it needs 4 GPUs, and none can be used"),
    }  # fmt: skip
