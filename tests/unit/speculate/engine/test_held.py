"""A beginning that rows of the caches hold is not read again, and every text and every bit stays as it was."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.family import record_of
from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.prefill import Held, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.models.states import StateCache
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.held import HeldTexts, Reuse
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import ScriptedLength, change_runs, complete, ids_of, make_decoder, outcome, requests_of
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.kinds import Make, kinds
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import FAMILIES, build_checkpoint, load_lean, load_ranks, tiny_model
from tests.helpers.prefix_runner import PrefixRunner

Ids = tuple[int, ...]
SHARED: dict[str, Any] = {"head_dim": 16, "vocab_size": 224}
"""Whole blocks on two ranks, so that compiled kernels take them."""
HYBRIDS = [kind for kind in FAMILIES if record_of(kind.partition(",")[0]).recurrent]


@pytest.fixture(autouse=True)
def _short_beginnings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.speculate.engine.held.LEAST_TOKENS", 1)


def wanted(*prompts: Ids, num_new: int = 6) -> list[Request]:
    return requests_of(prompts, num_new)


def reused(done: list[RowCompletion]) -> list[int]:
    return [each.num_reused_tokens for each in done]


class Conversations:
    """Prompts of one run after another, which go on from texts of the last run, or from the beginning of any."""

    def __init__(self, seed: int, *, most_tokens: int) -> None:
        self._draw, self._most = random.Random(seed), most_tokens
        self._texts: list[Ids] = [(1, 2, 3, 4, 5)]
        self._last = self._texts

    def requests(self) -> list[Request]:
        """Those of the next run, some of them equal."""
        draw, prompts = self._draw, list[Ids]()
        for _ in range(draw.randint(1, 7)):
            text = draw.choice([*self._texts, *prompts, *prompts])
            text = draw.choice([draw.choice(self._last), text[: draw.randint(1, self._most)]])
            prompts.append((*text, *draw.choices(range(11), k=draw.randint(0, 4))))
        return [
            Request(index=index, prompt_ids=ids, max_new_tokens=draw.randint(1, 12))
            for index, ids in enumerate(prompts)
        ]

    def take(self, done: list[RowCompletion]) -> None:
        """Hear the answers."""
        self._last = [(*each.request.prompt_ids, *each.token_ids) for each in done]
        self._texts += self._last


def read_in_chunks(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("architectures.engine", "models.prefill", "speculate.engine.loop", "speculate.engine.held"):
        monkeypatch.setattr(f"llama_ssp.{module}.PREFILL_CHUNK", num_tokens)


@kinds
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 512), (3, 512), (3, 5)])
def test_texts_are_the_target_s_own_whatever_earlier_runs_have_left(
    make: Make, batch_size: int, chunk: int, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while prompts that are longer than a chunk are read next to rows that decode."""
    read_in_chunks(chunk, monkeypatch)
    target, made = PrefixRunner(), make(3.0, batch_size=batch_size, eos_ids=[4])
    made.lag = lag
    talk, num_reused = Conversations(7, most_tokens=40), 0
    for _ in range(12):
        done = complete(made, talk.requests())
        talk.take(done)
        num_reused += sum(reused(done))
        for each in done:
            [greedy] = target.texts([each.request])
            assert each.token_ids == (greedy[: greedy.index(4) + 1] if 4 in greedy else greedy)
    assert num_reused > 100


