"""A replay calls and reads what Python would: every kind of draft, round and target in every mode, stage by stage.

Each decoder runs several texts in one process, short and long, with another decoder of the same target in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.models.cache import Taps
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import NullRunner, Runner
from llama_ssp.models.weights import Loading
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter, ProbsReceiver, TapsSender
from llama_ssp.speculate.engine.likelihoods import ScoredText
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.shards import Shard
from llama_ssp.weights.checkpoint import inspect
from tests.helpers import one_pass_heads
from tests.helpers.decoders import ScriptedLength, make_decoder, outcome, parts_of, tree_of
from tests.helpers.draft_heads import SMALL_WIDTH, inspect_pair, save_small_pair
from tests.helpers.extensions import copies, copying, module_of, of_heads
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.kinds import KINDS, near_pair
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.recorded import FakeRecorder, WatchedGraphs

CPU = torch.device("cpu")
RUNS = (0, 0, 60)
"""By how many tokens the first prompt of each run is longer: the last one needs a larger cache."""
BUCKET_STEP = 32
IN_BLOCKS = {"linear_num_value_heads": 32, "linear_value_head_dim": 4}
"""Sizes of which all products are our own, which can be recorded."""
Make = Callable[..., Decoder]

A, B = SamplingConfig(temperature=1.0), SamplingConfig(temperature=0.9, top_p=0.8)
C = SamplingConfig(temperature=0.0, frequency_penalty=0.3)
MODES: dict[str, SamplingConfig] = {
    "by row": SamplingConfig(temperature=1.0, by_row=True),
    "sampled": SamplingConfig(temperature=0.9),
    "greedy": SamplingConfig(temperature=0.0),
    "penalties": SamplingConfig(
        temperature=0.9, top_k=8, frequency_penalty=0.3, logit_bias={3: 1.0}, bad_ids=((5,), (2, 9))
    ),
    "log-probabilities": SamplingConfig(temperature=0.9),
}


def wanted(num_more: int) -> list[Request]:
    """Texts whose settings by row make the steps of rounds come and go."""
    rows: Sequence[tuple[tuple[int, ...], SamplingConfig, int]] = (
        ((5, 9, 1, 4, 2) + (3, 1) * (num_more // 2), A, 20),
        ((3,), A, 4),
        ((7, 8, 7, 8, 7), B, 8),
        ((1, 2, 3), A, 5),
        ((4, 4), C, 6),
    )
    return [
        Request(
            index=place, prompt_ids=ids, max_new_tokens=num_new, sampling=sampling, seed=place, num_draft_tokens=most
        )
        for place, (ids, sampling, num_new) in enumerate(rows)
        for most in [0 if sampling is B else None]
    ]


@torch.inference_mode()
def decoded(decoder: Decoder, num_more: int, *, mode: str) -> list[object]:
    """What a run decides; further texts are scored between its rounds if it gives log-probabilities."""
    by_row, scores, num_asked = mode == "by row", list[Any](), 0
    requests = wanted(num_more)
    if not by_row:
        requests = [replace(request, sampling=None, num_draft_tokens=None) for request in requests]

    def more(run: Decoding, num_free: int) -> list[Request] | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1 and num_free > 0 and not run.scoring:
            run.score([ScoredText(ids=(5, 6, 7, 8))], num_top=2, deliver=scores.append)
        return None if scores else []

    done = dict[int, Any]()
    for updates in decoder.run(requests, more=more if mode == "log-probabilities" else None):
        done |= {update.completion.request.index: update.completion for update in updates}
    return [outcome([done[index] for index in sorted(done)]), scores]


def outcomes(decoder: Decoder, *, mode: str = "sampled", is_shared: bool = False) -> list[list[object]]:
    """What each run decides; of a target `is_shared`, another decoder has a larger cache made before the last one."""
    decoder.space.bucket_step, found = BUCKET_STEP, []
    for number, num_more in enumerate(RUNS):
        if is_shared and number == len(RUNS) - 1:
            decoder.round.target.allocate(batch_size=2, capacity=300)
        found.append(decoded(decoder, num_more, mode=mode))
    return found


def check_recorded(make: Make, mode: str, *, is_whole: bool = True) -> None:
    """Hold graphs, and traces, to Python; a target that waits for the device leaves graphs for the draft alone."""
    make = partial(make, sampling=MODES[mode], batch_size=2)
    expected, recorded, traced = outcomes(make(replay=False), mode=mode), make(replay=WatchedGraphs), make(replay=True)
    assert outcomes(recorded, mode=mode, is_shared=True) == expected
    assert isinstance(recorded.executor, WatchedGraphs)
    assert recorded.executor.num_compared > 4
    assert {name for name, _ in recorded.executor.failed} == (set() if is_whole else {"verify"})
    assert outcomes(traced, mode=mode) == expected
    assert isinstance(traced.executor, module_of("cpu.executor").TracedExecutor)
    assert not any(stage.failed for stage in traced.executor.traced.values())


def choosing(**options: Any) -> Decoder:
    """A decoder that chooses a drafter and K for each round; drafters read late what they have missed."""
    decoder = make_decoder(*near_pair(1.0), ngram=True, num_draft_tokens=4, **options)
    choices = ((4,), (0,), (2,), *[(0,)] * 9, (4, 1), (4,), (1, 1))
    decoder.length = ScriptedLength([DraftChoice(*each) for each in choices], reads_late=True)
    return decoder


def drafting_greedily(*, sampling: SamplingConfig, **options: Any) -> Decoder:
    target, draft = near_pair(1.0)
    rule = make_rule(replace(sampling, temperature=0.0), VerificationConfig())
    parts = parts_of(draft, rule=rule, num_draft_tokens=4, vocab_size=target.vocab_size)
    return make_decoder(
        target, None, sampling=sampling, make_drafter=lambda _: ModelDrafter(parts), num_draft_tokens=4, **options
    )


def of_texts(folder: Path) -> Make:
    """A decoder that copies from earlier texts and from a corpus."""
    corpus_C = torch.tensor([5, 9, 1, 4, 2, 7, 8, 7, 3, 1, 2, 3, 6] * 4)
    (folder / "corpus").write_bytes(bytes(2 * len(corpus_C)))
    config = copies(longest=3, history=4, corpus=str(folder / "corpus"))
    how: dict[str, Any] = {"num_draft_tokens": 4, "vocab_size": 11, "config": config, "prepared": corpus_C}
    return partial(
        make_decoder,
        near_pair(1.0)[0],
        None,
        num_draft_tokens=4,
        make_drafter=lambda rule: copying(parts_of(rule=rule, **how)),
    )


def loaded(origin: Any, target: Runner | None = None) -> Any:
    return load_model(Loading(origin, dtype=torch.float32, target=target))


def pair_of(folder: Path, target: str, draft: str, **changes: Any) -> Make:
    """A target and a draft of families."""
    for name, family in (("target", target), ("draft", draft)):
        build_checkpoint(folder / name, family, vocab_size=32, **changes)
    return partial(make_decoder, *(loaded(inspect(folder / name)) for name in ("target", "draft")))


def with_head(folder: Path, kind: str, shape: str | None = None) -> Make:
    """A target and a head for it: EAGLE, one of one pass, or a target's own layer."""
    origin: Any
    if kind == "eagle":
        (files, origin), drafter, width = save_small_pair(folder), of_heads("drafter").HeadDrafter, SMALL_WIDTH
    elif kind == "mtp":
        save_with_mtp(folder, "qwen3_5_text", vocab_size=32, **IN_BLOCKS)
        files, drafter, width = inspect(folder), of_heads("drafter").HeadDrafter, 64
        origin = of_heads("sources").mtp_of(files)
    else:
        files, origin = one_pass_heads.save_pair(folder, kind)
        drafter, width = of_heads("one_pass_drafter").OnePassDrafter, one_pass_heads.WIDTH
    target, tree = loaded(files), tree_of(shape)
    head = loaded(origin, target)

    def make(**options: Any) -> Decoder:
        taps = Taps(origin.layers, width=width, dtype=torch.float32, device=CPU)
        number = tree.num_drafted if tree else 3
        return make_decoder(
            target,
            None,
            taps=taps,
            tree=tree,
            num_draft_tokens=number,
            **options,
            make_drafter=lambda rule: drafter(
                parts_of(
                    runner=head, taps=taps, rule=rule, tree=tree, num_draft_tokens=number, vocab_size=target.vocab_size
                )
            ),
        )

    return make


