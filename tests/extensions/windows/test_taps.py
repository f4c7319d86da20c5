"""Taps of a head that sees a window: which stay, what prompts take from rows whose taps are gone, what is sent.

Shapes: B rows, T positions, L tokens of a text, X taps.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import load
from llama_ssp.extensions.windows.records import WindowConfig
from llama_ssp.extensions.windows.taps import WindowTaps
from llama_ssp.models.cache import Taps
from llama_ssp.models.runner import NullRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.shared import BroadcastDrafter, ProbsReceiver, TapsSender
from llama_ssp.speculate.engine.batch_space import BatchSpace
from llama_ssp.speculate.engine.held import HeldTexts
from llama_ssp.speculate.engine.round import DraftChoice
from tests.extensions.windows.test_heads import TAPPED, loaded, windowed
from tests.helpers import draft_heads
from tests.helpers.decoders import ScriptedLength, complete, make_decoder, parts_of, requests_of
from tests.helpers.extensions import need
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.head_drafts import NUM_DRAFTED, Seen, make_head_decoder
from tests.helpers.lanes import heavy

WINDOW, SINKS, CPU = 8, 2, torch.device("cpu")
SETTINGS = WindowConfig(window=WINDOW, sinks=SINKS)


def made(*, num_rows: int, num_slots: int = 500, num_drafted: int = NUM_DRAFTED) -> WindowTaps:
    taps = WindowTaps([0], width=1, dtype=torch.float32, device=CPU, draft=SETTINGS, num_drafted=num_drafted)
    taps.allocate(batch_size=num_rows, num_slots=num_slots)
    return taps


def write(taps: Taps, positions_BT: Tensor, rows_B: Tensor) -> None:
    """Write taps that are their positions, and of each row's own hundreds."""
    slots_M = taps.slots(positions_BT, rows_B)
    of_rows_BT = positions_BT + 1000 * rows_B[:, None]
    taps.write(0, of_rows_BT.flatten()[:, None].float(), slots_M)


def seen_of(taps: Taps, row: int, length: int, *, num_ahead: int = 0) -> bool:
    """Whether a head finds the first taps of a row, and all that it may read behind a text of some tokens."""
    newest = range(max(length - WINDOW - NUM_DRAFTED - 2, 0), length + num_ahead)
    positions = torch.tensor([[*range(min(SINKS, length)), *newest]])
    return bool((taps.read(positions, torch.tensor([row])) == positions[..., None] + 1000 * row).all())


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_of_prompts_the_taps_stay_that_a_head_reads_whatever_they_are_filled_up_with(chunk: int) -> None:
    taps, lengths = made(num_rows=4), [90, 200, 3]
    rows_B = torch.tensor([2, 0, 3])
    of_prompts = taps.of_prompts(torch.tensor(lengths), [2, 0, 3])
    for start in range(0, max(lengths), chunk):
        positions_T = torch.arange(start, min(start + chunk, max(lengths)))
        write(of_prompts, positions_T.expand(3, -1), rows_B)
    for row, length in zip([2, 0, 3], lengths, strict=True):
        assert seen_of(taps, row, length)
        assert taps.in_rows().shape[1] < 40
    one_B = torch.tensor([2])
    for step in range(30):  # rounds go on from there, with what is not accepted
        write(taps, torch.arange(89 + step, 89 + step + NUM_DRAFTED + 1)[None], one_B)
        assert seen_of(taps, 2, 90 + step, num_ahead=NUM_DRAFTED)
    taps.copy(2, [1], 120)
    positions = torch.tensor([[0, 1, 110]])
    assert taps.read(positions, torch.tensor([1])).flatten().tolist() == [2000, 2001, 2110]


def test_taps_stay_where_rows_grow() -> None:
    taps = made(num_rows=2, num_slots=20)
    write(taps.of_prompts(torch.tensor([15]), [1]), torch.arange(18)[None], torch.tensor([1]))
    assert seen_of(taps, 1, 15)
    taps.allocate(batch_size=2, num_slots=300)
    assert seen_of(taps, 1, 15)


