"""A kernel of Triton's that does not work is a sentence with the package that is missing, and the run goes on."""

import logging
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

from llama_ssp.extensions.gpu import attempts, kernels, latents, linear, recurrence
from llama_ssp.kernels.linear import PlainLinear, make_linear
from llama_ssp.kernels.parts import KeptRows


@pytest.fixture(autouse=True)
def _nothing_was_said() -> Iterator[None]:
    """Warnings come once in a process, and once in a test."""
    attempts._said.clear()
    linear.few_rows_of.cache_clear()
    yield
    linear.few_rows_of.cache_clear()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """All programs that can be found: none, on a machine with Python's headers."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name, _scheme: str(tmp_path / "include"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "bin"


def install(programs: Path, name: str) -> None:
    (programs / name).touch(mode=0o755)


def test_a_missing_compiler_is_named_with_its_package(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempts.missing_packages() == ["gcc"]
    install(programs, "clang")
    assert attempts.missing_packages() == []
    monkeypatch.setenv("CC", "icx")
    assert attempts.missing_packages() == ["gcc"]
    install(programs, "icx")
    assert attempts.missing_packages() == []


def test_missing_headers_are_named_as_the_distribution_calls_them(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name, _scheme: str(programs))
    monkeypatch.setattr("sys.version_info", type("Version", (), {"major": 3, "minor": 12}))
    assert attempts.missing_packages() == ["python3.12-dev"]
    install(programs, "dnf")
    assert attempts.missing_packages() == ["python3.12-devel"]
    assert "sudo dnf install python3.12-devel installs them" in attempts.reason(OSError("gcc failed"))


def test_the_reason_is_what_is_missing_else_the_error(programs: Path) -> None:
    error = RuntimeError("Failed to find C compiler.\nTraceback")
    assert attempts.reason(error) == (
        "Triton needs a C compiler and Python.h, which this machine lacks; sudo apt-get install gcc installs them"
    )
    assert attempts.reason(ImportError("No module named 'triton'")) == "No module named 'triton'"
    install(programs, "gcc")
    assert attempts.reason(error) == "Failed to find C compiler."
    assert attempts.reason(AssertionError()) == "AssertionError"
    failed = CalledProcessError(1, ["/usr/bin/gcc", "-O3", "a.c"])
    wrapped = BackendCompilerFailed(lambda: None, failed, None)
    for each in (failed, wrapped):
        assert attempts.reason(each) == "/usr/bin/gcc failed, and its own message stands above"


def test_a_form_goes_on_without_its_kernel_and_says_so_once(
    programs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_operands: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    broken = SimpleNamespace(product_of_few_rows=no_compiler)
    monkeypatch.setitem(sys.modules, "llama_ssp.extensions.gpu.kernels.linear", broken)
    monkeypatch.setattr(kernels, "linear", broken, raising=False)
    dtypes = torch.uint8, torch.float8_e4m3fn, torch.float32
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert linear.few_rows_of("nvfp4", dtypes, (16, 0)) is None
    [record] = caplog.records
    assert record.getMessage().startswith("nvfp4 unpacks its weights in every forward")
    assert record.getMessage().endswith("sudo apt-get install gcc installs them")
    assert not list(programs.iterdir())


def test_our_product_of_halves_is_for_the_gpus_on_which_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(*_arguments: object) -> torch.Tensor:
        raise NotImplementedError

    monkeypatch.setattr(linear, "_halves_of", lambda _dtype: product)

    def most_rows(name: str, *shape: int) -> int | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
        kernel: Any = linear.find_halves(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        assert kernel is None or kernel.keywords["few_rows"] is product
        found: int | None = kernel and kernel.keywords["most_rows"]
        return found

    assert most_rows("NVIDIA H200", 4096, 4096) == 16
    assert most_rows("NVIDIA H200", 12288, 4096) == 8
    assert most_rows("NVIDIA H200", 10240, 5120) is most_rows("NVIDIA A100-SXM4-80GB", 4096, 4096) is None
    assert linear.find_halves(torch.ones(4, 4)) is None
    assert isinstance(make_linear(torch.ones(4, 4, dtype=torch.bfloat16), None, keeps_weight=True), PlainLinear)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_our_product_of_a_gpu_takes_the_rows_for_which_it_was_faster_and_torch_s_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def few_rows(
        x_MI: Tensor, weight_OI: Tensor, *, bias_O: Tensor | None, residual_MO: Tensor | None = None
    ) -> Tensor:
        taken.append(len(x_MI))
        y_MO = functional.linear(x_MI, weight_OI, bias_O)
        return y_MO if residual_MO is None else y_MO + residual_MO

    monkeypatch.setattr(linear, "_halves_of", lambda _dtype: few_rows)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    weight, bias, taken = numbers(40, 24), numbers(40), list[int]()
    kernel = linear.find_halves(torch.empty(12288, 4096, dtype=torch.bfloat16, device="meta"))
    assert kernel
    layer = kernel(weight, bias)
    for num_rows in (1, 8, 9):
        x, residual = numbers(num_rows, 24), numbers(num_rows, 40)
        wanted = x @ weight.t() + bias
        torch.testing.assert_close(layer(x), wanted)
        torch.testing.assert_close(layer(x, residual.clone()), wanted + residual)
    assert taken == [1, 1, 8, 8]


def test_kernels_that_launch_on_the_current_gpu_are_not_for_tensors_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of `accelerate` may be on several GPUs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(latents, "attempt", lambda *_, **__: "a kernel")
    sizes: Any = {"num_heads": 2, "rank": 16, "rotary": 8, "kept": KeptRows(torch.bfloat16), "dtype": torch.bfloat16}
    find: Any = latents.find_latents.__wrapped__
    assert [find(device=torch.device("cuda", number), **sizes) for number in (0, 1)] == ["a kernel", None]
    monkeypatch.setattr(recurrence, "attempt", lambda *_, **__: "a kernel")
    layer: Any = SimpleNamespace(device=torch.device("cuda", 1))
    find = recurrence.find_recurrence
    assert find(None, 8, mix=None, layer=None, like=layer) is None
    layer.device = torch.device("cuda", 0)
    assert find(None, 8, mix=None, layer=None, like=layer) == "a kernel"
