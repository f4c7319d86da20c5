"""Holds the compiled draw to the ids of torch's operators.

Shapes: B rows, V vocabulary.
"""

import logging

import pytest
import torch
from torch import Tensor

from llama_ssp.models.native.compiled import has_features
from llama_ssp.models.native.draw import Draw, find_draw
from llama_ssp.models.native.draw_operator import FEATURES
from llama_ssp.sampling import processors
from llama_ssp.sampling.processors import DRAW_UNITS, draw, draw_units, tokens_of_a_block, use_on_cpus
from tests.helpers.lanes import grid

SIZES = (1, 4, 17, 1000, 4096, 32000)
ALMOST_ONE = 1 - 2.0**-53


@pytest.fixture(autouse=True)
def none_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws by torch's operators until a test says otherwise."""
    monkeypatch.setattr(processors, "_on_cpus", [])


def made() -> Draw:
    if not has_features(FEATURES):
        pytest.skip("this processor has no such draw")
    found = find_draw()
    assert found
    return found


def drawn(weights: Tensor, uniforms: Tensor, *, units: float = DRAW_UNITS) -> Tensor:
    return made()(weights, uniforms, units, tokens_of_a_block(weights.shape[1]))


@grid(vocab_size=SIZES, num_rows=[1, 6], temperature=[0.05, 1.0, 50.0])
def test_ids_are_those_of_torchs_operators(vocab_size: int, num_rows: int, temperature: float) -> None:
    """Rows that peak, and rows that are flat; the last uniforms are the largest and the smallest that there are."""
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(40):
        logits = torch.randn(num_rows, vocab_size, generator=generator) / temperature
        uniforms = torch.rand(num_rows, 2, generator=generator, dtype=torch.float64)
        uniforms[-1] = torch.tensor([[0.0, ALMOST_ONE], [ALMOST_ONE, 0.0], [ALMOST_ONE, ALMOST_ONE]])[
            int(torch.randint(3, (), generator=generator))
        ]
        weights = logits.softmax(-1)
        assert torch.equal(drawn(weights, uniforms), draw(weights, uniforms))
        assert torch.equal(
            drawn(weights * DRAW_UNITS, uniforms, units=1.0),
            draw_units(weights * DRAW_UNITS, uniforms, vocab_size=vocab_size),
        )


def test_a_weight_of_zero_is_never_drawn() -> None:
    weights = torch.zeros(1, 300)
    weights[0, [37, 288]] = torch.tensor([0.25, 0.75])
    found = [int(drawn(weights, torch.tensor([[u, v]], dtype=torch.float64)))
             for u in (0.0, 0.2, 0.3, ALMOST_ONE) for v in (0.0, ALMOST_ONE)]  # fmt: skip
    assert found == [37] * 4 + [288] * 4


def test_weights_that_are_no_numbers_give_an_id() -> None:
    weights = torch.full((3, 1000), float("nan"))
    weights[1], weights[2] = float("inf"), float("-inf")
    ids = drawn(weights, torch.full((3, 2), ALMOST_ONE, dtype=torch.float64))
    assert bool(((ids >= 0) & (ids < 1000)).all())


def test_draws_take_it_once_it_is_used() -> None:
    calls = []

    def counted(*given: object) -> Tensor:
        calls.append(given)
        return made()(*given)  # type: ignore[arg-type]  # as the operator takes them

    use_on_cpus(counted)
    calls.clear()
    weights, uniforms = torch.randn(2, 3, 100).softmax(-1)[:, 1], torch.rand(2, 5, dtype=torch.float64)[:, 1:3]
    found = draw(weights, uniforms), draw_units(weights * DRAW_UNITS, uniforms, vocab_size=100)
    assert len(calls) == 2
    processors._on_cpus.clear()
    assert torch.equal(found[0], draw(weights, uniforms))
    assert torch.equal(found[1], found[0])
    draw(weights.double(), uniforms)
    assert len(calls) == 2


def test_a_draw_that_is_wrong_on_this_machine_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        use_on_cpus(lambda *given: made()(*given).add_(1))
    assert not processors._on_cpus
    assert "wrong on this CPU" in caplog.text
