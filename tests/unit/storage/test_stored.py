"""What a `quantization_config` describes."""

from dataclasses import replace

import pytest

from llama_ssp.storage import stored
from llama_ssp.storage.formats import Files, formats
from tests.helpers.packed_checkpoints import quantization_config


@pytest.mark.parametrize("form", ["float, one scale", "int8", "compressed-tensors", "awq", "gptq"])
def test_files_that_no_format_reads_have_a_problem(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extensions of their formats were taken out: without one, they would be taken for unquantized."""
    without = {name: replace(record, files=Files()) for name, record in formats().items()}
    monkeypatch.setattr(stored, "formats", lambda: without)
    problem = stored.layout_of(quantization_config(form))
    assert isinstance(problem, str)
    assert problem.startswith(("format ", "quant_method "))