@pytest.mark.seconds
@kinds
@pytest.mark.parametrize("chunk", [512, 5])
def test_drafts_and_decisions_are_those_behind_prompts_that_are_read(
    make: Make, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in_chunks(chunk, monkeypatch)
    reuses, reads = (make(1.0, batch_size=3, temperature=0.9) for _ in range(2))
    change_runs(reads, reuses=False)
    talk, num_reused = Conversations(11, most_tokens=40), 0
    for _ in range(6):
        requests = talk.requests()
        done = complete(reuses, requests)
        talk.take(done)
        num_reused += sum(reused(done))
        assert outcome(done) == outcome(complete(reads, requests))
    assert num_reused > 50


@pytest.mark.seconds
@pytest.mark.parametrize("shape", [None, "2x2x1"])
def test_a_plain_and_a_speculative_decoder_take_turns_on_one_cache(shape: str | None) -> None:
    target, draft = PrefixRunner(), PrefixRunner(seed=1)
    decoders = [make_decoder(target, each, batch_size=2, tree=shape if each else None) for each in (None, draft)]
    talk, order = Conversations(3, most_tokens=40), random.Random(1)
    for _ in range(25):
        done = complete(order.choice(decoders), talk.requests())
        talk.take(done)
        assert ids_of(done) == target.texts([each.request for each in done])


def tokens_read(runner: PrefixRunner, work: Callable[[], object]) -> int:
    """The tokens of all forwards of a model."""
    forward, numbers = runner.forward, list[int]()

    def counted(ids_BT: Tensor, *more: Any, **named: Any) -> Tensor:
        numbers.append(ids_BT.numel())
        return forward(ids_BT, *more, **named)

    runner.forward = counted  # type: ignore[method-assign]
    work()
    runner.forward = forward  # type: ignore[method-assign]
    return sum(numbers)


def test_samples_of_a_prompt_read_it_once_in_both_models() -> None:
    target, draft = PrefixRunner(), PrefixRunner(seed=1)
    decoder = make_decoder(target, draft, batch_size=4)
    samples = [Request(index=0, sample=sample, prompt_ids=(1, 2, 3, 4, 5, 6), max_new_tokens=1) for sample in range(9)]
    for model in (target, draft):
        change_runs(decoder, reuses=True)
        # Of the first four one reads all, of the next four and of the last one, one reads the last token.
        assert tokens_read(model, lambda: complete(decoder, samples)) == 6 + 1 + 1
        change_runs(decoder, reuses=False)
        assert tokens_read(model, lambda: complete(decoder, samples)) == 9 * 6


def test_prompts_that_begin_alike_read_the_beginning_once() -> None:
    decoder = make_decoder(PrefixRunner(), PrefixRunner(seed=1), batch_size=3)
    header = (1, 2, 3, 4, 5, 6, 7, 8)
    done = complete(decoder, wanted(*[(*header, 9, number, number) for number in range(6)]))
    assert reused(done) == [0, 9, 9, 9, 9, 9]


def test_a_turn_reads_neither_the_turns_before_it_nor_their_answers() -> None:
    decoder = make_decoder(PrefixRunner(), PrefixRunner(seed=1), batch_size=2)
    (first,) = complete(decoder, wanted((1, 2, 3)))
    text = (*first.request.prompt_ids, *first.token_ids)
    (second,) = complete(decoder, wanted((*text, 5, 6)))
    assert reused([first, second]) == [0, len(text) - 1]
    (again,) = complete(decoder, wanted((*text, 5, 6)))
    assert reused([again]) == [len(text) + 1], "all but the last token, whose logits are wanted"


@pytest.mark.parametrize("is_timed", [False, True])
@torch.inference_mode()
def test_what_timed_rounds_or_another_decoder_have_written_is_not_taken(is_timed: bool) -> None:
    target = PrefixRunner()
    decoder = make_decoder(target, PrefixRunner() if is_timed else None)
    complete(decoder, wanted((1, 2, 3, 4)))
    if is_timed:
        decoder.time_rounds(decoder.length.choices, num_slots=8)
    else:
        target.allocate(batch_size=1, capacity=4)
        target.slots.cache.fill_(1.0)
    (done,) = complete(decoder, wanted((1, 2, 3, 4)))
    assert (done.num_reused_tokens, done.token_ids) == (0, target.greedy((1, 2, 3, 4), 6))


def test_where_bits_depend_on_what_is_read_together_whole_chunks_of_prompts_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_in_chunks(4, monkeypatch)
    target = PrefixRunner()
    target.is_invariant = False
    decoder = make_decoder(target, None)
    ids = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert reused(complete(decoder, wanted(ids, (*ids[:7], 3, 3), ids[:8], ids[:3]))) == [0, 4, 4, 0]
    (first,) = complete(decoder, wanted((1, 2, 3), num_new=20))
    (second,) = complete(decoder, wanted((1, 2, 3, *first.token_ids)))
    assert reused([second]) == [0], "the answer was not read as a prompt"


def test_a_prompt_that_is_not_read_to_its_end_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row decodes meanwhile, and the consumer leaves the run after the first chunk of three."""
    read_in_chunks(4, monkeypatch)
    target = PrefixRunner()
    decoder = make_decoder(target, None, batch_size=2)
    ids = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    with torch.inference_mode():
        # Both short prompts, then a round before the first chunk and one behind it.
        [*islice(decoder.run([*wanted((3,), num_new=9), *wanted((4,), num_new=1), *wanted(ids)]), 3)]
    (done,) = complete(decoder, wanted(ids))
    assert (done.num_reused_tokens, done.token_ids) == (0, target.greedy(ids, 6))


def test_a_row_that_ends_while_a_prompt_is_read_chunk_by_chunk_gives_the_draft_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_in_chunks(5, monkeypatch)
    header = (1, 2, 3, 4, 5, 6, 7, 8)
    short, others = wanted((*header, 9), num_new=9), wanted((9,), (8,), num_new=60)
    prompts = [*short, others[0], replace(others[1], max_new_tokens=1), *wanted((*header, *range(10), *range(10)))]
    found = []
    for reuses in (True, False):
        target, draft = PrefixRunner(sharpness=1.0), PrefixRunner(sharpness=1.0)
        decoder = make_decoder(target, draft, batch_size=3, temperature=0.9)
        change_runs(decoder, reuses=reuses)
        found.append(outcome(complete(decoder, [replace(each, index=i) for i, each in enumerate(prompts)])))
    assert found[0] == found[1]


def test_a_draft_takes_nothing_of_a_prompt_that_it_has_not_read() -> None:
    """The first run never drafts; the second one reads the prompt, and the same draft is accepted."""
    target, draft = PrefixRunner(), PrefixRunner()
    decoder = make_decoder(target, draft)
    decoder.length = ScriptedLength([DraftChoice(0)], reads_late=True)
    ids = (1, 2, 3, 4, 5, 6, 7)
    complete(decoder, wanted(ids))
    assert draft.num_forwards == 0
    decoder.length = ScriptedLength([DraftChoice(3)])
    (done,) = complete(decoder, wanted(ids, num_new=20))
    assert done.accepted_lengths[:-1] == done.draft_lengths[:-1]
    assert done.num_reused_tokens == 6, "of the target's cache"


def test_too_short_a_beginning_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.speculate.engine.held.LEAST_TOKENS", 4)
    decoder = make_decoder(PrefixRunner(), None, batch_size=2)
    assert reused(complete(decoder, wanted((1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 3, 5, 7)))) == [0, 0, 4]


def lean(*, comm: Comm | None = None, folder: Path | None = None, **options: Any) -> LeanRunner:
    """A random Llama of compiled kernels, or a slice of one."""
    return load_lean(folder or tiny_model("llama", **SHARED), comm=comm, **options)


class FirstLogits:
    """What each model has said after its prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: dict[Runner, list[Tensor]] = {}
        monkeypatch.setattr("llama_ssp.speculate.engine.round.read_prompts", self._read)

    def _read(self, runner: Runner, *prompts: Any, **named: Any) -> Tensor:
        logits_RV = read_prompts(runner, *prompts, **named)
        self._found.setdefault(runner, []).extend(logits_RV)
        return logits_RV

    def of(self, decoder: Decoder, runs: list[list[Request]]) -> tuple[list[Tensor], list[object], int]:
        """Of a decoder's target in these runs; with all that they decide, and how many tokens were reused."""
        found: list[Tensor] = []
        self._found[decoder.round.target] = found
        done = [each for requests in runs for each in complete(decoder, requests)]
        return found, outcome(done), sum(reused(done))


def runs_of(decoder: Decoder, *, most_tokens: int = 60, num_runs: int = 6) -> list[list[Request]]:
    """Requests of several runs, which go on from the texts that this decoder gives them."""
    talk, runs = Conversations(5, most_tokens=most_tokens), list[list[Request]]()
    for _ in range(num_runs):
        runs.append(talk.requests())
        talk.take(complete(decoder, runs[-1]))
    return runs


def same_bits(make: Callable[[], Decoder], logits: FirstLogits) -> int:
    """Check that a decoder that reuses has the logits and decisions of one that reads; returns how much it reuses."""
    runs = runs_of(make())
    reuses, reads = make(), make()
    change_runs(reads, reuses=False)
    (found, decided, num_reused), (wanted_ones, wanted_decisions, none) = (
        logits.of(each, runs) for each in (reuses, reads)
    )
    assert len(found) == len(wanted_ones) > 20
    assert all(map(torch.equal, found, wanted_ones))
    assert decided == wanted_decisions
    assert none == 0
    return num_reused


@pytest.mark.seconds
@pytest.mark.parametrize(("batch_size", "shape"), [(1, None), heavy(3, None), heavy(1, "2x2x1")])
def test_logits_after_a_prompt_have_the_same_bits(
    batch_size: int, shape: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows grow, are copied, and are taken up again; nodes of trees have other bits, and their texts are read."""
    assert lean().is_invariant, "compiled kernels"

    def make() -> Decoder:
        return make_decoder(lean(), lean(), batch_size=batch_size, temperature=0.8, tree=shape)

    assert same_bits(make, FirstLogits(monkeypatch)) > 100


@pytest.mark.seconds
def test_logits_on_two_ranks_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint(tmp_path, "llama", **SHARED)
    logits, comms = FirstLogits(monkeypatch), thread_comms(2)
    models = [(lean(comm=comm, folder=tmp_path), lean()) for comm in comms]
    assert all(target.is_invariant for target, _ in models)

    def one_rank(comm: Comm) -> int:
        return same_bits(lambda: make_decoder(*models[comm.rank], batch_size=3, temperature=0.8, comm=comm), logits)

    one, other = on_ranks(comms, one_rank)
    assert one == other > 100


@pytest.mark.seconds
def test_logits_behind_whole_chunks_have_the_same_bits_with_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_chunks(8, monkeypatch)
    target = lean(kernel=PlainLinear)
    assert not target.is_invariant
    assert same_bits(lambda: make_decoder(target, None, temperature=0.8), FirstLogits(monkeypatch)) > 30


@pytest.mark.parametrize(
    ("first", "later", "held"),
    [
        ((), [range(12), range(20), range(30)], [0, 8, 16]),  # turns of a conversation
        ((), [range(12), range(12), range(12)], [0, 8, 8]),  # samples of a prompt
        ((), [(*range(9), *[number] * 9) for number in (90, 91, 92)], [0, 0, 8]),  # a header
        ([(*range(9), *[number] * 9) for number in (90, 91)], [(*range(9), *[92] * 9)], [8]),  # read together
        ((), [range(9), range(8), range(7), range(9)], [0, 0, 0, 0]),  # too short, or the last token is wanted
    ],
)
def test_states_are_saved_where_prompts_were_seen_to_part_else_at_their_end(
    first: list[Ids], later: list[range | Ids], held: list[int]
) -> None:
    texts = HeldTexts(3, step=8, from_states=True)
    texts.place(first, [1, 2])
    for ids, num_tokens in zip(map(tuple, later), held, strict=True):
        [place] = texts.place([ids], [0])
        assert place.target == place.draft == Held(num_tokens, place.target.row, from_saved=num_tokens > 0)


def load(folder: Path) -> Runner:
    return load_model(Loading(inspect(folder)))


def same_texts(make: Callable[[], Decoder]) -> int:
    """Check that a decoder that reuses decides as one that reads; returns how much it reuses."""
    reuses, reads = make(), make()
    change_runs(reads, reuses=False)
    runs = runs_of(reads, num_runs=4)
    found, others = ([*chain(*(complete(decoder, requests) for requests in runs))] for decoder in (reuses, reads))
    assert outcome(found) == outcome(others)
    return sum(reused(found))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "models", "batch_size"),
    [
        ("granitemoehybrid, dense", "both", 3),
        *(slow(kind, "both", 2) for kind in HYBRIDS),
        *(slow(*case) for case in (("qwen3_next", "target", 1), ("bamba", "draft", 3), ("kimi_linear", "plain", 3))),
    ],
)
def test_texts_go_on_from_states_that_were_saved(
    tmp_path: Path, kind: str, models: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not from one that follows a token less."""
    read_in_chunks(8, monkeypatch)
    build_checkpoint(tmp_path, kind)
    hybrid, draft = load(tmp_path), load(tmp_path)
    pairs = {"both": (hybrid, draft), "target": (hybrid, lean()), "draft": (lean(), draft), "plain": (hybrid, None)}
    pair = pairs[models]

    def make() -> Decoder:
        return make_decoder(*pair, batch_size=batch_size, temperature=0.8)

    if batch_size == 1:  # products over other numbers of rows round differently
        assert same_bits(make, FirstLogits(monkeypatch)) > 20
        return
    assert same_texts(make) > 20
    if batch_size == 3 and models == "both":
        take = StateCache.take
        monkeypatch.setattr(
            StateCache, "take", lambda own, other, row, rows, number: take(own, other, row, rows, number - 1)
        )
        with pytest.raises(AssertionError):
            same_texts(make)


@pytest.mark.parametrize("kind", [*map(slow, ("qwen3_next", "falcon_h1", "lfm2"))])
def test_ranks_go_on_from_states_that_were_saved(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_chunks(8, monkeypatch)
    build_checkpoint(tmp_path, kind)
    comms = thread_comms(2)
    pairs = [(target, load(tmp_path)) for target in load_ranks(tmp_path, comms)]

    def one_rank(comm: Comm) -> int:
        def make() -> Decoder:
            return make_decoder(*pairs[comm.rank], batch_size=3, temperature=0.8, comm=comm)

        return same_texts(make)

    one, other = on_ranks(comms, one_rank)
    assert one == other > 20


def test_ranks_reuse_all_or_only_chunks_together() -> None:
    """One whose slice is no whole number of blocks has other kernels."""
    for own, others, agreed in [(True, "invariant", True), (True, "", False), (False, "invariant", False)]:
        target, draft = PrefixRunner(), PrefixRunner()
        draft.is_invariant = own
        reuse = Reuse.of([target, draft], Mock(gather_text=lambda text, others=others: [text, others]))
        assert reuse.are_invariant is agreed
        assert target.is_invariant, "a model stays what it is"
