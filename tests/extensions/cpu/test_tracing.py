"""Holds recorded forwards and rounds to the ones that Python calls: the same bits, cache and text."""

import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llama_ssp.extensions.cpu.executor import TracedExecutor
from llama_ssp.extensions.cpu.tracing import Traced
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.kernels.linear import HalfLinear, Kernel, PackedLinear, PlainLinear, can_halve, can_pack
from llama_ssp.models.graph_inputs import Workspace
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.memory import anonymous_bytes
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.extensions import module_of
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import grid, heavy
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, load_lean, tiny_model
from tests.helpers.prefix_runner import PrefixRunner

STAGES = ("draft", "verify")


def runner(
    family: str = "llama",
    kernel: Kernel = PlainLinear,
    *,
    dtype: Any = torch.float32,
    **changes: int,
) -> LeanRunner:
    return load_lean(tiny_model(family, **changes).to(dtype), kernel=kernel)


def of_format(extension: str, kernel: str, **changes: int) -> LeanRunner:
    return runner("llama", getattr(module_of(f"{extension}.linear"), kernel), **changes)


RUNNERS: dict[str, tuple[Callable[[], LeanRunner], bool]] = {
    "plain": (runner, True),
    "packed": (partial(runner, kernel=PackedLinear), can_pack(torch.float32)),
    "half": (partial(runner, kernel=HalfLinear), can_halve()),
    "int8": (partial(of_format, "eight_bits", "int8_weight_only_linear"), True),
    "int4": (partial(of_format, "four_bits", "int4_weight_only_linear", hidden_size=128, intermediate_size=256), True),
    "nf4": (partial(of_format, "bitsandbytes", "Nf4Linear"), find_spec("bitsandbytes") is not None),
    "windows": (partial(runner, "qwen3, windows"), True),
    "biases": (partial(runner, "qwen2"), True),
    "narrow heads": (partial(runner, head_dim=16), True),
    "bf16": (partial(runner, dtype=torch.bfloat16), True),
    "fp16": (partial(runner, dtype=torch.float16), True),
}
"""Forms of weights, families and number formats, and whether this machine has them."""


class Replayed:
    """A runner whose forwards are recorded as those of rounds are."""

    def __init__(self, lean: LeanRunner) -> None:
        self.lean = lean
        self.recorded = Traced[Tensor](reads=(lean,))

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor, *, bucket: int, score_positions_BR: Tensor | None = None
    ) -> Tensor:
        self._bucket = bucket
        rows = () if score_positions_BR is None else (score_positions_BR,)
        made = self.lean.num_allocations
        key = ids_BT.shape, len(rows)
        return self.recorded(self._over, key, ids_BT, positions_BT, *rows, bucket=bucket, version=made)

    def _over(self, ids_BT: Tensor, positions_BT: Tensor, *rows: Tensor) -> Tensor:
        return self.lean.forward(
            ids_BT, positions_BT, bucket=self._bucket, score_positions_BR=rows[0] if rows else None
        )


@torch.inference_mode()
def texts(lean: LeanRunner, replayed: Replayed | None = None) -> list[Tensor]:
    """Logits of ragged rows, again and again: with other widths, with wanted rows, in a smaller and a larger cache."""
    generator = torch.Generator().manual_seed(1)
    forward = replayed.forward if replayed else lean.forward
    found = []
    for batch_size, capacity in ((3, 40), (1, 40), (3, 64)):
        lean.allocate(batch_size=batch_size, capacity=capacity)
        ids_BT = torch.randint(VOCAB_SIZE, (batch_size, 9), generator=generator)
        lean.forward(ids_BT, torch.arange(9).expand(batch_size, -1), bucket=16, cache_rows_B=torch.arange(batch_size))
        for start, num_tokens, bucket in ((9, 1, 16), (9, 3, 16), (7, 3, 24), (11, 3, 40), (10, 1, 40), (11, 1, 24)):
            ids_BT = torch.randint(VOCAB_SIZE, (batch_size, num_tokens), generator=generator)
            positions_BT = torch.arange(start, start + num_tokens) + torch.arange(batch_size)[:, None]
            found.append(forward(ids_BT, positions_BT, bucket=bucket))
            last_B1 = torch.full((batch_size, 1), num_tokens - 1)
            found.append(forward(ids_BT, positions_BT, bucket=bucket, score_positions_BR=last_B1))
        assert lean._cache
        found += [buffer.parts.clone() for buffer in lean._cache.shown[40]]
    return found


