"""Attention by lengths of rows gives what masks give, from one set of tables for all lengths.

The kernel is stood in for by plain operators, which check what a GPU's kernel would take for granted.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.decoding import config_of, load_pair, make_decoder, prompt
from llama_ssp.catalogue import Dtype
from llama_ssp.kernels import attention_by_length as varlen
from llama_ssp.kernels.attention_by_length import VarlenAttention, fault_of, find_varlen
from llama_ssp.kernels.parts import Heads
from llama_ssp.models.llama import decoder as lean_decoder
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.speculate.drafters.drafter import catch_up
from llama_ssp.speculate.engine.round import Executor
from llama_ssp.speculate.engine.state import Request
from tests.helpers.lanes import heavy
from tests.helpers.models import load_lean
from tests.helpers.varlen_attention import varlen_attention
from tests.unit.models.llama.test_decoder import assert_close, modules, ragged_rounds, random_ids

CPU = torch.device("cpu")
GROUPED = ["llama", "llama, one kv head", "llama, no groups", "mistral, window", "qwen3, windows"]


def pair(kind: str, *, batch_size: int, dtype: torch.dtype = torch.float32) -> tuple[LeanRunner, LeanRunner]:
    """Two decoders over the same weights: by lengths and by masks."""
    model = modules(kind, dtype)
    by_length = load_lean(model, varlen=varlen_attention)
    by_mask = load_lean(model)
    for runner in (by_length, by_mask):
        runner.allocate(batch_size=batch_size, capacity=40)
    return by_length, by_mask


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in GROUPED), ("llama", torch.bfloat16)])
def test_rows_of_any_length_get_what_masks_give(kind: str, dtype: torch.dtype) -> None:
    by_length, by_mask = pair(kind, batch_size=3, dtype=dtype)
    assert by_length.reads_by_length
    assert not by_mask.reads_by_length
    for found, wanted in zip(ragged_rounds(by_length), ragged_rounds(by_mask), strict=True):
        assert_close(found, wanted, dtype)


def test_rows_in_another_order_find_their_own_slots() -> None:
    """Prompts of 300 and 270 tokens, read in two chunks into swapped rows, then three tokens behind each."""
    runners = pair("mistral, window", batch_size=2)
    found: list[list[Tensor]] = []
    for runner in runners:
        runner.allocate(batch_size=2, capacity=320)
        ids_BT, rows_B = random_ids(2, 304), torch.tensor([1, 0])
        logits = []
        for start, stop in ((0, 200), (200, 300)):
            positions_BT = torch.arange(start, stop).expand(2, -1)
            logits.append(runner.forward(ids_BT[:, start:stop], positions_BT, bucket=stop, cache_rows_B=rows_B))
        positions_BT = torch.tensor([[300], [270]]) + torch.arange(3)
        found.append([*logits, runner.forward(ids_BT[:, :3], positions_BT, bucket=304)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


def test_positions_that_repeat_are_right_when_they_are_said_to() -> None:
    """The chunk of a draft that skipped rounds begins with its first token several times."""
    found: list[Tensor] = []
    ids_BT = random_ids(2, 90)
    for runner in pair("llama", batch_size=2):
        runner.allocate(batch_size=2, capacity=128)
        lengths_B1 = torch.tensor([[80], [30]])
        catch_up(runner, ids_BT, lengths_B1, num_unread=130, num_kept=2, bucket=128)
        found.append(runner.forward(ids_BT.gather(1, lengths_B1 - 2), lengths_B1 - 2, bucket=128))
    one, other = found
    assert_close(one, other)


def test_a_kernel_is_held_to_masks_before_it_is_used() -> None:
    def no_window(*arguments: Tensor, **options: object) -> Tensor:
        return varlen_attention(*arguments, **{**options, "window": None})  # type: ignore[arg-type]

    def sees_the_future(*arguments: Any, **options: Any) -> Tensor:
        queries, keys, values, sequences = arguments
        alone = sequences._replace(
            first_query_C1=torch.arange(len(queries) + 1, dtype=torch.int32),
            first_slot_C1=functional.pad(
                sequences.first_slot_C1[:-1].repeat_interleave(num := len(queries) // len(sequences.used_C)), (0, 1)
            ),
            used_C=sequences.used_C.repeat_interleave(num),
        )
        return varlen_attention(queries, keys, values, alone, **options)

    def no_number(query: Tensor, *_arguments: Tensor, **_options: object) -> Tensor:
        return torch.full_like(query, float("nan"))

    check: Any = partial(fault_of, device=CPU, dtype=torch.bfloat16, heads=Heads(4, 2, 64, 0.125), has_windows=True)
    assert check(varlen_attention) is None
    assert check(no_window) == "wrong values in row 0 where rows have 1 queries and a window of 4"
    assert check(no_number) == "wrong values in row 0 where rows have 1 queries"
    without_windows: Any = partial(check, has_windows=False)
    assert without_windows(no_window) is None
    assert without_windows(sees_the_future) == "wrong values in row 0 where rows have 5 queries"


HEADS = [Heads(4, 4, 32, 32**-0.5), Heads(8, 2, 16, 0.25), Heads(7, 1, 64, 0.125)]


@pytest.mark.seconds
@pytest.mark.parametrize("batch_size", [heavy(1), 3])
def test_the_layers_of_gpus_give_in_fp16_the_text_of_fp32_by_masks(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained pair, greedily, where rounding decides nothing; prompts of three lengths are read packed."""

    @torch.inference_mode()
    def texts(dtype: Dtype) -> dict[int, list[int]]:
        pair = load_pair(config_of("tiny", "tiny-draft", dtype=dtype, device=CPU))
        decoder = make_decoder(pair, speculative=True, temperature=0.0, batch_size=batch_size, cuda_graphs=False)
        if dtype is Dtype.fp16:
            for runner in (pair.models.target, pair.models.draft):
                assert isinstance(runner, LeanRunner)
                assert runner.reads_by_length
        decoder.executor = Executor()
        lengths = (40, 65, 90)
        wanted = [Request(index=row, prompt_ids=prompt(pair, lengths[row]), max_new_tokens=24) for row in range(3)]
        updates = [update for updates in decoder.run(wanted) for update in updates]
        return {update.completion.request.index: update.completion.token_ids for update in updates}

    by_mask = texts(Dtype.fp32)
    monkeypatch.setattr(lean_decoder, "find_varlen", lambda *_arguments, **_options: varlen_attention)
    assert texts(Dtype.fp16) == by_mask


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "is_amd", "rounds_inputs"),
    [
        ("cpu", torch.bfloat16, 64, False, False),
        ("cuda", torch.float32, 64, False, False),
        ("cuda", torch.float16, 20, False, False),
        ("cuda", torch.float16, 512, False, False),
        ("cuda", torch.float16, 64, True, False),
        ("cuda", torch.float16, 64, False, True),
    ],
)
def test_other_devices_formats_and_heads_keep_masks_as_plans_say(
    *,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    is_amd: bool,
    rounds_inputs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2" if is_amd else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 4))
    monkeypatch.setattr(varlen, "fault_of", lambda *_arguments, **_options: None)
    find_varlen.cache_clear()
    found = find_varlen(torch.device(device), dtype, Heads(4, 2, head_dim, 1.0), rounds_inputs=rounds_inputs)
    find_varlen.cache_clear()
    assert found is None


def tried(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, capability: tuple[int, int] = (8, 0)
) -> VarlenAttention | None:
    """The kernel of a GPU where it ends with an error."""

    def broken(*_arguments: object, **_options: object) -> str | None:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(varlen, "fault_of", broken)
    find_varlen.cache_clear()
    try:
        return find_varlen(torch.device("cuda", 0), torch.float16, HEADS[0])
    finally:
        find_varlen.cache_clear()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_kernel_that_fails_on_this_device_is_not_used_and_that_is_said(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert tried(monkeypatch, RuntimeError("no kernel image\nTraceback"), capability=capability) is None
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        []
        if capability < (8, 0)
        else ["continuing with masks, because attention by lengths does not work on cuda:0: no kernel image"]
    )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: an illegal memory access was met")],
)
def test_an_error_after_which_no_kernel_runs_is_no_reason_for_masks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)):
        tried(monkeypatch, error)
