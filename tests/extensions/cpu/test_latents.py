"""Holds compiled attention to latents to its reference in fp64, and queries to the same queries alone.

Shapes: B rows, H heads, T positions, S slots, R numbers of a latent, P of a rotary key, D = R + P, W width of a kept
part of a row.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.code.kinds import ATTENTION_NEEDS
from llama_ssp.extensions.cpu.latents import find_latents
from llama_ssp.kernels.latents import LatentAttention, by_torch
from llama_ssp.kernels.parts import SINGLES, KeptRows, rows_of
from llama_ssp.models.cache import Masks
from llama_ssp.storage.formats import CACHES
from tests.helpers.lanes import pairs

FORMATS = {name: rows_of(name, torch.float32) for name in CACHES.all()}
FAR, CROSSING = 700, 126
"""Of tokens behind 126 the first two see one chunk of slots, the others two."""


def made(widths: tuple[int, int], kept: KeptRows = SINGLES) -> LatentAttention:
    if not has_features(ATTENTION_NEEDS):
        pytest.skip("this processor has no such attention")
    found = find_latents(rank=widths[0], rotary=widths[1], kept=kept, dtype=torch.float32)
    assert found
    return found


class Case(NamedTuple):
    """The arguments of a call."""

    queries: Tensor
    latents: Tensor
    rotary: Tensor
    mask: Tensor
    scale: float

    def part(self, rows: slice, heads: slice, positions: slice) -> "Case":
        """The same for some queries."""
        return self._replace(
            queries=self.queries[rows, heads, positions],
            latents=self.latents[rows],
            rotary=self.rotary[rows],
            mask=self.mask[rows, :, positions],
        )


def case(
    starts: list[int],
    number: int,
    *,
    heads: int = 5,
    widths: tuple[int, int] = (32, 16),
    kept: KeptRows = SINGLES,
    way: str = "text",
) -> Case:
    """Random queries behind texts of some lengths, in a cache with room for more."""
    generator = torch.Generator().manual_seed(number)
    num_slots = (max(starts) + number + 10) // 8 * 8
    some = partial(torch.randn, generator=generator)
    packed = [kept.pack(some(len(starts), num_slots, width)) for width in widths]
    latents, rotary = torch.cat(packed, -1).split([part.shape[-1] for part in packed], -1)
    positions = torch.tensor(starts)[:, None] + torch.arange(number)
    window = 40 if way == "window" else None
    mask = Masks((window,), capacity=num_slots, dtype=torch.float32, device=torch.device("cpu")).rows(
        positions, bucket=num_slots
    )[window]
    if way == "tree":  # every other token is of another branch
        own = torch.arange(num_slots) - positions[:, :1, None]
        others = (own > 0) & (own % 2 != torch.arange(number)[:, None] % 2)
        mask = mask.masked_fill(others[:, None], float("-inf"))
    scale = 1e3 if way == "scores far apart" else sum(widths) ** -0.5
    return Case(some(len(starts), heads, number, sum(widths)), latents, rotary, mask, scale)


@pytest.mark.seconds
@pairs(
    name=[*FORMATS],
    widths=[(32, 16), (64, 16), (256, 32)],
    heads=[1, 5, 32],
    starts=[[0], [CROSSING], [300, 4, FAR]],
    number=[1, 5, 40],
    way=["text", "window", "tree", "scores far apart"],
)
def test_it_is_attention_to_latents(  # noqa: PLR0917 - a product
    name: str, widths: tuple[int, int], heads: int, starts: list[int], number: int, way: str
) -> None:
    """Rows are read as their format keeps them."""
    kept = FORMATS[name]
    given = case(starts, number, heads=heads, widths=widths, kept=kept, way=way)
    wanted = by_torch(given.queries.double(), *given[1:3], given.mask.double(), given.scale, kept=kept)
    found = made(widths, kept)(*given)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-3 if "far" in way else 5e-6)


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_a_query_has_the_bits_that_it_has_alone(name: str) -> None:
    """Among other rows, heads and positions, and with more slots behind it."""
    given = case([300, 4, 131], 9, kept=FORMATS[name], heads=7)
    attend = made((32, 16), FORMATS[name])
    whole = attend(*given)
    for row, head, position in ((0, 0, 0), (0, 6, 8), (1, 3, 2), (2, 5, 4)):
        part = slice(row, row + 1), slice(head, head + 1), slice(position, position + 1)
        alone = given.part(*part)
        assert torch.equal(attend(*alone), whole[part])
        shorter = alone._replace(
            latents=alone.latents[:, :320], rotary=alone.rotary[:, :320], mask=alone.mask[..., :320]
        )
        assert torch.equal(attend(*shorter), whole[part])
    some = slice(0, 3), slice(2, 5), slice(1, 6)
    assert torch.equal(attend(*given.part(*some)), whole[some])


def test_what_a_query_does_not_see_has_no_part_in_it_and_what_is_not_finite_shows() -> None:
    given, attend = case([20], 2, widths=(32, 16)), made((32, 16))
    wanted = attend(*given)
    given.latents[:, 22:] = 1e30
    assert torch.equal(attend(*given), wanted)
    given.latents[:, 5] = float("nan")
    assert attend(*given).isnan().all()


def test_models_in_other_numbers_or_of_odd_widths_have_torchs_operators() -> None:
    sizes: dict[str, Any] = {"rank": 32, "rotary": 16, "kept": SINGLES, "dtype": torch.float32}
    for odd in ({"rank": 22}, {"rotary": 6}, {"dtype": torch.float64}, {"kept": KeptRows(torch.float64)}):
        assert find_latents(**sizes | odd) is None
