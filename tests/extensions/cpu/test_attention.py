"""Holds compiled attention to its definition in fp64, tokens to the same tokens alone, and kept keys to what they were.

Shapes: B rows, T positions, M = B * T tokens, H query heads, N key-value heads, S slots of a row, D head dim, W width
of a cache's row.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.cpu.attention import ALL, SIGNATURE, Attention, by_torch, find_attention
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.code.kinds import ATTENTION_NEEDS
from llama_ssp.extensions.cpu.operators import find_operator
from llama_ssp.kernels.parts import SINGLES, KeptRows, rows_of
from llama_ssp.speculate.sampling.draft import find_topology
from llama_ssp.storage.formats import CACHES
from tests.helpers.lanes import pairs

HEADS = [(8, 4), (2, 2), (36, 1)]
FAR = 700
FORMATS = {name: rows_of(name, torch.float32) for name in CACHES.all()}


def made(head_dim: int, rows: KeptRows = SINGLES) -> Attention:
    if not has_features(ATTENTION_NEEDS):
        pytest.skip("this processor has no such attention")
    attention = find_attention(head_dim, rows)
    assert attention
    return attention


class Case(NamedTuple):
    """What one call is given, but for the cache."""

    qkv: Tensor
    turns: Tensor
    positions: Tensor
    num_heads: int
    scale: float
    window: int
    rows: KeptRows
    tree: tuple[Tensor, Tensor] | None = None
    """The slots of nodes in their rows, and what they see."""

    def part(self, rows: slice, tokens: slice) -> "Case":
        """The same for some tokens."""
        qkv = self.qkv.view(*self.positions.shape, -1)[rows, tokens].flatten(0, 1)
        return self._replace(qkv=qkv, positions=self.positions[rows, tokens].contiguous())

    def call(self, cache: Tensor, first_slots: Tensor, attend: Attention | None = None) -> Tensor:
        own_slots, sees = self.tree or (self.positions, ALL)
        slots = (first_slots[:, None] + own_slots).flatten()
        where = self.turns, self.positions, slots, cache, own_slots, sees
        attend = attend or made(2 * self.turns.shape[-1], self.rows)
        return attend(self.qkv, *where, self.num_heads, self.scale, self.window)


def case(
    starts: list[int],
    num_tokens: int,
    *,
    heads: tuple[int, int] = (8, 4),
    head_dim: int = 32,
    window: int = 0,
    rows: KeptRows = SINGLES,
) -> tuple[Case, Tensor, Tensor]:
    """Random tokens behind texts of some lengths, a filled cache, and where its rows begin."""
    generator = torch.Generator().manual_seed(len(starts) + num_tokens)
    (num_heads, num_kv), num_slots = heads, max(starts) + num_tokens + 3
    positions = torch.tensor(starts)[:, None] + torch.arange(num_tokens)
    angles = torch.randn(num_slots, 1, head_dim // 2, generator=generator)
    qkv = torch.randn(positions.numel(), (num_heads + 2 * num_kv) * head_dim, generator=generator)
    cache = torch.randn(2 * num_kv, len(starts) * num_slots, head_dim, generator=generator)
    given = Case(qkv, torch.polar(torch.ones_like(angles), angles), positions, num_heads, head_dim**-0.5, window, rows)
    return given, rows.pack(cache), torch.arange(len(starts)) * num_slots


@pytest.mark.parametrize(("name", "head_dim"), [("auto", 48), ("int8", 80), ("fp16", 16)])
def test_the_bits_do_not_depend_on_how_many_registers_a_cpu_has(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and dimensions are cut by the number of registers; any CPU can run both cuts."""
    rows = FORMATS[name]
    made(head_dim, rows)
    monkeypatch.setattr("llama_ssp.extensions.cpu.code.attention.has_features", lambda names: not has_features(names))
    cut_otherwise = find_operator(
        f"attention_cut_otherwise_{rows.kind}_{head_dim}({SIGNATURE}",
        "attention",
        rows.kind,
        head_dim,
        entry="attend",
        check=lambda _: None,
        instead="",
    )
    for num_tokens in (1, 2, 5, 9):
        given, cache, first_slots = case([300, 4], num_tokens, heads=(14, 2), head_dim=head_dim, rows=rows)
        wanted = given.call(cache.clone(), first_slots)
        assert torch.equal(given.call(cache, first_slots, cut_otherwise), wanted)


