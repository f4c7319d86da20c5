"""Where Triton finds no C compiler, runs go on and name the package; and a GPU that computes nothing is found."""

from pathlib import Path

import pytest

from tests.stub_gpu.process import Stub, end


@pytest.mark.parametrize(("dtype", "quantization"), [("fp16", "none"), ("bf16", "none"), ("fp16", "int8_weight_only")])
def test_a_run_without_a_compiler_goes_on_and_names_the_package(
    stub: Stub, tmp_path: Path, dtype: str, quantization: str
) -> None:
    (tmp_path / "bin").mkdir()
    output = stub.run(
        "launch/run.py", "task=generate", "device=cuda", "prompt=import os", "max_new_tokens=8",
        f"model.dtype={dtype}", f"draft.model.dtype={dtype}", f"model.quantization={quantization}",
        f"run_dir={tmp_path / 'run'}",
        PATH=tmp_path / "bin", TRITON_CACHE_DIR=tmp_path / "triton", TORCHINDUCTOR_CACHE_DIR=tmp_path / "inductor",
    )  # fmt: skip
    assert "Traceback" not in output
    assert "Triton needs a C compiler and Python.h, which this machine lacks" in output
    assert "install gcc" in output
    assert ("int8_weight_only unpacks its weights" in output) == (quantization != "none")
    assert (tmp_path / "run" / "status").read_text() == "done\n"


def test_a_device_that_computes_nothing_does_not_pass_for_a_gpu(stub: Stub) -> None:
    process = stub.start("launch/check_gpus.py", "1")
    output, _ = process.communicate(timeout=120)
    end(process)
    assert process.returncode == 2
    assert "on cuda:0: a product in torch.float32 sums to 0 instead of 65536" in output
