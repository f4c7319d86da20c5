"""Holds the loader to the library's own values under whatever name they are stored, and to reading only its slices."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.families import MORE
from llama_ssp import catalogue
from llama_ssp.architectures.family import record_of
from llama_ssp.errors import CheckpointError
from llama_ssp.models.llama.table import EMBEDDING, OUTPUT
from llama_ssp.models.loading import check_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading, StoredSlice, Weights
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import SINGLE_FILE, Checkpoint, inspect
from tests.helpers.draft_heads import make_tensors, save_original
from tests.helpers.extensions import of_heads
from tests.helpers.lanes import first, sample
from tests.helpers.models import FAMILIES, VOCAB_SIZE, build_checkpoint, load_modules, refusal, tiny_config
from tests.helpers.one_pass_heads import SHARING, save_head
from tests.unit.models.conftest import Saved


def load(folder: Path, *, dtype: torch.dtype | None = None, comm: Comm | None = None) -> PreTrainedModel:
    return load_modules(Loading(inspect(folder), dtype=dtype, comm=comm or Comm.single()))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE)


def assert_same_values(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    found_values, wanted_values = (dict(model.named_parameters(remove_duplicate=False)) for model in (found, wanted))
    assert found_values.keys() == wanted_values.keys()
    turned = record_of(wanted.config.model_type).turned
    for name, value in found_values.items():
        is_turned = name.endswith(turned) and value.dim() == 2
        assert torch.equal(value.T if is_turned else value, wanted_values[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2", "qwen3", "phi", "gemma2", "gpt_neo", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_has_the_value_that_was_saved(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = build_checkpoint(tmp_path, family, dtype=dtype, max_shard_size="40KB")
    loaded = load(tmp_path)
    assert_same_values(loaded, model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


WITHOUT_MTP = sorted(FAMILIES.keys() - {"deepseek_v3", "glm4_moe"})


@pytest.mark.parametrize("family", first(WITHOUT_MTP, num=8))
def test_more_layers_than_the_config_has_are_refused_with_both_numbers(tmp_path: Path, family: str) -> None:
    """Also where names lack the prefix of the base model."""
    prefix = f"{build_checkpoint(tmp_path, family, num_hidden_layers=4).base_model_prefix}."
    fewer = tmp_path / "fewer"
    tiny_config(family, num_hidden_layers=3).save_pretrained(fewer)
    (fewer / "config.json").replace(tmp_path / "config.json")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"holds tensors of 4 layers \(.*\.3\..*num_(hidden_)?layers=3: copy"):
            load(tmp_path)
        edit_tensors(tmp_path, lambda tensors: {name.removeprefix(prefix): t for name, t in tensors.items()})


@pytest.mark.parametrize(
    ("field", "prefix"),
    [
        ("num_nextn_predict_layers", "model.layers.3."),
        ("num_nextn_predict_layers", "model.mtp_layers.0."),
        ("mtp_num_hidden_layers", "mtp.layers.0."),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, field: str, prefix: str) -> None:
    """As DeepSeek V3 and GLM 4.5, MiMo, and Qwen 3.5 store them."""
    model = build_checkpoint(tmp_path, "qwen2", num_hidden_layers=3)
    first = "model.layers.0."

    def with_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = {f"{prefix}{name.removeprefix(first)}": tensor + 1 for name, tensor in tensors.items() if first in name}
        return tensors | more | {f"{prefix}eh_proj.weight": torch.ones(2)}

    edit_tensors(tmp_path, with_layer)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {field: 1}), encoding="utf-8")
    assert_same_values(load(tmp_path), model)


def test_one_layer_that_predicts_further_tokens_does_not_excuse_two_more(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "qwen2", num_hidden_layers=4)
    tiny_config("qwen2", num_hidden_layers=2, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds tensors of 4 layers"):
        load(tmp_path)


def test_tensors_that_no_layer_has_are_ignored(tmp_path: Path) -> None:
    model = build_checkpoint(tmp_path, "llama")
    extra = {"model.layers.5.self_attn.rotary_emb.inv_freq": torch.ones(4), "other.7.weight": torch.ones(2)}
    edit_tensors(tmp_path, lambda tensors: tensors | extra)
    assert_same_values(load(tmp_path), model)


def test_tensors_that_no_module_takes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_checkpoint(tmp_path, "llama")
    biases = {f"model.layers.1.self_attn.{name}_proj.bias": torch.ones(64) for name in "qo"}
    known = {f"{name}.weight": torch.ones(2) for name in ("vision_tower.layers.0.fc1", "mtp.fc", "model.visual.merger")}
    known |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(tmp_path, lambda tensors: tensors | known)
    check_model(inspect(tmp_path), num_ranks=2)
    assert not caplog.messages
    edit_tensors(tmp_path, lambda tensors: tensors | biases)
    check_model(inspect(tmp_path), num_ranks=2)
    named = "model.layers.1.self_attn.o_proj.bias, model.layers.1.self_attn.q_proj.bias"
    assert caplog.messages == [f"{tmp_path} holds tensors that no module takes, which are not read: {named}"]


@pytest.mark.parametrize("kind", sample({**FAMILIES, **MORE}, always={"gpt_neox", "gpt_neo", "nemotron_h", "qwen3"}))
def test_a_head_without_embedding_and_output_has_those_of_any_target(tmp_path: Path, kind: str) -> None:
    model = build_checkpoint(tmp_path / "target", kind, **MORE.get(kind, {}))
    layers = {"mask_token_id": VOCAB_SIZE - 1, "target_layer_ids": [0, 0, 0]}
    head = inspect(save_head(tmp_path / "head", SHARING, vocab_size=VOCAB_SIZE, dflash_config=layers))
    assert head.head
    target = inspect(tmp_path / "target")
    if refusal(lambda: check_model(target, num_ranks=1)):
        return
    source = of_heads("sources").of_target(head, head.head, target)
    check_model(source, num_ranks=1)
    tables: Any = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in zip((EMBEDDING, OUTPUT), tables, strict=True):
        assert torch.equal(source.read(name), module.weight)
        assert source.tensors[name].shape == module.weight.shape


def test_tensors_of_a_head_that_no_module_takes_are_an_error(tmp_path: Path) -> None:
    """Biases, and the hidden state of masked tokens of P-EAGLE."""
    tensors, target = make_tensors(), inspect(hub.resolve(catalogue.load("tiny")))
    strays = {"mask_hidden": torch.ones(1, 4), "midlayer.self_attn.q_proj.bias": torch.ones(4)}
    for name, stored in (("head", tensors), ("odd", tensors | strays)):
        files = inspect(save_original(tmp_path / name, stored))
        assert files.head
        source = of_heads("sources").of_target(files, files.head, target)
        said = refusal(partial(check_model, source, num_ranks=1))
        assert ("that no part of this head takes (mask_hidden, model.layers.0.self_attn.q_proj.bias)" in said) == (
            name == "odd"
        )


def test_parameters_are_cast_to_the_wanted_format_and_rotary_frequencies_stay_fp32(
    saved: Callable[[str], Saved],
) -> None:
    folder, model = saved("llama")
    loaded = load(folder, dtype=torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(("family", "name", "old"), [("gpt_neox", "lm_head", "embed_out"), ("qwen3", "model.", "")])
def test_old_names_and_names_without_the_prefix_of_the_base_model_are_understood(
    tmp_path: Path, family: str, name: str, old: str
) -> None:
    model = build_checkpoint(tmp_path, family)
    edit_tensors(tmp_path, lambda tensors: {each.replace(name, old, 1): t for each, t in tensors.items()})
    assert not any(each.startswith(name) for each in load_file(tmp_path / SINGLE_FILE))
    assert_same_values(load(tmp_path), model)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_are_held_once_whichever_of_them_is_stored(tmp_path: Path, stored: str) -> None:
    model = build_checkpoint(tmp_path, "qwen3")
    tied = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda tensors: {name.replace(tied, stored): t for name, t in tensors.items()})
    loaded = load(tmp_path)
    assert_same_values(loaded, model)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_missing_tensors_are_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if "mlp" not in name})
    monkeypatch.setattr(Checkpoint, "read", lambda *_args, **_kwargs: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError, match=r"lacks 6 of the 21 tensors .*0.mlp.gate_proj.weight.* and 2 more"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.zeros(100, 64), r"lm_head.weight is \[100, 64\], not \[200, 64\]"),
        (torch.zeros(200, 64, dtype=torch.int8), "lm_head.weight holds no floating-point numbers"),
    ],
)
def test_tensors_of_another_shape_or_kind_are_named(tmp_path: Path, weight: Tensor, sentence: str) -> None:
    build_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": weight})
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path)


def test_an_expert_that_is_not_there_is_named(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "mixtral")
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    edit_tensors(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(CheckpointError, match=r"lacks matrices of model.layers.1.*experts.gate_up_proj"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_no_rank_reads_more_than_it_holds(
    saved: Callable[[str], Saved], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_read_bytes = Checkpoint.read, []

    def counted(self: Checkpoint, name: str, **options: Any) -> Tensor:
        values = read(self, name, **options)
        num_read_bytes.append(values.untyped_storage().nbytes())
        return values

    monkeypatch.setattr(Checkpoint, "read", counted)
    folder, whole = saved(family)
    whole_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    for rank in range(3):
        num_read_bytes.clear()
        local = load(folder, comm=Comm(rank=rank, size=3))
        held_bytes = sum(parameter.nbytes for parameter in local.parameters())
        assert sum(num_read_bytes) == held_bytes
        assert held_bytes < 0.6 * whole_bytes


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_weights_are_taken_in_the_order_in_which_they_are_read_ahead(
    family: str, saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    values_of = Weights._values

    def noted(weights: Weights, row: StoredSlice) -> Tensor:
        taken.append(next(iter(weights._wanted)) == row)
        return values_of(weights, row)

    monkeypatch.setattr(Weights, "_values", noted)
    load_modules(Loading(inspect(saved(family)[0]), precision=Precision(quantization="int8_weight_only")))
    assert len(taken) > 1
    assert all(taken)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_progress_counts_bytes_up_to_all_that_the_rank_holds(family: str, saved: Callable[[str], Saved]) -> None:
    seen: list[tuple[int, int]] = []
    folder, model = saved(family)
    load_modules(Loading(inspect(folder), progress=lambda *report: seen.append(report)))
    held_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert seen == sorted(seen)
    assert seen[-1] == (held_bytes, held_bytes)