@pytest.mark.seconds
@pairs(name=[*FORMATS][1:], heads=HEADS, head_dim=[16, 80, 128], starts=[[0], [300, 4, FAR]], num_tokens=[1, 5])
def test_a_cache_of_fewer_bits_is_read_and_written_as_its_format_says(
    name: str, heads: tuple[int, int], head_dim: int, starts: list[int], num_tokens: int
) -> None:
    rows = FORMATS[name]
    given, cache, first_slots = case(starts, num_tokens, heads=heads, head_dim=head_dim, rows=rows)
    wanted_cache = cache.clone()
    wanted = given.call(wanted_cache, first_slots, partial(by_torch, rows=rows))
    found = given.call(cache, first_slots)
    old, new = (rows.unpack(each, torch.float64) for each in (wanted_cache, cache))
    largest = old.abs().amax(-1, keepdim=True)
    # The turned key differs in its last bit, so that a number between two steps may become either.
    one_step = {"bf16": 2**-7, "fp16": 2**-10, "int8": 1 / 126, "fp8": 2**-3}[name]
    apart = (new - old).abs() / largest
    assert float(apart.max()) <= one_step
    assert float((apart > 1e-5).double().mean()) < 0.001
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 + one_step * float((apart > 1e-5).any()))


def defined(given: Case, cache: Tensor, first_slots: Tensor) -> Tensor:
    """The attended values by the reference in fp64, which writes into the cache too."""
    in_fp64 = given._replace(qkv=given.qkv.double(), turns=given.turns.to(torch.complex128))
    return in_fp64.call(cache, first_slots, by_torch)


@pytest.mark.seconds
@pairs(
    heads=HEADS,
    head_dim=[16, 32, 64, 80, 128, 256],
    starts=[[0], [120], [300, 4, FAR]],
    num_tokens=[1, 5, 40],
    way=["text", "window", "trees", "trees in a window", "trees in a small window", "scores far apart"],
)
def test_it_is_attention(heads: tuple[int, int], head_dim: int, starts: list[int], num_tokens: int, way: str) -> None:
    """To a text, to the last positions of one, and of nodes of trees to the text and their ancestors."""
    window = 2 if "small" in way else 150 if "window" in way else 0
    given, cache, first_slots = case(starts, num_tokens, heads=heads, head_dim=head_dim, window=window)
    given = in_trees(given, starts) if "trees" in way else given
    given = given._replace(scale=1e4) if "far" in way else given
    wanted_cache = cache.double()
    wanted = defined(given, wanted_cache, first_slots)
    torch.testing.assert_close(
        given.call(cache, first_slots).double(), wanted, rtol=0, atol=1e-5 if "far" in way else 2e-6
    )
    torch.testing.assert_close(cache.double(), wanted_cache, rtol=0, atol=1e-6)


@pytest.mark.seconds
@pairs(name=[*FORMATS], heads=HEADS, head_dim=[32, 128], starts=[[3, 126, FAR], [FAR]], window=[0, 150])
def test_a_token_has_the_same_bits_alone(
    name: str, heads: tuple[int, int], head_dim: int, starts: list[int], window: int
) -> None:
    """One query after the other, one row after the other, in a cache of one row that ends with the text."""
    given, cache, first_slots = case(starts, 5, heads=heads, head_dim=head_dim, window=window, rows=FORMATS[name])
    before, together = cache.clone(), given.call(cache, first_slots).view(len(starts), 5, -1)
    for row, start in enumerate(starts):
        own = before[:, first_slots[row] : first_slots[row] + start + 5].contiguous()
        alone = [given.part(slice(row, row + 1), slice(t, t + 1)).call(own, torch.tensor([0])) for t in range(5)]
        assert torch.equal(together[row], torch.cat(alone))
        assert torch.equal(cache[:, first_slots[row] : first_slots[row] + start + 5], own)


