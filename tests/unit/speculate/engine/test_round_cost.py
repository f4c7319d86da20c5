"""What a round costs: no value is read from the device, its operators are a + bK in number, its bytes linear in slots.

Counted where torch dispatches them, in the engine itself over lean decoders. A decoder has one form of linear layer
here; a run chooses by timing, and one of the forms takes two operators more for a few rows.

Shapes: B sequences, K drafted tokens.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Held
from llama_ssp.speculate.engine.held import PromptRow
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import Executor
from llama_ssp.speculate.engine.state import BatchState, Request
from tests.helpers.decoders import advance, complete, make_decoder
from tests.helpers.lanes import heavy
from tests.helpers.models import load_lean, tiny_model

READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal"}
NUM_SLOTS, SHORT, LONG = 192, 64, 128
"""Slots of a row, and two buckets of the cache that a round may read; to read all slots is another view."""
LOOK_UPS = {"aten::index_select", "aten::gather", "aten::embedding"}
WRITES_AT = {"aten::index_copy_", "aten::scatter_"}
"""Operators that touch as much of a tensor as they give, or take, and not all of it."""


class Counting(TorchDispatchMode):
    """Counts operators by name, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = func.name().partition(".")[0]
        self.operators[name] += 1
        result = func(*args, **(kwargs or {}))
        if name in LOOK_UPS:
            self.num_bytes += 2 * bytes_of(result)
        elif name in WRITES_AT:
            self.num_bytes += 2 * bytes_of(args[-1])
        elif not func.is_view:
            self.num_bytes += bytes_of((args, kwargs, result))
        return result


def bytes_of(values: object) -> int:
    """Size of all tensors in a tree."""
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def lean(num_layers: int) -> LeanRunner:
    """A random Llama with one form of linear layer."""
    return load_lean(tiny_model("llama", num_hidden_layers=num_layers), kernel=PlainLinear)


def decoder(*, num_draft_tokens: int, temperature: float, batch_size: int = 1) -> Decoder:
    """A speculative decoder, plain without drafted tokens."""
    draft = lean(1) if num_draft_tokens else None
    return make_decoder(
        lean(2), draft, temperature=temperature, num_draft_tokens=num_draft_tokens, batch_size=batch_size
    )


@torch.inference_mode()
def counted_round(
    *,
    num_draft_tokens: int,
    batch_size: int = 2,
    prompt_tokens: int = 9,
    num_slots: int = NUM_SLOTS,
    bucket: int = SHORT,
    temperature: float = 0.8,
) -> Counting:
    """What one round dispatches, after some that have made buffers and views, and recorded the forwards."""
    made = decoder(num_draft_tokens=num_draft_tokens, temperature=temperature, batch_size=batch_size)
    round_ = made.round
    round_.allocate(batch_size=batch_size, num_slots=num_slots)
    state = BatchState.empty(batch_size, num_slots=num_slots, num_rounds=21, table=round_.uniforms)
    requests = [
        Request(index=row, prompt_ids=tuple(range(2, 2 + prompt_tokens - row)), max_new_tokens=20)
        for row in range(batch_size)
    ]
    prompts = BatchState.of(requests, num_slots=num_slots, num_rounds=21, table=round_.uniforms, seed=0)
    buckets = Buckets(step=SHORT, num_slots=num_slots)
    lengths = [len(request.prompt_ids) for request in requests]
    places = [PromptRow(row, Held(), Held()) for row in range(batch_size)]
    round_.prefill(Executor(), state, prompts, places, lengths=lengths, buckets=buckets, deliver=lambda _: None)
    state.put(torch.arange(batch_size), prompts)
    for _ in range(3):
        advance(made, state, bucket=bucket)
    counting = Counting()
    with counting:
        advance(made, state, bucket=bucket)
    return counting


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_the_loop_reads_values_only_out_of_the_results_copy(
    num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One `tolist` per flight; none of the other ways to ask for a value, wherever they are called from."""
    reads: Counter[str] = Counter()
    run = decoder(num_draft_tokens=num_draft_tokens, temperature=0.8, batch_size=2)
    requests = [Request(index=row, prompt_ids=(2, 3, 4 + row), max_new_tokens=12) for row in range(2)]
    complete(run, requests)  # rounds are recorded, which asks for sizes

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(*arguments: Any, **named: Any) -> Any:
            reads[name] += 1
            return original(*arguments, **named)

        return read

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    counting = Counting()
    with torch.inference_mode(), counting:
        num_flights = sum(1 for _ in run.run(requests))
    assert num_flights > 2
    assert reads == {"tolist": num_flights}
    assert counting.operators.keys() & READS == set()


@pytest.mark.seconds
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_operators_of_a_round_are_a_plus_b_times_k(temperature: float) -> None:
    totals = {k: counted_round(num_draft_tokens=k, temperature=temperature).operators.total() for k in (1, 2, 3, 6)}
    per_token = totals[2] - totals[1]
    assert totals == {k: totals[1] + (k - 1) * per_token for k in totals}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, heavy(6)])
def test_operators_of_a_round_depend_neither_on_batch_nor_on_length(num_draft_tokens: int) -> None:
    """From a batch of two on. One row needs fewer: `logits.rows_at`, and torch in attention, let it off some."""

    def operators(**shape: int) -> Counter[str]:
        return counted_round(num_draft_tokens=num_draft_tokens, **shape).operators

    pair = operators()
    assert operators(batch_size=8) == pair
    assert operators(prompt_tokens=90, bucket=LONG) == pair
    assert operators(batch_size=1).total() <= pair.total()


@pytest.mark.parametrize("num_draft_tokens", [0, heavy(4)])
def test_bytes_of_a_round_are_a_straight_line_over_the_slots_that_it_reads(num_draft_tokens: int) -> None:
    """Neither how long the text is within them, nor how many slots there are besides, makes a difference."""

    def moved(bucket: int, *, prompt_tokens: int = 9, num_slots: int = 512) -> int:
        return counted_round(
            num_draft_tokens=num_draft_tokens, prompt_tokens=prompt_tokens, num_slots=num_slots, bucket=bucket
        ).num_bytes

    measured = [moved(bucket) for bucket in range(SHORT, 6 * SHORT, SHORT)]
    steps = {more - less for less, more in pairwise(measured)}
    assert len(steps) == 1
    assert 0 < steps.pop() * 4 < measured[0]
    assert moved(LONG, prompt_tokens=100) == moved(LONG, num_slots=1024) == measured[1]
