"""Holds the slices of all ranks to being exactly the whole, for any sizes, and to the borders that were promised."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_ssp.architectures.matrices import BLOCK, Cut, Matrix, cut_of, split_blocks, split_heads, split_model
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError


def shape(**sizes: Any) -> ModelShape:
    known = ModelShape(
        model_type="llama",
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=1024,
        vocab_size=4096,
        max_position_embeddings=128,
    )
    return replace(known, **sizes)


@given(num_parts=st.integers(1, 20), block=st.sampled_from([1, 7, 64]), extra=st.integers(0, 5000))
def test_blocks_of_all_parts_are_the_whole_in_order(num_parts: int, block: int, extra: int) -> None:
    size = (num_parts - 1) * block + 1 + extra
    parts = split_blocks(size, num_parts, block=block)
    assert list(chain(*parts)) == list(range(size))
    assert all(part.start % block == 0 for part in parts)
    assert all(0 <= len(left) - len(right) <= block for left, right in pairwise(parts[:-1]))
    assert len(parts[-1]) <= len(parts[0])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "query_heads", "kv_heads"),
    [
        (8, 4, 3, [4, 2, 2], [[0, 1], [2], [3]]),
        (52, 52, 8, [7, 7, 7, 7, 6, 6, 6, 6], None),
        (64, 8, 16, [4] * 16, [[rank // 2] for rank in range(16)]),
        (4, 2, 3, [1, 1, 2], [[0], [0], [1]]),
    ],
)
def test_heads_are_shared_out_at_the_borders_of_groups(
    num_heads: int, num_kv_heads: int, num_ranks: int, query_heads: list[int], kv_heads: list[list[int]] | None
) -> None:
    shards = split_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, num_ranks=num_ranks)
    assert [len(part.query_heads) for part in shards] == query_heads
    assert kv_heads is None or [list(part.kv_heads) for part in shards] == kv_heads


@given(data=st.data(), num_kv_heads=st.integers(1, 16), group=st.integers(1, 8))
def test_every_query_head_is_on_one_rank_beside_the_kv_head_that_it_reads(
    data: st.DataObject, num_kv_heads: int, group: int
) -> None:
    num_heads = num_kv_heads * group
    num_ranks = data.draw(st.integers(1, num_heads))
    shards = split_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, num_ranks=num_ranks)
    assert list(chain(*(part.query_heads for part in shards))) == list(range(num_heads))
    for part in shards:
        assert part.query_heads
        assert {head // group for head in part.query_heads} == set(part.kv_heads)
        # The library repeats each key-value head for the same number of query heads.
        assert len(part.query_heads) % len(part.kv_heads) == 0


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (partial(split_blocks, 100, 3, block=64), "at most 2 ranks"),
        (
            partial(split_heads, num_heads=8, num_kv_heads=4, num_ranks=9),
            "8 attention heads cannot be shared by 9 ranks: use at most 8",
        ),
        (partial(split_heads, num_heads=8, num_kv_heads=3, num_ranks=2), "multiple"),
        (partial(cut_of, "model.layers.0.mlp.router"), r"model\.layers\.0\.mlp\.router"),
    ],
)
def test_too_many_ranks_uneven_groups_and_modules_without_a_rule_are_refused(
    cut: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(PlacementError, match=sentence):
        cut()


@pytest.mark.seconds
@given(
    num_ranks=st.integers(1, 8),
    intermediate_size=st.integers(8, 3000),
    vocab_size=st.integers(8, 9000),
    head_dim=st.sampled_from([8, 20, 128]),
)
def test_slices_of_all_ranks_are_every_feature_of_every_matrix(
    num_ranks: int, intermediate_size: int, vocab_size: int, head_dim: int
) -> None:
    model = shape(num_key_value_heads=8, intermediate_size=intermediate_size, vocab_size=vocab_size, head_dim=head_dim)
    shards = split_model(model, num_ranks=num_ranks)
    heads = 8 * head_dim
    totals = [heads, heads, 3 * heads, 3 * heads, intermediate_size, 2 * intermediate_size, vocab_size]
    for cut, total in zip(Cut, totals, strict=True):
        held = list(chain(*(part for shard in shards for part in shard.features(cut, total))))
        assert sorted(held) == list(range(total))
        if cut not in {Cut.qkv, Cut.gate_up}:
            assert held == sorted(held)


def test_a_fused_matrix_is_cut_in_each_of_its_parts() -> None:
    first, last = split_model(shape(num_key_value_heads=4, num_attention_heads=8), num_ranks=2)
    assert first.features(Cut.qkv, 128) == (range(32), range(64, 80), range(96, 112))
    assert last.features(Cut.qkv, 128) == (range(32, 64), range(80, 96), range(112, 128))
    assert last.features(Cut.gate_up, 512) == (range(128, 256), range(384, 512))


def test_tokens_that_choose_experts_evenly_read_few_of_them_twice() -> None:
    matrix = Matrix(module="down_proj", num_rows=4, num_columns=4, copies=8, num_chosen=2)
    assert matrix.num_used(1) == 2
    assert matrix.num_used(2) == 8 * (1 - (6 / 8) ** 2)
    assert matrix.num_used(1000) == pytest.approx(8)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_of_experts_that_are_spread_the_busiest_rank_reads_the_most(num_ranks: int) -> None:
    """Held to 4000 draws of 5 tokens; a false alarm has a chance below 1e-6, a mean instead of the most is seen."""
    parts = split_model(shape(num_experts=32, num_experts_per_tok=4, spreads_experts=True), num_ranks=num_ranks)
    assert sorted(chain(*(part.own_experts(32) for part in parts))) == [*range(32)]
    whole = Matrix(module="down_proj", num_rows=4, num_columns=4, cut=1, copies=32, num_chosen=4)
    held = {whole.of_rank(part) for part in parts}
    assert sum(whole.of_rank(part).num_elements for part in parts) == whole.num_elements
    draw, most = Random(3), 0
    for _ in range(4000):
        chosen = {expert for _ in range(5) for expert in draw.sample(range(32), 4)}
        most += max(len(chosen.intersection(part.own_experts(32))) for part in parts)
    (matrix,) = held
    assert matrix.num_used(5) == pytest.approx(most / 4000, rel=0.04)
    assert matrix.num_used(5) > 1.1 * whole.num_used(5) / num_ranks


@pytest.mark.parametrize(("units", "block"), [(BLOCK * 3, BLOCK), (BLOCK * 2 + 1, BLOCK), (BLOCK * 2, 1)])
def test_units_are_cut_in_blocks_where_there_are_enough(units: int, block: int) -> None:
    shards = split_model(shape(intermediate_size=units), num_ranks=3)
    parts = [part.features(Cut.mlp_units, units) for part in shards]
    assert parts == [(part,) for part in split_blocks(units, 3, block=block)]


def test_a_module_is_cut_by_the_last_part_of_its_name() -> None:
    assert cut_of("model.layers.3.self_attn.k_proj") is Cut.kv_heads
    assert cut_of("lm_head") is Cut.vocabulary
    assert cut_of("model.layers.3.mlp.gate_proj") is Cut.mlp_units
    assert cut_of("model.layers.3.self_attn.gate_proj") is Cut.query_heads  # or by the last two
