"""Public checkpoints by their config.json: one verdict of plan and run, and the bytes of transformers' own modules."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from transformers import CONFIG_MAPPING

from llama_ssp import catalogue
from llama_ssp.architectures import reading
from llama_ssp.architectures.family import inventory, kinds, record_of, text_part
from llama_ssp.architectures.matrices import Inventory
from llama_ssp.architectures.reading import check_readable, read_config, read_stored_format
from llama_ssp.catalogue import Dtype, ModelConfig, ModelShape
from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.modules.building import build_empty
from llama_ssp.extensions.modules.tensor_parallel import shard
from llama_ssp.models import loading
from llama_ssp.models.weights import Loading, Matched
from llama_ssp.planning.model import PlannedModel, planned_model
from llama_ssp.planning.weights import model_bytes, rank_shares
from llama_ssp.ranks.comms import Comm
from llama_ssp.run import checkpoints
from llama_ssp.run.checkpoints import read_tokenizer
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import Checkpoint, inspect, shape_of
from tests.helpers import library_kinds
from tests.helpers.edits import edit_json
from tests.helpers.models import FAMILIES, refusal, tiny_config

pytestmark = pytest.mark.seconds

CONFIGS = yaml.safe_load(Path(__file__).with_name("configs.yaml").read_text())

of_523 = pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."), reason="kinds.json is of transformers 5.23"
)


def whole(value: Any) -> Any:
    """Lists of equal values are written short: `32 x 3072`, and factors by their number."""
    if isinstance(value, dict):
        return {
            key: [1.0] * each if key in {"long_factor", "short_factor"} else whole(each) for key, each in value.items()
        }
    if isinstance(value, str) and " x " in value:
        count, each = map(int, value.split(" x "))
        return [each] * count
    return value


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            each,
            id=each["name"].partition("/")[2],
            marks=() if each.get("light") else pytest.mark.slow if place % 3 else pytest.mark.heavy,
        )
        for place, each in enumerate(CONFIGS)
    ],
)
def test_plan_and_run_have_one_verdict_and_count_the_bytes_of_the_modules(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matched, "_found", lambda *_args, **_options: {})  # the files are not here
    content = whole(given["config"])
    content.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    for num_ranks in (1, 8):
        said = refusal(partial(check_run, tmp_path, num_ranks))
        assert refusal(partial(check_readable, tmp_path, "none", num_ranks=num_ranks)) == said
        wanted = given.get("refused", {}).get(num_ranks, "")
        assert wanted in said
        assert bool(wanted) == bool(said), said
        if not said:
            model = planned_model(ModelConfig(name="mine", path=str(tmp_path), dtype=Dtype.bf16), device="cuda")
            shares, origin = rank_shares(model, num_ranks=num_ranks), inspect(tmp_path, config_alone=True)
            planned = model_bytes(shares[-1], model, device="cuda").total_bytes
            assert planned == pytest.approx(held_bytes(origin, num_ranks - 1, num_ranks), rel=0.01)


def check_run(folder: Path, num_ranks: int) -> None:
    loading.check_model(inspect(folder, config_alone=True), num_ranks=num_ranks)


def held_bytes(origin: Checkpoint, rank: int, num_ranks: int) -> int:
    """Bytes of a rank's parameters in bf16, by transformers' modules on the meta device."""
    model = build_empty(origin)
    of_rank = Loading(origin, comm=Comm(rank=rank, size=num_ranks))
    shard(model, origin.shape, of_rank.comm, own=of_rank.own_shard, whole=of_rank.kept_whole)
    found, tied = dict(model.named_parameters()), model.all_tied_weights_keys
    own = [each for name, each in found.items() if name not in tied or each.shape != found[tied[name]].shape]
    return sum(2 * each.numel() for each in own)


@of_523
def test_names_and_defaults_are_those_of_the_library() -> None:
    assert json.loads(library_kinds.FILE.read_text()) == library_kinds.library_kinds()


@of_523
@pytest.mark.parametrize("kind", [kind for kind in kinds() if record_of(kind).is_written])
def test_a_config_that_leaves_all_to_its_family_has_the_sizes_of_the_library(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert read_config(tmp_path)[0] == shape_of(CONFIG_MAPPING[kind]())


def described(folder: Path, content: object, monkeypatch: pytest.MonkeyPatch) -> list[ModelShape]:
    """The shape of a model by its config.json, with the library and without."""
    (folder / "config.json").write_text(json.dumps(content))
    by_library, _ = read_config(folder)
    monkeypatch.setattr(reading, "_by_modules", lambda *_: (None, ""))
    return [by_library, read_config(folder)[0]]


@pytest.mark.parametrize("family", [name for name in FAMILIES if record_of(name.partition(",")[0]).modules])
def test_arithmetic_lists_the_modules_of_the_library(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_library, alone = described(tmp_path, tiny_config(family).to_dict(), monkeypatch)
    assert by_library.refusal == ""
    assert inventory(alone) == inventory(by_library)
    assert by_place(inventory(alone)) == by_place(inventory(by_library))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(each, id=each["name"].partition("/")[2], marks=() if place % 3 == 0 else pytest.mark.heavy)
        for place, each in enumerate(
            each for each in CONFIGS if record_of(text_part(each["config"])["model_type"]).modules
        )
    ],
)
def test_a_plan_without_the_library_has_the_sizes_of_one_with_it(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the hub name layers and sizes otherwise than the library, which reads them all."""
    by_library, alone = described(tmp_path, whole(given["config"]), monkeypatch)
    assert alone == by_library


