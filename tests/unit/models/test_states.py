"""States that a row keeps by position: rollback, padding, and the law of a text whose state is rolled back."""

from collections.abc import Sequence
from functools import partial
from math import log
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from llama_ssp.kernels.recurrence import Steps, recur
from llama_ssp.models.states import LayerState, StateCache, StateView
from tests.helpers.rolled_back import LENGTH, Forward, K, V, code, text_law, wanted_law
from tests.helpers.table_models import random_table

CPU = torch.device("cpu")
H, N, P, C, WIDTH = 2, 3, 4, 5, 4


class Inputs(NamedTuple):
    """Inputs of a layer, by token of each row."""

    steps: Steps
    x_BTC: Tensor


def random_inputs(num_rows: int, num_tokens: int, *, with_rates: bool, num_decays: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(num_rows, *shape, generator=generator)

    keys = torch.nn.functional.normalize(some(H, num_tokens, N), dim=-1)
    rates = some(H, num_tokens).sigmoid() if with_rates else None
    steps = Steps(some(H, num_tokens, N), keys, some(H, num_tokens, P), -some(H, num_tokens, num_decays).exp(), rates)
    return Inputs(steps, some(num_tokens, C))


def one_by_one(steps: Steps) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, T, P) and states (B, T, H, N, P) by the definition of `kernels.recurrence`."""
    state, outputs, states = torch.zeros(*steps.keys.shape[:2], N, P), [], []
    for place in range(steps.keys.shape[2]):
        key, value = steps.keys[:, :, place], steps.values[:, :, place]
        state = state * steps.log_decays[:, :, place, :, None].exp()
        if steps.rates is not None:
            value = steps.rates[:, :, place, None] * (value - (state * key[..., None]).sum(-2))
        state = state + key[..., None] * value[..., None, :]
        states.append(state)
        outputs.append((state * steps.queries[:, :, place, :, None]).sum(-2))
    return torch.stack(outputs, 2), torch.stack(states, 1)


@pytest.mark.parametrize(("with_rates", "num_decays"), [(True, 1), (False, 1), (True, N)])
def test_tokens_that_are_taken_in_together_leave_the_states_of_single_ones(with_rates: bool, num_decays: int) -> None:
    steps, _ = random_inputs(3, 150, with_rates=with_rates, num_decays=num_decays)
    outputs, states = one_by_one(steps)
    found, last = recur(torch.zeros(3, H, N, P), steps, keeps_all=False)
    torch.testing.assert_close(found, outputs, rtol=0, atol=1e-4)
    torch.testing.assert_close(last[:, 0], states[:, -1], rtol=0, atol=1e-4)
    found, kept = recur(states[:, 99], steps.part(slice(100, 108)), keeps_all=True)
    torch.testing.assert_close(found, outputs[:, :, 100:108], rtol=0, atol=1e-4)
    torch.testing.assert_close(kept, states[:, 100:108], rtol=0, atol=1e-4)


def chosen(part: Tensor, *, places_BT: Tensor, dim: int) -> Tensor:
    """The numbers at some places of each row along a dimension."""
    shape = [1] * part.dim()
    shape[0], shape[dim] = places_BT.shape
    sizes = [*part.shape]
    sizes[dim] = places_BT.shape[1]
    return part.gather(dim, places_BT.view(shape).expand(sizes))


@pytest.mark.parametrize("with_rates", [True, False])
def test_rows_read_the_state_and_the_window_of_their_position_wherever_a_forward_begins(with_rates: bool) -> None:
    """Ragged rows that are taken back, prompts longer than the ring, tokens that do not count, and rows that rest."""
    num_rows, num_kept, longest = 4, 5, 70
    inputs = random_inputs(num_rows, 2 * longest, with_rates=with_rates)  # the second half stands for padding
    _, states = one_by_one(inputs.steps)
    cache = StateCache(
        [LayerState(3, C, WIDTH, (H, N, P), CPU)], batch_size=num_rows, num_kept=num_kept, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(2)
    lengths, rows_B = torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows)
    for num_tokens in (9, 5, 1, 3, 5, 2, 12, 5, 4, 1):
        taken_B = torch.randint(0, num_tokens + 1, (num_rows,), generator=generator)
        positions_BT = lengths[:, None] + torch.arange(num_tokens)
        is_rubbish_BT = torch.arange(num_tokens) >= taken_B[:, None]
        places_BT = positions_BT + longest * is_rubbish_BT
        steps = inputs.steps.map(partial(chosen, places_BT=places_BT, dim=2))
        view = cache.view(positions_BT, taken_B=taken_B, cache_rows_B=rows_B)
        before = view.state(3)
        x_BTC = view.with_inputs_before(3, chosen(inputs.x_BTC, places_BT=places_BT, dim=1))
        for row, length in enumerate(lengths.tolist()):
            wanted = states[row, length - 1] if length else torch.zeros(H, N, P)
            torch.testing.assert_close(before[row], wanted, rtol=0, atol=1e-5)
            window = torch.cat([torch.zeros(WIDTH, C), inputs.x_BTC[row, :length]])[length + 1 :][: WIDTH - 1]
            torch.testing.assert_close(x_BTC[row, : WIDTH - 1], window, rtol=0, atol=0)
        _, kept = recur(before, steps.masked(view.takes), keeps_all=view.keeps_all)
        view.keep(3, kept)
        # Up to all but the oldest kept state may go; a long forward keeps its last one alone.
        most = (taken_B - 1).clamp(0, num_kept - 1) if view.keeps_all else torch.zeros_like(taken_B)
        lengths = lengths + taken_B - (torch.rand(num_rows, generator=generator) * (most + 1)).long()
    assert lengths.max() > 2 * num_kept


class CountingModel:
    """A model whose state is the number of its prefix in base V, and whose logits also look at the last two tokens."""

    def __init__(self) -> None:
        self.tables = random_table(seed=1, num_tables=1, max_length=LENGTH + K, vocab_size=V).logits
        self.of_newest = torch.randn(V + 1, V + 1, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Those (V) behind a text, by definition."""
        before, newest = [0, 0, *(token + 1 for token in ids)][-2:]
        return self.tables[len(ids)][0, code(ids)] + self.of_newest[before, newest]

    def start(self, num_rows: int) -> Forward:
        """See `rolled_back.RolledBack`."""
        states = [LayerState(0, 1, 2, (1, 1, 1), CPU)]
        return partial(self._forward, StateCache(states, batch_size=num_rows, num_kept=K + 1, dtype=torch.float32))

    def _forward(self, cache: StateCache, ids_BT: Tensor, positions_BT: Tensor, taken_B: Tensor) -> Tensor:
        view = cache.view(positions_BT, taken_B=taken_B, cache_rows_B=None)
        digits_BT = torch.where(positions_BT > 0, ids_BT, 0).float()
        x_BTC = view.with_inputs_before(0, torch.where(positions_BT > 0, digits_BT + 1, 0)[..., None]).long()
        ones_B1T1 = torch.ones(*ids_BT.shape, 1)[:, None]
        steps = Steps(ones_B1T1, ones_B1T1, digits_BT[:, None, :, None], torch.full_like(ones_B1T1, log(V)))
        codes_B1T1, kept = recur(view.state(0), steps.masked(view.takes), keeps_all=view.keeps_all)
        view.keep(0, kept)
        codes_BT = codes_B1T1[:, 0, :, 0].round().long()
        found = [
            torch.stack([self.tables[place][0, number % V**place] for number, place in zip(*row, strict=True)])
            for row in zip(codes_BT.tolist(), positions_BT.tolist(), strict=True)
        ]
        return torch.stack(found) + self.of_newest[x_BTC[:, :-1, 0], x_BTC[:, 1:, 0]]


