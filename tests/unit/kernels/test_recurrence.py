"""Both solutions of a chunk's tokens, of which rounds of GPUs have one and all others the other, are equal."""

import pytest
import torch

from llama_ssp.kernels import recurrence


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 17])
def test_what_a_captured_round_solves_by_products_alone_is_the_solution(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    lower, values = (torch.randn(2, 3, num_tokens, width, dtype=torch.float64) for width in (num_tokens, 4))
    wanted = recurrence._solved(lower, values)
    monkeypatch.setattr(torch.linalg, "solve_triangular", None)
    torch.testing.assert_close(recurrence._substituted(lower, values), wanted)
