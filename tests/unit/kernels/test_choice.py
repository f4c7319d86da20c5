"""An operator that this machine cannot have, or that is wrong here, is not used, and one sentence says so."""

import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from llama_ssp.kernels import attention, choice, layer, linear
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.ranks.comms import Comm
from tests.helpers.models import tiny_model


@pytest.fixture(autouse=True)
def _nothing_is_chosen_yet() -> Iterator[None]:
    """Operators that are looked for again, in the test and after it."""
    forget()
    yield
    forget()


def forget() -> None:
    for found in (linear.product_of, attention.find_attention, layer._operator_of):
        found.cache_clear()


def logits(precision: Precision) -> Tensor:
    """Of a model whose linear layers all have compiled products."""
    model = tiny_model("llama", head_dim=16, hidden_size=128, intermediate_size=256, vocab_size=208)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    runner = LeanRunner(model, comm=Comm.single(), precision=precision)
    runner.allocate(batch_size=1, capacity=40)
    return runner.forward(torch.arange(9)[None], torch.arange(9)[None], bucket=32)


@pytest.mark.parametrize("precision", [UNQUANTIZED, Precision(quantization="int8_weight_only")])
def test_without_the_compiler_the_references_give_the_same(
    precision: Precision, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = logits(precision)
    forget()
    for name in ("compiled", "emit", "linear_cpu", "attention_cpu", "layer_cpu"):
        monkeypatch.delitem(sys.modules, f"llama_ssp.kernels.{name}", raising=False)
        monkeypatch.delattr(f"llama_ssp.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with caplog.at_level(logging.WARNING):
        found = logits(precision)
        logits(precision)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    sentences = [record.message for record in caplog.records]
    kinds = {"halves", "bytes"} if precision.kernel else {"halves"}
    assert sorted(message.partition(",")[0] for message in sentences) == [
        "continuing without compiled attention",
        *["continuing without compiled kernels for quantized weights"] * len(kinds),
    ]
    assert all("llvmlite" in message for message in sentences)


FINDERS: dict[str, tuple[object, Callable[[], object]]] = {
    "linear": (linear, lambda: linear.product_of("bytes")),
    "attention": (attention, lambda: attention.find_attention(torch.device("cpu"), torch.float32, 32)),
    "layer": (layer, lambda: layer._operator_of("halves", 32, _attention())),
}


def _attention() -> attention.Attention:
    found = attention.find_attention(torch.device("cpu"), torch.float32, 32)
    return found or pytest.skip("this processor has no such layer")


@pytest.mark.parametrize(
    ("name", "is_in_cache"), [("linear", False), ("attention", False), ("attention", True), ("layer", False),
                              ("layer", True)],
)  # fmt: skip
def test_an_operator_that_is_wrong_on_this_machine_is_not_used(
    name: str, is_in_cache: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, find = FINDERS[name]
    assert find() is not None
    forget()
    if name == "layer":
        _attention()
        linear.product_of("halves")

    def found_wrong(*given: object, check: Callable[[choice.Operator], None], **named: object) -> object:
        def wrong(operator: choice.Operator) -> choice.Operator:
            def called(*arguments: Tensor) -> Tensor:
                found = operator(*arguments)
                (arguments[4] if is_in_cache else found).mul_(1.1)
                return found

            return called

        return choice.find_operator(*given, check=lambda operator: check(wrong(operator)), **named)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "find_operator", found_wrong)
    assert find() is None
    assert "wrong on this CPU" in caplog.text
