"""A kernel of Triton's that does not work is a sentence with the package that is missing, and the run goes on."""

import logging
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from llama_ssp.kernels import choice_gpu


@pytest.fixture(autouse=True)
def _nothing_was_said() -> Iterator[None]:
    """Warnings come once in a process, and once in a test."""
    choice_gpu._said.clear()
    choice_gpu.few_rows_of.cache_clear()
    yield
    choice_gpu.few_rows_of.cache_clear()


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
    assert choice_gpu.missing_packages() == ["gcc"]
    install(programs, "clang")
    assert choice_gpu.missing_packages() == []
    monkeypatch.setenv("CC", "icx")
    assert choice_gpu.missing_packages() == ["gcc"]
    install(programs, "icx")
    assert choice_gpu.missing_packages() == []


def test_missing_headers_are_named_as_the_distribution_calls_them(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name, _scheme: str(programs))
    monkeypatch.setattr("sys.version_info", type("Version", (), {"major": 3, "minor": 12}))
    assert choice_gpu.missing_packages() == ["python3.12-dev"]
    install(programs, "dnf")
    assert choice_gpu.missing_packages() == ["python3.12-devel"]
    assert "sudo dnf install python3.12-devel installs them" in choice_gpu.reason(OSError("gcc failed"))


def test_the_reason_is_what_is_missing_else_the_error(programs: Path) -> None:
    error = RuntimeError("Failed to find C compiler.\nTraceback")
    assert choice_gpu.reason(error) == (
        "Triton needs a C compiler and Python.h, which this machine lacks; sudo apt-get install gcc installs them"
    )
    assert choice_gpu.reason(ImportError("No module named 'triton'")) == "No module named 'triton'"
    install(programs, "gcc")
    assert choice_gpu.reason(error) == "Failed to find C compiler."
    assert choice_gpu.reason(AssertionError()) == "AssertionError"
    failed = CalledProcessError(1, ["/usr/bin/gcc", "-O3", "a.c"])
    wrapped = BackendCompilerFailed(lambda: None, failed, None)
    for each in (failed, wrapped):
        assert choice_gpu.reason(each) == "/usr/bin/gcc failed, and its own message stands above"


def test_a_form_goes_on_without_its_kernel_and_says_so_once(
    programs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_operands: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    kernels = SimpleNamespace(product_of_few_rows=no_compiler)
    monkeypatch.setitem(sys.modules, "llama_ssp.kernels.linear_gpu", kernels)
    dtypes = torch.uint8, torch.float8_e4m3fn, torch.float32
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choice_gpu.few_rows_of("nvfp4", dtypes, (16, 0)) is None
    [record] = caplog.records
    assert record.getMessage().startswith("nvfp4 unpacks its weights in every forward")
    assert record.getMessage().endswith("sudo apt-get install gcc installs them")
    assert not list(programs.iterdir())


def test_our_product_of_halves_is_for_the_gpus_on_which_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    def product(*_arguments: object) -> torch.Tensor:
        raise NotImplementedError

    monkeypatch.setattr(choice_gpu, "_halves_of", lambda _dtype: product)

    def found(name: str, *shape: int) -> object:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
        return choice_gpu.find_halves(torch.empty(shape, dtype=torch.bfloat16, device="meta").as_subclass(OnGpu))

    assert found("NVIDIA H200", 4096, 4096) == (product, 16)
    assert found("NVIDIA H200", 12288, 4096) == (product, 8)
    assert found("NVIDIA H200", 10240, 5120) is found("NVIDIA A100-SXM4-80GB", 4096, 4096) is None
    assert choice_gpu.find_halves(torch.ones(4, 4).as_subclass(OnGpu)) is None
    assert choice_gpu.find_halves(torch.ones(4, 4, dtype=torch.bfloat16)) is None
