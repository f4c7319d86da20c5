"""A target that drafts for itself: its law at every step of every round, its texts, its bytes, and what is refused.

Shapes: K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from llama_ssp import load, plan
from llama_ssp.architectures.engine import whole_steps
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.self_drafts.drafter import SelfDrafter
from llama_ssp.extensions.self_drafts.records import SelfConfig, chosen_layers
from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.cache import StaticCache
from llama_ssp.models.graph_inputs import find_parts
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import NullRunner, masks_of
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.stages import ModelStage
from llama_ssp.settings.drafters import drafters
from llama_ssp.speculate.engine.batch_space import BatchSpace
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.composed import check_refused
from tests.helpers.decoders import (
    ScriptedLength,
    change_runs,
    complete,
    ids_of,
    make_decoder,
    parts_of,
    requests_of,
    tree_of,
)
from tests.helpers.lanes import first, heavy, pairs
from tests.helpers.models import SIZES, build_checkpoint, load_lean
from tests.helpers.recorded import FakeRecorder
from tests.helpers.varlen_attention import varlen_operator

TEMPERATURE, NUM_DRAFTED = 0.8, 3
PROMPTS = ((5, 90, 17, 4, 25), (31,), tuple(range(40, 70)))
WAYS: dict[str, dict[str, Any]] = {
    "window": {"window": 8, "sinks": 2},
    "window, no sinks": {"window": 4, "sinks": 0},
    "first layers": {"layers": 2},
    "some layers": {"layers": [0, 2, 3]},
    "both": {"window": 6, "sinks": 1, "layers": [1, 2]},
    "a copy in 8 bits": {"quantization": "int8_weight_only"},
    "a copy of some layers, window": {"quantization": "int8_weight_only", "layers": [0, 2], "window": 8, "sinks": 2},
}
Seen = list[tuple[list[int], Tensor, Tensor]]
"""Texts, and what was drafted behind them: tokens and their law."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("self")
    build_checkpoint(folder, "llama", num_hidden_layers=4, num_key_value_heads=4)
    return folder


FOLDERS: dict[LeanRunner, Path] = {}
"""The files of each target."""


@pytest.fixture(scope="module")
def target(folder: Path) -> LeanRunner:
    target = load_lean(folder, dtype=torch.float32)
    FOLDERS[target] = folder
    return target


