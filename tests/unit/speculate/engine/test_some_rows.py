"""Rounds of the rows that decode: what they compute, and that no text is another one than in rounds of all rows."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.rows import computed_rows
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import ScriptedLength, ids_of, make_decoder, outcome, requests
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.kinds import KINDS, Make, kinds, near_pair
from tests.helpers.lanes import pairs
from tests.helpers.recorded import WatchedGraphs


def sizes_of(decoder: Decoder) -> list[int]:
    """The number of rows of each round of later runs."""
    found, step = list[int](), decoder.round.step

    def watched(executor: Any, state: Any, *given: Any, **how: Any) -> Any:
        found.append(len(state.lengths_B))
        return step(executor, state, *given, **how)

    decoder.round.step = watched  # type: ignore[method-assign]
    return found


@torch.inference_mode()
def in_turn(decoder: Decoder, wanted: Sequence[Request], *, most: int) -> list[RowCompletion]:
    """Complete requests that come as others end, `most` at a time, so that rows between others are vacant."""
    rest, done = deque(wanted), dict[int, RowCompletion]()
    decoder.make_room(wanted)

    def more(run: Decoding, _number: int) -> list[Request] | None:
        free = most - len(run.rows.decoding)
        return [rest.popleft() for _ in range(min(free, len(rest)))] if rest else None

    for updates in decoder.run([], more=more):
        done |= {update.completion.request.index: update.completion for update in updates}
    return [done[request.index] for request in wanted]


def test_a_round_computes_the_rows_that_decode_or_a_few_times_the_first_one() -> None:
    sizes = [len(computed_rows(range(number), most=64)) for number in range(1, 14)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert computed_rows([7, 2, 9, 4, 5], most=8) == [7, 2, 9, 4, 5, 7]
    assert computed_rows([4, 2, 1, 0, 3], most=5) == [4, 2, 1, 0, 3]


@kinds
@pytest.mark.parametrize(("temperature", "replay"), [(0.9, False), (0.0, True), (0.9, True)])
def test_texts_and_rounds_of_a_row_do_not_depend_on_vacant_ones(make: Make, temperature: float, replay: bool) -> None:
    how: dict[str, Any] = {"batch_size": 8, "temperature": temperature, "replay": replay, "eos_ids": [4]}
    some, whole = make(1.0, **how), make(1.0, **how)
    whole.picks_rows = False
    wanted, sizes, of_whole = requests(), sizes_of(some), sizes_of(whole)
    assert outcome(in_turn(some, wanted, most=3)) == outcome(in_turn(whole, wanted, most=3))
    assert {*of_whole} == {8}
    assert {1, 2} <= {*sizes} <= {1, 2, 3, 4}


@pytest.mark.parametrize("shape", ["2x2x1", "dynamic-7x3x3"])
@pytest.mark.parametrize("replay", [False, True])
def test_paths_of_trees_move_in_the_rows_that_decode(shape: str, replay: bool) -> None:
    made = [make_decoder(*near_pair(1.0), tree=shape, batch_size=6, temperature=0.9, replay=replay) for _ in range(2)]
    made[1].picks_rows = False
    some, whole = (in_turn(decoder, requests(), most=3) for decoder in made)
    assert outcome(some) == outcome(whole)
    assert sum(map(sum, (each.accepted_lengths for each in some))) > 10


@pytest.mark.parametrize("replay", [False, True])
def test_drafters_catch_up_in_the_rows_that_decode(replay: bool) -> None:
    choices = [DraftChoice(0)] * 3 + [DraftChoice(3), DraftChoice(2)]
    made = [make_decoder(*near_pair(1.0), batch_size=6, temperature=0.9, replay=replay) for _ in range(2)]
    for decoder in made:
        decoder.choose_by(ScriptedLength(choices, reads_late=True))
    made[1].picks_rows = False
    some, whole = (in_turn(decoder, requests(), most=3) for decoder in made)
    assert outcome(some) == outcome(whole)


def test_a_graph_whose_tensors_stay_in_place_computes_all_rows() -> None:
    decoder = KINDS["model"](1.0, batch_size=6, replay=WatchedGraphs)
    sizes = sizes_of(decoder)
    in_turn(decoder, requests(12)[:3], most=2)
    assert {*sizes} == {6}


def test_a_prompt_takes_what_a_vacant_row_holds_while_others_decode() -> None:
    """Rounds of the rows that decode leave the texts of vacant rows as they are."""
    text = tuple(place % 7 for place in range(80))
    wanted = [
        Request(index=0, prompt_ids=text, max_new_tokens=3),
        Request(index=1, prompt_ids=(5, 6), max_new_tokens=12),
        Request(index=2, prompt_ids=(*text, 9), max_new_tokens=20),
    ]
    decoder = make_decoder(*near_pair(1.0), batch_size=4, temperature=0.9)
    alone = [in_turn(make_decoder(*near_pair(1.0), temperature=0.9), [request], most=1)[0] for request in wanted]
    found = in_turn(decoder, wanted, most=2)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert found[2].num_reused_tokens == 80


BY_ROW = SamplingConfig(temperature=1.0, by_row=True)
MOSTS = (None, 0, 0, 2, None, 0, 1, 0)


def mixed_decoder(kind: str = "model", *, reading_rows: float = 0.0, **how: Any) -> Decoder:
    """A decoder of rows with settings of their own, whose weights take as long to read as some rows to compute."""
    how = {"sampling": BY_ROW, "batch_size": 6, "eos_ids": [4]} | how
    decoder = KINDS[kind](1.0, **how)
    decoder.reading_rows = reading_rows
    return decoder


def mixed(mosts: Sequence[int | None] = MOSTS, temperature: float = 0.8) -> list[Request]:
    """Requests that take so many drafted tokens of a round."""
    sampling = SamplingConfig(temperature=temperature)
    return [
        Request(
            index=place,
            prompt_ids=(place % 5, 4, 2),
            max_new_tokens=40 - 3 * place,
            sampling=sampling,
            seed=3,
            num_draft_tokens=most,
        )
        for place, most in enumerate(mosts)
    ]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "setting", [{"top_p": 0.5}, {"min_p": 0.4}, {"repetition_penalty": 1.9}, {"logit_bias": {3: 2.0}}]
)
def test_a_row_that_fills_up_a_round_has_its_settings_there_too(setting: dict[str, Any]) -> None:
    """The first of five rows is computed twice, and counts twice where rows with settings are picked."""
    own, plain = SamplingConfig(temperature=0.9, **setting), SamplingConfig(temperature=0.9)
    wanted = [replace(each, sampling=own if each.index < 2 else plain) for each in requests()]
    some, whole = (mixed_decoder(batch_size=8, eos_ids=[]) for _ in range(2))
    whole.picks_rows, sizes = False, sizes_of(some)
    assert outcome(in_turn(some, wanted, most=5)) == outcome(in_turn(whole, wanted, most=5))
    assert 6 in sizes


@pairs(
    kind=["model", "overlapped", "ngram", "other tokenizer"],
    replay=[False, True],
    rule_name=["speculative", "block"],
    temperature=[0.8, 0.0],
)
def test_rows_without_drafts_have_their_texts_in_rounds_of_their_own(
    kind: str, replay: bool, rule_name: str, temperature: float
) -> None:
    apart, joint = (
        mixed_decoder(kind, reading_rows=reading_rows, replay=replay, rule_name=rule_name)
        for reading_rows in (0.0, math.inf)
    )
    joint.picks_rows, wanted = False, mixed(temperature=temperature)
    found, sizes = in_turn(apart, wanted, most=5), sizes_of(apart)
    assert outcome(found) == outcome(in_turn(joint, wanted, most=5))
    assert ids_of(in_turn(apart, wanted, most=1)) == ids_of(found)
    assert {*sizes} == {1}


@pytest.mark.parametrize(("reading_rows", "number"), [(0.0, 5), (2.0, 2), (2.5, 2), (8.1, 0), (math.inf, 0)])
def test_a_round_that_drafts_is_followed_by_plain_ones_as_far_as_its_time_allows(
    reading_rows: float, number: int
) -> None:
    """Of two rows that take 5 positions each: 10 positions for readings of the weights and two rows in each round."""
    decoder, rounds = mixed_decoder(reading_rows=reading_rows), list[tuple[int, int]]()
    step = decoder.round.step

    def watched(executor: Any, state: Any, *given: Any, choice: DraftChoice, **how: Any) -> Any:
        rounds.append((len(state.lengths_B), choice.num_tokens))
        return step(executor, state, *given, choice=choice, **how)

    decoder.round.step = watched  # type: ignore[method-assign]
    wanted = [replace(request, max_new_tokens=60, ignores_eos=True) for request in mixed((None, 0, None, 0))]
    in_turn(decoder, wanted, most=4)
    assert rounds[: 2 * (number + 1)] == ([(2, 4), *[(2, 0)] * number] if number else [(4, 4)]) * 2


def test_rows_with_drafts_wait_for_one_chunk_of_prompts_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("models.prefill", "speculate.engine.loop"):
        monkeypatch.setattr(f"llama_ssp.{module}.PREFILL_CHUNK", 4)
    decoder, seen = mixed_decoder(batch_size=12, replay=False), list[str]()
    step, target = decoder.round.step, decoder.round.target
    forward = target.forward

    def stepped(*given: Any, choice: DraftChoice, **how: Any) -> Any:
        seen.append("drafts" if choice.num_tokens else "plain")
        return step(*given, choice=choice, **how)

    def read(*given: Any, **how: Any) -> torch.Tensor:
        seen.extend(["prompt"] * (how.get("score_positions_BR") is not None))
        return forward(*given, **how)

    decoder.round.step, target.forward = stepped, read  # type: ignore[method-assign]
    wanted = deque(
        replace(request, max_new_tokens=30, ignores_eos=True) for request in mixed((None, 0, 0, *[None] * 7))
    )
    first = [wanted.popleft() for _ in range(3)]
    decoder.make_room([*first, *wanted])

    def more(_run: Decoding, _number: int) -> list[Request] | None:
        is_time = seen.count("drafts") == 2
        return [] if wanted and not is_time else [wanted.popleft() for _ in range(len(wanted))] if wanted else None

    with torch.inference_mode():
        deque(decoder.run(first, more=more), maxlen=0)
    assert seen.count("prompt") > 7
    between = [[*group] for is_draft, group in groupby(seen, lambda name: name == "drafts") if not is_draft]
    assert max(group.count("prompt") for group in between[1:]) == 1
    assert {group.count("plain") for group in between[1:5]} == {5}


def test_rounds_of_some_rows_and_of_all_are_not_taken_for_each_other() -> None:
    """Five rows with drafts are computed in six places, as all six rows are once the one without drafts has ended."""
    apart, joint = (mixed_decoder(reading_rows=reading_rows) for reading_rows in (0.0, math.inf))
    wanted = [replace(request, max_new_tokens=40, ignores_eos=True) for request in mixed((None, 0, *[None] * 4))]
    wanted[1] = replace(wanted[1], max_new_tokens=16)
    joint.picks_rows = False
    assert outcome(in_turn(apart, wanted, most=6)) == outcome(in_turn(joint, wanted, most=6))


def test_a_round_drafts_no_more_than_a_row_takes_unless_its_rule_judges_whole_drafts() -> None:
    lengths = dict[str, set[int]]()
    for rule_name in ("speculative", "coupled", "block"):
        found = list[list[object]]()
        for shortens in (True, False):
            decoder = mixed_decoder(rule_name=rule_name, reading_rows=math.inf)
            decoder.round.verifier.rule.goes_by_token &= shortens
            drafter = decoder.round.drafters[0]

            def watched(*given: Any, drafted: set[int], propose: Any, num_tokens: int, **how: Any) -> Any:
                drafted.add(num_tokens)
                return propose(*given, num_tokens=num_tokens, **how)

            drafted = set[int]()
            drafter.propose = partial(watched, drafted=drafted, propose=drafter.propose)  # type: ignore[method-assign]
            done = in_turn(decoder, mixed((2, 0, 1, 2)), most=4)
            found.append([(each.token_ids, each.accepted_lengths, each.examined_lengths) for each in done])
            lengths.setdefault(rule_name, drafted)
        assert found[0] == found[1]
    assert lengths == {"speculative": {2}, "coupled": {2}, "block": {4}}


@pytest.mark.parametrize("kind", ["model", "overlapped"])
def test_ranks_compute_the_same_rows(kind: str) -> None:
    """A rank that computed others would wait for messages of another size."""

    def one_rank(comm: ThreadComm) -> tuple[list[object], list[int], list[object]]:
        some, whole = (mixed_decoder(kind, comm=comm, replay=False) for _ in range(2))
        sizes, whole.picks_rows = sizes_of(some), False
        return outcome(in_turn(some, mixed(), most=5)), sizes, outcome(in_turn(whole, mixed(), most=5))

    first, second = on_ranks(thread_comms(2), one_rank)
    found, sizes, of_whole = first
    assert first == second
    assert found == of_whole
    assert len({*sizes}) > 2