def replayed_texts(lean: LeanRunner) -> list[Tensor]:
    """The same from recordings, which must not have failed."""
    replayed = Replayed(lean)
    found = texts(lean, replayed)
    assert not replayed.recorded.failed
    assert sum(replay is not None for replay in replayed.recorded.replays.values()) == 8
    return found


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.seconds
@pytest.mark.parametrize("name", [heavy(name) if name == "nf4" else name for name in RUNNERS])
def test_a_recording_gives_the_same_bits(name: str) -> None:
    make, is_there = RUNNERS[name]
    if not is_there:
        pytest.skip("this build of torch has no such product")
    assert_same_bits(replayed_texts(make()), texts(make()))


def cut(folder: Path, comms: Sequence[Comm]) -> list[LeanRunner]:
    """A checkpoint over ranks."""
    build_checkpoint(folder, "llama")
    return [load_lean(folder, comm=comm, kernel=PlainLinear) for comm in comms]


@pytest.mark.seconds
def test_ranks_meet_inside_of_a_recording_and_one_may_record_while_another_does_not(tmp_path: Path) -> None:
    comms = thread_comms(3)
    plain, mixed = cut(tmp_path, comms), cut(tmp_path, comms)
    wanted = on_ranks(comms, lambda comm: texts(plain[comm.rank]))
    found = on_ranks(comms, lambda comm: (replayed_texts if comm.rank else texts)(mixed[comm.rank]))
    for one_rank, alone in zip(found, wanted, strict=True):
        assert_same_bits(one_rank, alone)


class LostComm(ThreadComm):
    """A group whose other rank goes away when there is mail for a third one."""

    def do_all_reduce(self, values: Tensor) -> Tensor:
        summed = super().do_all_reduce(values)
        if (2, 2) in self.mail:
            raise dist.DistBackendError("rank 1 of the group has ended")
        return summed


@pytest.mark.seconds
def test_what_a_collective_raises_keeps_its_type(tmp_path: Path) -> None:
    comms: list[ThreadComm] = [LostComm(**vars(comm)) for comm in thread_comms(2)]
    runners = cut(tmp_path, comms)

    def rounds(comm: ThreadComm) -> None:
        lean = runners[comm.rank]
        replayed = Replayed(lean)
        texts(lean, replayed)
        comm.meeting.wait(timeout=60)
        comm.mail[2, 2] = SimpleQueue()
        with pytest.raises(dist.DistBackendError, match="rank 1 of the group has ended"):
            replayed.forward(torch.ones(3, 1, dtype=torch.int64), torch.full((3, 1), 9), bucket=16)

    on_ranks(comms, rounds)


@pytest.mark.seconds
def test_weights_go_with_the_runner() -> None:
    lean = runner()
    replayed_texts(lean)
    watched = [weakref.ref(lean._layers[0].qkv.linear.weight_OI), weakref.ref(lean._cache._wholes[0])]  # type: ignore[union-attr]
    del lean
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_a_trace_has_a_short_stack_however_deep_its_caller_is() -> None:
    """It is stored with each operator."""
    traced, depths = Traced[Tensor](), list[int]()

    def function(x: Tensor) -> Tensor:
        depths.append(sum(1 for _ in traceback.walk_stack(None)))
        return x + 1

    def called(depth: int) -> Tensor:
        return called(depth - 1) if depth else traced(function, "key", torch.ones(3))

    assert [called(100).tolist() for _ in range(3)] == [[2.0] * 3] * 3
    from_python, while_tracing = depths
    assert from_python > 100
    assert while_tracing < 30


