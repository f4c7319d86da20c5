"""Holds a merged adapter to the whole matrices that it stands for, and names what it refuses.

The numbers are chosen so that all sums are exact in fp32, so equal means equal in every bit.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.families import MORE
from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.adapters.merging import with_adapter
from llama_ssp.extensions.adapters.records import WEIGHTS
from llama_ssp.weights.checkpoint import Checkpoint, inspect
from tests.helpers.adapters import LAYERS, RANK, round_weights, save_adapter, save_merged
from tests.helpers.edits import Edit, edit_json, edit_tensors
from tests.helpers.models import build_checkpoint

pytestmark = pytest.mark.seconds

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


class Folders(NamedTuple):
    """A checkpoint, an adapter, and the checkpoint with the adapter in it."""

    base: Path
    adapter: Path
    merged: Path


def make(
    folder: Path,
    *,
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    layers: Sequence[str] = LAYERS,
    use_rslora: bool = False,
) -> Folders:
    found = Folders(folder / "base", folder / "adapter", folder / "merged")
    build_checkpoint(found.base, kind, dtype=dtype, **MORE.get(kind, {}))
    round_weights(found.base)
    save_adapter(found.adapter, found.base, layers=layers, use_rslora=use_rslora, fan_in_fan_out=kind == "gpt2")
    save_merged(found.merged, found.base, found.adapter)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make(tmp_path_factory.mktemp("adapter"))


def adapted(folders: Folders) -> Checkpoint:
    return with_adapter(inspect(folders.base), folders.adapter)


@pytest.mark.parametrize(
    ("kind", "layers", "use_rslora"),
    [
        ("llama", LAYERS, False),
        ("llama", LAYERS, True),
        ("llama", ("lm_head", "k_proj"), False),
        ("gpt2", ("c_attn", "c_proj", "c_fc"), False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_are_those_of_the_merged_matrices(
    tmp_path: Path, kind: str, dtype: torch.dtype, layers: Sequence[str], use_rslora: bool
) -> None:
    """Rounded once: products of the adapter alone have more digits than bf16 holds. GPT-2 stores matrices as (I, O)."""
    folders = make(tmp_path, kind=kind, dtype=dtype, layers=layers, use_rslora=use_rslora)
    found, wanted = adapted(folders), inspect(folders.merged)
    assert found.dtype == dtype
    changed = 0
    for name, facts in found.tensors.items():
        assert torch.equal(found.read(name), wanted.read(name)), name
        assert found.read(name).dtype == dtype
        changed += not torch.equal(found.read(name), inspect(folders.base).read(name))
        for dim, size in enumerate(facts.shape):
            parts = [range(size // 2, size), range(size // 4)]
            piece = found.read(name, dim=dim, parts=parts)
            assert torch.equal(piece, wanted.read(name, dim=dim, parts=parts)), name
    assert changed == len(load_file(folders.adapter / WEIGHTS)) // 2


@pytest.mark.parametrize(
    ("part", "prefix"), [("base", ""), ("adapter", "model.language_model."), ("adapter", "language_model.model.")]
)
def test_names_without_the_prefix_of_the_base_model_or_of_a_text_part_are_found(
    part: str, prefix: str, folders: Folders, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(getattr(folders, part), tmp_path / part))
    (file,) = folder.glob("*.safetensors")
    save_file({name.replace("model.layers.", f"{prefix}layers."): each for name, each in load_file(file).items()}, file)
    found = adapted(folders._replace(**{part: folder}))
    name = Q_PROJ if part == "adapter" else Q_PROJ.removeprefix("model.")
    assert torch.equal(found.read(name), inspect(folders.merged).read(Q_PROJ))


def test_patterns_of_modules_have_ranks_and_alphas_of_their_own(folders: Folders, tmp_path: Path) -> None:
    """As PEFT reads them: the first pattern that matches the end of a module's name."""
    adapter = Path(shutil.copytree(folders.adapter, tmp_path / "adapter"))
    halved = load_file(adapter / WEIGHTS)
    for name in [name for name in halved if "layers.0.self_attn.q_proj" in name]:
        halved[name] = (halved[name][:2] if "lora_A" in name else halved[name][:, :2]).contiguous()
    save_file(halved, adapter / WEIGHTS)
    config(rank_pattern={r"layers\.0\.self_attn\.q_proj": 2}, alpha_pattern={"o_proj": 2, ".*": 12})(adapter)
    found, base = with_adapter(inspect(folders.base), adapter), inspect(folders.base)
    for name, scale in ((Q_PROJ, 6), (Q_PROJ.replace(".0.", ".1."), 3), (Q_PROJ.replace("q_proj", "o_proj"), 0.5)):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = (halved[f"{key}.lora_{side}.weight"] for side in "AB")
        assert torch.equal(found.read(name), base.read(name) + scale * (up @ down))


