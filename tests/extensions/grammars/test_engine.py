"""Rows with a constraint in the engine: beside rows without, with every kind of draft, and where they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from llama_ssp.errors import SspError
from llama_ssp.extensions.grammars.records import GrammarSampling
from llama_ssp.extensions.grammars.text import GrammarText, prepare
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.masks import Constraint, Vocabulary
from llama_ssp.speculate.engine.round import DraftChoice, Stage
from llama_ssp.speculate.engine.state import BatchState, Request
from tests.extensions.grammars.toy import EOS, TOKENS, VOCABULARY
from tests.helpers.decoders import ScriptedLength, complete, ids_of, make_decoder, outcome
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.repository import ROOT

REGEX = "(ab|b)*a"
STRUCTURED = GrammarSampling(regex=REGEX)


def decoder(*, has_draft: bool = True, batch_size: int = 3, lag: int = 0, follows: bool = True, **how: Any) -> Decoder:
    """A decoder over four tokens; rows with a `regex` in their sampling follow it.

    Without `follows`, masks are written as for a GPU.
    """
    draft = PrefixRunner(4, seed=5) if has_draft else None
    how = {"temperature": 0.8, "replay": False} | how
    made = make_decoder(PrefixRunner(4, seed=3), draft, batch_size=batch_size, eos_ids=(EOS,), has_masks=True, **how)

    def constrain(request: Request) -> Constraint | None:
        asked = getattr(request, "structure", None)
        return prepare(asked, VOCABULARY)() if asked else None

    made.constrain, made.lag = constrain, lag
    if not follows and made.round.masks:
        made.round.masks.follows_drafts = False
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Request):
    """A request for a text with a structure."""

    structure: SamplingConfig | None = None


def asked(structures: Sequence[SamplingConfig | None], num_new: int = 20) -> list[Request]:
    prompts = cycle([(1,), (2, 3, 1), (0, 0), (1, 2, 0, 1, 1)])
    return [
        Asked(index=index, prompt_ids=next(prompts), max_new_tokens=num_new, structure=structure)
        for index, structure in enumerate(structures)
    ]


def text_of(done: RowCompletion) -> str:
    return b"".join(TOKENS[token] for token in done.token_ids).decode()


def follows(done: RowCompletion) -> bool:
    """Whether a text is in the language, or the beginning of one of its texts if it was cut."""
    text = text_of(done)
    rest = text.replace("ab", "").replace("b", "")
    return rest in ({"a"} if done.finish_reason == "eos" else {"", "a"}) and (not rest or text.endswith("a"))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"has_draft": False},
    "chain": {},
    "greedy": {"temperature": 0.0},
    "tree": {"tree": "2x2"},
    "greedy tree": {"tree": "2x2", "temperature": 0.0},
    "dynamic tree": {"tree": "dynamic-5x2x3", "temperature": 0.0},
    "block": {"rule_name": "block"},
    "coupled": {"rule_name": "coupled"},
    "copies": {"has_draft": False, "ngram": True},
    "traced": {"replay": True},
    "traced greedy": {"replay": True, "temperature": 0.0},
    "late": {"lag": 1},
    "as on a GPU": {"follows": False},
    "traced as on a GPU": {"follows": False, "replay": True},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_texts_follow_the_grammar_and_their_neighbours_do_not_change(kind: str) -> None:
    mixed = complete(decoder(**KINDS[kind]), asked([STRUCTURED, None, STRUCTURED, None, STRUCTURED, STRUCTURED]))
    free = complete(decoder(**KINDS[kind]), asked([None] * 6))
    for place, (done, other) in enumerate(zip(mixed, free, strict=True)):
        if place in {1, 3}:
            assert done.token_ids == other.token_ids
        else:
            assert follows(done)
            assert done.finish_reason in {"eos", "length"}
    assert not all(follows(done) for done in free)


@pytest.mark.parametrize("how", [{}, {"tree": "2x2"}, {"rule_name": "coupled", "temperature": 0.8}], ids=str)
def test_greedy_and_coupled_texts_are_those_without_a_draft(how: dict[str, Any]) -> None:
    how = {"temperature": 0.0} | how
    requests = asked([STRUCTURED, None, STRUCTURED, STRUCTURED])
    drafted = complete(decoder(**how), requests)
    plain = complete(
        decoder(has_draft=False, **{name: value for name, value in how.items() if name != "tree"}), requests
    )
    assert ids_of(drafted) == ids_of(plain)


@pytest.mark.parametrize("kind", ["chain", "greedy", "coupled", "traced"])
def test_a_text_is_the_same_alone_and_in_a_batch(kind: str) -> None:
    requests = asked([STRUCTURED, STRUCTURED, None, STRUCTURED])
    assert outcome(complete(decoder(**KINDS[kind], batch_size=1), requests)) == outcome(
        complete(decoder(**KINDS[kind], batch_size=4), requests)
    )


def test_a_choice_of_lengths_keeps_the_greedy_text() -> None:
    made, requests = decoder(temperature=0.0), asked([STRUCTURED, None, STRUCTURED])
    made.choose_by(ScriptedLength([DraftChoice(2), DraftChoice(0), DraftChoice(3)]))
    assert ids_of(complete(made, requests)) == ids_of(complete(decoder(has_draft=False, temperature=0.0), requests))


@pytest.mark.parametrize("kind", ["plain", "chain", "greedy", "tree", "greedy tree", "block", "coupled"])
def test_a_row_without_an_allowed_token_ends_with_an_error_of_its_own(kind: str) -> None:
    dead = GrammarSampling(regex="(ab|b){2}c")  # which no token can end
    requests, failed = asked([STRUCTURED, dead, None]), dict[int, str]()

    def take(request: Request, error: SspError) -> None:
        failed[request.index] = str(error)

    made = decoder(**KINDS[kind])
    done = completed(made, requests, take)
    assert list(failed) == [1]
    assert "no token is left that the constraint of the text allows" in failed[1]
    others = complete(decoder(**KINDS[kind]), asked([STRUCTURED, None, None]))
    assert done[0] == others[0].token_ids
    assert done[2] == others[2].token_ids


def completed(
    made: Decoder, requests: list[Request], failed: Callable[[Request, SspError], None]
) -> dict[int, list[int]]:
    with torch.inference_mode():
        runs = [update for updates in made.run(requests, failed=failed) for update in updates]
    return {update.completion.request.index: update.completion.token_ids for update in runs}


def test_a_round_without_such_rows_runs_the_stages_of_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    made, names = decoder(), list[str]()
    run = made.executor.run

    def noted(stage: Stage, state: BatchState, *values: Any) -> Any:
        names.append(stage.name)
        return run(stage, state, *values)

    monkeypatch.setattr(made.executor, "run", noted)
    complete(made, asked([None, None]))
    assert {*names} == {"draft", "verify"}
    complete(made, asked([STRUCTURED, None], num_new=3))
    assert {"score", "decide"} <= {*names}


def test_a_stop_counts_only_where_the_text_may_end() -> None:
    class Stops:
        def watch(self, _: object) -> Any:
            return self

        def num_until_stop(self, ids: list[int]) -> int | None:
            return 1 if ids[0] == 1 else None  # after every b

    whole = GrammarSampling(regex="(ab|b){3}")
    stops: Any = Stops()
    [done] = complete(decoder(), [replace(request, stops=stops) for request in asked([whole])])
    assert done.finish_reason in {"eos", "stop"}
    assert text_of(done).count("b") == 3


def test_a_text_ends_where_nothing_follows_without_an_end_of_sequence_token() -> None:
    made = decoder()
    made.eos_ids = frozenset()
    [done] = complete(made, asked([GrammarSampling(regex="ab{3}")]))
    assert (text_of(done), done.finish_reason) == ("abbb", "stop")


def test_fixed_lengths_of_one_token_follow_the_grammar() -> None:
    made = decoder()
    made.choose_by(FixedLength(1))
    assert all(map(follows, complete(made, asked([STRUCTURED] * 4))))


@pytest.mark.seconds
def test_forced_tokens_are_drafted_and_change_no_greedy_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch with a row without any; the drafter goes on from them."""
    whole = GrammarSampling(regex="(ab|b){2}")

    def known(constraint: GrammarText, number: int) -> Sequence[int]:
        del constraint
        return (1, 1, EOS)[:number]  # the token b twice, then the end

    plain = complete(decoder(has_draft=False, temperature=0.0), asked([whole, None, whole]))
    monkeypatch.setattr(GrammarText, "forced", known)
    kinds: list[dict[str, Any]] = [
        {},
        {"follows": False},
        {"follows": False, "replay": True},
        {"replay": True},
        {"rule_name": "coupled", "follows": False},
        {"tree": "2x2"},
        {"tree": "2x2", "replay": True},
        {"tree": "dynamic-5x2x3"},
        {"has_draft": False, "ngram": True},
        {"has_draft": False, "ngram": True, "tree": "2x2"},
    ]
    for how in kinds:
        found = complete(decoder(**{"temperature": 0.0} | how), asked([whole, None, whole]))
        assert ids_of(found) == ids_of(plain)
        sampled = complete(decoder(**how), asked([whole] * 6))
        assert {text_of(done) for done in sampled} <= {"abab", "abb", "bab", "bb"}
    sampled = complete(decoder(rule_name="block"), asked([whole] * 6))
    assert {text_of(done) for done in sampled} <= {"abab", "abb", "bab", "bb"}