@pytest.mark.heavy
def test_recordings_go_with_what_made_them() -> None:
    """Torch keeps a page of text for each operator, and what `torch.jit.trace` makes for ever."""

    def many(values: Tensor) -> Tensor:
        for _ in range(400):
            values = values + 1
        return values

    def make() -> None:
        recorded = Traced[Tensor]()
        assert [recorded(many, 0, torch.tensor(0.0)).item() for _ in range(3)] == [400] * 3
        assert recorded.replays[0]
        gc.collect()

    make()
    before = anonymous_bytes()
    for _ in range(10):
        make()
    after = anonymous_bytes()
    assert before
    assert after
    assert after - before < 4 * 2**20


def test_what_cannot_be_recorded_goes_on_from_python(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Tensor] = []

    def double(values: Tensor) -> Tensor:
        calls.append(values)
        if len(calls) == 2:  # the first call is from Python
            raise RuntimeError("not this one\nTraceback")
        return values * 2

    recorded = Traced[Tensor]()
    with caplog.at_level(logging.WARNING):
        assert [recorded(double, 0, torch.tensor(float(number))).item() for number in range(4)] == [0, 2, 4, 6]
    assert [record.message for record in caplog.records] == ["continuing without tracing: not this one"]


def test_the_traces_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.extensions.cpu.tracing.MOST", 2)
    sizes_of_calls: list[int] = []

    def double(values: Tensor) -> Tensor:
        sizes_of_calls.append(len(values))
        return values * 2

    recorded = Traced[Tensor]()
    for size in (1, 1, 2, 2, 1, 3, 3, 1, 2, 2):  # two calls before a replay
        assert recorded(double, size, torch.arange(size)).tolist() == [2 * number for number in range(size)]
    assert sizes_of_calls == [1, 1, 2, 2, 3, 3, 2, 2]
    assert list(recorded.replays) == [1, 2]


