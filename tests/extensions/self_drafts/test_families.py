"""Targets on the library's modules that draft for themselves: experts, layers of other kinds, states."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import record_of
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.modules.building import layers_of
from llama_ssp.extensions.self_drafts.drafter import SelfDrafter
from llama_ssp.extensions.self_drafts.records import SelfConfig
from llama_ssp.models import prefill
from llama_ssp.models.loading import is_llama_kind, load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.stages import ModelStage
from llama_ssp.settings.checks import check_values
from llama_ssp.speculate.engine import held, loop
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.composed import compose_run
from tests.helpers.decoders import change_runs, complete, ids_of, make_decoder, parts_of, requests_of
from tests.helpers.lanes import sample
from tests.helpers.models import FAMILIES, build_checkpoint, tiny_config

NUM_LAYERS, NUM_DRAFTED, TEMPERATURE = 4, 3, 0.8
PROMPTS = ((5, 90, 17, 4, 25), (31,), tuple(range(40, 70)))
KINDS = [kind for kind in FAMILIES if not is_llama_kind(tiny_config(kind))]
COPIED = [
    kind for kind in KINDS if (record := record_of(tiny_config(kind).model_type)).has_stages and not record.recurrent
]
Seen = list[tuple[list[int], Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in chunks of 8, between rounds of other rows."""
    for module in (engine, prefill, loop, held):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 8)


def decode(
    target: Any,
    draft: SelfConfig | None,
    seen: Seen | None = None,
    copied: Any = None,
    **how: Any,
) -> list[RowCompletion]:
    def make_drafter(rule: Any) -> Any:
        sizes: Any = {"num_draft_tokens": NUM_DRAFTED, "vocab_size": target.vocab_size, "prepared": copied}
        drafter: Any = SelfDrafter(parts_of(target=target, config=draft, rule=rule, **sizes))
        propose = drafter.propose

        def watched(rows: Rows, **named: Any) -> Any:
            texts = [ids[:length].tolist() for ids, length in zip(rows.tokens_BS, rows.lengths_B, strict=True)]
            go_on_B = rows.lengths_B < rows.limits_B
            found = propose(rows, **named)
            if seen is not None:
                drafts = zip(texts, found.ids_BK.clone(), found.drawn_law.clone(), strict=True)
                seen.extend(each for each, goes_on in zip(drafts, go_on_B.tolist(), strict=True) if goes_on)
            return found

        drafter.propose = watched
        return drafter

    decoder = make_decoder(
        target,
        None,
        make_drafter=make_drafter if draft else None,
        num_draft_tokens=NUM_DRAFTED,
        replay=False,
        batch_size=2,
        **how,
    )
    change_runs(decoder, reuses=True)
    return complete(decoder, requests_of(PROMPTS, 12))