MAKERS: dict[str, Callable[[Path], Make]] = {
    **{name: lambda _, make=make: partial(make, 1.0) for name, make in KINDS.items()},  # type: ignore[misc]
    "a choice for each round": lambda _: choosing,
    "greedy drafts": lambda _: drafting_greedily,
    "a corpus": of_texts,
    "eagle": partial(with_head, kind="eagle"),
    "peagle": partial(with_head, kind="peagle"),
    "an own layer of a hybrid": partial(with_head, kind="mtp"),
    "a hybrid": lambda folder: pair_of(folder, "qwen3_5_text", "qwen3_5_text", **IN_BLOCKS),
    "experts": partial(pair_of, target="mixtral", draft="llama"),
}
TREES: dict[str, Callable[[Path], Make]] = {
    **{
        f"{shape} of a model": lambda _, shape=shape: partial(make_decoder, *near_pair(1.0), tree=shape)  # type: ignore[misc]
        for shape in ("2x2x1", "dynamic-7x3x3")
    },
    "look-up": lambda _: partial(make_decoder, near_pair(1.0)[0], None, ngram=True, tree="3x2x1"),
    "eagle": partial(with_head, kind="eagle", shape="2x2x1"),
    "dynamic eagle": partial(with_head, kind="eagle", shape="dynamic-7x3x3"),
    "dspark": partial(with_head, kind="dspark", shape="2x2x1"),
}
OF_TREES = ("sampled", "greedy")
"""Penalties need the text before each token, which a tree does not have."""
LIGHT = ("none", "model", "overlapped", "a choice for each round", "greedy drafts", "a corpus", "a hybrid", "experts")


