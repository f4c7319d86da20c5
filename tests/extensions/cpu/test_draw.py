"""Holds the compiled draw to the ids of torch's operators, and draws in fp32 on CPUs to it.

Shapes: B rows, V vocabulary.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.draw import COMPILED_DRAW_NEEDS, find_draw
from llama_ssp.extensions.cpu.operators import Operator
from llama_ssp.extensions.cpu.tracing import Traced
from llama_ssp.speculate.sampling import processors
from llama_ssp.speculate.sampling.processors import DRAW_UNITS, draw
from tests.helpers.lanes import pairs
from tests.helpers.operator_count import OperatorCount

SIZES = (1, 4, 17, 1000, 4096, 32000)
ALMOST_ONE = 1 - 2.0**-53
ONE = {"llama_ssp.draw.default": 1}


def made() -> Operator:
    if not has_features(COMPILED_DRAW_NEEDS):
        pytest.skip("this processor has no such draw")
    found = find_draw()
    assert found
    return found


def drawn(weights: Tensor, uniforms: Tensor, *, units: float = DRAW_UNITS) -> Tensor:
    return made()(weights, uniforms, units, tokens_of_a_block(weights.shape[1]))


def by_torch(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The ids of torch's operators."""
    return processors.draw_units(weights * DRAW_UNITS, uniforms, vocab_size=weights.shape[1])


@pairs(vocab_size=SIZES, num_rows=[1, 6], temperature=[0.05, 1.0, 50.0])
def test_ids_are_those_of_torchs_operators(vocab_size: int, num_rows: int, temperature: float) -> None:
    """Rows that peak, and rows that are flat; the last uniforms are the largest and the smallest that there are."""
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(20):
        logits = torch.randn(num_rows, vocab_size, generator=generator) / temperature
        uniforms = torch.rand(num_rows, 2, generator=generator, dtype=torch.float64)
        uniforms[-1] = torch.tensor([[0.0, ALMOST_ONE], [ALMOST_ONE, 0.0], [ALMOST_ONE, ALMOST_ONE]])[
            int(torch.randint(3, (), generator=generator))
        ]
        weights = logits.softmax(-1)
        wanted = by_torch(weights, uniforms)
        assert torch.equal(drawn(weights, uniforms), wanted)
        assert torch.equal(drawn(weights * DRAW_UNITS, uniforms, units=1.0), wanted)


def test_weights_that_are_no_numbers_give_an_id() -> None:
    weights = torch.full((3, 1000), float("nan"))
    weights[1], weights[2] = float("inf"), float("-inf")
    ids = drawn(weights, torch.full((3, 2), ALMOST_ONE, dtype=torch.float64))
    assert bool(((ids >= 0) & (ids < 1000)).all())


def operators_of(call: Callable[[], object]) -> Counter[str]:
    call()  # the first one finds the operator
    count = OperatorCount()
    with count:
        call()
    return count.counts


@pytest.fixture
def forgotten() -> Iterator[None]:
    """A draw that is looked for again, in the test and after it."""
    forget()
    yield
    forget()


def forget() -> None:
    find_draw.cache_clear()
    processors.made.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_a_trace_holds_the_draw_alone_and_not_its_check() -> None:
    if not has_features(COMPILED_DRAW_NEEDS):
        pytest.skip("this processor has no such draw")
    weights, uniforms = torch.randn(2, 100).softmax(-1), torch.rand(2, 2, dtype=torch.float64)
    traced = Traced[torch.Tensor]()
    for _ in range(3):
        assert torch.equal(traced(draw, 0, weights, uniforms), by_torch(weights, uniforms))
    assert traced.replays[0]
    assert operators_of(lambda: traced(draw, 0, weights, uniforms)) == ONE


@pytest.mark.usefixtures("forgotten")
def test_where_the_processor_lacks_instructions_torchs_operators_draw_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llama_ssp.extensions.cpu.operators.has_features", lambda _needs: False)
    weights, uniforms = torch.randn(2, 100).softmax(-1), torch.rand(2, 2, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        assert "llama_ssp.draw.default" not in operators_of(lambda: draw(weights, uniforms))
    assert torch.equal(draw(weights, uniforms), by_torch(weights, uniforms))
    assert not caplog.records