class Table(Workspace):
    """What `allocate` would make."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Holder:
    """Something that a traced function reads."""

    def __init__(self) -> None:
        self.table = Table(torch.arange(3.0))

    def doubled(self) -> Tensor:
        return self.table.values * 2


def test_a_tensor_that_cannot_be_found_is_not_taken_for_a_constant(caplog: pytest.LogCaptureFixture) -> None:
    hidden, holder = Traced[Tensor](), Holder()
    with caplog.at_level(logging.WARNING):
        assert [hidden(holder.doubled, 0).tolist() for _ in range(3)] == [[0, 2, 4]] * 3
    assert [record.message for record in caplog.records] == [
        "continuing without tracing: tracing would freeze a tensor of shape (3,) as a constant: pass it as an input"
    ]


@pytest.mark.seconds
def test_a_workspace_that_was_made_again_is_read_and_the_old_one_is_not_kept_alive() -> None:
    holder = Holder()
    found = Traced[Tensor](reads=(holder,))
    assert [found(holder.doubled, 0).tolist() for _ in range(3)] == [[0, 2, 4]] * 3
    watched = weakref.ref(holder.table.values)
    holder.table = Table(torch.ones(3))
    gc.collect()
    assert watched() is None
    assert found(holder.doubled, 0, version=1).tolist() == [2, 2, 2]
    assert not found.failed


@torch.inference_mode()
def test_a_cache_may_be_made_by_a_forward_that_was_recorded_for_another() -> None:
    """As where rounds of a kept decoder are timed before any prompt is read."""
    lean = runner()
    replayed = Replayed(lean)
    ids_BT, positions_BT = torch.ones(1, 3, dtype=torch.long), torch.arange(3)[None]
    for capacity in (40, 64):
        lean.allocate(batch_size=1, capacity=capacity)
        found = [replayed.forward(ids_BT, positions_BT, bucket=bucket) for bucket in (16, 16, 24, 16, 24)]
        assert_same_bits(found, [lean.forward(ids_BT, positions_BT, bucket=bucket) for bucket in (16, 16, 24, 16, 24)])


def requests(*lengths: int, new_tokens: int = 40) -> list[Request]:
    return [
        Request(index=index, prompt_ids=tuple(range(2, 2 + length)), max_new_tokens=new_tokens + index)
        for index, length in enumerate(lengths)
    ]


def decoded(decoder: Decoder) -> list[list[int]]:
    """Of short prompts, then of one that needs a larger cache, then of short ones again."""
    parts = [requests(3, 9, 5), requests(60, new_tokens=70), requests(4, 2)]
    return [completion.token_ids for part in parts for completion in complete(decoder, part)]


def replays(decoder: Decoder) -> dict[str, dict[Any, Any]]:
    """Those of each stage; none of them has failed."""
    executor = decoder.executor
    assert isinstance(executor, TracedExecutor)
    assert not any(each.failed for each in executor.traced.values())
    return {stage: dict(each.replays) for stage, each in executor.traced.items()}


def pair_of(num_draft_tokens: int, **options: Any) -> Decoder:
    draft = runner(num_hidden_layers=1) if num_draft_tokens else None
    return make_decoder(runner(num_hidden_layers=2), draft, num_draft_tokens=num_draft_tokens, **options)


@pytest.mark.seconds
@grid(num_draft_tokens=[0, 1, 4], batch_size=[1, 3], rule_name=["greedy", "speculative", "block"])
def test_the_text_is_that_of_rounds_from_python(num_draft_tokens: int, batch_size: int, rule_name: str) -> None:
    temperature = 0.0 if rule_name == "greedy" else 0.9
    decoder = partial(pair_of, num_draft_tokens, batch_size=batch_size, temperature=temperature, rule_name=rule_name)
    replayed = decoder(replay=True)
    assert decoded(replayed) == decoded(decoder(replay=False))
    found = replays(replayed)
    of_sizes = dict.fromkeys(STAGES[not num_draft_tokens :], 2)  # of the cache
    assert {stage: len(each) for stage, each in found.items()} == of_sizes
    assert all(found["verify"].values())


@pytest.mark.seconds
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_after_a_warm_up_no_timed_round_is_recorded(num_draft_tokens: int) -> None:
    warm, wanted = pair_of(num_draft_tokens, temperature=0.9), requests(3, new_tokens=10)
    with torch.inference_mode():
        warm.make_room(wanted)
        warm.warm_up(wanted)
    found = replays(warm)
    assert {stage: len(each) for stage, each in found.items()} == dict.fromkeys(STAGES[not num_draft_tokens :], 1)
    assert all(all(each.values()) for each in found.values())
    texts_of = [
        [done.token_ids for done in complete(decoder, wanted)]
        for decoder in (warm, pair_of(num_draft_tokens, temperature=0.9))
    ]
    assert texts_of[0] == texts_of[1]
    assert replays(warm) == found


@pytest.mark.seconds
@pytest.mark.parametrize("temperature", [heavy(0.0), 0.9])
def test_ranks_that_share_a_target_agree_inside_of_recordings(tmp_path: Path, temperature: float) -> None:
    comms = thread_comms(2)
    alone, *targets = cut(tmp_path, [Comm.single(), *comms])

    def one_rank(comm: ThreadComm) -> list[list[int]]:
        decoder = make_decoder(targets[comm.rank], runner(num_hidden_layers=1), temperature=temperature, comm=comm)
        found = decoded(decoder)
        assert all(all(each.values()) for each in replays(decoder).values())
        return found

    wanted = decoded(make_decoder(alone, runner(num_hidden_layers=1), temperature=temperature, replay=False))
    assert on_ranks(comms, one_rank) == [wanted, wanted]


@pytest.mark.heavy
def test_a_model_that_cannot_be_recorded_goes_on_from_python() -> None:
    modules = ModuleRunner(tiny_model("gpt_neox"), comm=Comm.single())
    decoder = make_decoder(modules, PrefixRunner(modules.vocab_size), temperature=0.9)
    wanted = make_decoder(modules, PrefixRunner(modules.vocab_size), temperature=0.9, replay=False)
    assert decoded(decoder) == decoded(wanted)
    assert any(replays(decoder)["draft"].values())
    assert not replays(decoder).get("verify")