def cases(kinds: Sequence[str], modes: Sequence[str], *, light: Sequence[str]) -> list[Any]:
    """Every kind in every mode: the first of the `light` ones always, with --heavy all of them in the first mode.

    Of light kinds in other modes, and of other kinds in the first one, a sixth runs with --heavy; the rest with --slow.
    """

    def lane(place: int, kind: str, mode: str) -> object:
        if kind == light[0]:
            return kind, mode
        if kind in light and mode == modes[0]:
            return heavy(kind, mode)
        is_chosen = (kind in light or mode == modes[0]) and (place + modes.index(mode)) % 6 == 0
        return (heavy if is_chosen else slow)(kind, mode)

    return [lane(place, kind, mode) for (place, kind), mode in product(enumerate(kinds), modes)]


@pytest.mark.seconds
@pytest.mark.parametrize(("kind", "mode"), cases([*MAKERS], [*MODES], light=("model", *LIGHT)))
def test_chains(kind: str, mode: str, tmp_path: Path) -> None:
    check_recorded(MAKERS[kind](tmp_path), mode, is_whole=kind != "experts")


@pytest.mark.seconds
@pytest.mark.parametrize(("kind", "mode"), cases([*TREES], OF_TREES, light=("2x2x1 of a model", "look-up")))
def test_trees(kind: str, mode: str, tmp_path: Path) -> None:
    check_recorded(TREES[kind](tmp_path), mode)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("num_ranks", "num_targets", "mode"), [heavy(2, 1, "by row"), (2, 1, "sampled"), heavy(3, 2, "by row")]
)
def test_rounds_that_overlap_on_ranks(num_ranks: int, num_targets: int, mode: str) -> None:
    make = partial(overlapped_decoder, sampling=MODES[mode], batch_size=2, num_draft_tokens=4)
    expected = outcomes(make(*near_pair(1.0), replay=False), mode=mode)

    def one_rank(comm: ThreadComm) -> list[list[object]]:
        decoder = make(*near_pair(1.0), comm=comm, num_target_ranks=num_targets, replay=WatchedGraphs)
        return outcomes(decoder, mode=mode)

    assert on_ranks(thread_comms(num_ranks), one_rank) == [expected] * num_ranks


@pytest.mark.seconds
@pytest.mark.parametrize("ngram", [False, heavy(True)])
def test_draws_over_shards(ngram: bool) -> None:
    def made(comm: ThreadComm | None, replay: Any) -> Decoder:
        models = near_pair(1.0)
        for model in models if comm else ():
            model.comm = comm  # type: ignore[assignment]
        return make_decoder(
            models[0],
            None if ngram else models[1],
            ngram=ngram,
            comm=comm,
            batch_size=2,
            temperature=0.9,
            replay=replay,
            shard=Shard(comm, models[0].vocab_size) if comm else Shard(),
        )

    expected = outcomes(made(None, replay=False))
    assert on_ranks(thread_comms(2), lambda comm: outcomes(made(comm, WatchedGraphs))) == [expected] * 2


