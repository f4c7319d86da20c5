"""Prompt look-up: what is copied, by a plain search in Python and by cases that a reader can follow."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.copies.corpus import read_corpus
from llama_ssp.extensions.copies.drafter import Corpus, History, NgramDrafter
from llama_ssp.extensions.copies.records import NgramConfig
from llama_ssp.models.prefill import Prompts
from llama_ssp.settings.trees import tree_shape
from llama_ssp.speculate.sampling.context import Rows
from tests.helpers.decoders import parts_of, tree_of
from tests.helpers.operator_count import OperatorCount
from tests.helpers.planning import make_spec
from tests.helpers.tokenizers import byte_level

CPU = torch.device("cpu")


def propose(
    texts: list[list[int]], *, num_draft_tokens: int = 4, longest: int = 3, shortest: int = 1, shape: str | None = None
) -> list[list[int]]:
    """Draft for some rows; the slots after each row's text hold other tokens, as after a rejected round.

    Chains are written behind the texts, and trees of a `shape` nowhere.
    """
    tree = tree_of(shape)
    num_draft_tokens = tree.num_drafted if tree else num_draft_tokens
    num_slots = max(map(len, texts)) + num_draft_tokens + 5
    config = NgramConfig(kind="ngram", longest=longest, shortest=shortest, history=0)
    drafter = NgramDrafter(parts_of(config=config, num_draft_tokens=num_draft_tokens, tree=tree))
    drafter.allocate(batch_size=len(texts), num_slots=num_slots)
    tokens_BS = torch.tensor([text + [text[-1]] * (num_slots - len(text)) for text in texts])
    before_BS, lengths_B = tokens_BS.clone(), torch.tensor([len(text) for text in texts])
    uniforms_BKP = torch.zeros(len(texts), num_draft_tokens, 2)
    bucket = max(map(len, texts)) + num_draft_tokens
    draft = drafter.propose(
        Rows(tokens_BS, lengths_B, lengths_B, lengths_B),
        num_tokens=num_draft_tokens,
        uniforms_BKP=uniforms_BKP,
        bucket=bucket,
    )
    assert not tree or torch.equal(tokens_BS, before_BS)
    for row, text in enumerate(texts if tree is None else ()):
        written = tokens_BS[row, len(text) : len(text) + num_draft_tokens]
        assert torch.equal(written, draft.ids_BK[row])
    assert draft.is_certain
    return draft.ids_BK.tolist()


@pytest.mark.parametrize(
    ("history", "num_corpus_tokens", "shape"),
    [(0, 0, None), (64, 0, None), (64, 100, None), (0, 0, "3x1x1"), (0, 0, "2x2x1")],
)
def test_a_plan_counts_the_kernels_of_a_search(
    history: int, num_corpus_tokens: int, shape: str | None, tmp_path: Path
) -> None:
    (tmp_path / "corpus").write_text(num_corpus_tokens * "ab")
    config = NgramConfig(kind="ngram", history=history, corpus=str(tmp_path / "corpus") if num_corpus_tokens else None)
    tree, corpus_C = tree_of(shape), torch.arange(num_corpus_tokens) if num_corpus_tokens else None
    num_tokens = tree.num_drafted if tree else 4
    drafter = NgramDrafter(parts_of(config=config, num_draft_tokens=num_tokens, tree=tree, prepared=corpus_C))
    drafter.allocate(batch_size=1, num_slots=64)
    length_1 = torch.tensor([40])
    rows = Rows(torch.arange(64)[None], length_1, length_1, length_1)
    with OperatorCount() as count:
        drafter.propose(rows, num_tokens=num_tokens, uniforms_BKP=torch.zeros(1, num_tokens, 2), bucket=64)
    spec = make_spec("7B", free_draft="ngram", free_settings=config, tree=tree_shape(shape) if shape else None)
    assert spec.free_terms.num_kernels == pytest.approx(count.num_kernels, rel=0.25 if shape else 0.05)


def test_what_followed_the_last_tokens_is_copied() -> None:
    assert propose([[1, 2, 3, 4, 5, 6, 1, 2, 3]]) == [[4, 5, 6, 1]]


def expected_tree(text: list[int], *, widths: list[int], longest: int, shortest: int) -> list[int]:
    """A tree by a plain search: each node has a text, and how far behind the end of it the copy goes on."""
    drafted: list[int] = []
    nodes: list[tuple[list[int], int | None]] = [(text, None)]
    for width in widths:
        children = []
        for known, period in nodes:
            matches = [
                len(known) - end
                for length in range(longest, shortest - 1, -1)
                for end in range(len(known) - 1, length - 1, -1)
                if known[end - length : end] == known[-length:]
            ]
            chosen = {known[-period]: period} if period else {}
            for each in matches:
                chosen.setdefault(known[-each], each)
            fillers = [(known[-1], 1)] * width
            children += [([*known, token], each) for token, each in [*chosen.items(), *fillers][:width]]
        drafted += [known[-1] for known, _ in children]
        nodes = list(children)
    return drafted


def test_a_tree_has_several_continuations_the_longest_match_first_then_the_latest() -> None:
    text = [1, 2, 7, 2, 8, 5, 2, 9, 2, 8, 1, 2]
    assert propose([text], shape="3") == [[7, 8, 9]]
    assert propose([text], shape="3x1") == [[7, 8, 9, 2, 1, 2]]


@pytest.mark.seconds
@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=18), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_every_tree_is_drafted_as_by_a_plain_search(
    texts: list[list[int]], widths: list[int], sizes: list[int]
) -> None:
    shortest, longest = sizes
    said = propose(texts, longest=longest, shortest=shortest, shape="x".join(map(str, widths)))
    assert said == [expected_tree(text, widths=widths, longest=longest, shortest=shortest) for text in texts]


@pytest.mark.seconds
@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=14), min_size=1, max_size=4),
    number=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_a_chain_is_drafted_as_a_tree_of_one_child_each(texts: list[list[int]], number: int, sizes: list[int]) -> None:
    shortest, longest = sizes
    chain = propose(texts, num_draft_tokens=number, longest=longest, shortest=shortest)
    assert chain == [expected_tree(text, widths=[1] * number, longest=longest, shortest=shortest) for text in texts]


def test_no_value_is_read_on_the_host() -> None:
    meta = torch.device("meta")
    drafter = NgramDrafter(parts_of(config=NgramConfig(kind="ngram"), device=meta, tree="3x2x1"))
    tokens_BS, numbers_B = (torch.zeros(shape, dtype=torch.int64, device=meta) for shape in ((2, 40), (2,)))
    rows = Rows(tokens_BS, numbers_B, numbers_B, numbers_B)
    draft = drafter.propose(rows, num_tokens=15, uniforms_BKP=torch.empty(2, 15, 2, device=meta), bucket=32)
    assert draft.ids_BK.shape == (2, 15)


def longest_in(texts: list[list[int]], last: list[int], *, longest: int) -> tuple[int, int, int] | None:
    """Length, text and slot of the longest match before a known token, of several the latest of the newest text."""
    for length in range(min(longest, len(last)), 0, -1):
        for number in reversed(range(len(texts))):
            text = texts[number]
            for slot in range(len(text) - 1, length - 1, -1):
                if text[slot - length : slot] == last[-length:]:
                    return length, number, slot
    return None


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_match_in_the_newest_texts_is_found(seed: int) -> None:
    """Rows grow by 1 to 4 tokens a round, and some begin another text; a prompt may be shorter than a sequence."""
    generator, num_texts, num_slots = random.Random(seed), 5, 60
    history = History((num_texts, 2, num_slots), longest=3, shortest=1, device=CPU)
    every: list[list[int]] = []
    rows: list[list[int]] = [[], []]

    def some(number: int) -> list[int]:
        return [generator.randrange(4) for _ in range(number)]

    def begin(row: int) -> None:
        rows[row] = some(generator.randint(1, 9))
        every.append(rows[row])
        tokens_RS, length = torch.tensor([rows[row]]), len(rows[row])
        history.begin(Prompts(tokens_RS, torch.tensor([length]), [length], length), [row])

    begin(0)
    begin(1)
    for _ in range(30):
        for row, text in enumerate(rows):
            if generator.random() < 0.1 or len(text) > num_slots - 6:
                begin(row)
        for text in rows:
            text.extend(some(generator.randint(1, 4)))
        tokens_BS = torch.tensor([text + [0] * (num_slots - len(text)) for text in rows])
        lengths_B1 = torch.tensor([[len(text)] for text in rows])
        history.add(tokens_BS, lengths_B1, num_tokens=6)
        matched_B1, copied_BK = history.find(tokens_BS, lengths_B1, torch.arange(2))
        for row, text in enumerate(rows):
            wanted = longest_in(every[-num_texts:], text, longest=3)
            assert (wanted[0] if wanted else 0) == matched_B1[row]
            if wanted:
                _, number, slot = wanted
                known = every[-num_texts:][number][slot : slot + 2]
                assert copied_BK[row, : len(known)].tolist() == known


def in_history(*, num_rows: int, num_texts: int) -> tuple[History, Callable[[int, list[int]], None]]:
    """A history of texts of up to 20 tokens, and what begins a text in a row."""
    history = History((num_texts, num_rows, 20), longest=3, shortest=1, device=CPU)
    return history, lambda row, text: history.begin(
        Prompts(torch.tensor([text]), torch.tensor([len(text)]), [len(text)], len(text)), [row]
    )


def rows_of(*texts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([text + [0] * (20 - len(text)) for text in texts]), torch.tensor(
        [[len(text)] for text in texts]
    )


def test_a_text_that_is_no_longer_kept_writes_into_no_other() -> None:
    """Two rows would write one cell, and GPUs keep either value: ranks could draft different tokens."""
    history, begin = in_history(num_rows=2, num_texts=3)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    begin(0, old)
    for text in ([13], [14], new):
        begin(1, text)
    for rows in ((old, new), (new, old)):  # whichever row is written last
        history._serials_B1.copy_(torch.tensor([[1], [4]] if rows[0] is old else [[4], [1]]))
        history.add(*rows_of(*rows), num_tokens=6)
        matched_B1, copied_BK = history.find(*rows_of([20, 7, 8], [20, 1, 2]), torch.arange(4))
        assert matched_B1.tolist() == [[2], [0]]
        assert copied_BK[0].tolist() == new[2:]


def test_texts_that_are_forgotten_are_not_copied() -> None:
    history, begin = in_history(num_rows=1, num_texts=3)
    begin(0, [1, 2, 3, 4])
    history.forget()
    matched_B1, _ = history.find(*rows_of([9, 1, 2]), torch.arange(2))
    assert matched_B1.tolist() == [[0]]
    begin(0, [1, 2, 5, 6])
    matched_B1, copied_BK = history.find(*rows_of([9, 1, 2]), torch.arange(2))
    assert (matched_B1.tolist(), copied_BK.tolist()) == ([[2]], [[5, 6]])


def test_rows_that_hold_no_text_are_not_copied_from() -> None:
    """Rounds are timed over vacant rows before the first text begins."""
    history, _ = in_history(num_rows=1, num_texts=3)
    history.add(*rows_of([0, 0]), num_tokens=2)
    matched_B1, _ = history.find(*rows_of([0, 0]), torch.arange(2))
    assert matched_B1.tolist() == [[0]]


@pytest.mark.seconds
@settings(max_examples=100, deadline=None)
@given(
    corpus=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_of_a_corpus_the_longest_match_then_the_most_frequent_continuation_is_copied(
    corpus: list[int], texts: list[list[int]], sizes: list[int]
) -> None:
    shortest, longest = sizes
    ids_C = torch.tensor(corpus)
    found = Corpus(ids_C, num_tokens=len(corpus) + 7, longest=longest, shortest=shortest, device=CPU)
    matched_B1, copied_BK = found.find(*rows_of(*texts), torch.arange(2))
    for row, text in enumerate(texts):
        wanted = 0
        for length in range(min(longest, len(text)), shortest - 1, -1):
            ends = [end for end in range(length, len(corpus)) if corpus[end - length : end] == text[-length:]]
            if ends:
                wanted, counts = length, Counter(corpus[end] for end in ends)
                place = max(ends, key=lambda end: (counts[corpus[end]], end))
                assert (
                    copied_BK[row].tolist()
                    == ids_C.new_zeros(len(corpus) + 7)
                    .index_copy_(0, torch.arange(len(corpus)), ids_C)[place : place + 2]
                    .tolist()
                )
                break
        assert matched_B1[row] == wanted


def test_other_texts_and_a_corpus_take_the_planned_bytes(tmp_path: Path) -> None:
    (file := tmp_path / "corpus.txt").write_text("x" * 999, encoding="utf-8")
    config = NgramConfig(kind="ngram", corpus=str(file), history=5, shortest=2)
    assert config.num_corpus_tokens == 500
    sizes: dict[str, Any] = {"longest": config.longest, "shortest": config.shortest, "device": CPU}
    held = [History((7, 2, 40), **sizes), Corpus(torch.arange(90), num_tokens=config.num_corpus_tokens, **sizes)]
    allocated = sum(part.nbytes for texts in held for part in vars(texts).values() if isinstance(part, torch.Tensor))
    numbers = 8 * (2 + 1 + 3 + 2 * (3 + 4 + 4))  # serials, the newest one, offsets of the table, and lengths of both
    spec = make_spec("7B", free_draft="ngram", free_settings=config, batch_size=2, prompt_tokens=20, max_new_tokens=15)
    assert (spec.num_slots, spec.free_terms.held_bytes) == (40, allocated - numbers)
    nowhere = replace(spec, free_settings=NgramConfig(kind="ngram", corpus="nowhere"))
    with pytest.raises(ConfigError, match=r"draft\.corpus=nowhere is no file"):
        _ = nowhere.free_terms


def test_a_corpus_is_the_texts_of_a_run_or_a_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    for name, content, texts in [
        ("a.txt", "the world\nother", ["the world\nother"]),
        ("run.jsonl", '{"prompt": "the", "text": " world"}\n{"prompt": "other", "text": ""}\n', ["the world", "other"]),
    ]:
        (tmp_path / name).write_text(content, encoding="utf-8")
        ids_C = read_corpus(NgramConfig(kind="ngram", corpus=str(tmp_path / name)), tokenizer)
        assert ids_C is not None
        wanted = [token for text in texts for token in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
        assert ids_C.tolist() == wanted
    for faulty in (b'{"prompt": "the"}', b"[1]", b"{", b"\xff"):
        (tmp_path / "run.jsonl").write_bytes(faulty)
        with pytest.raises(ConfigError, match=r"cannot be read \(.*give the run.jsonl of a run, or a text"):
            read_corpus(NgramConfig(kind="ngram", corpus=str(tmp_path / "run.jsonl")), tokenizer)
