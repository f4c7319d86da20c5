"""How tokens of a chunk that depend on each other are solved in rounds on a GPU."""

import pytest
import torch

from llama_ssp.kernels import recurrence


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 17, 64])
def test_what_a_captured_round_solves_token_by_token_is_the_solution(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    lower, values = (torch.randn(2, 3, num_tokens, width, dtype=torch.float64) for width in (num_tokens, 4))
    wanted = torch.linalg.solve_triangular(lower, values, upper=False, unitriangular=True)
    monkeypatch.setattr(torch.linalg, "solve_triangular", None)
    torch.testing.assert_close(recurrence._substituted(lower, values), wanted)
