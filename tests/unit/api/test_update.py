"""`Pair.update`: other weights in the tensors of a pair that runs, as if it had been loaded with them."""

import gc
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from llama_ssp import load
from llama_ssp.api.pair import Pair
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models.graph_inputs import NOWHERE, InPlace, find_tensors
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.run import decoders
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.weights.checkpoint import inspect
from tests.helpers import one_pass_heads, other_tokenizer
from tests.helpers.draft_heads import save_small_pair
from tests.helpers.edits import edit_tensors
from tests.helpers.extensions import module_of, need
from tests.helpers.joined_experts import join_on_cpu
from tests.helpers.lanes import first, heavy, slow
from tests.helpers.models import FAMILIES, VOCAB_SIZE, build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.reachable import contents
from tests.helpers.recorded import FakeRecorder
from tests.helpers.tokenizers import save_tokenizer

PROMPTS = ["t5 t9 t3 " * 12, "t7 t8"]
OF_TARGET: dict[str, dict[str, Any]] = {
    "self as int8": {"kind": "self", "quantization": "int8_weight_only"},
    "self as int8, a layer and a window": {
        "kind": "self",
        "quantization": "int8_weight_only",
        "layers": [0],
        "window": 8,
    },
    "self as int4": {"kind": "self", "quantization": "int4_weight_only"},
    "self, a layer": {"kind": "self", "layers": 1},
    "self, a window": {"kind": "self", "window": 8},
    "copies": {"kind": "ngram", "history": 0},
}
"""Drafts without weights of their own; texts of earlier calls, which prompt look-up copies, stay after an update."""
EXTENSIONS = {"self": "self_drafts", "copies": "copies", "windows": "windows", "tokenizers": "tokenizers"}
"""By the first word of a kind of draft."""
Draft = Path | str | dict[str, Any]


def save_pair(folder: Path, kind: str) -> tuple[Path, Draft]:
    """The folders of a random target and its draft; or the name or the settings of the draft."""
    target, draft, vocab_size = folder / "target", folder / "draft", VOCAB_SIZE
    if extension := EXTENSIONS.get(kind.partition(" ")[0].strip(",")):
        need(extension)
    if kind.startswith("windows of "):
        target, inner = save_pair(folder, kind.removeprefix("windows of "))
        return target, {"model": inner, "window": 16}
    if kind.startswith("tokenizers"):
        other_tokenizer.save_pair(folder)
        return target, draft
    if found := next((name for name in OF_TARGET if kind.startswith(name)), None):
        target, _ = save_pair(folder, kind.partition(" of ")[2] or "llama")
        return target, OF_TARGET[found]
    if kind.startswith("head"):
        save_small_pair(folder)
        draft, vocab_size = folder / "head", 224
    elif kind in one_pass_heads.CONFIGS:
        one_pass_heads.save_pair(folder, kind)
        draft, vocab_size = folder / "head", 224
    elif kind.startswith("mtp "):
        save_with_mtp(target, kind.removeprefix("mtp "))
    else:
        family, *in_16_bits = kind.partition(" as ")[0].split(" in ")
        for path in (target, draft):
            vocab_size = 224  # whole blocks
            build_checkpoint(path, family, dtype=torch.bfloat16 if in_16_bits else torch.float32, vocab_size=vocab_size)
            save_tokenizer(path, vocab_size)
    save_tokenizer(target, vocab_size)
    return target, "mtp" if kind.startswith("mtp ") else draft


def loaded(target: Any, draft: Draft, kind: str) -> Pair:
    """The pair of a kind, in the formats that its name ends with."""
    form, dtype = kind.partition(" as ")[2], ("fp32", "bf16") if "in bf16" in kind else "fp32"
    vocabulary = {"tokenizer": "own"} if kind.startswith("tokenizers") else {}
    own: dict[str, Any] = {"quantization": form} if form and not kind.startswith("self") else {}
    return load(target, draft, **own | vocabulary | {"dtype": dtype})


def renewed(draft: Draft, *, seed: int = 0) -> tuple[Draft, Path | None]:
    """A draft with other weights, for a fresh load and for an update, which has none of a draft without weights."""
    if isinstance(draft, dict) and "model" in draft:
        path = trained(draft["model"], seed=seed)
        return draft | {"model": path}, path
    if isinstance(draft, Path):
        return (path := trained(draft, seed=seed)), path
    return draft, None


def trained(folder: Path, *, seed: int = 0) -> Path:
    """A copy of a folder with other weights."""
    other = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}, trained {seed}")))
    torch.manual_seed(seed)

    def step(tensors: dict[str, Tensor]) -> None:
        for values in filter(Tensor.is_floating_point, tensors.values()):
            values.add_(0.05 * torch.randn_like(values))

    edit_tensors(other / "model.safetensors", step)
    return other


@torch.no_grad()
def train(model: PreTrainedModel, *, seed: int) -> None:
    """Change the weights of a loaded model."""
    for values in model.parameters():
        values.add_(0.05 * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)))