@pytest.fixture(scope="module")
def library(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def copy_of(target: LeanRunner, draft: SelfConfig) -> Any:
    """The second copy that a draft asks for, as runs load it."""
    copied = drafters()["self"].copies(draft, target.num_layers)
    if not copied:
        return None
    inner = ModelStage(number=1, num_stages=3, layers=range(copied[1]))
    precision = Precision(quantization=copied[0])
    loaded: Any = load_model(Loading(inspect(FOLDERS[target]), stage=inner, precision=precision, dtype=target.dtype))
    assert loaded.embedding is None
    return loaded


def decode(
    target: LeanRunner,
    draft: SelfConfig,
    *,
    num_new: int = 16,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    **how: Any,
) -> list[RowCompletion]:
    """Decode with the target as its own draft; for other arguments see `decoder_of`."""
    return complete(decoder_of(target, draft, **how), requests_of(prompts, num_new))


def decoder_of(
    target: LeanRunner,
    draft: SelfConfig,
    *,
    seen: Seen | None = None,
    tree: str | None = None,
    choices: Sequence[DraftChoice] = (),
    **how: Any,
) -> Decoder:
    """A decoder with the target as its own draft; `seen` takes its drafts, round by round."""
    shape = tree_of(tree)
    num_drafted = shape.num_drafted if shape else NUM_DRAFTED

    def make_drafter(rule: Any) -> Any:
        sizes: Any = {"num_draft_tokens": num_drafted, "vocab_size": target.vocab_size}
        copied = copy_of(target, draft)
        parts = parts_of(target=target, config=draft, rule=rule, tree=tree, prepared=copied, **sizes)
        drafter: Any = SelfDrafter(parts)
        propose = drafter.propose

        def watched(rows: Any, **named: Any) -> Any:
            texts = [ids[:length].tolist() for ids, length in zip(rows.tokens_BS, rows.lengths_B, strict=True)]
            found = propose(rows, **named)
            assert seen is not None
            seen.extend(zip(texts, found.ids_BK.clone(), found.drawn_law.clone(), strict=True))
            return found

        if seen is not None:
            drafter.propose = watched
        return drafter

    given = {"temperature": TEMPERATURE, "replay": seen is None, "batch_size": 2} | how
    decoder = make_decoder(target, None, make_drafter=make_drafter, tree=tree, num_draft_tokens=num_drafted, **given)
    change_runs(decoder, reuses=True)
    if choices:
        decoder.length = ScriptedLength(choices)
    return decoder


def in_8_bits(layers: Any) -> Any:
    """The layers with weights that are rounded to 8 bits, row by row."""
    layers = deepcopy(layers)
    for module in layers.modules():
        if isinstance(module, torch.nn.Linear):
            steps_O1 = module.weight.abs().amax(1, keepdim=True) / 127
            module.weight.data = (module.weight / steps_O1).round() * steps_O1
    return layers


@torch.inference_mode()
def logits_after(library: Any, draft: SelfConfig, text: list[int], drafted: list[int]) -> Tensor:
    """The logits of transformers' model over what is left of the cache that the whole model has made of the text."""
    cache, num_read, layers = DynamicCache(), len(text) - 1, library.model.layers
    library(torch.tensor([text[:-1]]), past_key_values=cache)
    kept = [*range(num_read)]
    if draft.window is not None and num_read > draft.window + draft.sinks:
        kept = [*kept[: draft.sinks], *kept[-draft.window :]]
    for each in cache.layers:
        layer: Any = each
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    ids = torch.tensor([[text[-1], *drafted]])
    number = ids.shape[1]
    mask = torch.cat([torch.ones(number, len(kept)), torch.ones(number, number).tril()], 1).log()[None, None]
    chosen = chosen_layers(draft, len(layers))
    try:
        used = in_8_bits(layers) if draft.quantization else layers
        library.model.layers = torch.nn.ModuleList([used[place] for place in chosen])
        library.config.num_hidden_layers = len(chosen)
        found = library(
            ids,
            position_ids=torch.arange(num_read, num_read + number)[None],
            past_key_values=cache,
            attention_mask=mask,
        )
    finally:
        library.model.layers, library.config.num_hidden_layers = layers, len(layers)
    logits_V: Tensor = found.logits[0, -1].double()
    return logits_V


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "tree"), [*((name, None) for name in WAYS), ("both", "2x2x1"), heavy("first layers", "2x1")]
)
def test_every_draft_has_the_law_of_the_layers_over_what_they_see(
    name: str,
    tree: str | None,
    target: LeanRunner,
    library: Any,
) -> None:
    """After rounds of any outcome and rounds without drafts, in rows shorter and longer than the window."""
    draft, seen = SelfConfig(kind="self", **WAYS[name]), Seen()
    pauses = [DraftChoice(0, 0), DraftChoice(0, 0), DraftChoice(NUM_DRAFTED, 0)] if tree is None else []
    decode(target, draft, seen=seen, tree=tree, choices=pauses)
    number, shape = 0, tree_of(tree)
    for text, ids_K, law_TV in seen:
        if text == [0, 0]:  # a vacant row
            continue
        for step in range(shape.num_parents if shape else NUM_DRAFTED):
            path = [
                node - 1 for node in range(1, step + 1) if shape is None or shape.topology.ancestors_BTT[0][step, node]
            ]
            wanted_V = (logits_after(library, draft, text, ids_K[path].tolist()) / TEMPERATURE).softmax(-1)
            torch.testing.assert_close(law_TV[step].double(), wanted_V, atol=2e-5, rtol=1e-3)
            number += 1
    assert number > 20


@pytest.mark.seconds
@pairs(
    name=[*WAYS],
    rule_name=["speculative", "coupled"],
    tree=[None, "2x2x1"],
    replay=[True, FakeRecorder()],
    where=lambda rule_name, tree, **_: tree is None or rule_name == "speculative",
)
def test_greedy_and_coupled_texts_are_those_of_plain_decoding(
    name: str,
    rule_name: str,
    tree: str | None,
    replay: Any,
    target: LeanRunner,
) -> None:
    temperature = 0.9 if rule_name == "coupled" else 0.0
    how: dict[str, Any] = {"temperature": temperature, "rule_name": rule_name, "batch_size": 2}
    plain = complete(make_decoder(target, None, **how), requests_of(PROMPTS, 24))
    draft = SelfConfig(kind="self", **WAYS[name])
    assert ids_of(decode(target, draft, tree=tree, num_new=24, replay=replay, **how)) == ids_of(plain)


