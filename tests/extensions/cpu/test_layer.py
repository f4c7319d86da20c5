"""Holds a layer in one operator to the bits of an operator for each of its parts, and all operators to one thread's."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.code.kinds import ATTENTION_NEEDS
from llama_ssp.extensions.cpu.layer import CompiledLayers
from llama_ssp.extensions.cpu.linear import find_block
from llama_ssp.models.cache import Taps
from llama_ssp.models.llama import layer as layers
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.layer import join
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.storage.formats import CACHES, formats
from tests.extensions.cpu.test_attention import case
from tests.extensions.cpu.test_linear import COMPILED, native, numbers
from tests.helpers.lanes import pairs
from tests.helpers.models import load_lean, tiny_model

FORMS = ("none", "fp32", *(form.name for form in formats().values() if form.compiled and not form.is_stored_alone))
VOCABULARY = 208
BEHIND = 150
"""More tokens than go through whole layers."""


def runner(form: str = "none", cache_dtype: str = "auto", **sizes: int) -> LeanRunner:
    """A model whose linear layers all have compiled products."""
    if not has_features(ATTENTION_NEEDS):
        pytest.skip("this processor has no such layer")
    if (stored := formats().get(form)) and stored.compiled and not find_block(stored):
        pytest.skip("this processor has no such product")
    sizes = {"head_dim": 16, "hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCABULARY} | sizes
    model = tiny_model("llama", **sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float() if form != "fp32" else parameter.data
    kernel = None if form in {"none", "fp32"} else Precision(quantization=form).kernel
    return load_lean(model, kernel=kernel, precision=Precision(cache_dtype=cache_dtype))


def logits(model: LeanRunner, num_tokens: int, *, batch_size: int = 1, taps: tuple[int, ...] = ()) -> Tensor:
    """Of some tokens behind others."""
    kept = Taps(taps, width=128, dtype=torch.float32, device=model.device) if taps else None
    if kept:
        kept.allocate(batch_size=batch_size, num_slots=BEHIND + num_tokens)
    model.allocate(batch_size=batch_size, capacity=BEHIND + num_tokens)
    ids = torch.randint(0, VOCABULARY, (batch_size, BEHIND + num_tokens), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(BEHIND + num_tokens).expand(batch_size, -1).contiguous()
    model.forward(ids[:, :BEHIND], positions[:, :BEHIND], bucket=BEHIND + num_tokens, taps=kept)
    return model.forward(ids[:, BEHIND:], positions[:, BEHIND:], bucket=BEHIND + num_tokens, taps=kept)


def join_layers(model: LeanRunner) -> None:
    """Join the layers that a model has now."""
    assert model._compiled
    join(model._layers, model._compiled.whole_layers([layer.parts for layer in model._layers], model._windows))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the calls of whole layers."""
    found: list[int] = []
    call = CompiledLayers.__call__

    def counted(layer: CompiledLayers, x: Tensor, *given: object, **named: object) -> Tensor:
        found.append(len(x))
        return call(layer, x, *given, **named)  # type: ignore[arg-type]  # as the method takes them

    monkeypatch.setattr(CompiledLayers, "__call__", counted)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_in_one_operator_has_the_bits_of_its_parts(
    form: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runner(form)
    for batch_size, num_tokens in ((1, 1), (3, 2), (1, 5), (3, 5), (1, 17), (3, 9)):
        calls.clear()  # some check operators
        found = logits(model, num_tokens, batch_size=batch_size)
        assert calls == [batch_size * num_tokens]
        with monkeypatch.context() as patch:
            patch.setattr(layers, "WHOLE_LAYER_TOKENS", 0)
            assert torch.equal(logits(model, num_tokens, batch_size=batch_size), found)
        assert len(calls) == 1


def test_layers_are_as_many_calls_as_their_windows_and_taps_ask_for(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runner(num_hidden_layers=6)
    model._windows = (None, None, None, 40, 40, None)
    join_layers(model)
    tapped, taps = (0, 2, 4), []
    monkeypatch.setattr(Taps, "write", lambda _, layer, x, __: taps.append((layer, x.clone())))
    for number, wanted in (((), 3), (tapped, 5)):
        calls.clear()
        found = logits(model, 2, taps=number)
        assert len(calls) == wanted  # 0 1 2 | 3 4 | 5, and 0 1 | 2 | 3 | 4 | 5
        found_taps, taps[:] = [*taps], []
        with monkeypatch.context() as patch:
            patch.setattr(layers, "WHOLE_LAYER_TOKENS", 0)
            assert torch.equal(logits(model, 2, taps=number), found)
        assert [layer for layer, _ in taps] == [*number] * 2
        assert all(map(torch.equal, (x for _, x in taps), (x for _, x in found_taps)))
        taps.clear()


def test_layers_of_other_sizes_or_formats_are_not_one_call(calls: list[int]) -> None:
    model, other = runner(num_hidden_layers=5), runner("int8_weight_only", num_hidden_layers=5)
    model._layers[1] = other._layers[1]
    model._layers[4] = runner(num_hidden_layers=5, intermediate_size=512)._layers[4]
    join_layers(model)
    calls.clear()  # some check operators
    logits(model, 1)
    assert len(calls) == 4  # 0 | 1 | 2 3 | 4


@pairs(batch_size=[1, 3], capacity=[300, 900], bucket=[256, 300], cache_dtype=[*CACHES.all()])
def test_verifying_gives_the_logits_of_single_steps_whatever_the_cache(
    batch_size: int, capacity: int, bucket: int, cache_dtype: str
) -> None:
    ids = torch.randint(0, 208, (1, 206), generator=torch.Generator().manual_seed(0))
    alone, model = (runner(cache_dtype=cache_dtype) for _ in range(2))
    alone.allocate(batch_size=1, capacity=220)
    model.allocate(batch_size=batch_size, capacity=capacity)
    singles = [alone.forward(ids[:, t : t + 1], torch.tensor([[t]]), bucket=220) for t in range(206)]
    row = torch.tensor([batch_size - 1])
    model.forward(ids[:, :201], torch.arange(201)[None], bucket=bucket, cache_rows_B=row)
    together = model.forward(ids[:, 201:], torch.arange(201, 206)[None], bucket=bucket, cache_rows_B=row)
    assert torch.equal(together, torch.cat(singles[201:], 1))


def call_of(operator: str) -> Callable[[], Tensor]:
    if operator == "attention":
        given, cache, first_slots = case([700, 20], 40)
        return lambda: given.call(cache.clone(), first_slots)
    if operator == "layer":
        return partial(logits, runner(hidden_size=256, intermediate_size=1024), 5)
    return partial(native(operator, numbers(1040, 512)), numbers(5, 512))


@pytest.mark.parametrize("operator", [*COMPILED, "attention", "layer"])
def test_the_number_of_threads_does_not_show(operator: str) -> None:
    """Five threads on fewer cores: some wait for others that have no core."""
    call = call_of(operator)
    wanted, before = call(), torch.get_num_threads()
    try:
        for num_threads in (2, 5):
            torch.set_num_threads(num_threads)
            assert all(torch.equal(call(), wanted) for _ in range(5))
    finally:
        torch.set_num_threads(before)


def test_another_thread_of_python_gets_the_same() -> None:
    model = runner(hidden_size=256, intermediate_size=1024)
    wanted, found = logits(model, 5), []
    worker = threading.Thread(target=lambda: found.append(logits(model, 5)))
    worker.start()
    worker.join()
    assert torch.equal(found[0], wanted)
