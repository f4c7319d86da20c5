"""The loop writes the target's own text, whatever the draft, the batch, the lengths and the ends of its rows."""

import gc
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, groupby
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from llama_ssp.errors import CapacityError, NumericError, SspError
from llama_ssp.reports.summary import acceptance_rate
from llama_ssp.speculate.drafters.shared import BroadcastDrafter
from llama_ssp.speculate.engine import loop
from llama_ssp.speculate.engine.completion import RowCompletion, StopRequest
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.results import Update
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable
from tests.helpers.decoders import complete, ids_of, make_decoder, outcome, requests, requests_of
from tests.helpers.kinds import Make, kinds
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.runs import FAST


@pytest.mark.parametrize(("max_new_tokens", "eos_ids"), [(1, ()), (9, range(11))])
def test_a_wish_to_stop_counts_where_every_row_ends_in_its_prefill(max_new_tokens: int, eos_ids: Sequence[int]) -> None:
    stop_request = StopRequest()
    decoder = make_decoder(PrefixRunner(), PrefixRunner(), batch_size=2, eos_ids=eos_ids, stop_request=stop_request)
    num_ended = 0
    with torch.inference_mode():
        for updates in decoder.run(requests_of([(1,)] * 100, max_new_tokens)):
            num_ended += len(updates)
            stop_request.requested = True
    assert decoder.stopped
    assert num_ended <= 4


@kinds
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_text_is_the_targets_own(make: Make, batch_size: int, lag: int) -> None:
    target, made = PrefixRunner(), make(3.0, batch_size=batch_size)
    made.lag = lag
    done = complete(made, requests())
    assert ids_of(done) == target.texts(requests())
    assert {each.finish_reason for each in done} == {"length"}


@kinds
@pytest.mark.parametrize("lag", [0, 1])
def test_further_requests_are_taken_only_for_free_rows_and_end_in_the_same_texts(make: Make, lag: int) -> None:
    made, whole = make(1.0, batch_size=3, temperature=0.9), make(1.0, batch_size=3, temperature=0.9)
    made.lag, wanted, asked = lag, requests(), list[int]()
    rest = deque(wanted[3:])

    def more(run: Decoding, number: int) -> list[Request] | None:
        asked.append(number)
        assert number <= 3 - len(run.rows.decoding), "rows are free"
        return [rest.popleft() for _ in range(min(number, len(rest)))] if rest else None

    found = []
    with torch.inference_mode():
        for updates in made.run(wanted[:3], more=more):
            ended = [update.completion for update in updates if update.completion.finish_reason]
            found += ended
    assert sum(asked) >= len(wanted) - 3
    assert not rest
    in_order = sorted(found, key=lambda completion: completion.request.index)
    assert outcome(in_order) == outcome(complete(whole, wanted))


@pytest.mark.parametrize("draft_seed", [0, 1], ids=["always accepted", "mostly rejected"])
@pytest.mark.parametrize(
    ("num_draft_tokens", "step", "lag"), [(1, 64, 0), (2, 64, 0), (5, 64, 0), (3, 1, 0), (3, 1, 1)]
)
def test_greedy_text_is_that_of_every_k_however_finely_the_width_follows_it(
    draft_seed: int, num_draft_tokens: int, step: int, lag: int
) -> None:
    """A round reads all that is filled."""
    target, draft = PrefixRunner(), PrefixRunner(seed=draft_seed)
    decoder = make_decoder(target, draft, num_draft_tokens=num_draft_tokens, batch_size=1 if step == 1 else 3)
    decoder.space.bucket_step, decoder.lag = step, lag
    assert ids_of(complete(decoder, requests())) == target.texts(requests())


@kinds
def test_reading_results_a_round_late_changes_nothing(make: Make) -> None:
    """As on a GPU."""
    prompt, late = (make(1.0, batch_size=3, eos_ids=[4], temperature=0.9) for _ in range(2))
    late.lag = 1
    assert outcome(complete(late, requests())) == outcome(complete(prompt, requests()))


