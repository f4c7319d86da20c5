"""A storage format from outside the package: one file calls `register`; planner and loader then know the format."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_ssp.architectures.family import inventory
from llama_ssp.errors import ConfigError
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.loading import check_model, load_model, load_modules
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.planning.memory import weight_bytes
from llama_ssp.planning.spec import planned_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings import catalogue
from llama_ssp.settings.formats import FORMATS, format_of, formats, problem_of
from llama_ssp.settings.schema import Dtype
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.models import VOCAB_SIZE, build_checkpoint

CPU = torch.device("cpu")
TOY = """
import torch
from llama_ssp.settings.formats import StorageFormat, register


class Toy:
    '''Weights rounded to 1/1024, as 16-bit integers.'''

    def __init__(self, weight_OI, bias_O):
        self._weight_OI, self._bias_O = (weight_OI * 1024).round().to(torch.int16), bias_O

    def __call__(self, x_MI):
        y_MO = x_MI @ (self._weight_OI.to(x_MI.dtype) / 1024).t()
        return y_MO if self._bias_O is None else y_MO + self._bias_O

    def add(self, x_MI, residual_MO):
        return self(x_MI) + residual_MO


register(
    StorageFormat(
        name="toy16", kernel="toy_format:Toy", matrix_bytes=lambda num_weights, value_bytes: 2 * num_weights,
        row_bytes=lambda value_bytes: 1,
    )
)
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the toy from a file, and forget it afterwards."""
    (tmp_path / "toy_format.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FORMATS, "records", {**FORMATS.records})
    __import__("toy_format")
    yield
    del sys.modules["toy_format"]


def test_the_planner_counts_its_bytes_and_tries_it() -> None:
    assert list(formats()) == ["none", "int8", "nf4", "int8_weight_only", "int4_weight_only", "toy16"]
    model = planned_model(replace(catalogue.load("7B"), quantization="toy16"), device="cuda")
    held = inventory(model.shape)
    unquantized = weight_bytes(held, dtype=Dtype.fp32, quantization="none")
    found = weight_bytes(held, dtype=Dtype.fp32, quantization=model.quantization)
    matrices = sum(matrix.num_elements for matrix in held.layer)
    rows = sum(matrix.num_rows for matrix in held.layer)
    assert unquantized.total_bytes - found.total_bytes == held.num_layers * (2 * matrices - rows)


@pytest.mark.parametrize("implementation", ["lean", "modules"])
@torch.inference_mode()
def test_a_model_loads_in_it(tmp_path: Path, implementation: str) -> None:
    build_checkpoint(tmp_path, "llama")
    origin = inspect(tmp_path)
    check_model(origin, num_ranks=1, quantization="toy16")
    ids_BT = torch.randint(0, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(1))
    logits = []
    for precision in (UNQUANTIZED, Precision(quantization="toy16")):
        comm = Comm.single()
        if implementation == "lean":
            runner = load_model(origin, dtype=torch.float32, device=CPU, comm=comm, precision=precision)
        else:
            modules = load_modules(origin, dtype=torch.float32, device=CPU, comm=comm, precision=precision)
            runner = ModuleRunner(modules, comm=comm)
        runner.allocate(batch_size=2, capacity=8)
        logits.append(runner.forward(ids_BT, torch.arange(8).expand(2, -1), bucket=8))
    error = (logits[1] - logits[0]).abs().max()
    assert 0 < error < 0.05 * logits[0].abs().max()


def test_an_unknown_name_is_one_sentence_with_a_guess() -> None:
    assert problem_of("toy16") is None
    with pytest.raises(ConfigError, match=r"unknown model.quantization 'toy61': there are .*; did you mean toy16\?"):
        format_of("toy61")