WHOLE_GROUPS = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 224}
KINDS = [
    ("gpt_oss", "int8_weight_only"),
    ("gpt_neox", "none"),
    *(heavy(family, "int4_weight_only") for family in ("llama", "mixtral", "gpt_oss")),
    *(slow("gpt_oss", form) for form in ("fp8_weight_only", "nf4", "fp4")),
    *(slow(family, form) for family in ("qwen2", "glm4_moe") for form in ("fp8_weight_only", "nf4")),
    *(slow(family, "none") for family in FAMILIES if family != "gpt_neox"),
]


def texts(pair: Pair) -> list[tuple[list[int], list[int], int]]:
    found = pair.generate(PROMPTS, max_new_tokens=12, seed=1, num_samples=2)
    return [(done.token_ids, done.accepted_lengths, done.num_reused_tokens) for done in found]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "kind",
    [
        *first((*OF_TARGET, "self as int8 of mixtral", "windows of llama", "windows of head", "head in bf16")),
        *first(("llama as int8_weight_only", "head", "gpt_neox", "mtp qwen2", one_pass_heads.SHARING), num=2),
        *map(slow, ("llama as int4_weight_only", "qwen3 in 16 bits", "glm4_moe", "mtp glm4_moe", "peagle")),
        *map(slow, [kind for kind in one_pass_heads.CONFIGS if kind not in {"peagle", one_pass_heads.SHARING}]),
        slow("tokenizers"),
    ],
)
def test_an_update_gives_the_texts_of_a_fresh_load(tmp_path: Path, kind: str) -> None:
    """And the accepted tokens, which tell weights of a draft that the rules keep out of the texts."""
    target, draft = save_pair(tmp_path, kind)
    pair = loaded(target, draft, kind)
    before, models = texts(pair), pair.models
    new_target, (new_draft, of_draft) = trained(target), renewed(draft)
    pair.update(new_target, of_draft)
    assert pair.models.target is models.target
    assert pair.models.draft is models.draft
    assert pair.models.prepared is models.prepared
    after = texts(pair)
    assert after == texts(loaded(new_target, new_draft, kind)) != before


@pytest.mark.seconds
@pytest.mark.parametrize("in_memory", [False, True], ids=["files", "memory"])
@pytest.mark.parametrize("order", first(["target", "target, draft", "draft, target"], num=3))
@pytest.mark.parametrize("kind", first([one_pass_heads.SHARING, "head in bf16", "head", "llama"]))
def test_updates_one_after_the_other_give_the_texts_of_a_fresh_load(
    tmp_path: Path, kind: str, order: str, in_memory: bool
) -> None:
    """Memory changes after each update, and a head without tables has its target's all the same."""
    target, draft = save_pair(tmp_path, kind)
    new = {"model": trained(target), "draft": renewed(draft, seed=1)[1]}
    pair = loaded(target, draft, kind)
    for part in order.replace("target", "model").split(", "):
        given: Any = load_file(Path(new[part]) / "model.safetensors") if in_memory else new[part]  # type: ignore[arg-type]
        pair.update(**{part: given})
        for values in given.values() if in_memory else ():
            values.zero_()
    fresh = loaded(new["model"], (new if "draft" in order else {"draft": draft})["draft"], kind)  # type: ignore[arg-type]
    assert texts(pair) == texts(fresh)


@pytest.mark.parametrize("tied", first([False, True]))
def test_mtp_layers_that_stay_have_the_new_tables_of_their_target(tmp_path: Path, tied: bool) -> None:
    target, both = tmp_path / "target", tmp_path / "both"
    save_with_mtp(target, "qwen2", tie_word_embeddings=tied)
    save_tokenizer(target, VOCAB_SIZE)
    shutil.copytree(target, both)
    pair, stored = load(target, "mtp", dtype="fp32"), load_file(trained(target) / "model.safetensors")
    own = {name: values for name, values in stored.items() if "mtp" not in name}
    edit_tensors(both / "model.safetensors", lambda tensors: tensors.update(own))
    pair.update(own)
    assert texts(pair) == texts(load(both, "mtp", dtype="fp32"))


@pytest.mark.parametrize(("family", "form"), KINDS)
def test_after_an_update_nothing_holds_old_weights_and_code_least_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, form: str
) -> None:
    """All tensors that a model leads to, those of closures too, are those of a fresh load."""
    join_on_cpu(monkeypatch)
    runner_of_modules = module_of("modules.runner").ModuleRunner
    monkeypatch.setattr(runner_of_modules, "_compare", lambda _: None)  # which leaves a cache
    sizes = {"moe_intermediate_size": 128} | FAMILIES[family] | WHOLE_GROUPS if form != "none" else {}
    build_checkpoint(tmp_path / "model", family, **sizes)

    def loaded(folder: Path, into: InPlace = NOWHERE) -> Runner:
        precision = Precision(quantization=form)
        return load_model(Loading(inspect(folder), dtype=torch.float32, precision=precision, into=into))

    runner, other = loaded(tmp_path / "model"), trained(tmp_path / "model")
    before = contents(runner)
    assert loaded(other, InPlace(runner)) is runner
    assert contents(runner) == contents(loaded(other)) != before


