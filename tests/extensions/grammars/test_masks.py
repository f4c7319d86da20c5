"""Masks of all rows are made together, as drafts grow, and drafts are drawn from what they leave."""

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.grammars import text as extension
from llama_ssp.extensions.grammars.records import GrammarSampling
from llama_ssp.extensions.grammars.text import GrammarText, prepare
from llama_ssp.speculate.engine.masks import Drafted, Nodes, TokenMasks, write
from tests.extensions.grammars.test_engine import KINDS, STRUCTURED, asked, decoder
from tests.extensions.grammars.toy import EOS, LANGUAGES, VOCABULARY
from tests.helpers.decoders import complete, ids_of
from tests.helpers.lanes import grid

K = 4


def begun(number: int) -> list[GrammarText]:
    """Texts of the toy's languages, some tokens long."""
    chosen, texts = random.Random(number), list[GrammarText]()
    for regex in [*LANGUAGES, *LANGUAGES]:
        text = prepare(GrammarSampling(regex=regex), VOCABULARY)()
        for _ in range(chosen.randrange(3)):
            mask_1X = torch.full((1, 1), -1, dtype=torch.int32)
            text.fill(mask_1X, (), ())
            if allowed := [token for token in range(EOS) if int(mask_1X) >> token & 1]:
                text.extend(chosen.choice(allowed))
        texts.append(text)
    return texts


def one_by_one(texts: Sequence[GrammarText], drafts: Sequence[list[int]], parents: Any) -> Tensor:
    """The masks without anything after an end-of-sequence token, where the text ends."""
    found = torch.full((len(texts), K + 1, 1), -1, dtype=torch.int32)
    for row, text in enumerate(texts):
        text.fill(found[row], drafts[row], parents)
    return found


def before_ends(masks_BTX: Tensor, drafts: Sequence[list[int]]) -> list[list[int]]:
    """The masks up to the first end-of-sequence token of each draft."""
    ends = [draft.index(EOS) if EOS in draft else K for draft in drafts]
    return [masks_BTX[row, : end + 1, 0].tolist() for row, end in enumerate(ends)]


@grid(number=range(8), way=["a whole draft", "as it grows", "a tree"])
def test_masks_of_all_rows_are_those_of_each(number: int, way: str) -> None:
    """After tokens that are forbidden and texts that end, too; twice, since a matcher has to come back to its text."""
    texts, chosen = begun(number), random.Random(100 + number)
    found = torch.empty(len(texts), K + 1, 1, dtype=torch.int32)
    for _ in range(2):
        drafts = [[chosen.randrange(VOCABULARY.size) for _ in range(K)] for _ in texts]
        parents: Any = [0, 0, 1, 2] if way == "a tree" else range(K)
        wanted = one_by_one(texts, drafts, parents)
        found.fill_(-1)
        for place in range(K + 1) if way == "as it grows" else ():
            nodes = (Nodes(row, text, drafts[row][:place], range(place), place) for row, text in enumerate(texts))
            write(found, nodes)
        if way != "as it grows":
            write(found, (Nodes(row, text, drafts[row], parents) for row, text in enumerate(texts)))
        assert before_ends(found, drafts) == before_ends(wanted, drafts)


def test_rows_take_one_call_of_the_library_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole draft takes one, and a draft that grows one for each place."""
    calls, executor = list[int](), extension._executor()

    class Counted:
        def unsafe_compute_mask_ptr(self, some: list[Any], *where: int) -> None:
            calls.append(len(some))
            executor.unsafe_compute_mask_ptr(some, *where)

        def unsafe_compute_mask_ptr_with_draft_token(self, some: list[Any], *where: int) -> None:
            calls.append(len(some))
            executor.unsafe_compute_mask_ptr_with_draft_token(some, *where)

    texts = [prepare(GrammarSampling(regex="[ab]*"), VOCABULARY)() for _ in range(32)]
    monkeypatch.setattr(extension, "_executor", Counted)
    masks = TokenMasks(K + 1, VOCABULARY.size, torch.device("cpu"))
    masks.allocate(32)
    ids_BK = torch.ones(32, K, dtype=torch.int64)
    drafted: Any = type("Drafted", (), {"of_row": lambda _, row: (ids_BK[row].tolist(), range(K)), "is_tree": False})()
    masks.fill(slice(0, 32), texts, drafted)
    assert calls == [32]
    calls.clear()
    masks.begin(slice(0, 32), texts)
    for place in range(1, K):
        masks.after(ids_BK[:, :place], 0)
    masks.fill(slice(0, 32), texts, drafted)
    assert calls == [32] * (K + 1)


def test_a_row_that_is_there_several_times_has_its_masks_each_time() -> None:
    """As in rounds of few rows; the library may not be given one text twice."""
    [text, other], found = begun(1)[:2], torch.full((3, K + 1, 1), -1, dtype=torch.int32)
    write(found, (Nodes(row, one, [1, 1, 1, 1], range(K)) for row, one in enumerate([text, other, text])))
    assert found[2].tolist() == found[0].tolist() == one_by_one([text], [[1, 1, 1, 1]], range(K))[0].tolist()


@pytest.mark.parametrize("kind", ["chain", "tree", "coupled", "traced", "copies"])
def test_a_constraint_without_a_call_for_all_rows_makes_the_same_texts(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    requests = asked([STRUCTURED, None, STRUCTURED, STRUCTURED])
    wanted = ids_of(complete(decoder(**KINDS[kind]), requests))
    monkeypatch.delattr(GrammarText, "fill_rows")
    assert ids_of(complete(decoder(**KINDS[kind]), requests)) == wanted


@pytest.mark.parametrize("kind", ["chain", "block", "coupled", "greedy", "traced"])
@pytest.mark.parametrize("follows", [True, False])
def test_drafts_are_drawn_from_the_masks(monkeypatch: pytest.MonkeyPatch, kind: str, follows: bool) -> None:
    """All tokens where masks follow drafts, else the first ones."""
    found, fill = list[tuple[int, int]](), TokenMasks.fill

    def noted(masks: TokenMasks, rows: slice, constraints: Sequence[Any], drafted: Drafted | None) -> None:
        for row, one in enumerate(constraints if drafted else ()):
            assert drafted
            ids = [*takewhile(lambda token: token != EOS, drafted.of_row(row)[0])]
            text = prepare(STRUCTURED, VOCABULARY)()
            for token in one._text if one else ():
                text.extend(token)
            if one and ids:
                found.append((text._matcher.validate_tokens(ids), len(ids)))
        fill(masks, rows, constraints, drafted)

    monkeypatch.setattr(TokenMasks, "fill", noted)
    monkeypatch.setattr(GrammarText, "forced", lambda _text, _number: ())
    complete(decoder(**KINDS[kind], follows=follows), asked([STRUCTURED] * 9))
    assert all(number == most if follows else number > 0 for number, most in found)
    assert all(number == most for number, most in found) is (follows or kind == "greedy")  # whose drafts go on so