@pytest.mark.parametrize("name", WAYS)
def test_a_draft_along_a_finished_text_leaves_the_cache_of_the_target(name: str, target: LeanRunner) -> None:
    draft = drafters()["self"].alone(SelfConfig(kind="self", **WAYS[name]))
    parts = parts_of(target=target, config=draft, vocab_size=target.vocab_size, prepared=copy_of(target, draft))
    drafter = SelfDrafter(parts)
    target.allocate(batch_size=2, capacity=40)
    drafter.allocate(batch_size=2, num_slots=40)
    text_BT, positions_BT = torch.arange(40).repeat(2, 1), torch.arange(20).repeat(2, 1)
    with torch.inference_mode():
        target.forward(text_BT[:, :20], positions_BT, bucket=40)
        before = target.cache.slots(torch.arange(40).repeat(2, 1), range(4))
        lengths_B = torch.tensor([20, 12])
        rows = Rows(text_BT, lengths_B, lengths_B, lengths_B)
        drafter.propose(rows, num_tokens=NUM_DRAFTED, uniforms_BKP=torch.full((2, NUM_DRAFTED, 2), 0.5), bucket=40)
        after = target.cache.slots(torch.arange(40).repeat(2, 1), range(4))
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("draft", [SelfConfig(kind="self", window=640), SelfConfig(kind="self", layers=4)])
def test_a_draft_that_sees_and_computes_all_is_accepted_whole(draft: SelfConfig, target: LeanRunner) -> None:
    done = decode(target, draft, temperature=0.0)
    assert all(number == NUM_DRAFTED for one in done for number in one.accepted_lengths[:-1])