def by_place(held: Inventory) -> list[Inventory]:
    """The layers that differ, their matrices in an order of their own."""
    return [replace(layer, layer=tuple(sorted(layer.layer, key=str))) for layer in held.each]


LLAMA = {"model_type": "llama", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("file", "quantization", "counted"),
    [
        ("hf_quant_config.json", {"quant_algo": "FP8"}, "fp8_weight_only"),
        ("hf_quant_config.json", {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4"),
        ("config.json", {"group_size": 64, "bits": 4}, "int4_weight_only"),
    ],
    ids=["ModelOpt fp8", "ModelOpt nvfp4", "MLX"],
)
def test_a_quantization_that_another_file_or_field_names_is_planned(
    file: str, quantization: dict[str, Any], counted: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(json.dumps(LLAMA | {"quantization": quantization}))
    found = read_stored_format(tmp_path, read_config(tmp_path)[0])
    assert found
    assert found.planned == counted
    if "bits" in quantization:
        with pytest.raises(CheckpointError, match='quant_method "mlx"'):
            check_readable(tmp_path, "none")


@pytest.mark.parametrize("changes", [{}, {"tokenizer_class": "OtherTokenizer"}, {"tokenizer_class": None}])
def test_code_that_a_tokenizer_names_is_passed_over(changes: dict[str, Any], tmp_path: Path) -> None:
    for file in hub.resolve(catalogue.load("tiny")).glob("*.json"):
        shutil.copy(file, tmp_path)
    code = {"AutoTokenizer": ["tokenization_other.OtherTokenizer", None]}
    edit_json(tmp_path / "tokenizer_config.json", auto_map=code, **changes)
    wanted = read_tokenizer(hub.resolve(catalogue.load("tiny")))
    assert read_tokenizer(tmp_path)("def f").input_ids == wanted("def f").input_ids


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("tekken.json", r"tekken\.json is Mistral's own layout, which is not read"),
        ("tokenizer.model", r"a tokenizer\.model alone needs two packages: pip install sentencepiece protobuf"),
    ],
)
def test_a_tokenizer_in_another_layout_is_refused_with_its_cause(
    file: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "find_spec", lambda _: None)
    (tmp_path / file).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match=reason):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_every_rank_caches_the_latent_of_a_token(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 61}))
    shape, _ = read_config(tmp_path, describes=False)
    model = PlannedModel(name="mine", shape=shape, dtype=Dtype.bf16, quantization="none")
    assert model.slot_bytes(shape.num_key_value_heads) == model.slot_bytes(1) == 61 * (512 + 64) * 2