@pytest.mark.parametrize("kind", first(["head", "mtp qwen2", *one_pass_heads.CONFIGS]))
def test_after_an_update_nothing_of_a_head_holds_old_weights(tmp_path: Path, kind: str) -> None:
    target, draft = save_pair(tmp_path, kind)
    pair = load(target, draft, dtype="fp32")
    new_target, new_draft = trained(target), trained(draft) if isinstance(draft, Path) else None
    pair.update(new_target, new_draft)
    fresh = load(new_target, new_draft or draft, dtype="fp32")
    assert contents([pair.models.target, pair.models.draft]) == contents([fresh.models.target, fresh.models.draft])


@pytest.mark.heavy
def test_weights_that_need_another_kernel_are_taken_too(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, "qwen3 in 16 bits")  # with one tensor for embedding and output
    pair = load(target, draft, dtype="fp32")
    texts(pair)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    train(model, seed=1)
    pair.update(model)
    assert texts(pair) == texts(load(model, draft, dtype="fp32", tokenizer=pair.tokenizer))
    pair.update(target)
    assert texts(pair) == texts(load(target, draft, dtype="fp32"))


@pytest.mark.seconds
@pytest.mark.parametrize("graphs", first([False, True]), ids=["traces", "graphs"])
def test_a_loop_of_updates_allocates_and_captures_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    recorder, traces = FakeRecorder(), list[None]()
    traced_of_cpus = module_of("cpu.tracing").Traced
    trace = traced_of_cpus._trace

    def counted(*arguments: Any) -> object:
        traces.append(None)
        return trace(*arguments)

    monkeypatch.setattr(traced_of_cpus, "_trace", counted)
    if graphs:
        monkeypatch.setattr(decoders, "make_executor", lambda round_, **_: GraphExecutor(round_, recorder=recorder))
    target, draft = save_pair(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    pair, loop = load(target, draft, dtype="fp32"), []
    for step in range(10):
        train(model, seed=step)
        pair.update(model.state_dict() if step % 2 else model)
        loop.append(texts(pair))
        if step == 1:
            places, known = addresses(pair), (len(traces), recorder.num_recorded, live())
    assert known[graphs] > 0
    assert addresses(pair) == places
    assert (len(traces), recorder.num_recorded, live()) == known
    assert loop[-1] == texts(load(model, draft, dtype="fp32", tokenizer=pair.tokenizer))
    assert len({str(found) for found in loop}) > 5


def live() -> int:
    """Bytes of all tensors."""
    gc.collect()
    return sum(found.nbytes for found in gc.get_objects() if type(found) in {Tensor, torch.nn.Parameter})


def addresses(pair: Pair) -> list[int]:
    """Of the tensors that both models hold."""
    held = find_tensors([pair.models.target, pair.models.draft], bucket=256)
    return [tensor.data_ptr() for tensor in chain(*held) if isinstance(tensor, Tensor)]


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, "llama")
    other, _ = save_pair(tmp_path / "other", "qwen3")
    pair, tensors = load(target, draft, dtype="fp32"), load_file(target / "model.safetensors")
    before = texts(pair)
    narrow = tensors | {"lm_head.weight": tensors["lm_head.weight"][:10]}
    renamed = {name.replace("q_proj", "query"): values for name, values in tensors.items()}
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        (other, None, ConfigError, r"model=\S+ must have the sizes and settings .*head_dim is 16, not 8"),
        ("nowhere", None, ConfigError, "nowhere"),
        (7, None, ConfigError, "model=7 must be"),
        ({"lm_head.weight": 3}, None, ConfigError, "tensors by name"),
        ({"lm_head.weight": torch.empty(3, device="meta")}, None, ConfigError, "lm_head.weight' is on the meta device"),
        (narrow, None, CheckpointError, r"lm_head.weight is \[10, 64\], not \[224, 64\]"),
        (trained(target), renamed, CheckpointError, r"lacks 2 of the 21 tensors .*q_proj.* and has others .*query"),
        (trained(target, seed=1), other, ConfigError, "draft=.* must have the sizes"),
    ]
    for model, new_draft, error, sentence in refused:
        with pytest.raises(error, match=sentence):
            pair.update(model, new_draft)
    assert [found[:2] for found in texts(pair)] == [found[:2] for found in before]


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "layers"])
def test_names_that_torch_s_wrappers_add_to_are_read(tmp_path: Path, wrapped: str) -> None:
    target, draft = save_pair(tmp_path, "llama")
    pair, plain = load(target, draft, dtype="fp32"), load_file(trained(target, seed=3) / "model.safetensors")
    if wrapped == "layers":  # each compiled by itself
        named = {re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name): values for name, values in plain.items()}
    else:
        named = {wrapped.format(name): values for name, values in plain.items()}
    pair.update(plain)
    expected = texts(pair)
    pair.update(trained(target, seed=4))
    assert texts(pair) != expected
    pair.update(named)
    assert texts(pair) == expected


def test_an_update_without_weights_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^an update needs new weights: give model=, draft= or both$"):
        load("tiny-draft").update()