@pytest.mark.parametrize(
    "kind", ["as on a GPU", "greedy", "tree", "greedy tree", "dynamic tree", "copies", "copied tree"]
)
def test_what_must_follow_is_drafted_whatever_drafts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A text that is known passes in rounds of as many tokens as a draft can have, and one more."""
    how = KINDS.get(kind, {"has_draft": False, "ngram": True, "tree": "2x2", "temperature": 0.0})
    ids = [1] * 5 + [0] * 7
    monkeypatch.setattr(GrammarText, "forced", lambda text, number: ids[len(text._text) :][:number])
    [done] = complete(decoder(**how, batch_size=1), asked([GrammarSampling(regex="b{5}a{7}")]))
    assert text_of(done) == "bbbbbaaaaaaa"
    made = decoder(**how).round
    depth = made.tree.depth if made.tree else made.max_tokens_per_round - 1
    assert depth > 1
    assert [*done.accepted_lengths[:-1]] == [depth] * (len(done.accepted_lengths) - 1)


def test_the_bytes_that_must_follow_are_forced_but_for_the_last_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "llama_ssp" / "shipped" / "tiny")
    vocabulary = Vocabulary(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    text = prepare(GrammarSampling(choice=["return self.value", "return self.name"]), vocabulary)()
    ids = tokenizer("return self.", add_special_tokens=False).input_ids[:-1]
    assert len(ids) > 1
    assert [*text.forced(9)] == ids
    assert [*text.forced(1)] == ids[:1]
    for token in ids:
        text.extend(token)
    assert [*prepare(GrammarSampling(regex="a|b"), vocabulary)().forced(4)] == []


@pytest.mark.parametrize("kind", ["chain", "plain", "tree"])
def test_a_row_is_free_once_its_structured_text_has_ended(kind: str) -> None:
    """While another row still has masks."""
    short, long = GrammarSampling(regex="b"), GrammarSampling(regex="b{40}")
    mixed = complete(decoder(batch_size=2, **KINDS[kind]), asked([short, long, None]))
    free = complete(decoder(batch_size=2, **KINDS[kind]), asked([None, None, None]))
    assert text_of(mixed[1]) == "b" * 20
    assert mixed[2].token_ids == free[2].token_ids


class Failing:
    """A matcher whose masks fail after a drafted token; it counts the tokens that all copies have read."""

    num_read = 0

    def __init__(self) -> None:
        self.is_ahead = self.fails = False

    def deep_copy(self) -> "Failing":
        return Failing()

    def consume_tokens(self, ids: Sequence[int]) -> None:
        Failing.num_read += len(ids)

    def try_consume_tokens(self, ids: Sequence[int]) -> int:
        Failing.num_read += len(ids)
        self.is_ahead = True
        return len(ids)

    def consume_token(self, _token: int) -> None:
        Failing.num_read += 1

    def rollback(self, _number: int) -> None:
        self.is_ahead = False

    def unsafe_compute_mask_ptr(self, _place: int, _size: int) -> None:
        self.fails = self.is_ahead

    def is_error(self) -> bool:
        return self.fails

    def get_error(self) -> str:
        return "too many items" if self.fails else ""

    def is_accepting(self) -> bool:
        return False

    is_stopped = is_accepting


def test_a_text_whose_drafts_fail_is_read_in_steps_that_grow_with_it() -> None:
    def num_read(length: int) -> int:
        Failing.num_read = 0
        text, masks_TX = GrammarText(Failing(), VOCABULARY), torch.full((2, 1), -1, dtype=torch.int32)
        for _ in range(length):
            text.fill(masks_TX.fill_(-1), [0], range(1))
            assert text.problem == "too many items"
            text.extend(0)
        return Failing.num_read

    assert num_read(200) < 15 * num_read(20)
