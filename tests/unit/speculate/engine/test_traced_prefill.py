"""Holds traced prefills to those that Python runs: the same bits, whatever the length of the prompts."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llama_ssp import Pair, load
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import row_class
from llama_ssp.speculate.engine import executors
from llama_ssp.speculate.engine.executors import TracedPrefill
from llama_ssp.speculate.engine.tracing import Traced
from tests.helpers.lanes import heavy
from tests.helpers.models import VOCAB_SIZE
from tests.unit.speculate.engine.test_tracing import KERNELS, runner

pytestmark = pytest.mark.seconds

BUCKETS = Buckets(step=16, num_slots=64)


def cached(lean: LeanRunner, length: int) -> list[Tensor]:
    assert lean._cache
    return [whole[:, :, :, :length].clone() for whole in lean._cache._wholes if whole is not None]


@pytest.mark.parametrize("family", ["llama", heavy("qwen3"), heavy("mistral")])
@pytest.mark.parametrize("kernel", [each if each in {"plain", "columns"} else heavy(each) for each in KERNELS])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_one_trace_reads_prompts_of_all_lengths_with_the_same_bits(kernel: str, family: str, num_rows: int) -> None:
    make, is_there = KERNELS[kernel]
    if not is_there():
        pytest.skip(f"this machine has no {kernel} kernel")
    sizes = {"hidden_size": 128, "intermediate_size": 256} if kernel == "int4_weight_only" else {}
    lean = runner(family, make, **sizes)
    lean.allocate(batch_size=num_rows, capacity=64)
    at_once = Traced(
        lambda tokens_RT, lengths_R, rows_R: read_prompts(
            lean, Prompts(tokens_RT, lengths_R, lengths, longest, rows_R), rows=rows, buckets=BUCKETS
        ),
        reads=(lean,),
    )
    generator = torch.Generator().manual_seed(0)
    for longest in (9, 40, 3, 64, 8, 21, 1, 33, 2, 64):
        rows = torch.randperm(num_rows, generator=generator).tolist()
        lengths = [longest, *torch.randint(1, longest + 1, (num_rows - 1,), generator=generator).tolist()]
        tokens_RS = torch.randint(VOCAB_SIZE, (num_rows, 64), generator=generator)
        lengths_R = torch.tensor(lengths)
        eager = read_prompts(lean, Prompts(tokens_RS, lengths_R, lengths, longest), rows=rows, buckets=BUCKETS)
        known, bucket = cached(lean, longest), BUCKETS.covering(longest)
        key = row_class(num_rows * longest)
        for _ in range(3 if key not in at_once.replays else 1):
            replayed = at_once(key, tokens_RS[:, :longest], lengths_R, torch.tensor(rows), bucket=bucket)
            assert torch.equal(eager, replayed), longest
            assert all(map(torch.equal, known, cached(lean, longest))), longest
    assert not at_once.failed
    assert all(at_once.replays.values())


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load("tiny", "tiny-draft")


def texts(pair: Pair, monkeypatch: pytest.MonkeyPatch, *, most_tokens: int, **settings: object) -> list[list[int]]:
    """Complete prompts of different lengths with a fresh pair, whose prefills are traced up to so many tokens."""
    monkeypatch.setattr(executors, "_MOST_TOKENS", most_tokens)
    monkeypatch.setattr(executors, "_LONGEST_S", 60.0)
    fresh = Pair(models=pair.models, config=pair.config)
    prompts = ["import os\n" * number for number in (1, 3, 2, 9, 4, 3, 1, 5)]
    found = [fresh.generate(prompt, max_new_tokens=6, seed=7, **settings)[0].token_ids for prompt in prompts]  # type: ignore[arg-type]
    (decoder,) = fresh._decoders.values()
    prefill = decoder.prefill
    assert isinstance(prefill, TracedPrefill)
    assert not prefill.traced.failed
    assert any(prefill.traced.replays.values()) is bool(most_tokens)
    return found


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"plain": True}, {"repetition_penalty": 1.3}], ids=str)
def test_texts_do_not_depend_on_what_is_traced(
    pair: Pair, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, traced = (texts(pair, monkeypatch, most_tokens=most, **settings) for most in (0, 64))
    assert eager == traced


@pytest.mark.parametrize(("seconds", "is_traced"), [(10.0, True), (0.0, False)])
def test_prefills_that_take_long_are_never_traced(
    pair: Pair, seconds: float, is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace would read the prompts once more, and a large model gains nothing from it."""
    monkeypatch.setattr(executors, "_LONGEST_S", seconds)
    fresh = Pair(models=pair.models, config=pair.config)
    for seed in range(5):
        fresh.generate("import os\n", max_new_tokens=2, seed=seed)
    assert traces(fresh) == [is_traced]


def traces(pair: Pair) -> Sequence[bool]:
    prefills = [decoder.prefill for decoder in pair._decoders.values()]
    return [any(prefill.traced.replays.values()) for prefill in prefills if isinstance(prefill, TracedPrefill)]


def test_caches_that_were_made_anew_are_read_by_the_same_trace(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prefill into them runs from Python, which makes their buffers."""
    monkeypatch.setattr(executors, "_LONGEST_S", 60.0)

    def complete(pair: Pair, *, changes: bool) -> list[list[int]]:
        found = []
        for number in range(10):
            if changes and number == 6:
                pair.generate(["a", "b"], max_new_tokens=2)
            prompt = ["import os\n", "def main():\n", "x = 10\ny = 20\nprint("][number % 3]
            found.append(pair.generate(prompt, max_new_tokens=8, seed=number)[0].token_ids)
        return found

    whole, changed = (Pair(models=pair.models, config=pair.config) for _ in range(2))
    assert complete(whole, changes=False) == complete(changed, changes=True)