@pytest.mark.parametrize("lag", [0, 1])
def test_rounds_do_not_count_the_wait_for_prompts(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU still reads them when the next round has been launched."""
    decoder, slow_s = make_decoder(PrefixRunner(), PrefixRunner(), batch_size=8), 5.0
    decoder.lag, collect = lag, Decoding._collect

    def collect_slowly(run: Decoding) -> list[Update]:
        if run._pending[0].is_prefill:
            late_s.append(slow_s)
        return collect(run)

    late_s: list[float] = []
    clock = time.perf_counter
    monkeypatch.setattr(Decoding, "_collect", collect_slowly)
    monkeypatch.setattr("time.perf_counter", lambda: clock() + sum(late_s))
    done = complete(decoder, requests())
    assert late_s
    assert decoder.rounds_s < slow_s
    assert sum(part_s for one in done for part_s in one.part_s.values()) < slow_s
    assert all(one.first_token_s > slow_s for one in done)


@pytest.mark.seconds
@kinds
def test_an_end_of_sequence_token_ends_the_row_at_once_also_inside_a_draft(make: Make) -> None:
    target, ended_inside, drafts = PrefixRunner(), 0, False
    for eos in range(target.vocab_size):
        made = make(3.0, batch_size=2, eos_ids=[eos])
        drafts = bool(made.round.drafters)
        for completion in complete(made, requests()):
            request = completion.request
            wanted = target.greedy(request.prompt_ids, request.max_new_tokens)
            wanted = wanted[: wanted.index(eos) + 1] if eos in wanted else wanted
            assert completion.token_ids == wanted
            assert completion.finish_reason == ("eos" if wanted[-1] == eos else "length")
            ended_inside += bool(completion.accepted_lengths) and completion.accepted_lengths[-1] not in (0, 4)
    assert ended_inside or not drafts, "no row ended inside a draft: the test shows nothing"


@kinds
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("lag", [0, 1])
def test_logits_that_are_no_numbers_end_the_run(make: Make, lag: int, temperature: float) -> None:
    made = make(3.0, batch_size=2, temperature=temperature)
    made.lag = lag
    wanted = requests_of([(2, 3)] * 2, 30)
    assert len(complete(made, wanted)) == 2
    drafter: Any = made.round.drafters[0] if made.round.drafters else None
    models: list[Any] = [made.round.target]
    if temperature and isinstance(drafter, BroadcastDrafter):  # a greedy draft's ids are checked, not believed
        models.append(drafter._inner.runner)  # type: ignore[union-attr]
    for model in models:
        before = float(model.head[3, 5])
        model.head[3, 5] = torch.nan
        with pytest.raises(NumericError, match=r"prompt 1, token [1-9].*: logits became NaN: the weights of"):
            complete(made, wanted)
        model.head[3, 5] = before


FAULTS = ("nan", "memory", "memory in chunks")


def break_token(made: Decoder, fault: str) -> None:
    """Let prompts with token 10 fail, which the target itself never writes."""
    target: Any = made.round.target
    target.head[:, 10] = 0
    if fault == "nan":
        target.table[10] = torch.nan
        return
    read = target.forward

    def forward(ids_BT: torch.Tensor, *given: Any, **how: Any) -> torch.Tensor:
        if how.get("score_positions_BR") is not None and (ids_BT == 10).any():  # a prompt
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found: torch.Tensor = read(ids_BT, *given, **how)
        return found

    target.forward = forward


@kinds
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_fails_ends_alone(make: Make, lag: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their texts, later ones in its row too; who takes no errors gets that of the row at the end."""
    if "chunks" in fault:
        monkeypatch.setattr(loop, "PREFILL_CHUNK", 2)
    prompts = [(1, 2), (2, 3, 4), (10, 1, 10), (7, 7), (0, 9, 8, 1, 2), (5, 10), (5, 6, 5), (10,)]
    wanted, wrong = requests_of(prompts, 12), [2, 5, 7]
    failed = dict[int, SspError]()
    made, others = make(3.0, batch_size=3), [request for request in wanted if request.index not in wrong]
    made.lag = lag
    break_token(made, fault)
    with torch.inference_mode():
        updates = [*chain.from_iterable(made.run(wanted, failed=lambda one, error: failed.update({one.index: error})))]
        done = {update.completion.request.index: update.completion.token_ids for update in updates}
        assert [done[request.index] for request in others] == made.round.target.texts(others)  # type: ignore[attr-defined]
        kind, words = (NumericError, "logits became NaN") if fault == "nan" else (CapacityError, "out of memory")
        assert sorted(failed) == wrong
        assert all(type(error) is kind and words in str(error) for error in failed.values())
        before = list[RowCompletion]()
        with pytest.raises(kind, match=f"prompt 3, .*{words}"):
            before.extend(update.completion for update in chain.from_iterable(made.run(wanted)))
    ended = {one.request.index: one.token_ids for one in before if one.finish_reason}
    assert ended == {index: done[index] for index in ended}
    assert ended, "its neighbours have ended"
    assert len(ended) == len({one.request.index for one in before})


def test_a_run_to_its_length_goes_on_behind_an_end_of_sequence() -> None:
    target, wanted = PrefixRunner(), Request(index=0, prompt_ids=(2, 3), max_new_tokens=20)
    decoder = make_decoder(target, PrefixRunner(), eos_ids=target.greedy(wanted.prompt_ids, 1))
    with torch.inference_mode():
        *_, ((completion, *_),) = decoder.run([wanted], to_length=True)
    assert completion.token_ids == target.greedy(wanted.prompt_ids, 20)
    assert completion.finish_reason == "length"
    (completion,) = complete(decoder, [wanted])
    assert len(completion.token_ids) == 1


@kinds
def test_sampled_text_does_not_depend_on_the_batch(make: Make) -> None:
    one, three, seven = (
        ids_of(complete(make(1.0, temperature=0.9, batch_size=batch_size), requests())) for batch_size in (1, 3, 7)
    )
    assert one == three == seven


def test_a_prompt_may_leave_room_for_one_token_only() -> None:
    target, [first, second] = PrefixRunner(), requests_of([(1, 2, 3), (4,)], 2)
    wanted = [replace(first, max_new_tokens=1), second]
    assert ids_of(complete(make_decoder(target, PrefixRunner(seed=1)), wanted)) == target.texts(wanted)


@pytest.mark.parametrize(("num_prompt_tokens", "num_chunks"), [(1, 1), (6, 2), (7, 3)])
def test_every_chunk_of_a_prompt_is_a_forward_of_the_target(
    num_prompt_tokens: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_ssp.models.prefill.PREFILL_CHUNK", 3)
    target = PrefixRunner()
    decoder = make_decoder(target, None, replay=False)
    prompt_ids = (1, 5, 3, 4, 2, 6, 8)[:num_prompt_tokens]
    (completion,) = complete(decoder, [Request(index=0, prompt_ids=prompt_ids, max_new_tokens=5)])
    assert completion.token_ids == target.greedy(prompt_ids, 5)
    assert completion.num_target_forwards == target.num_forwards == num_chunks + 4


@pytest.mark.parametrize("lengths", [[10, 3], [2, 2, 2, 2, 2], [1, 9, 1, 2]])
def test_rows_that_decode_wait_for_one_chunk_at_a_time(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt decodes until all others, which find free rows, have been read, a chunk of 4 before a round."""
    for module in ("models.prefill", "speculate.engine.loop"):
        monkeypatch.setattr(f"llama_ssp.{module}.PREFILL_CHUNK", 4)
    target, sizes = PrefixRunner(), list[int]()
    forward = target.forward

    def watched(ids_BT: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        sizes.append(0 if named.get("score_positions_BR") is None else ids_BT.numel())
        return forward(ids_BT, *more, **named)

    target.forward = watched  # type: ignore[method-assign]
    decoder = make_decoder(target, None, batch_size=len(lengths) + 1, replay=False)
    # At the beginning, when no row decodes, all rows are filled at once.
    later = [tuple(range(number, number + length)) for number, length in enumerate(lengths)]
    first, *others = requests_of([(1,)] * (len(lengths) + 1) + later, 3)
    wanted = [replace(first, max_new_tokens=40), *others]
    assert ids_of(complete(decoder, wanted)) == target.texts(wanted)
    between = [[*group] for is_round, group in groupby(sizes, lambda size: not size) if not is_round][1:]
    assert sum(map(sum, between)) >= sum(lengths)
    assert all(sum(chunk) <= 4 for chunk in between)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_the_numbers_of_a_round_are_keyed_by_the_length_at_which_it_begins(
    num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of P tokens has its first token from the numbers at P, and the next round has those at P + 1."""
    seen: list[list[float]] = []
    split = UniformTable.split

    def watched(table: UniformTable, uniforms_BN: torch.Tensor, *more: int) -> Draws:
        seen.extend(uniforms_BN.tolist())
        return split(table, uniforms_BN, *more)

    monkeypatch.setattr(UniformTable, "split", watched)
    draft = PrefixRunner(seed=1, sharpness=1.0) if num_draft_tokens else None
    decoder = make_decoder(PrefixRunner(sharpness=1.0), draft, temperature=0.9, replay=False)
    table, wanted = UniformTable(num_draft_tokens, torch.device("cpu")), []
    for completion in complete(decoder, requests(24)):
        start, key = len(completion.request.prompt_ids), torch.tensor([completion.request.key(7)])
        rounds = completion.accepted_lengths if draft else [0] * (len(completion.token_ids) - 1)
        starts = [start, *(start + 1 + sum(rounds[:number]) + number for number in range(len(rounds)))]
        wanted += table.uniforms(key, torch.tensor(starts)).tolist()
    assert [numbers for numbers, _ in groupby(seen)] == wanted


def test_the_time_of_a_pass_is_shared_by_the_rows_that_ran_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass takes a second; three requests in two rows make a prefill and three rounds, twice."""
    seconds = count(step=0.5)  # asked at its beginning, after the launch and at its end
    monkeypatch.setattr(
        "llama_ssp.speculate.engine.loop.time", SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    )
    decoder = make_decoder(PrefixRunner(), None, batch_size=2)
    monkeypatch.setattr(decoder.clock, "take", lambda: (0.5, 0.25))
    *both, alone = complete(decoder, requests_of([(1, 2)] * 3, 4))
    assert [completion.busy_s for completion in (*both, alone)] == [4.0, 4.0, 4.0]
    assert [completion.first_token_s for completion in (*both, alone)] == [1.0, 1.0, 1.0], "the prefill's pass"
    assert [completion.share_s for completion in (*both, alone)] == [2.0, 2.0, 4.0]
    assert [done.part_s for done in both] == [{"draft": 0.75, "verify": 0.375, "other": 0.375}] * 2
    assert alone.part_s == {"draft": 1.5, "verify": 0.75, "other": 0.75}


def test_an_accepted_draft_costs_one_target_forward_for_k_plus_one_tokens() -> None:
    target = PrefixRunner()
    decoder = make_decoder(target, PrefixRunner(), num_draft_tokens=4, replay=False)
    (completion,) = complete(decoder, [Request(index=0, prompt_ids=(1, 2), max_new_tokens=51)])
    assert completion.accepted_lengths == [4] * 10
    assert completion.num_target_forwards == target.num_forwards == 11


@kinds
@pytest.mark.parametrize("batch_size", [1, 3])
@torch.inference_mode()
def test_a_wish_to_stop_ends_the_loop_after_the_round(make: Make, batch_size: int) -> None:
    stop_request = StopRequest()
    made = make(3.0, batch_size=batch_size, stop_request=stop_request)
    num_tokens = 0
    for updates in made.run(requests_of([(1,)] * batch_size, 100)):
        num_tokens += sum(len(update.new_ids) for update in updates)
        stop_request.requested = num_tokens > 10 * batch_size
    assert made.stopped
    assert num_tokens < 20 * batch_size


def test_acceptance_counts_leave_out_rounds_that_the_limit_could_cut() -> None:
    decoder = make_decoder(PrefixRunner(), PrefixRunner(), num_draft_tokens=4)
    (completion,) = complete(decoder, [Request(index=0, prompt_ids=(1, 2), max_new_tokens=9)])
    assert completion.accepted_lengths == [4, 3]
    assert completion.examined_lengths == [4, 0]


@torch.inference_mode()
def test_acceptance_counts_leave_out_what_lies_behind_an_end_inside_a_draft() -> None:
    decoder = make_decoder(
        PrefixRunner(sharpness=1.0), PrefixRunner(sharpness=0.5), temperature=0.9, num_draft_tokens=4, eos_ids=[3]
    )
    wanted = [Request(index=0, sample=sample, prompt_ids=(1, 2), max_new_tokens=90) for sample in range(40)]
    ends = [update for updates in decoder.run(wanted) for update in updates if update.completion.finish_reason == "eos"]
    drafted = [end for end in ends if end.completion.accepted_lengths and end.num_drafted == len(end.new_ids)]
    assert {end.num_drafted for end in drafted} >= {1, 2, 3}
    for end in drafted:
        assert end.completion.examined_lengths[-1] == end.completion.accepted_lengths[-1] == end.num_drafted


def test_rounds_near_the_length_limit_do_not_bias_the_acceptance_rate() -> None:
    """With 9 in 10 drafted tokens accepted (a fixed cycle of outcomes), short texts report the same 9 in 10."""
    outcomes = [4, 4, 1, 4, 4, 0, 4, 4, 3, 4, 4, 2]
    lines, request = [], Request(index=0, prompt_ids=(1,), max_new_tokens=13)
    for first in range(len(outcomes)):
        done, room, step = RowCompletion(request=request), 12, first
        while room > 0:
            drawn = outcomes[step % len(outcomes)]
            done.accepted_lengths.append(min(drawn, room))
            done.draft_lengths.append(4)
            room -= drawn + 1
            step += 1
        accepted, examined = done.accepted_lengths, done.examined_lengths
        lines.append(replace(FAST, num_rounds=len(accepted), accepted_lengths=accepted, examined_lengths=examined))
    expected = sum(outcomes) / sum(min(outcome + 1, 4) for outcome in outcomes)
    assert acceptance_rate(lines) == pytest.approx(expected, abs=0.03)


def test_a_decoder_that_nobody_has_any_more_is_gone_at_once_with_its_caches() -> None:
    decoder = make_decoder(PrefixRunner(), PrefixRunner(seed=1))
    complete(decoder, requests()[:1])
    is_there = ref(decoder)
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert is_there() is None
    finally:
        gc.enable()