@pytest.mark.parametrize(
    ("num_read", "length", "held"),
    [
        (None, 130, 100),  # the row reads more: the window of a prompt of 130 tokens begins behind 100
        (None, 105, 94),  # and this one before
        (101, 105, 100),  # a later turn
        (140, 105, 94),  # the text was longer
        (140, 141, 100),
        (140, 60, 49),
    ],
)
@pytest.mark.parametrize("from_states", [False, True])
def test_a_prompt_takes_what_its_window_needs_no_taps_of(
    num_read: int | None, length: int, held: int, from_states: bool
) -> None:
    """States are taken where they are saved, or not at all."""
    texts = HeldTexts(2, step=4 if from_states else 1, num_tapped=WINDOW + SINKS, from_states=from_states)
    [place] = texts.place([tuple(range(100)) + (7,) * from_states], [0])
    if num_read is not None:
        texts.end(0, num_read)
    prompt = (*range(100), *range(500, 600))[:length]
    [found] = texts.place([prompt], [1])
    if from_states:
        held = 100 * (held == 100)
        assert place.saved == 100
    assert found.target.num_tokens == held


@pytest.mark.seconds
def test_laws_behind_a_shared_beginning_are_those_behind_texts_that_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that run and rows that have ended, and of spare ones, beyond the window and within it."""
    monkeypatch.setattr("llama_ssp.speculate.engine.held.LEAST_TOKENS", 1)
    target, origin = draft_heads.save_small_pair(tmp_path, of_head=TAPPED)
    runner, headers = loaded(target), [tuple(range(40, 70)), tuple(range(90, 130))]
    questions = [(5,), (7, 8, 9), tuple(range(5, 30)), (11,) * 4, (5, 6), (3,)]
    prompts = [(*headers[number % 2], *question) for number, question in enumerate(questions)]
    laws, reused, (kind, config) = list[dict[tuple[int, ...], Tensor]](), list[int](), windowed("window")
    for num_spare, batch_size, reuses in ((0, 2, True), (3, 1, True), (0, 2, False)):
        seen, head = Seen(), loaded(origin, runner)
        decoder = make_head_decoder(
            runner,
            kind,
            head,
            origin.layers,
            width=draft_heads.SMALL_WIDTH,
            seen=seen,
            reuses=reuses,
            draft=config,
            batch_size=batch_size,
        )
        reuse = replace(decoder.space._reuse, num_spare=num_spare)
        decoder.space = BatchSpace(decoder.round, decoder.executor, batch_size=batch_size, reuse=reuse)
        done = complete(decoder, requests_of(prompts, 9))
        reused.append(sum(each.num_reused_tokens for each in done))
        laws.append({tuple(text): law for text, _, law in seen if len(text) > len(headers[0])})
    assert min(reused[:2]) > 60 > reused[2] == 0
    for found in laws[:2]:
        assert found.keys() == laws[2].keys()
        for text, law in found.items():
            torch.testing.assert_close(law, laws[2][text])


def test_a_head_that_begins_anew_behind_a_shared_beginning_has_the_drafts_of_a_text_that_is_read_whole(
    tmp_path: Path,
) -> None:
    """Every second round is without drafts; the beginning is of a row that goes on."""
    need("cpu")
    target, origin = draft_heads.save_small_pair(tmp_path, of_head=TAPPED)
    runner, header, (kind, config) = loaded(target), tuple(range(40, 100)), windowed("no first tokens")
    prompts, laws = [(*header, 1), (5, 6), (*header, 7, 8)], list[dict[tuple[int, ...], Tensor]]()
    for reuses in (True, False):
        seen = Seen()
        decoder = make_head_decoder(
            runner,
            kind,
            loaded(origin, runner),
            origin.layers,
            width=draft_heads.SMALL_WIDTH,
            seen=seen,
            reuses=reuses,
            draft=config,
            batch_size=2,
            choices=[DraftChoice(0), DraftChoice(NUM_DRAFTED)],
        )
        requests = requests_of(prompts, 9)
        requests = [replace(one, max_new_tokens=num) for one, num in zip(requests, (60, 25, 20), strict=True)]
        assert bool(complete(decoder, requests)[2].num_reused_tokens) == reuses
        laws.append({tuple(text): law for text, _, law in seen})
    assert laws[0].keys() == laws[1].keys()
    for text, law in laws[0].items():
        torch.testing.assert_close(law, laws[1][text])


@pytest.mark.seconds
def test_spare_rows_of_a_head_with_a_window_take_calls_of_any_length() -> None:
    """Rows have taps by the most drafted tokens of a call, and decoders of a pair share what is spare."""
    pair = load("tiny", {"model": "tiny-eagle", "window": 16, "sinks": 4}, spare_rows=1)
    prompt = [*range(40, 140)]
    wanted = pair.generate([prompt], plain=True, temperature=0, max_new_tokens=4)[0].token_ids
    for num_drafted in (8, 2, 5):
        how: dict[str, Any] = {"num_draft_tokens": num_drafted, "temperature": 0, "max_new_tokens": 4}
        first, then = (pair.generate([ids], **how)[0] for ids in (prompt, [*prompt, *wanted, 50]))
        assert first.token_ids == wanted
        assert then.num_reused_tokens > 60


def drafts_of(
    comm: Comm | None, pair: tuple[Any, Any], prompts: Sequence[tuple[int, ...]], choices: Sequence[DraftChoice]
) -> list[list[int]]:
    """Tokens and accepted ones of texts; of two ranks the second one has the head alone."""
    (target, origin), (kind, config) = pair, windowed("window")
    runner = loaded(target)
    num_kept, rank = WINDOW + SINKS, comm.rank if comm else 0
    taps = WindowTaps(
        origin.layers,
        width=draft_heads.SMALL_WIDTH,
        dtype=torch.float32,
        device=CPU,
        draft=config,
        num_drafted=NUM_DRAFTED,
    )

    def make(rule: Any) -> Any:
        head = loaded(origin, runner) if rank or not comm else None
        parts = parts_of(runner=head, taps=taps, rule=rule, vocab_size=runner.vocab_size)
        if comm is None:
            return kind(parts)
        sender = TapsSender(taps, 0, most_accepted=NUM_DRAFTED)
        receiver = ProbsReceiver(0, runner.vocab_size)
        return BroadcastDrafter(head and kind(parts), parts, comm=comm, src=1, receiver=receiver, taps=sender)

    none = NullRunner(device=CPU, vocab_size=runner.vocab_size, max_position_embeddings=512)
    decoder = make_decoder(
        none if rank else runner,
        None,
        temperature=0.9,
        make_drafter=make,
        comm=comm,
        taps=taps,
        replay=False,
        num_tapped=num_kept,
        batch_size=2,
    )
    if choices:
        decoder.length = ScriptedLength(choices)
    wanted = requests_of(prompts, 70 if choices else 30)
    return [[*done.token_ids, *done.accepted_lengths] for done in complete(decoder, wanted)]


@pytest.mark.seconds
@pytest.mark.parametrize("pauses", [0, heavy(33)])
def test_a_rank_with_the_head_alone_gets_the_taps_of_its_window(
    pauses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, shared, share = [tuple(range(40, 100)), (5,), tuple(range(50, 64))], list[int](), Taps.share

    def counting(self: Taps, positions_BT: Tensor, rows_B: Tensor | None = None, *, comm: Comm, src: int) -> None:
        shared.append(positions_BT.shape[1])
        share(self, positions_BT, rows_B, comm=comm, src=src)

    monkeypatch.setattr(Taps, "share", counting)
    choices = [*[DraftChoice(0)] * pauses, DraftChoice(3), DraftChoice(2)] if pauses else []
    how: Any = {"pair": draft_heads.save_small_pair(tmp_path, of_head=TAPPED), "prompts": prompts, "choices": choices}
    one = drafts_of(None, **how)
    two = on_ranks(thread_comms(2), partial(drafts_of, **how))
    assert two == [one, one]
    assert 0 < max(shared) <= SINKS + WINDOW + NUM_DRAFTED + 2