def pass_over(_layer: Any, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
    before = args[0] if args else options["hidden_states"]
    return (before, *output[1:]) if isinstance(output, tuple) else before


@torch.inference_mode()
def check_law(library: Any, seen: Seen, num_layers: int) -> None:
    """Of the first layers: what these keep of a text does not depend on the others, so a forward has no cache."""
    layers = next(module for module in library.modules() if isinstance(module, torch.nn.ModuleList))
    hooks = [layer.register_forward_hook(pass_over, with_kwargs=True) for layer in layers[num_layers:]]
    for text, ids_K, law_TV in seen:
        logits_TV = library(torch.tensor([[*text, *ids_K[:-1].tolist()]]), use_cache=False).logits[0].double()
        wanted_TV = (logits_TV[len(text) - 1 :] / TEMPERATURE).softmax(-1)
        torch.testing.assert_close(law_TV[:NUM_DRAFTED].double(), wanted_TV, atol=1e-4, rtol=3e-3)
    for hook in hooks:
        hook.remove()


@pytest.mark.seconds
@pytest.mark.parametrize("kind", sample(KINDS, always={"lfm2", "mixtral"}))
def test_layers_of_any_family_draft_with_their_own_law(kind: str, tmp_path: Path) -> None:
    library = build_checkpoint(tmp_path, kind, num_hidden_layers=NUM_LAYERS)
    target: Any = load_model(Loading(inspect(tmp_path)))
    seen = Seen()
    decode(target, SelfConfig(kind="self", layers=NUM_LAYERS - 1), seen, temperature=TEMPERATURE)
    assert len(seen) > 5
    check_law(library, seen[::3], NUM_LAYERS - 1)
    greedy = partial(decode, target, temperature=0.0)
    plain = ids_of(greedy(None))
    ways: list[dict[str, Any]] = [{"layers": [0, 2]}, {"layers": NUM_LAYERS}]
    ways += [] if target.is_recurrent else [{"window": 8, "sinks": 2}, {"window": 640}]
    for way in ways:
        done = greedy(SelfConfig(kind="self", **way))
        assert ids_of(done) == plain
        if way in ({"layers": NUM_LAYERS}, {"window": 640}):
            assert all(number == NUM_DRAFTED for one in done for number in one.accepted_lengths[:-1]), way


@torch.inference_mode()
def check_law_of_copy(library: Any, other: Any, seen: Seen) -> None:
    """Of the other model's layers over what the library's have kept of a text."""
    (name, own), (_, others) = layers_of(library), layers_of(other)
    for text, ids_K, law_TV in seen:
        cache = DynamicCache(config=library.config)
        library(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
        library.set_submodule(name, others)
        read_T = torch.tensor([[text[-1], *ids_K[:-1].tolist()]])
        logits_TV = library(read_T, past_key_values=cache, use_cache=True).logits[0].double()
        library.set_submodule(name, own)
        wanted_TV = (logits_TV / TEMPERATURE).softmax(-1)
        torch.testing.assert_close(law_TV[:NUM_DRAFTED].double(), wanted_TV, atol=1e-4, rtol=3e-3)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", sample(COPIED, always={"mixtral"}))
def test_a_copy_of_the_layers_of_any_family_drafts_over_the_targets_cache(kind: str, tmp_path: Path) -> None:
    """A copy of other weights shows whose they are; one of fewer bits is nearly always right."""
    library, other = (build_checkpoint(tmp_path / name, kind, num_hidden_layers=NUM_LAYERS) for name in "ab")
    for parameter in layers_of(other)[1].parameters():
        parameter.data *= 1.1
    other.save_pretrained(tmp_path / "b")
    target: Any = load_model(Loading(inspect(tmp_path / "a")))
    inner: dict[str, Any] = {"stage": ModelStage(number=1, num_stages=3, layers=range(NUM_LAYERS))}
    copied: Any = load_model(Loading(inspect(tmp_path / "b"), **inner))
    precision = Precision(quantization="int8_weight_only")
    rounded: Any = load_model(Loading(inspect(tmp_path / "a"), precision=precision, **inner))
    draft, seen = SelfConfig(kind="self", quantization="int8_weight_only"), Seen()
    decode(target, draft, seen, copied=copied, temperature=TEMPERATURE)
    seen = [each for each in seen if len(each[0]) > 1]
    assert len(seen) > 5
    check_law_of_copy(library, other, seen[::3])
    plain = ids_of(decode(target, None, temperature=0.0))
    done = decode(target, draft, copied=rounded, temperature=0.0)
    assert ids_of(done) == plain
    lengths = [number for one in done for number in one.accepted_lengths[:-1]]
    assert sum(lengths) > 0.6 * NUM_DRAFTED * len(lengths)
    if kind == "mixtral":
        for way in ({"layers": [0, 2]}, {"layers": NUM_LAYERS - 1, "window": 8, "sinks": 2}):
            found = decode(target, replace(draft, **way), copied=rounded, temperature=0.0)
            assert ids_of(found) == plain, way
        assert len(rounded._counter._chosen) <= NUM_LAYERS, "or a text would fill memory"


@torch.inference_mode()
def test_a_draft_along_a_finished_text_leaves_states_of_the_target(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "lfm2", num_hidden_layers=NUM_LAYERS)
    target: Any = load_model(Loading(inspect(tmp_path)))
    draft = SelfConfig(kind="self", layers=3, restores=True)
    drafter = SelfDrafter(parts_of(target=target, config=draft, vocab_size=target.vocab_size))
    target.allocate(batch_size=2, capacity=40, num_rolled_back=NUM_DRAFTED)
    drafter.allocate(batch_size=2, num_slots=40)
    text_BT = torch.arange(40).repeat(2, 1)
    target.forward(text_BT[:, :20], text_BT[:, :20], bucket=40)
    before = [state.clone() for state in target.state_tensors]
    lengths_B = torch.tensor([20, 20])
    rows = Rows(text_BT, lengths_B, lengths_B, lengths_B)
    drafter.propose(rows, num_tokens=NUM_DRAFTED, uniforms_BKP=torch.full((2, NUM_DRAFTED, 2), 0.5), bucket=40)
    assert before
    assert all(map(torch.equal, before, target.state_tensors))


@pytest.mark.seconds
def test_a_window_of_a_target_with_states_is_one_sentence() -> None:
    config, _ = compose_run("task=generate", "draft=self", "draft.window=64", "model=tiny")
    shape = config.model.shape
    assert shape
    with pytest.raises(ConfigError, match=r"draft.window=64 needs a target that keeps all of a text, .* one state"):
        check_values(config, replace(shape, recurrent="linear_attention"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"recurrent": "conv"}, "keep states"), ({"model_type": "gemma3n_text"}, "read more of earlier layers")],
)
def test_a_copy_of_layers_that_do_not_stand_alone_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    config, _ = compose_run("task=generate", "draft=self", "draft.quantization=int8_weight_only", "model=tiny")
    assert config.model.shape
    config = replace(config, model=replace(config.model, shape=replace(config.model.shape, **change)))
    with pytest.raises(ConfigError, match=rf"copies layers that stand alone, .*{sentence}.*: give draft.layers= alone"):
        check_values(config)