def in_trees(given: Case, starts: list[int]) -> Case:
    """The tokens as nodes of trees whose first node is the root."""
    num_nodes = given.positions.shape[1]
    generator = torch.Generator().manual_seed(num_nodes)
    parents = [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes)]
    shape = find_topology(torch.tensor([parents] * len(starts)).view(len(starts), -1).long(), depth=num_nodes)
    positions, slots = torch.tensor(starts)[:, None] + shape.depths_BT, given.positions
    return given._replace(positions=positions, tree=(slots, shape.ancestors_BTT))


@pytest.mark.seconds
@pairs(name=[*FORMATS], heads=HEADS, head_dim=[32, 128], starts=[[3, 120, FAR], [250]], window=[0, 3, 150])
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(
    name: str, heads: tuple[int, int], head_dim: int, starts: list[int], window: int
) -> None:
    """Wherever the slots of its ancestors are; two of the roots stand before a chunk's end that their trees pass."""
    chains, cache, first_slots = case(starts, 12, heads=heads, head_dim=head_dim, window=window, rows=FORMATS[name])
    given = in_trees(chains, starts)
    assert given.tree
    before, found = cache.clone(), given.call(cache, first_slots).view(len(starts), 12, -1)
    for row, start in enumerate(starts):
        for node in range(12):
            path = given.tree[1][row, node].nonzero().flatten()
            assert given.positions[row, node] == start + len(path) - 1
            own = chains.part(slice(row, row + 1), slice(None))
            chain = own._replace(qkv=own.qkv[path], positions=own.positions[:, : len(path)].contiguous())
            assert torch.equal(chain.call(before.clone(), first_slots[row, None])[-1], found[row, node])


def test_a_node_that_is_no_number_spoils_those_behind_it_alone() -> None:
    """A key that is no number hides nothing else: what a node does not see counts as zero."""
    chain, cache, first_slots = case([120], 40)
    given = in_trees(chain, [120])
    assert given.tree
    wanted = given.call(cache.clone(), first_slots)
    given.qkv[7, 8 * 32 : 12 * 32] = float("nan")  # its keys
    found, sees_7 = given.call(cache, first_slots), given.tree[1][0, :, 7]
    assert found.isnan().any(1).tolist() == sees_7.tolist()
    assert torch.equal(found[~sees_7], wanted[~sees_7])


def test_slots_behind_a_token_and_in_other_rows_do_not_count() -> None:
    given, cache, first_slots = case([130, 7], 2)
    wanted = given.call(cache.clone(), first_slots)
    cache[:, 132 : first_slots[1]] = float("nan")
    cache[:, first_slots[1] + 9 :] = float("nan")
    assert torch.equal(given.call(cache, first_slots), wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_no_number_spoils_its_head_alone(bad: float) -> None:
    given, cache, first_slots = case([130], 2)
    wanted = given.call(cache.clone(), first_slots)
    given.qkv[1, 3] = bad
    found = given.call(cache, first_slots)
    assert not found[1, :32].isfinite().any()
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1, 32:], wanted[1, 32:])


FURTHEST = {"auto": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127, "fp8": 16 / 448}
"""The most that a kept number may differ by, in largest numbers of its row."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_near_its_numbers_and_has_the_planned_bytes(name: str) -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[[1e-3]], [[1.0]], [[100.0]]])
    rows = FORMATS[name]
    packed = rows.pack(x)
    assert packed.dtype is rows.stored_dtype
    assert packed.shape == (3, 2, rows.width(64))
    assert packed[0, 0].nbytes == CACHES.of(name).row_bytes(64, value_bytes=4)
    apart = (rows.unpack(packed, torch.float32) - x).abs() / x.abs().amax(-1, keepdim=True)
    assert float(apart.max()) <= FURTHEST[name] * (1 + 1e-6)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_zeros_stay_zeros_and_what_is_no_number_shows(name: str) -> None:
    rows = FORMATS[name]
    assert not rows.unpack(rows.pack(torch.zeros(2, 16)), torch.float32).any()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16).index_fill(0, torch.tensor(3), bad)
        assert not rows.unpack(rows.pack(x), torch.float32).isfinite().any()
