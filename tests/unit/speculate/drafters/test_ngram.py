"""Prompt look-up: what is copied, by a plain search in Python and by cases that a reader can follow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.speculate.drafters.ngram import NgramDrafter
from llama_ssp.speculate.sampling.context import Rows

CPU = torch.device("cpu")


def propose(
    texts: list[list[int]], *, num_draft_tokens: int = 4, longest: int = 3, shortest: int = 1
) -> list[list[int]]:
    """Draft for some rows; the slots after each row's text hold other tokens, as after a rejected round."""
    num_slots = max(map(len, texts)) + num_draft_tokens + 5
    drafter = NgramDrafter(num_draft_tokens=num_draft_tokens, longest=longest, shortest=shortest, device=CPU)
    drafter.allocate(batch_size=len(texts), num_slots=num_slots)
    tokens_BS = torch.tensor([text + [text[-1]] * (num_slots - len(text)) for text in texts])
    lengths_B = torch.tensor([len(text) for text in texts])
    uniforms_BKP = torch.zeros(len(texts), num_draft_tokens, 2)
    bucket = max(map(len, texts)) + num_draft_tokens
    draft = drafter.propose(
        Rows(tokens_BS, lengths_B, lengths_B), num_tokens=num_draft_tokens, uniforms_BKP=uniforms_BKP, bucket=bucket
    )
    for row, text in enumerate(texts):
        written = tokens_BS[row, len(text) : len(text) + num_draft_tokens]
        assert torch.equal(written, draft.ids_BK[row])
    assert draft.probs_BTV is None
    return draft.ids_BK.tolist()


def expected(text: list[int], *, num_draft_tokens: int, longest: int, shortest: int) -> list[int]:
    """The same by a plain search: the longest match, of several the latest."""
    for length in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[-length:]:
                known = list(text)
                for offset in range(num_draft_tokens):
                    known.append(known[end + 1 + offset])
                return known[len(text) :]
    return [text[-1]] * num_draft_tokens


def test_what_followed_the_last_tokens_is_copied() -> None:
    assert propose([[1, 2, 3, 4, 5, 6, 1, 2, 3]]) == [[4, 5, 6, 1]]


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert propose([[1, 2, 3, 7, 7, 9, 3, 8, 8, 1, 2, 3]], num_draft_tokens=2) == [[7, 7]]


def test_of_equal_matches_the_latest_wins() -> None:
    assert propose([[3, 7, 3, 8, 3]], num_draft_tokens=1) == [[8]]


def test_a_text_that_repeats_itself_is_continued_in_its_period() -> None:
    assert propose([[5, 1, 2, 1, 2]], num_draft_tokens=5) == [[1, 2, 1, 2, 1]]


def test_without_a_match_the_last_token_is_drafted() -> None:
    assert propose([[1, 2, 3]]) == [[3, 3, 3, 3]]
    assert propose([[1, 2, 9, 2]], shortest=2) == [[2, 2, 2, 2]]


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=14), min_size=1, max_size=4),
    num_draft_tokens=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_every_row_is_drafted_as_by_a_plain_search(
    texts: list[list[int]], num_draft_tokens: int, sizes: list[int]
) -> None:
    shortest, longest = sizes
    said = propose(texts, num_draft_tokens=num_draft_tokens, longest=longest, shortest=shortest)
    assert said == [
        expected(text, num_draft_tokens=num_draft_tokens, longest=longest, shortest=shortest) for text in texts
    ]


@pytest.mark.parametrize("length", [2, 3])
def test_short_texts_are_no_exception(length: int) -> None:
    assert propose([[4] * length], longest=5) == [[4, 4, 4, 4]]