def test_the_base_that_peft_saves_with_an_output_head_is_read_too(tmp_path: Path) -> None:
    """Beside lora_A and lora_B of lm_head its file has the weight that they are added to."""
    folders = make(tmp_path, layers=("lm_head", "q_proj"))
    key, head = "base_model.model.lm_head.base_layer.weight", inspect(folders.base).read("lm_head.weight")
    edit_tensors(folders.adapter / WEIGHTS, lambda found: found.update({key: head}))
    found, wanted = adapted(folders), inspect(folders.merged)
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in found.tensors)
    edit_tensors(folders.adapter / WEIGHTS, lambda found: found.update({key: head[1:].clone()}))
    with pytest.raises(CheckpointError, match=r"does not fit .*lm_head\.weight"):
        adapted(folders)


Fault = Callable[[Path], object]


def config(**changes: object) -> Fault:
    return lambda folder: edit_json(folder / "adapter_config.json", **changes)


def tensors(edit: Edit) -> Fault:
    return lambda folder: edit_tensors(folder / WEIGHTS, edit)


@pytest.mark.parametrize("missing", [(), ("lm_head.weight",)])
def test_a_head_that_is_the_embedding_is_not_changed_alone(tmp_path: Path, missing: Sequence[str]) -> None:
    folders = make(tmp_path, layers=("lm_head", "q_proj"))
    edit_tensors(folders.base / "model.safetensors", lambda stored: [stored.pop(name) for name in missing])
    edit_json(folders.base / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"changes lm_head, whose weights .* shares with its embedding: merge"):
        adapted(folders)


KEY = f"base_model.model.{Q_PROJ.removesuffix('.weight')}.lora_A.weight"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (shutil.rmtree, "does not exist: a folder with adapter_config.json is required"),
        (lambda folder: (folder / "adapter_config.json").unlink(), r"adapter_config.json cannot be read"),
        (config(use_dora=True, bias="all"), r"cannot be merged \(use_dora true, bias \"all\"\): merge it with PEFT"),
        (config(modules_to_save=["lm_head"]), r'modules_to_save \["lm_head"\]'),
        (config(rank_pattern={"q_proj": 8}), f"does not fit .* of rank {RANK}, or that of rank_pattern"),
        (config(rank_pattern={"q_proj": "many"}), 'rank_pattern has "many", and a number above 0'),
        (config(alpha_pattern={"(": 8}), r"alpha_pattern has '.*' is no pattern of the kind that is read"),
        (config(fan_in_fan_out=True), "fan_in_fan_out true"),
        (config(peft_type="IA3"), 'peft_type "IA3"'),
        (config(init_lora_weights="pissa"), 'init_lora_weights "pissa"'),
        (config(lora_alpha=None), "no lora_alpha"),
        (config(r="four"), 'has r "four", and a whole number'),
        (config(r=RANK + 1), f"does not fit .* lora_A and lora_B of rank {RANK + 1}"),
        (
            lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
            "pickle weights, adapter_model.bin",
        ),
        (lambda folder: (folder / WEIGHTS).unlink(), "holds no adapter_model.safetensors: save it"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x"), "is truncated or corrupt"),
        (tensors(dict.clear), "changes nothing"),
        (tensors(lambda found: found.update(other=torch.ones(2))), "holds other, and only lora_A and lora_B of linear"),
        (tensors(lambda found: found.pop(KEY)), "does not fit .*q_proj"),
        (tensors(lambda found: found.update({KEY: torch.ones(RANK, 3)})), "does not fit .*q_proj"),
        (tensors(lambda found: found.update({KEY: found[KEY].int()})), "does not fit .*q_proj"),
        (
            tensors(lambda found: found.update({KEY.replace(".0.", ".9."): found.pop(KEY)})),
            r"changes model.layers.9.*, which .* lacks: give the adapter of this model",
        ),
    ],
)
def test_an_adapter_that_cannot_be_merged_exactly_is_refused(
    folders: Folders, tmp_path: Path, fault: Fault, reason: str
) -> None:
    folder = Path(shutil.copytree(folders.adapter, tmp_path / "adapter"))
    fault(folder)
    with pytest.raises(CheckpointError, match=reason) as caught:
        with_adapter(inspect(folders.base), folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
