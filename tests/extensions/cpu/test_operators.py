"""An operator that this machine cannot have, or that is wrong here, is not used, and one sentence says so."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.cpu import attention, draw, layer, linear, operators
from llama_ssp.extensions.cpu.code.kinds import IN_FP16
from llama_ssp.kernels.parts import SINGLES
from llama_ssp.speculate.sampling import processors
from llama_ssp.storage.formats import format_of
from tests.extensions.cpu.test_layer import logits, runner


@pytest.fixture(autouse=True)
def _nothing_is_chosen_yet() -> Iterator[None]:
    """Operators that are looked for again, in the test and after it."""
    forget()
    yield
    forget()


def forget() -> None:
    for found in (linear.product_of, attention.find_attention, layer._operator_of, draw.find_draw):
        found.cache_clear()
    processors.made.cache_clear()
    operators._say_what_is_missing.cache_clear()


@pytest.mark.parametrize("form", ["none", "int8_weight_only"])
def test_without_the_compiler_the_references_give_the_same(
    form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, weights, uniforms = logits(runner(form), 5), torch.ones(2, 100), torch.rand(2, 2, dtype=torch.float64)
    ids = processors.draw(weights, uniforms)
    forget()
    for name in ("compiled", "emit", "linear", "attention", "layer", "draw"):
        monkeypatch.delitem(sys.modules, f"llama_ssp.extensions.cpu.code.{name}", raising=False)
        monkeypatch.delattr(f"llama_ssp.extensions.cpu.code.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with caplog.at_level(logging.WARNING):
        found = logits(runner(form), 5)
        logits(runner(form), 5)
        assert torch.equal(processors.draw(weights, uniforms), ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (sentence,) = [record.message for record in caplog.records]
    assert "pip install llvmlite" in sentence


FINDERS: dict[str, tuple[object, Callable[[], object]]] = {
    "linear": (linear, lambda: linear.product_of(format_of("int8_weight_only").product)),
    "attention": (attention, lambda: attention.find_attention(32)),
    "draw": (draw, draw.find_draw),
    "layer": (layer, lambda: layer._operator_of(IN_FP16, SINGLES, 32, _parts_of_layer())),
}


def _parts_of_layer() -> attention.Attention:
    linear.product_of(IN_FP16)
    found = attention.find_attention(32)
    return found or pytest.skip("this processor has no such layer")


@pytest.mark.parametrize("name", [*FINDERS, "attention, cache", "layer, cache"])
def test_an_operator_that_is_wrong_on_this_machine_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, _, is_in_cache = name.partition(",")
    module, find = FINDERS[name]
    if find() is None:
        pytest.skip("this processor has no such operator")
    forget()

    def found_wrong(*given: object, check: Callable[[operators.Operator], None], **named: object) -> object:
        def off_by_one(operator: operators.Operator) -> operators.Operator:
            def called(*arguments: Any) -> Tensor:
                found = operator(*arguments)
                wrong = found if not is_in_cache else arguments[6][-1] if name == "layer" else arguments[4]
                wrong.add_(1)
                return found

            return called

        return operators.find_operator(*given, check=lambda operator: check(off_by_one(operator)), **named)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "find_operator", found_wrong)
    assert find() is None
    assert "wrong on this CPU" in caplog.text
