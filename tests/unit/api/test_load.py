"""`load` takes what a notebook has already: models and tokenizers of transformers, dtypes and devices of torch."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mypy.api
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.families import MORE
from llama_ssp import load
from llama_ssp.api.elsewhere import ELSEWHERE, Elsewhere
from llama_ssp.api.pair import Pair
from llama_ssp.architectures.reading import check_readable
from llama_ssp.errors import ConfigError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.weights import Loading
from llama_ssp.settings.drafters import SAME
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.in_memory import weights_of
from tests.helpers.extensions import need
from tests.helpers.hub import shipped
from tests.helpers.lanes import sample
from tests.helpers.models import FAMILIES, VOCAB_SIZE, build_checkpoint, load_modules, refusal, tiny_model
from tests.helpers.packed_checkpoints import pack_checkpoint
from tests.helpers.repository import ROOT
from tests.helpers.tokenizers import save_tokenizer

TINY, DRAFT = (shipped(name) for name in ("tiny", "tiny-draft"))


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (TINY, DRAFT))
    return target, draft


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY)
    return loaded


@pytest.mark.parametrize(
    ("number", "words"), [(-1, "at least 0 rows"), ("2", "a whole number"), (True, "a whole number")]
)
def test_a_wrong_number_of_spare_rows_is_one_sentence(number: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^spare_rows={number!r} must be {words}"):
        load(TINY, spare_rows=number)


@pytest.mark.seconds
def test_loaded_models_give_the_text_of_their_folders(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    loaded, from_files = load(*models), load(TINY, DRAFT)
    assert repr(loaded) == "Pair(tiny, draft tiny-draft, on cpu, context 2048)"
    texts = [pair.generate("import os\n", max_new_tokens=12, seed=1)[0] for pair in (loaded, from_files)]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].accepted_lengths == texts[1].accepted_lengths
    assert loaded.models.eos_ids == from_files.models.eos_ids
    assert not next(models[0].parameters()).is_meta, "the models stay usable"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_in_memory_are_those_of_the_saved_files(tmp_path: Path, family: str) -> None:
    model = build_checkpoint(tmp_path, family)
    held, stored = weights_of(model, what="target"), inspect(tmp_path)
    assert held.tensors.keys() == stored.tensors.keys(), "tied ones once"
    assert (held.shape, held.dtype, held.context) == (stored.shape, stored.dtype, stored.context)
    for name in held.tensors:
        values = held.read(name, dtype=torch.bfloat16)
        assert torch.equal(values, stored.read(name, dtype=torch.bfloat16))
        assert values.data_ptr() != held.parameters[name].data_ptr()
    matrix = next(name for name, facts in held.tensors.items() if len(facts.shape) == 2)
    parts = [range(1, 3), range(5, 6)]
    assert torch.equal(held.read(matrix, dim=0, parts=parts), stored.read(matrix, dim=0, parts=parts))


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gpt_neo"])
def test_families_whose_files_have_other_names_load_from_memory(family: str) -> None:
    model = tiny_model(family)
    held = weights_of(model, what="target")
    loaded = load_modules(Loading(held))
    for name, values in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], values), name


@pytest.mark.seconds
@pytest.mark.parametrize("kind", sample({**FAMILIES, **MORE}, always={"apertus", "laguna", "kimi_linear"}))
def test_a_loaded_model_of_every_family_is_as_its_files_and_updates_a_pair(tmp_path: Path, kind: str) -> None:
    """Also once it has been saved, and with the buffers that are stored."""
    model = build_checkpoint(tmp_path, kind, **MORE.get(kind, {}))
    save_tokenizer(tmp_path, VOCAB_SIZE)
    if refusal(lambda: check_readable(tmp_path, "none")):
        return

    def text(pair: Pair) -> list[list[int]]:
        return [done.token_ids for done in pair.generate(["t5 t9 t3 " * 7, "t7 t8"], max_new_tokens=8, temperature=0)]

    stored = load(tmp_path, dtype="fp32")
    held = load(model, dtype="fp32", tokenizer=stored.tokenizer)
    before = text(stored)
    assert text(held) == before
    generator = torch.Generator().manual_seed(5)
    for values in filter(torch.is_floating_point, model.state_dict().values()):
        values.add_(0.2 * torch.randn(values.shape, generator=generator))
    held.update(model)
    stored.update(model.state_dict())
    wanted = text(load(model, dtype="fp32", tokenizer=stored.tokenizer))
    assert text(held) == text(stored) == wanted != before


@pytest.mark.seconds
def test_a_loaded_tokenizer_is_that_of_the_pair(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = load("tiny", "tiny-draft", tokenizer=tokenizer)
    assert pair.tokenizer is tokenizer
    again = load("tiny", "tiny-draft", tokenizer=(tokenizer, AutoTokenizer.from_pretrained(DRAFT)))
    assert again.tokenizer is tokenizer, "two of one vocabulary are as one"
    assert again.models.vocabulary is SAME


def test_a_model_without_a_tokenizer_asks_for_one(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"model is a loaded LlamaForCausalLM without a folder.* give tokenizer="):
        load(model)
    with pytest.raises(ConfigError, match="draft is a loaded LlamaForCausalLM without a folder"):
        load(models[0], model)


def test_models_whose_weights_are_elsewhere_are_refused() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(ConfigError, match="whose weights are not all in memory: load it without offload"):
        load(model)


@pytest.mark.heavy
def test_each_model_has_its_own_format_on_request() -> None:
    pair = load(
        "tiny",
        "tiny-draft",
        dtype=(torch.float32, "bf16"),
        quantization=("int8_weight_only", None),
        cache_dtype=(None, "fp16"),
    )
    target, draft = pair.models.target, pair.models.draft
    assert isinstance(target, LeanRunner)
    assert isinstance(draft, LeanRunner)
    assert (target.dtype, draft.dtype) == (torch.float32, torch.bfloat16)
    assert [source.precision.quantization for source in pair.models.sources] == ["int8_weight_only", "none"]
    assert [source.precision.cache_dtype for source in pair.models.sources] == ["auto", "fp16"]


@pytest.mark.seconds
def test_a_quantized_checkpoint_is_loaded_as_it_is_stored(tmp_path: Path) -> None:
    pack_checkpoint(TINY, tmp_path / "packed", tmp_path / "numbers", "fp8")
    packed, numbers = (load(tmp_path / name, DRAFT, device="cpu") for name in ("packed", "numbers"))
    assert [source.precision.quantization for source in packed.models.sources] == ["fp8_weight_only", "none"]
    texts = [pair.generate("import os\n", max_new_tokens=12, temperature=0)[0].text for pair in (packed, numbers)]
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="holds fp8_weight_only weights, which are read as they are"):
        load(tmp_path / "packed", quantization=("nf4", None))


def far(num_ranks: int, given: dict[str, object]) -> tuple[int, object]:
    return num_ranks, given["draft"]


@pytest.mark.seconds
def test_ranks_are_for_the_record_that_loads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ELSEWHERE.find("")  # read those that there are
    monkeypatch.setitem(ELSEWHERE.records, "ranks", Elsewhere(name="ranks", load=f"{__name__}:far"))
    found: object = load("tiny", "tiny-draft", ranks=3)
    assert found == (3, "tiny-draft")
    assert isinstance(load("tiny", ranks=1), Pair)
    monkeypatch.delitem(ELSEWHERE.records, "ranks")
    with pytest.raises(ConfigError, match="ranks"):
        load("tiny", ranks=2)


def test_a_number_of_ranks_is_a_whole_number() -> None:
    with pytest.raises(ConfigError, match="ranks='two' must be a whole number or None"):
        load("tiny", ranks="two")  # type: ignore[arg-type]


@pytest.mark.seconds
def test_a_plan_needs_no_torch() -> None:
    program = (
        "import sys; from llama_ssp import plan; found = plan('30B', '7B', hardware='8xa100_80gb'); "
        "assert found.fits; print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "hydra"} & set(ended.stdout.split()) == set()


@pytest.mark.seconds
def test_checkers_of_types_find_a_name_that_the_package_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (api := tmp_path / "llama_ssp/api").mkdir(parents=True)
    (tmp_path / "llama_ssp/__init__.py").write_text((ROOT / "llama_ssp/__init__.py").read_text())
    names = {"loading": ["load"], "pair": ["Completion", "Pair"], "planning": ["plan"], "__init__": []}
    for module, of in names.items():
        (api / f"{module}.py").write_text("".join(f"def {name}() -> None: ...\n" for name in of))
    (tmp_path / "wrong.py").write_text("from llama_ssp import load, loads\nprint(load, loads)\n")
    said, _, code = mypy.api.run(["--strict", "--no-incremental", "--config-file=", str(tmp_path / "wrong.py")])
    assert (code, said.count("error:")) == (1, 1), said
    assert 'Module "llama_ssp" has no attribute "loads"' in said


@pytest.mark.seconds
def test_a_fallback_serves_the_calls_that_let_k_be_chosen() -> None:
    need("adaptive")
    need("copies")
    with load("tiny", {"model": "tiny-draft", "fallback": "ngram"}) as pair:
        texts = [pair.generate("a b a b", max_new_tokens=8, num_draft_tokens=k, temperature=0) for k in ("auto", 3)]
        assert texts[0][0].token_ids == texts[1][0].token_ids
        names = {tuple(type(one).__name__ for one in decoder.round.drafters) for decoder in pair._decoders.values()}
    assert sorted(map(len, names)) == [1, 2], "of the call with a number, and of the one that chooses"


@pytest.mark.parametrize(
    "draft",
    [
        {"model": "tiny-draft", "fallback": "nosuch"},
        {"model": "tiny-draft", "sinks": 2},
        {"kind": "self", "layers": 2, "sinks": 2},
        {"kind": "self", "layers": 99},
        {"kind": "self"},
        {"kind": "ngram", "fallback": "ngram", "longest": 0},
    ],
)
def test_messages_name_settings_as_the_library_has_them(draft: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused, load("tiny", draft) as pair:
        pair.generate("a")
    assert not re.search(r"\b(draft|sampling|speculation|timeouts)\.[a-z_]+", str(refused.value)), refused.value