@pytest.mark.parametrize("name", first(["window", "both", "first layers"]))
def test_the_small_cache_has_the_slots_that_a_plan_counts(name: str, folder: Path) -> None:
    draft = SelfConfig(kind="self", **WAYS[name])
    target = load_lean(folder, dtype=torch.float32)
    drafter = SelfDrafter(parts_of(target=target, config=draft, vocab_size=target.vocab_size))
    target.allocate(batch_size=3, capacity=40)
    drafter.allocate(batch_size=3, num_slots=40)
    own = [cache for cache in find_parts(drafter, StaticCache, seen=set()) if cache is not target.cache]
    held = sum(whole.nbytes for cache in own for whole in cache.in_rows())
    slots, layers = (draft.window or 0) + draft.sinks if draft.window else 0, len(chosen_layers(draft, 4))
    value_bytes = 4 * 2 * 4 * (SIZES["hidden_size"] // SIZES["num_attention_heads"])
    assert held == (3 * whole_steps(slots + NUM_DRAFTED + 1) * layers * value_bytes if slots else 0)


@pytest.mark.seconds
@pytest.mark.parametrize("name", first(["window", "both"]))
def test_a_window_that_is_read_by_lengths_has_the_drafts_of_one_that_is_read_by_masks(name: str, folder: Path) -> None:
    """Steps of one token a row need no mask; a larger batch takes another small cache."""
    draft, texts = SelfConfig(kind="self", **WAYS[name]), list[list[Seen]]()
    for varlen in (varlen_operator, None):
        target, seen = load_lean(folder, dtype=torch.float32, varlen=varlen, kernel=PlainLinear), [Seen(), Seen()]
        with patch("llama_ssp.models.llama.decoder.masks_of", wraps=masks_of) as masks:
            for batch_size, of_batch in zip((2, 3), seen, strict=True):
                decode(target, draft, seen=of_batch, batch_size=batch_size)
        assert masks.called is (varlen is None)
        texts.append(seen)
    for by_length, by_mask in zip(*texts, strict=True):
        for (text, ids_K, law_KV), (wanted, wanted_K, wanted_KV) in zip(by_length, by_mask, strict=True):
            assert (text, ids_K.tolist()) == (wanted, wanted_K.tolist())
            torch.testing.assert_close(law_KV, wanted_KV)


@pytest.mark.seconds
@pytest.mark.parametrize("name", first(["a copy of some layers, window", "first layers", "window"]))
def test_texts_go_on_from_spare_rows_and_in_later_runs_as_in_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chats take turns in one row; and prompts that another decoder completes have the same texts."""
    monkeypatch.setattr("llama_ssp.speculate.engine.held.LEAST_TOKENS", 1)
    build_checkpoint(tmp_path, "llama", num_hidden_layers=4, head_dim=16, vocab_size=224)  # of whole blocks
    target = load_lean(tmp_path, dtype=torch.float32)
    FOLDERS[target] = tmp_path
    draft, chats, reused = SelfConfig(kind="self", **WAYS[name]), list[list[tuple[int, ...]]](), list[int]()
    for num_spare in (2, 0):
        decoder, texts = decoder_of(target, draft, batch_size=1), [*PROMPTS[::2]]
        decoder.space = BatchSpace(
            decoder.round, decoder.executor, batch_size=1, reuse=replace(decoder.space._reuse, num_spare=num_spare)
        )
        for turn in ((3, 1), (7, 7, 2)):
            for number, text in enumerate(texts):
                [done] = complete(decoder, requests_of([(*text, *turn)], 6))
                texts[number] = (*done.request.prompt_ids, *done.token_ids)
        reused.append(done.num_reused_tokens)
        chats.append(texts)
    assert reused[0] > len(PROMPTS[2]) > reused[1]
    assert chats[0] == chats[1]
    together = ids_of(decode(target, draft))
    assert [ids_of(decode(target, draft, prompts=[prompt]))[0] for prompt in PROMPTS] == together


@pytest.mark.seconds
@pytest.mark.parametrize("draft", first([{"window": 16, "sinks": 2}, {"layers": 8}]))
def test_the_library_drafts_with_the_target_as_a_run_does(draft: dict[str, Any]) -> None:
    plain, drafts = load("tiny"), load("tiny", {"kind": "self", **draft})
    assert repr(drafts).startswith("Pair(tiny, draft self, on cpu")
    texts = [pair.generate("import os\n", max_new_tokens=12, temperature=0)[0] for pair in (plain, drafts)]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].draft_lengths
    planned = plan("7B", {"kind": "self", "window": 512}, hardware="h100", prompt_tokens=1000)
    assert planned.ranks[0].draft_cache_bytes > 0


BAD_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "nothing cheaper": ("self", "gains nothing: give layers=, window= or quantization= of fewer bits"),
    "out of range": ({"kind": "self", "layers": 11}, "^layers=11 is out of range: the target has 10 layers"),
    "a text": ({"kind": "self", "window": "wide"}, "^window='wide' must be a whole number or None"),
    "below one": ({"kind": "self", "window": 0}, "^window=0 must be at least 1 token"),
    "another name": ({"kind": "self", "windows": 3}, "unknown setting of the draft 'windows': .*did you mean window"),
    "no kind": ({"window": 3}, "must have either a kind, as .* or a model, as"),
    "another kind": ({"kind": "selves"}, "unknown draft 'selves': .*did you mean self"),
    "of no window": ({"kind": "self", "layers": 2, "sinks": 3}, "sinks has no effect without window"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_of_the_library_that_cannot_be_are_one_sentence(name: str) -> None:
    given, sentence = BAD_ARGUMENTS[name]
    with pytest.raises(ConfigError, match=sentence):
        load("tiny", given).generate("import", max_new_tokens=2)


def test_a_rank_without_the_target_is_refused() -> None:
    nothing = NullRunner(device=torch.device("cpu"), vocab_size=8, max_position_embeddings=8)
    with pytest.raises(ConfigError, match="every rank to hold a part of the target"):
        SelfDrafter(parts_of(target=nothing, config=SelfConfig(kind="self", layers=1)))


BAD = {
    "": "give draft.layers=, draft.window= or draft.quantization= of fewer bits",
    "draft.quantization=none": "with draft.quantization=none, which gains nothing",
    "draft.quantization=int7": "unknown draft.quantization 'int7'",
    "draft.layers=11": "draft.layers=11 is out of range: the target has 10 layers",
    "draft.layers=0": "draft.layers=0 is out of range",
    "draft.layers=[0,10]": "a rising list of numbers from 0 to 9",
    "draft.layers=[2,1]": "a rising list",
    "draft.layers=many": "neither a number of layers nor a rising list",
    "draft.layers=true": "neither a number of layers nor a rising list",
    "draft.window=4": "draft.window=4 is less than K + 1, here 5: give a wider window",
    "draft.window=0 speculation.num_draft_tokens=1": "draft.window=0 must be at least 1 token",
    "draft.window=9 draft.sinks=-1": "draft.sinks=-1 must be at least 0",
    "draft.layers=2 draft.sinks=3": "draft.sinks has no effect without draft.window",
    "draft.layers=2 speculation.overlap=true": "overlap",
    "draft.window=9 speculation.tree=wide": "'wide' is not the shape of a tree",
    "draft.layers=2 task=acceptance task.store=true": "keeps no pair of draft=self",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_draft_of_its_own_that_cannot_be_is_one_sentence(words: str, sentence: str) -> None:
    check_refused(f"task=generate draft=self {words}", sentence)