@pytest.mark.seconds
def test_a_text_whose_states_roll_back_has_the_law_of_its_model() -> None:
    assert (text_law(CountingModel()) - wanted_law(CountingModel())).abs().max() < 1e-12


@pytest.mark.seconds
@pytest.mark.parametrize("fault", ["not rolled back", "one too few", "window forgotten"])
def test_a_lost_rollback_or_window_changes_the_law(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    init = StateView.__init__

    def planted(view: StateView, cache: StateCache, positions_BT: Tensor, *rest: Any) -> None:
        init(view, cache, positions_BT, *rest)
        first_B = torch.arange(len(positions_BT)) * cache.num_kept
        is_before_BW1, *others = view._input_rows
        is_new_B, read_B, written_M = view._state_rows
        if fault == "window forgotten":
            is_before_BW1 = torch.ones_like(is_before_BW1)
        elif fault == "one too few":
            read_B = first_B + positions_BT[:, 0].remainder(cache.num_kept)
        else:  # each row goes on from the last state that it has written
            newest_B = vars(cache).get("newest_B", read_B)
            vars(cache)["newest_B"], read_B = written_M.view(len(first_B), -1)[:, -1], newest_B
        vars(view).update(_input_rows=(is_before_BW1, *others), _state_rows=(is_new_B, read_B, written_M))

    monkeypatch.setattr(StateView, "__init__", planted)
    assert (text_law(CountingModel()) - wanted_law(CountingModel())).abs().max() > 1e-3