@pytest.mark.heavy
def test_a_head_on_a_rank_of_its_own(tmp_path: Path) -> None:
    expected = outcomes(with_head(tmp_path, "eagle")(batch_size=2, temperature=0.9, replay=False))
    files, origin = inspect_pair(tmp_path)
    target = loaded(files)

    def one_rank(comm: ThreadComm) -> list[list[object]]:
        taps = Taps(origin.layers, width=SMALL_WIDTH, dtype=torch.float32, device=CPU)

        def make(rule: Any) -> Any:
            parts = parts_of(
                runner=loaded(origin) if comm.rank else None, taps=taps, rule=rule, vocab_size=target.vocab_size
            )
            inner = of_heads("drafter").HeadDrafter(parts) if comm.rank else None
            receiver, sender = ProbsReceiver(0, target.vocab_size), TapsSender(taps, 0, most_accepted=3)
            return BroadcastDrafter(inner, parts, comm=comm, src=1, receiver=receiver, taps=sender)

        own = NullRunner(device=CPU, vocab_size=target.vocab_size, max_position_embeddings=512) if comm.rank else target
        return outcomes(
            make_decoder(
                own, None, batch_size=2, temperature=0.9, make_drafter=make, comm=comm, taps=taps, replay=WatchedGraphs
            )
        )

    assert on_ranks(thread_comms(2), one_rank) == [expected] * 2


def test_taps_that_other_rounds_have_moved_are_an_allocation() -> None:
    taps = Taps((0,), width=4, dtype=torch.float32, device=CPU)
    decoder = make_decoder(near_pair()[0], None, taps=taps)
    before = decoder.round.num_allocations
    taps.allocate(batch_size=1, num_slots=8)
    assert decoder.round.num_allocations != before


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("model", "draft"),
        ("overlapped", "exchange"),
        heavy("model", "verify"),
        *(heavy("overlapped", stage) for stage in ("draft", "score", "decide")),
    ],
)
def test_a_stage_that_cannot_be_captured_costs_its_own_graph_alone(
    kind: str, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(WatchedGraphs):
        refused = stage

    make = partial(KINDS[kind], 1.0, sampling=MODES["sampled"], batch_size=2)
    recorded, expected = make(replay=Refusing), outcomes(make(replay=False))
    assert outcomes(recorded) == expected
    assert isinstance(recorded.executor, Refusing)
    assert {name for name, _ in recorded.executor.failed} == {stage}
    others = {"draft", "verify"} if kind == "model" else {"draft", "score", "exchange", "decide"}
    assert {name for name, number in recorded.executor.num_of.items() if number > 2} == others - {stage}
    assert [record.getMessage() for record in caplog.records] == [
        f"{stage} runs from Python, since it could not be captured as a graph: it is refused"
    ]


WAITING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a number": lambda x_N, _: x_N[0].item(),
    "a choice": lambda x_N, _: bool(x_N[0]),
    "a list": lambda x_N, _: x_N.tolist(),
    "an array": lambda x_N, _: x_N.numpy(),
    "a mask": lambda x_N, mask_N: x_N[mask_N],
    "a mask that is written": lambda x_N, mask_N: x_N.__setitem__(mask_N, x_N[:2]),
    "an index of the host": lambda x_N, _: x_N[[0, 1]],
    "a number by index": lambda x_N, _: x_N.__setitem__(1, 5),
    "a tensor of the host": lambda *_: torch.tensor([1, 2]),
    "places": lambda _, mask_N: torch.where(mask_N),
    "places in rows": lambda _, mask_N: mask_N.argwhere(),
    "counts": lambda x_N, _: x_N.bincount(),
    "each once": lambda x_N, _: x_N.unique(),
    "each once in turn": lambda x_N, _: x_N.unique_consecutive(),
    "rows once": lambda x_N, _: x_N[:, None].unique(dim=0),
    "repeated": lambda x_N, _: x_N.repeat_interleave(x_N),
}
FREE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "filled": lambda x_N, _: x_N[1].fill_(5),
    "ids": lambda x_N, _: x_N[x_N[:2]],
    "masked": lambda x_N, mask_N: x_N.masked_fill_(mask_N, 3),
    "chosen": lambda x_N, mask_N: torch.where(mask_N, x_N, 0),
    "repeated alike": lambda x_N, _: x_N.repeat_interleave(2),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", [*WAITING, *FREE])
def test_what_waits_for_the_device_is_not_recorded(name: str) -> None:
    piece = (WAITING | FREE)[name]
    x_N = torch.arange(4)
    record = partial(FakeRecorder().record, partial(piece, x_N, x_N > 1))
    if name in FREE:
        record()
        return
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        record()


@torch.inference_mode()
def test_rows_are_freed_without_a_wait() -> None:
    decoder = make_decoder(near_pair()[0], None, batch_size=2)
    decoder.make_room(wanted(0))
    state = decoder.space.empty_state()
    for rows, length in ((1, 2), (0, 40), (slice(None), 7)):
        _, replay = FakeRecorder().record(partial(state.vacate, rows, length=length))
        replay()
        assert state.lengths_B[rows].tolist() == state.limits_B[rows].tolist()
        assert bool((state.lengths_B[rows] == length).all())
        assert bool((state.first_round_B[rows] == -length).all())
