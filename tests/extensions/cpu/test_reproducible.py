"""The logits of a position have the same bits for any number of rows, positions and threads.

Each case compares a model with itself: position by position of one row alone, and any rows and positions together.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.kernels.linear import NativeLinear
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Held, Prompts, read_prompts
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.checks import check_values
from llama_ssp.storage.formats import format_of
from tests.helpers.doors import config_of
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.lanes import heavy
from tests.helpers.models import build_checkpoint, load_lean

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 192,
}
ROWS, POSITIONS, LENGTH = 16, 9, 40
BOTH = [(1, 1), (2, 9), (3, 2), (5, 5), (7, 1), (16, 3), (16, 9)]
"""Rows and positions that are read together."""
FORMATS = ["int8_weight_only", "fp8_weight_only", "int8", "int4_weight_only"]
CASES = [
    ("llama", None, "none"),
    ("llama", torch.bfloat16, "none"),
    ("qwen3, windows", torch.bfloat16, "none"),
    ("qwen2", torch.float16, "none"),
    ("llama", torch.bfloat16, "int8_weight_only"),
]
MORE = [("llama", dtype, name) for dtype in (None, torch.bfloat16) for name in FORMATS]
MORE += [(family, dtype, "none") for family in ("qwen2", "qwen3, windows") for dtype in (None, torch.bfloat16)]


def model(folder: Path, family: str, dtype: torch.dtype | None, name: str, comm: Comm | None = None) -> LeanRunner:
    product = format_of(name).compiled
    if product and not has_features(product.needs):
        pytest.skip("this processor has no such product")
    build_checkpoint(folder, family, **SIZES)
    found = load_lean(folder, dtype=dtype, precision=Precision(quantization=name), comm=comm)
    assert found.is_invariant
    return found


@torch.inference_mode()
def differing(runner: LeanRunner, both: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The numbers of rows, positions and threads with other logits than those of each position alone."""
    runner.allocate(batch_size=ROWS, capacity=64)
    ids_BT = torch.randint(runner.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    places_T = torch.arange(LENGTH)

    def read(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return runner.forward(ids, positions, bucket=64, cache_rows_B=rows).clone()

    alone_BTV = torch.stack(
        [
            torch.cat(
                [
                    read(ids_BT[row, at, None][None], places_T[at, None][None], torch.tensor([row]))[0]
                    for at in range(LENGTH)
                ]
            )
            for row in range(max(rows for rows, _ in both))
        ]
    )
    found, before = [], torch.get_num_threads()
    try:
        for number, (rows, positions) in enumerate(both):
            torch.set_num_threads(threads := 1 + number % 2)
            at_BT = torch.arange(rows)[:, None] * 7 % (LENGTH - POSITIONS) + torch.arange(positions)
            logits_BTV = read(ids_BT[:rows].gather(1, at_BT), at_BT, torch.arange(rows))
            wanted_BTV = alone_BTV[:rows].gather(1, at_BT[..., None].expand_as(logits_BTV))
            if not torch.equal(logits_BTV, wanted_BTV):
                found.append((rows, positions, threads))
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.seconds
@pytest.mark.parametrize(("family", "dtype", "name"), CASES)
def test_rounds_have_the_bits_of_single_positions(
    tmp_path: Path, family: str, dtype: torch.dtype | None, name: str
) -> None:
    assert differing(model(tmp_path, family, dtype, name), BOTH) == []


@pytest.mark.parametrize(("family", "dtype", "name"), [heavy(*case) for case in MORE])
def test_all_rounds_have_the_bits_of_single_positions(
    tmp_path: Path, family: str, dtype: torch.dtype | None, name: str
) -> None:
    both = [(rows, positions) for rows in range(1, ROWS + 1) for positions in range(1, POSITIONS + 1)]
    assert differing(model(tmp_path, family, dtype, name), both) == []


@pytest.mark.seconds
@pytest.mark.parametrize("num_ranks", [2, heavy(3)])
def test_rounds_over_ranks_have_the_bits_of_single_positions(tmp_path: Path, num_ranks: int) -> None:
    comms = thread_comms(num_ranks)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 288}
    build_checkpoint(tmp_path, "llama", **{**SIZES, **sizes})
    models = [load_lean(tmp_path, dtype=torch.bfloat16, comm=comm) for comm in comms]
    assert all(each.is_invariant for each in models)
    assert on_ranks(comms, lambda comm: differing(models[comm.rank], BOTH[:4])) == [[]] * num_ranks


def test_a_product_that_splits_its_sums_by_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = model(tmp_path, "llama", torch.bfloat16, "none")
    for layer in runner._layers:
        inner: NativeLinear = layer.down.linear  # type: ignore[assignment]

        def by_halves(x_MI: Tensor, residual_MO: Tensor | None = None, inner: NativeLinear = inner) -> Tensor:
            if len(x_MI) < 4:
                return inner(x_MI, residual_MO)
            half = torch.arange(x_MI.shape[1]) < x_MI.shape[1] // 2
            return inner(x_MI * half, residual_MO) + inner(x_MI * ~half)

        monkeypatch.setattr(layer.down, "linear", by_halves)
    assert differing(runner, BOTH[:4]) == [(2, 9, 2), (3, 2, 1), (5, 5, 2)]


@pytest.mark.parametrize("lengths", [(1200, 700), (700, 1200)])
def test_chunks_of_a_prompt_begin_and_end_where_its_own_positions_say(
    tmp_path: Path, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose bits depend on what is read together, whatever is read beside it."""
    build_checkpoint(tmp_path, "llama", **{**SIZES, "head_dim": 8, "max_position_embeddings": 4096})
    runner = load_lean(tmp_path)
    assert not runner.is_invariant
    monkeypatch.setattr("llama_ssp.architectures.engine.MASKED_PAIRS", 2**18)  # shorter chunks behind 1024 slots
    runner.allocate(batch_size=2, capacity=2048)
    chunks = dict[int, set[tuple[int, int]]]()

    def forward(_ids: Tensor, positions_BT: Tensor, *, cache_rows_B: Tensor, **_how: Any) -> Tensor:
        for row, own_T in zip(cache_rows_B.tolist(), positions_BT, strict=True):
            chunks.setdefault(row, set()).add((int(own_T[0]), len(own_T)))
        return torch.zeros(len(positions_BT), 1, runner.vocab_size)

    monkeypatch.setattr(runner, "forward", forward)

    def read(rows: list[int]) -> dict[int, set[tuple[int, int]]]:
        chunks.clear()
        some = [lengths[row] for row in rows]
        held = [Held(1024 if length > 1024 else 512, row) for row, length in zip(rows, some, strict=True)]
        prompts = Prompts(torch.zeros(len(rows), 2048, dtype=torch.int64), torch.tensor(some), some, max(some), held)
        read_prompts(runner, prompts, rows=rows, buckets=Buckets(step=64, num_slots=2048))
        return dict(chunks)

    assert read([0, 1]) == read([0]) | read([1])


def test_a_draft_whose_probabilities_no_rule_reads_may_be_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.extensions.cpu.equal_bits._of_machine", lambda _models: ())
    words = ["model=tiny", "draft=gpt_neo_1.3B", "device=cpu", "reproducible=true"]
    check_values(config_of([*words, "sampling=greedy"]))
    with pytest.raises(ConfigError, match="gpt_neo models run on the modules"):
        check_values(config_of([*words, "sampling.temperature=0.7"]))
