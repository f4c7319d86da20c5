"""Texts that have ended stay in spare rows, so that what prompts have in common is read about once."""

import random
from dataclasses import replace

import pytest
import torch

from llama_ssp.machines import hardware
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.planning.memory import memory
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.held import HeldTexts
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.helpers.composed import check_refused
from tests.helpers.decoders import complete, ids_of, make_decoder
from tests.helpers.extensions import need
from tests.helpers.lanes import heavy
from tests.helpers.models import build_checkpoint, load_lean
from tests.helpers.planning import make_spec

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LeanRunner]:
    folder = tmp_path_factory.mktemp("spare")
    build_checkpoint(folder, "llama", head_dim=16, vocab_size=224)
    return [load_lean(folder, dtype=torch.float32) for _ in range(2)]


def made(models: list[LeanRunner], num_spare: int, *, batch_size: int = 4) -> Decoder:
    target, draft = models
    decoder = make_decoder(target, draft, batch_size=batch_size, temperature=0.9, replay=False)
    decoder.space = type(decoder.space)(
        decoder.round, decoder.executor, batch_size=batch_size, reuse=replace(decoder.space._reuse, num_spare=num_spare)
    )
    return decoder


def arriving(num_requests: int, num_beginnings: int) -> tuple[list[Request], int]:
    """Requests over some beginnings in random order, and how many tokens differ among all of them."""
    draw = random.Random(3)
    beginnings = [tuple(draw.choices(range(224), k=60)) for _ in range(num_beginnings)]
    prompts = [(*draw.choice(beginnings), *draw.choices(range(224), k=6)) for _ in range(num_requests)]
    num_used = len({prompt[:60] for prompt in prompts})
    requests = [
        Request(index=index, prompt_ids=ids, max_new_tokens=draw.randint(1, 4)) for index, ids in enumerate(prompts)
    ]
    return requests, 60 * num_used + 6 * num_requests


def num_read(done: list[RowCompletion]) -> int:
    return sum(len(each.request.prompt_ids) - each.num_reused_tokens for each in done)


@pytest.mark.parametrize(("num_requests", "num_beginnings"), [(60, 10), heavy(200, 20)])
def test_a_beginning_is_read_about_once_and_texts_stay_the_same(
    num_requests: int, num_beginnings: int, models: list[LeanRunner]
) -> None:
    need("cpu")
    requests, num_distinct = arriving(num_requests, num_beginnings)
    spare, none = (complete(made(models, number), requests) for number in (num_beginnings, 0))
    assert ids_of(spare) == ids_of(none)
    assert num_read(spare) <= 1.1 * num_distinct < 2 * num_distinct < num_read(none)


def test_texts_stay_where_rows_grow(models: list[LeanRunner]) -> None:
    need("cpu")
    first, other, longer = (tuple(range(start, start + 50)) for start in (0, 50, 100))
    found = []
    for number in (0, 3):
        decoder, texts = made(models, number, batch_size=1), list[list[int]]()
        for prompt in (first, other, (*longer, *longer, *longer), (*first, 7), (*other, 8)):
            [done] = complete(decoder, [Request(index=0, prompt_ids=prompt, max_new_tokens=5)])
            texts.append(done.token_ids)
        found.append((texts, done.num_reused_tokens))
    assert found[0][0] == found[1][0]
    assert [number for _, number in found] == [0, 50]


def ids(letters: str) -> Ids:
    """A text of 40 tokens for each letter."""
    return tuple(ord(letter) * 100 + place for letter in letters for place in range(40))


def kept_after(texts: list[str], *, num_spare: int) -> list[Ids]:
    held = HeldTexts(1, step=1, num_spare=num_spare)
    for text in texts:
        [place] = held.place([ids(text)], [0])
        held.enter(place, ids(text))
        held.keep(0)
    return [text.ids for text in held._texts[1:]]


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["a", "b", "c"], ["c", "b"]),  # least recently used
        (["ab", "c", "abx"], ["abx", "c"]),  # the next turn of a chat
        (["abc", "d", "abe"], ["abe", "d"]),  # most of it is shared
        (["ab", "c", "ad", "e"], ["ad", "e"]),  # "c" is the oldest, then "ab", whose half is shared
        (["ab", "c", "a", "d"], ["ab", "d"]),  # all of "a" is held: "ab" was used
    ],
)
def test_a_text_takes_the_place_of_one_like_it_or_of_the_one_used_least_recently(
    texts: list[str], kept: list[str]
) -> None:
    assert sorted(kept_after(texts, num_spare=2)) == sorted(map(ids, kept))


def test_a_short_text_is_not_kept() -> None:
    held = HeldTexts(1, step=1, num_spare=1)
    [place] = held.place([tuple(range(20))], [0])
    held.enter(place, tuple(range(20)))
    assert held.keep(0) is None


def test_plans_count_spare_rows_as_rows_of_the_target_alone() -> None:
    none, four, rows = (
        memory(make_spec("7B", draft="7B", spare_rows=spare, batch_size=size), hardware.load("h100"))[0]
        for spare, size in ((0, 2), (4, 2), (0, 6))
    )
    assert four.target_cache_bytes == rows.target_cache_bytes == 3 * none.target_cache_bytes
    assert four.draft_cache_bytes == none.draft_cache_bytes


BAD = {
    "spare_rows=-1": "spare_rows=-1 must be at least 0 rows",
    "spare_rows=2 task=latency": "spare_rows has no effect with task=latency, which reads every prompt",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_spare_rows_that_cannot_be_are_one_sentence(words: str, sentence: str) -> None:
    check_refused(words if "task=" in words else f"task=generate {words}", sentence)
