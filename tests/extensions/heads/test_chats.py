"""A head reads of each turn of a chat what is new, and drafts as behind a text that it has read whole."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import catalogue
from llama_ssp.extensions.heads.sources import mtp_of, source_of
from llama_ssp.models.cache import Taps
from llama_ssp.models.loading import load_model
from llama_ssp.models.prefill import Held, Prompts
from llama_ssp.models.runner import NullRunner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.shared import BroadcastDrafter, ProbsReceiver, TapsSender
from llama_ssp.speculate.engine.batch_space import BatchSpace
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import change_runs, complete, make_decoder, parts_of, requests_of
from tests.helpers.extensions import need
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.head_drafts import Seen, chat, make_head_decoder
from tests.helpers.lanes import heavy
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.one_pass_heads import WIDTH, save_pair

TURNS = [tuple(range(40 + turn, 70 - 2 * turn)) for turn in range(10)]
BLOCKS: dict[str, Any] = {"head_dim": 16, "vocab_size": 224}
"""Whole blocks, which compiled kernels take."""


def loaded(origin: Any, target: Any = None) -> Any:
    return load_model(Loading(origin, dtype=torch.float32, target=target))


def eagle(_: Path) -> tuple[Any, ...]:
    target, head = (inspect(hub.resolve(catalogue.load(name))) for name in ("tiny", "tiny-eagle"))
    return target, source_of(head, target), 256


def one_pass(layout: str, folder: Path) -> tuple[Any, ...]:
    return *save_pair(folder, layout), WIDTH


def mtp(family: str, folder: Path) -> tuple[Any, ...]:
    save_with_mtp(folder, family, **BLOCKS)
    return (target := inspect(folder)), mtp_of(target), 64


@pytest.fixture(autouse=True)
def _short_beginnings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.speculate.engine.held.LEAST_TOKENS", 1)


@pytest.mark.parametrize(
    ("make", "tree", "num_turns"),
    [
        (partial(one_pass, "peagle"), None, 3),
        (partial(mtp, "qwen2"), "2x2x1", 3),
        heavy(eagle, None, 10),
        heavy(eagle, "2x2x1", 3),
        *(heavy(partial(one_pass, layout), None, 3) for layout in ("dflash", "dspark")),
    ],
)
def test_a_turn_of_a_chat_is_read_once(
    make: Callable[[Path], tuple[Any, ...]],
    tree: str | None,
    num_turns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head reads the last answer and the new turn, the same laws drafted as behind texts that are read whole."""
    need("cpu")
    target, origin, width = make(tmp_path)
    runner = loaded(target)
    head, laws, extra = loaded(origin, runner), list[dict[tuple[int, ...], Tensor]](), list[int]()
    for reuses in (True, False):
        seen = Seen()
        decoder = make_head_decoder(
            runner, head.make_drafter, head, origin.layers, width=width, tree=tree, seen=seen, reuses=reuses
        )
        extra.append(chat(decoder, head, monkeypatch, turns=TURNS[:num_turns]))
        laws.append({tuple(text): law for text, _, law in seen})
    assert extra[0] <= 0 < extra[1]
    assert laws[0].keys() == laws[1].keys()
    assert all(law.equal(laws[1][text]) for text, law in laws[0].items())


def test_taps_outlive_their_row_with_the_text(tmp_path: Path) -> None:
    """Two chats take turns in one row, and drafts have the same laws as behind texts that are read whole."""
    need("cpu")
    target, origin, width = one_pass("peagle", tmp_path)
    runner = loaded(target)
    head, laws, reused = loaded(origin, runner), list[dict[tuple[int, ...], Tensor]](), list[int]()
    for num_spare in (2, 0):
        seen, texts = Seen(), [TURNS[0], TURNS[9]]
        decoder = make_head_decoder(runner, head.make_drafter, head, origin.layers, width=width, seen=seen)
        reuse = replace(decoder.space._reuse, num_spare=num_spare)
        decoder.space = BatchSpace(decoder.round, decoder.executor, batch_size=1, reuse=reuse)
        for turn in TURNS[1:3]:
            for number, text in enumerate(texts):
                [done] = complete(decoder, requests_of([(*text, *turn)], 6))
                texts[number] = (*done.request.prompt_ids, *done.token_ids)
        reused.append(done.num_reused_tokens)
        laws.append({tuple(text): law for text, _, law in seen})
    assert reused[0] > len(TURNS[9]) + len(TURNS[1]) > reused[1]
    assert laws[0].keys() == laws[1].keys()
    assert all(law.equal(laws[1][text]) for text, law in laws[0].items())


