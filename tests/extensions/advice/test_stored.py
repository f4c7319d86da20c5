"""What advice and searches name for checkpoints whose files are quantized."""

from dataclasses import replace
from pathlib import Path

from llama_ssp.extensions.advice.advice import changes_that_fit
from llama_ssp.extensions.advice.search import search
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import spec_of_plan
from tests.helpers.extensions import need
from tests.unit.planning.test_stored_plans import AWQ, FP8, H100, LLAMA_70B, W8A8_ZEROS, config_of


def test_no_change_quantizes_files_again(tmp_path: Path) -> None:
    """With 60 GB int4_weight_only would have room."""
    machine = replace(H100, memory_bytes=60 * 10**9)
    spec = spec_of_plan(config_of(tmp_path, LLAMA_70B, FP8), machine)
    assert fits(replace(spec, target=spec.target.quantized("int4_weight_only")), machine)
    found = changes_that_fit(spec, machine)
    assert found
    assert "quantization" not in " ".join(setting for change in found for setting in change.settings)


def test_searches_name_no_format_that_a_run_would_refuse(tmp_path: Path) -> None:
    need("eight_bits")
    need("four_bits")
    for described, name in ((W8A8_ZEROS, "int8_weight_only"), (AWQ, "int4_weight_only")):
        config = config_of(tmp_path, LLAMA_70B, described)
        rows = search(spec_of_plan(config, H100), H100)
        assert {row["quantization"] for row in rows} == {name}
        assert not any(setting.startswith("model.quantization") for row in rows for setting in row["settings"])
