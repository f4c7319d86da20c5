"""The extension's parts: kernels import nothing that chooses them, and who chooses needs no Triton to be imported."""

import ast
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.gpu import records
from llama_ssp.registry import imported
from llama_ssp.registry.operators import OPERATORS, DeviceOperator
from llama_ssp.settings import checks
from tests.helpers.composed import compose_run

OWN = [record for record in vars(records).values() if isinstance(record, DeviceOperator)]
KERNELS = "llama_ssp.extensions.gpu.kernels"
FOLDER = Path(records.__file__).parent / "kernels"


def test_kernels_import_nothing_that_chooses_them() -> None:
    trees = [ast.parse(path.read_text()) for path in FOLDER.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    of_extensions = {name for name in found if name.startswith("llama_ssp.extensions")}
    assert of_extensions
    assert all(name.startswith(KERNELS) for name in of_extensions)


@pytest.mark.parametrize("record", OWN, ids=lambda record: record.name)
def test_who_chooses_an_operator_can_be_imported_without_triton(record: DeviceOperator) -> None:
    assert OPERATORS.of(record.name) is record
    assert callable(imported(record.make, setting=record.name))


def test_own_sums_have_no_effect_where_no_operator_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    config, explicit = compose_run("own_sums=true", "device=cuda")
    checks.check(config, explicit, world_size=2)
    monkeypatch.delitem(OPERATORS.records, records.SUMS.name)
    with pytest.raises(ConfigError, match="own_sums has no effect without the sums of llama_ssp/extensions/gpu"):
        checks.check(config, explicit, world_size=2)