def test_a_rank_with_the_head_alone_gets_the_taps_of_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("cpu")
    target, origin, width = one_pass("peagle", tmp_path)
    runner = loaded(target)
    shared, share = list[int](), Taps.share

    def counting(self: Taps, positions_BT: Tensor, rows_B: Tensor | None = None, *, comm: Comm, src: int) -> None:
        shared.extend([positions_BT.numel()] * (comm.rank > 0 and rows_B is not None))  # of prompts
        share(self, positions_BT, rows_B, comm=comm, src=src)

    def one_rank(comm: Any, reuses: bool) -> list[list[int]]:
        taps = Taps(origin.layers, width=width, dtype=torch.float32, device=torch.device("cpu"))

        def make(rule: Any) -> Any:
            head = loaded(origin, runner) if comm.rank else None
            parts = parts_of(runner=head, taps=taps, rule=rule, vocab_size=runner.vocab_size)
            how: Any = {"receiver": ProbsReceiver(0, runner.vocab_size), "taps": TapsSender(taps, 0, most_accepted=3)}
            return BroadcastDrafter(head and head.make_drafter(parts), parts, comm=comm, src=1, **how)

        none = NullRunner(device=torch.device("cpu"), vocab_size=runner.vocab_size, max_position_embeddings=512)
        decoder = make_decoder(
            none if comm.rank else runner, None, temperature=0.9, make_drafter=make, comm=comm, taps=taps, replay=False
        )
        change_runs(decoder, reuses=reuses)
        text: tuple[int, ...] = ()
        answers = list[list[int]]()
        for turn in TURNS[:3]:
            [done] = complete(decoder, requests_of([(*text, *turn)], 6))
            text = (*text, *turn, *done.token_ids)
            answers.append([*done.token_ids, *done.accepted_lengths])
        return answers

    monkeypatch.setattr(Taps, "share", counting)
    found = on_ranks(thread_comms(2), partial(one_rank, reuses=True))
    num_shared = sum(shared)
    assert found == on_ranks(thread_comms(2), partial(one_rank, reuses=False))
    assert num_shared <= sum(len(turn) + 6 + 1 for turn in TURNS[:3]) < sum(shared) - num_shared


@pytest.mark.parametrize(("starts", "lengths", "first"), [((8, 11), (14, 11), 0), ((16,), (19,), 8), ((5,), (9,), 4)])
def test_a_rank_with_the_head_alone_gets_the_taps_of_a_chunk_that_it_reads_again(
    starts: tuple[int, ...], lengths: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that reads chunk by chunk begins in the last chunk that is held, perhaps in another row."""
    monkeypatch.setattr("llama_ssp.speculate.drafters.shared.PREFILL_CHUNK", 8)
    tokens_RS = torch.zeros(len(starts), max(lengths), dtype=torch.int64)
    held = [Held(start, row) for row, start in enumerate(starts)]
    prompts = Prompts(tokens_RS, torch.tensor(lengths), lengths, max(lengths), held)

    def one_rank(comm: Any) -> Tensor:
        taps = Taps([0], width=1, dtype=torch.float32, device=torch.device("cpu"))
        taps.allocate(batch_size=len(starts), num_slots=32)
        taps.in_rows().fill_(comm.rank == 0)
        TapsSender(taps, 0, most_accepted=3).send_prompts(prompts, range(len(starts)), comm=comm)
        return taps.in_rows()[0, :, 0]

    _, found_S = on_ranks(thread_comms(2), one_rank)
    assert found_S.nonzero().flatten().tolist() == [*range(first, max(lengths))]
