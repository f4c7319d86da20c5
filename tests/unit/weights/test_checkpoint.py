"""Holds every way in which a folder can be faulty to one sentence that names it, and slices to being what was saved."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llama_ssp.architectures.decoders import LLAMA
from llama_ssp.architectures.family import FAMILIES
from llama_ssp.architectures.model_files import read_json
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import CheckpointError
from llama_ssp.weights.checkpoint import INDEX_FILE, SINGLE_FILE, check_shape, inspect, shape_of
from llama_ssp.weights.hashes import fingerprint
from tests.helpers.edits import edit_config, edit_json, edit_tensors
from tests.helpers.models import build_checkpoint, tiny_config
from tests.helpers.packed_checkpoints import changed

pytestmark = pytest.mark.seconds

Fault = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file; read only."""
    folder = tmp_path_factory.mktemp("whole")
    build_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, free to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in many files; read only."""
    folder = tmp_path_factory.mktemp("shards")
    build_checkpoint(folder, "llama", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def config(**changes: object) -> Fault:
    return lambda folder: edit_config(folder, **changes)


def edit_bytes(change: Callable[[bytes], bytes]) -> Fault:
    return lambda folder: (folder / SINGLE_FILE).write_bytes(change((folder / SINGLE_FILE).read_bytes()))


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: content[:-100],
    lambda content: content[:100],
    lambda content: content + b"!",
    lambda content: content[:8] + b"#" * 20 + content[28:],  # in its header
    lambda _: b"",
    lambda _: b"<html>not found</html>",
]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (shutil.rmtree, "does not exist: a folder with config.json"),
        (lambda folder: (folder / "config.json").unlink(), r"config.json cannot be read \(No such file"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (config(model_type=None), "config.json has no model_type"),
        (config(model_type="lama"), 'model_type "lama", unknown to transformers'),
        (config(model_type="vit"), 'model_type "vit", for which transformers .* has no causal language model'),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "blt"}'),
            "describes no decoder with attention",
        ),
        (config(model_type=["llama"]), r'has model_type \["llama"\], and a text is required'),
        (config(text_config={"model_type": ["llama"]}), r'has model_type \["llama"\], and a text is required'),
        (config(rope_scaling={"rope_type": ["yarn"]}), "has rope_scaling .* rope_type as a text"),
        (config(rope_parameters={"rope_type": "linear", "factor": 0}), "rope_parameters .* and factor and rope"),
        (config(rope_parameters={"full_attention": {"rope_theta": 0}}), "rope_parameters .* rope_theta above 0"),
        (
            config(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 0}),
            "rope_parameters .* original_max_position_embeddings above 0",
        ),
        (config(original_max_position_embeddings=0), "has original_max_position_embeddings 0, and a whole number"),
        (config(rope_theta=0), "has rope_theta 0, and a number above 0 is required"),
        (
            config(model_type="step4", auto_map={"AutoConfig": "a.B"}),
            'has model_type "step4", unknown to transformers .*, and asks for Python code .* never run',
        ),
        (config(medusa_num_heads=5), "describes Medusa heads, and of draft heads those of EAGLE-3, P-EAGLE, D"),
        (
            lambda folder: (folder / "config.json").write_text('{"speculators_model_type": "peagle"}'),
            "json lacks vocab_size, hidden_size, num_attention_heads, mask",
        ),
        (
            config(quantization_config=changed("gptq", bits=3)),
            r"config.json describes quantized weights that cannot be read \(bits 3\): .*groups of 32",
        ),
        (config(hidden_size="wide"), 'has hidden_size "wide", and a whole number'),
        (config(hidden_size=65), "config.json is no valid configuration of llama"),
        *((edit_bytes(change), "model.safetensors is truncated or corrupt") for change in DAMAGES),
        (
            lambda folder: (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin"),
            r"pickle weights \(pytorch_model.bin\).*convert them with python -c .*save_pretrained",
        ),
        (lambda folder: (folder / SINGLE_FILE).unlink(), "holds no weights: model.safetensors"),
        (lambda folder: (folder / SINGLE_FILE).rename(folder / "a.safetensors"), "a.safetensors but no model.safe"),
    ],
)
def test_a_faulty_folder_is_refused_in_one_sentence(folder: Path, fault: Fault, reason: str) -> None:
    fault(folder)
    with pytest.raises(CheckpointError, match=reason) as caught:
        inspect(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_llama_kind_that_transformers_does_not_know_has_a_llamas_fields(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(folder, model_type="lama")
    monkeypatch.setitem(FAMILIES.records, "lama", replace(LLAMA, model_type="lama"))
    found = inspect(folder)
    assert (found.config.model_type, found.shape.model_type, found.config.hidden_act) == ("lama", "lama", "silu")
    assert read_config(folder) == (found.shape, Dtype.fp32)


def renamed(file: str, *, says: str | None = None, keeps_config: bool = False) -> Fault:
    """The weights under another name, beside a file that says what they are."""

    def change(folder: Path) -> None:
        (folder / SINGLE_FILE).rename(folder / file)
        if says:
            (folder / says).write_text("{}")
        if not keeps_config:
            (folder / "config.json").unlink()

    return change


MISTRAL = partial(renamed, "consolidated.safetensors", says="params.json")
GGUF = partial(renamed, "model-Q4_K_M.gguf")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (GGUF(), "holds GGUF weights, which are not read: use the repository of this model with safetensors weights"),
        (GGUF(keeps_config=True), "holds GGUF weights, which are not read"),
        (MISTRAL(), "holds Mistral's own layout .params.json, consolidated.safetensors., which is not read: use a"),
        (MISTRAL(keeps_config=True), "holds Mistral's own layout"),
    ],
)
def test_other_layouts_are_named_by_runs_and_plans(folder: Path, kind: Fault, reason: str) -> None:
    kind(folder)
    readers: list[Fault] = [inspect]
    if not (folder / "config.json").exists():
        readers += [read_config, lambda folder: check_readable(folder, "none")]
    for read in readers:
        with pytest.raises(CheckpointError, match=f"^{folder} .*{reason}"):
            read(folder)


def edit_index(change: Callable[[dict[str, str]], object]) -> Fault:
    def edit(folder: Path) -> None:
        change(file_of := read_json(folder / INDEX_FILE)["weight_map"])
        edit_json(folder / INDEX_FILE, weight_map=file_of)

    return edit


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "names model-00002-of-.*, which is missing"),
        (lambda folder: (folder / INDEX_FILE).unlink(), "but no model.safetensors.index.json"),
        (lambda folder: (folder / INDEX_FILE).write_text("{"), "index.json is not JSON"),
        (lambda folder: (folder / INDEX_FILE).write_text("{}"), "has no weight_map"),
        (edit_index(lambda file_of: file_of.update(other="../other.safetensors")), "has no weight_map from tensors"),
    ],
)
def test_a_faulty_index_is_refused_in_one_sentence(shards: Path, tmp_path: Path, fault: Fault, reason: str) -> None:
    folder = Path(shutil.copytree(shards, tmp_path / "checkpoint"))
    fault(folder)
    with pytest.raises(CheckpointError, match=reason):
        inspect(folder)


def test_an_index_that_is_wrong_about_tensors_is_read_as_transformers_reads_it(shards: Path, tmp_path: Path) -> None:
    folder, whole = Path(shutil.copytree(shards, tmp_path / "checkpoint")), inspect(shards)

    def change(file_of: dict[str, str]) -> None:
        files = [*file_of.values()]
        shared = [name for name, file in file_of.items() if files.count(file) > 2]
        file_of["nobody.weight"] = files[0]
        file_of[shared[0]] = next(file for file in files if file != file_of[shared[0]])
        del file_of[shared[1]]

    edit_index(change)(folder)
    assert inspect(folder).tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert torch.equal(inspect(folder).read(name), whole.read(name))


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_theta": 1e4, "high": {"__float__": "Infinity"}})
    assert read_json(folder / "config.json")["rope_parameters"]["high"] == float("inf")
    config = tiny_config("llama")
    config.high = float("-inf")
    config.save_pretrained(folder)
    assert "__float__" in (folder / "config.json").read_text()
    assert read_json(folder / "config.json")["high"] == float("-inf")


def test_a_gguf_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="gguf holds GGUF weights, which are not read"):
        inspect(file)


def test_a_file_that_breaks_after_its_inspection_is_one_sentence_too(folder: Path) -> None:
    checkpoint = inspect(folder)
    edit_bytes(DAMAGES[0])(folder)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        checkpoint.read("lm_head.weight")


def test_a_slice_is_what_was_saved_and_a_copy_of_its_own(folder: Path) -> None:
    matrix = torch.arange(60, dtype=torch.bfloat16).reshape(6, 10)
    save_file({"matrix": matrix}, folder / SINGLE_FILE)
    checkpoint = inspect(folder)
    assert checkpoint.dtype is torch.bfloat16
    for dim, parts in ((0, [range(2, 5)]), (1, [range(3, 10)]), (0, [range(4, 6), range(1)])):
        piece = checkpoint.read("matrix", dim=dim, parts=parts)
        wanted = torch.cat([matrix.narrow(dim, part.start, len(part)) for part in parts], dim=dim)
        assert torch.equal(piece, wanted)
        assert piece.is_contiguous()
        assert piece.untyped_storage().nbytes() == wanted.numel() * 2


def test_files_of_another_shape_than_the_catalogue_says_are_refused_by_field(folder: Path) -> None:
    checkpoint = inspect(folder)
    entry = ModelConfig(name="7B", shape=shape_of(tiny_config("llama")))
    check_shape(entry, checkpoint)
    check_shape(ModelConfig(name="local"), checkpoint)
    entry.shape = shape_of(tiny_config("llama", num_hidden_layers=3, vocab_size=300))
    with pytest.raises(CheckpointError, match="is not 7B: num_hidden_layers is 2, not 3, vocab_size is 200, not 300;"):
        check_shape(entry, checkpoint)


@pytest.mark.parametrize("other", ["model.embed_tokens.weight", "model.norm.weight"])
def test_the_file_of_a_tensor_with_other_values_differs(other: str, shards: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(shards, tmp_path / "copy"))
    (folder / "README.md").write_text("Another text.")
    before = fingerprint(shards)
    assert fingerprint(folder) == before
    assert before.keys() == {file.name for file in shards.iterdir()}
    file = read_json(folder / INDEX_FILE)["weight_map"][other]
    edit_tensors(folder / file, lambda tensors: tensors[other].add_(1))
    after = fingerprint(folder)
    assert {name for name in before if before[name] != after[name]} == {file}


def test_of_very_many_tensors_some_are_read_from_the_first_to_the_last_part(tmp_path: Path) -> None:
    names, found = [f"expert{number:05d}" for number in range(5000)], set()
    for other in (range(0), range(3), range(2500, 2503), range(4997, 5000)):
        values = {name: torch.full((2,), float(number in other)) for number, name in enumerate(names)}
        save_file(values | {"empty": torch.zeros(0, 4)}, tmp_path / SINGLE_FILE)
        found.add(fingerprint(tmp_path)[SINGLE_FILE])
    assert len(found) == 4
