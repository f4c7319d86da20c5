"""The host side of decoding: fills free rows, launches rounds, and reads their results a fixed lag later.

The lag is one round on a GPU, so that the device never waits for the host, and zero on the CPU. Every rank has the same
lag; otherwise ranks would leave the loop in different rounds. Results are only displayed, recorded, and used to free
rows: no round depends on them.

While rows decode, they wait for one chunk at a time: of new prompts, as many as fit into it or a part of one, or, by
turns, of texts that are scored in free rows.

    rows decode    | round | chunk | round | chunk | round |      of the target; the draft reads a prompt at once
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.architectures.engine import BUCKET_STEP, CATCH_UP_CHUNK, PREFILL_CHUNK, whole_steps
from llama_ssp.cpu.threads import ThreadChoice
from llama_ssp.errors import LOGITS_ARE_NAN, NumericError, SspError
from llama_ssp.models.prefill import Buckets, Held, forwards_per_prompt
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.memory import exhaustion
from llama_ssp.speculate.engine.adaptive import FixedLength, num_chunks
from llama_ssp.speculate.engine.clock import EventClock, HostClock
from llama_ssp.speculate.engine.completion import PARTS, FinishReason, RowCompletion, StopRequest
from llama_ssp.speculate.engine.held import HeldTexts, PromptRow
from llama_ssp.speculate.engine.likelihoods import ScoredText, TokenScores, score_in_rows
from llama_ssp.speculate.engine.round import DraftChoice, Executor, Round
from llama_ssp.speculate.engine.state import BatchState, Request
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.speculate.engine.verifier import GOES_ON, NEWS, NOT_A_NUMBER, STOP_REQUESTED
from llama_ssp.speculate.sampling.by_row import NUM_SETTINGS
from llama_ssp.speculate.sampling.draft import POINT_MASS, Law

More = Callable[[int], Sequence[Request] | None]
"""Gives further requests before a round, of which so many find a free row; None once there will be no more."""
Failed = Callable[[Request, SspError], None]
"""Takes a request that ended by an error of its own."""


class Update(NamedTuple):
    """New tokens of one completion; the first `num_drafted` were drafted, the target chose the rest."""

    completion: RowCompletion
    new_ids: list[int]
    num_drafted: int


class _PendingRound(NamedTuple):
    """A prefill or a round that was launched but not read yet; `passed` follows the copy of the result to the host."""

    result: Tensor
    owners: list[RowCompletion | None]
    choice: DraftChoice
    is_prefill: bool
    passed: torch.cuda.Event | None


class _Reading(NamedTuple):
    """A prompt that is read chunk by chunk, while other rows decode; its row is none of theirs yet."""

    request: Request
    prompts: BatchState
    place: PromptRow
    owner: RowCompletion


class _Scoring(NamedTuple):
    """Texts that are scored chunk by chunk, in rows of no completion."""

    rows: Sequence[int]
    chunks: Iterator[list[TokenScores | SspError]]
    deliver: Callable[[list[TokenScores | SspError]], None]


class Decoder:
    """Turns requests into completions, a batch of rows at a time.

    By default rounds run from Python, and each drafts the most tokens.

    Attributes:
        length: chooses what each round drafts.
        threads: chooses how many threads compute a round.
        reuses: what caches hold of a prompt is not read again, as measurements of prefill want it to be.
        rounds_s, num_rounds: time and number of all rounds so far.
        scoring: texts that are being scored; further ones have to wait.
        has_news: the deciding rank has announced `NEWS`; `more` resets it.
    """

    def __init__(
        self,
        round_: Round,
        *,
        executor: Executor | None = None,
        batch_size: int,
        eos_ids: Sequence[int],
        seed: int,
        stops: StopStrings | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        self.round = round_
        self.executor = executor or Executor()
        self.length = FixedLength(round_.max_tokens_per_round - 1)
        self.threads = ThreadChoice()
        self.batch_size, self.seed, self.stops = batch_size, seed, stops
        self._eos_ids = frozenset(eos_ids)
        self.stop_request = stop_request or StopRequest()
        self.stopped = self.has_news = False
        self.rounds_s, self.num_rounds = 0.0, 0
        self.reuses = True
        self._num_uses = -1
        self._comm = round_.verifier.comm
        self._device = round_.target.device
        self._is_cuda = self._device.type == "cuda"
        self.clock = EventClock() if self._is_cuda else HostClock()
        self._lag = 1 if self._is_cuda else 0
        self.bucket_step = BUCKET_STEP["cuda" if self._is_cuda else "cpu"]
        self._most_ahead = round_.max_tokens_per_round + round_.num_ahead
        self._num_slots = self._num_rounds = 0
        self._kept: BatchState | None = None
        self._reading: _Reading | None = None
        self.scoring: _Scoring | None = None
        self._error: SspError | None = None
        self._reads_first = False

    def run(
        self, requests: Sequence[Request], *, to_length: bool = False, more: More | None = None,
        failed: Failed | None = None,
    ) -> Iterator[list[Update]]:  # fmt: skip
        """Decode all requests, in list order as rows become free.

        Call it under `torch.inference_mode()`: entering that mode in each round would cost as much as a draw. Prompt
        and new tokens must be within the models' contexts; `to_length` ignores end-of-sequence tokens and stop strings.
        `more` is called before each round, on all ranks alike, until it ends.
        Yields the new tokens of each completion, one round at a time.

        A row whose logits are NaN, or a prompt that memory is too small for, ends by itself, and `failed` gets it.
        Without `failed` no further request begins, and once its neighbours have ended, every rank raises NumericError
        or CapacityError.
        """
        assert torch.is_inference_mode_enabled()
        self.make_room(requests)
        self._to_length = to_length
        self._waiting = deque(requests)
        self._more, self._failed = more, failed
        self._rows: list[RowCompletion | None] = [None] * self.batch_size
        self._pending: deque[_PendingRound] = deque()
        self._num_skipped = [0 for _ in self.round.drafters]
        # Of each drafter, the rows whose prompts it has not read, and their lengths.
        self._unread: list[dict[int, int]] = [{} for _ in self.round.drafters]
        self._reading = self.scoring = self._error = None
        # Rows that are read or scored chunk by chunk, and the lengths of their texts.
        self._reserved: dict[int, int] = {}
        in_flight: Law = POINT_MASS
        was_round = True
        with self.threads.in_use():
            while not self.stopped and (self._refill() or not self.is_idle or self._more):
                if self.is_idle and not (self._waiting or self.scoring):
                    continue
                started = time.perf_counter()
                if self.stop_request.requested:
                    self.round.verifier.announce(STOP_REQUESTED)
                was_round = not (
                    (self._waiting or self._reserved) and (was_round or not any(self._rows)) and self._take_turn()
                )
                if was_round:
                    if not all(self._rows):
                        self._held.forget(self._free_rows())
                    for row, length in self._reserved.items():  # rounds write behind the text there
                        self._state.vacate(row, length=length)
                    choice = self._choose()
                    bucket = self._bucket(choice)
                    result, in_flight = self.round.step(
                        self.executor, self._state, in_flight, choice=choice, bucket=bucket, clock=self.clock
                    )
                    self._launch(result, list(self._rows), choice, is_prefill=False)
                running, launched = self._running(), time.perf_counter()
                reads_prompts = bool(self._pending) and self._pending[0].is_prefill
                updates = self._collect() if len(self._pending) > self._lag else []
                ended = time.perf_counter()
                # A GPU still reads prompts when the round behind them has been launched.
                round_s = (launched if reads_prompts else ended) - started if was_round else None
                if round_s is not None:
                    self.threads.after_round((choice, bucket), round_s)
                self._record_time(running, ended - started, round_s=round_s)
                if updates:
                    yield updates

    def make_room(self, requests: Sequence[Request]) -> None:
        """Allocate caches for these and all earlier requests; call it first to avoid later reallocation."""
        longest = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=0)
        self._num_slots = max(self._num_slots, whole_steps(longest + self._most_ahead))
        self._num_rounds = max(self._num_rounds, max((request.max_new_tokens for request in requests), default=0) + 1)
        by_length = self._is_cuda and self.round.reads_by_length
        self._buckets = Buckets(step=self._num_slots if by_length else self.bucket_step, num_slots=self._num_slots)
        target = self.round.target
        others_came = target.num_uses != self._num_uses
        self.round.allocate(batch_size=self.batch_size, num_slots=self._num_slots)
        self.executor.make_room()
        self._num_uses = target.num_uses
        if others_came or not self.reuses:
            step = 1 if target.is_invariant and not target.keeps_states else PREFILL_CHUNK
            self._held = HeldTexts(self.batch_size, step=step, keeps_states=target.keeps_states)

    def time_rounds(self, choices: Sequence[DraftChoice], *, num_slots: int) -> list[float]:
        """Run one round of each choice over vacant rows, reading `num_slots` slots, after `make_room`.

        Returns the seconds of each. The first two calls warm up executors; later ones measure.
        """
        self._held.forget(range(self.batch_size))
        state, bucket, clock = self._empty_state(), self._buckets.covering(num_slots), type(self.clock)()
        if self._is_cuda and self.round.reads_by_length:
            state.vacate(slice(None), length=max(num_slots - self._most_ahead, 2))

        def time_round(choice: DraftChoice) -> float:
            started = time.perf_counter()
            self.round.step(self.executor, state, choice=choice, bucket=bucket, clock=clock)
            if self._is_cuda:
                self._comm.finish()
            return time.perf_counter() - started

        with self.threads.in_use():
            while self.threads.is_undecided:
                self.threads.after_round((choices[0], bucket), time_round(choices[0]))
            return [time_round(choice) for choice in choices]

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Run rounds over vacant rows, after `make_room`, so that none is traced or captured while rounds are timed.

        A run of one K captures every width of the cache that these requests will read; any other gets one width.
        """
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        widths = {self._buckets.covering(longest)}
        if self.executor.keeps_state and len(self.length.choices) == 1:
            shortest, ahead = min(len(request.prompt_ids) for request in requests), self.round.max_tokens_per_round
            widths = {self._buckets.covering(length) for length in range(shortest + ahead, longest + 2 * ahead)}
        for width in sorted(widths):
            self.time_rounds(self.length.choices * 2, num_slots=width)

    def _choose(self) -> DraftChoice:
        """Choose what the next round drafts, and count what each drafter will have skipped after it.

        A drafter that has not read all prompts reads them now if it drafts.
        """
        self._use_steps(owner.request for owner in self._rows if owner)
        choice = self.length.choose(
            [
                skipped + max(lengths.values(), default=0)
                for skipped, lengths in zip(self._num_skipped, self._unread, strict=True)
            ]
        )
        if self.round.limit and all(self._outgrew(owner, choice) for owner in self._rows if owner):
            return DraftChoice(0)  # no row will be drafted for again, so that nothing is skipped
        if choice.num_tokens:
            if unread := self._unread[choice.source]:
                self.round.read_late(
                    self.executor, choice.source, self._state, [*unread],
                    lengths=[*unread.values()], buckets=self._buckets,
                )  # fmt: skip
                unread.clear()
            num_unread = 2 + CATCH_UP_CHUNK * num_chunks(self._num_skipped[choice.source])
            choice = choice._replace(num_unread=num_unread)
        for source, skipped in enumerate(self._num_skipped):
            drafted = choice.num_tokens and source == choice.source
            self._num_skipped[source] = 0 if drafted else skipped + choice.num_tokens + 1
        return choice

    def _empty_state(self) -> BatchState:
        """The previous run's batch if the executor keeps it and its sizes fit; else a new one."""
        num_slots, num_rounds = sizes = self._num_slots, self._num_rounds
        if self._kept and sizes == (self._kept.tokens_BS.shape[1], self._kept.uniforms_BMN.shape[1]):
            self._kept.vacate(slice(None))
            return self._kept
        state = BatchState.empty(
            self.batch_size, num_slots=num_slots, num_rounds=num_rounds, table=self.round.uniforms,
            num_settings=NUM_SETTINGS if self.round.steps else 0,
        )  # fmt: skip
        self._kept = state if self.executor.keeps_state else None
        return state

    def _running(self) -> list[RowCompletion]:
        being_read = [self._reading.owner] if self._reading else []
        return [owner for owner in self._rows if owner] + being_read

    def _free_rows(self) -> list[int]:
        return [row for row, owner in enumerate(self._rows) if owner is None and row not in self._reserved]

    def _release(self, rows: Iterable[int]) -> None:
        """Make reserved rows free again."""
        for row in rows:
            del self._reserved[row]
            if any(self._rows):
                self._state.vacate(row)

    def _refill(self) -> bool:
        """Ask for further requests; returns whether any wait. Raises an error that nobody took, once all rows ended."""
        if self._error and self.is_idle:
            raise self._error
        if self._more:
            found = self._more(len(self._free_rows()) - len(self._waiting))
            self._waiting.extend(found or ())
            self._more = self._more if found is not None else None
        return bool(self._waiting)

    def _use_steps(self, requests: Iterable[Request]) -> None:
        """Let the next draws do what these requests need, if rows have settings of their own."""
        if steps := self.round.steps:
            found = [request.sampling for request in requests if request.sampling]
            steps.truncates = any(sampling.truncates for sampling in found)
            steps.penalizes = any(sampling.penalizes for sampling in found)

    @property
    def is_idle(self) -> bool:
        """Whether no row decodes or is being read."""
        return not any(self._rows) and self._reading is None

    def drop(self, indices: Collection[int]) -> None:
        """End requests with these indices, on all ranks alike, between two rounds."""
        if self._reading and self._reading.request.index in indices:
            self._release([self._reading.place.row])
            self._reading = None
        self._waiting = deque(request for request in self._waiting if request.index not in indices)
        for owner in self._rows:
            if owner and owner.request.index in indices:
                self._free(owner, "stop")

    def score(
        self, texts: Sequence[ScoredText], *, num_top: int, deliver: Callable[[list[TokenScores | SspError]], None]
    ) -> None:
        """Score texts in free rows, on all ranks alike, a chunk between two rounds; `deliver` gets scores or errors."""
        rows, src = self._free_rows()[: len(texts)], self.round.verifier.verify_rank
        self._held.forget(rows)
        self._reserved.update(zip(rows, (len(text.ids) for text in texts), strict=True))
        chunks = score_in_rows(self.round.target, texts, rows, self._buckets, comm=self._comm, src=src, num_top=num_top)
        self.scoring = _Scoring(rows, chunks, deliver)

    def _fail(self, request: Request, error: SspError) -> None:
        """Let a request end by an error of its own."""
        if self._failed:
            self._failed(request, error)
        else:
            self._error = self._error or type(error)(f"prompt {request.index + 1}, {error}")
            self._waiting.clear()
            self._more = None

    def _forget(self, rows: Sequence[int]) -> None:
        """Let nobody read what rows hold."""
        self._held.forget(rows)
        self.round.clear(rows)

    def _free(self, owner: RowCompletion, reason: FinishReason) -> int:
        """End a completion, and free its row; returns that."""
        owner.finish_reason = reason
        row = self._rows.index(owner)
        self._rows[row] = None
        for unread in self._unread:
            unread.pop(row, None)
        self._state.vacate(row)
        return row

    def _take_turn(self) -> bool:
        """Read a chunk of new prompts or score one of texts, by turns; returns whether there is any."""
        self._reads_first = not self._reads_first
        turns = (self._read, self._score) if self._reads_first else (self._score, self._read)
        return any(take() for take in turns)

    def _score(self) -> bool:
        if not self.scoring:
            return False
        rows, chunks, deliver = self.scoring
        scores = list[TokenScores | SspError]()
        if error := self._out_of_memory(lambda: scores.extend(next(chunks))):
            scores = [error] * len(rows)
        if scores:
            self.scoring = None
            self._release(rows)
            if any(isinstance(found, SspError) for found in scores):
                self._forget(rows)
            deliver(scores)
        return True

    def _read(self) -> bool:
        """Read a chunk of new prompts, or all that rows are free for if none decodes."""
        if not self._reading:
            waiting, free = self._waiting, self._free_rows()
            most = min(len(waiting), len(free))
            if not most:
                return False
            if any(self._rows):
                most = self._num_of_a_chunk([*islice(waiting, most)])
            if most:
                self._admit_new([waiting.popleft() for _ in range(most)])
                return True
            self._begin(waiting.popleft(), free)
        assert self._reading
        request, _, place, owner = self._reading
        if error := self._out_of_memory(self._read_more, [place], [owner]):
            self._reading = None
            self._release({place.row} & {*self._reserved})
            self._fail(request, error)
        return True

    def _admit_new(self, requests: Sequence[Request]) -> None:
        """Read prompts together, or one by one if memory is too small for that."""
        places, owners = self._place(requests, self._free_rows())
        admit = partial(self._admit, requests, self._state_of(requests), places, owners)
        error = self._out_of_memory(admit, places, owners)
        if error and len(requests) == 1:
            self._fail(requests[0], error)
        elif error:
            for request in requests:
                self._admit_new([request])

    def _out_of_memory(
        self, read: Callable[[], object], places: Sequence[PromptRow] = (), owners: Sequence[RowCompletion] = ()
    ) -> SspError | None:
        """Read texts; returns an error, and forgets them, if memory is too small for that on all ranks alike."""
        try:
            read()
        except (MemoryError, RuntimeError) as error:
            found = exhaustion(error)
            if not (found and self._comm.all_say("out of memory")):
                raise
        else:
            return None
        for owner in owners:
            owner.finish_reason = "stop"
        self._forget([place.row for place in places])  # the error no longer holds tensors
        return found

    def _num_of_a_chunk(self, requests: Sequence[Request]) -> int:
        """How many of these requests, from the first on, have prompts that are read in one chunk."""
        num_tokens = accumulate(
            len(request.prompt_ids) - (self._held.num_held(request.prompt_ids) if self.reuses else 0)
            for request in requests
        )
        return sum(number <= PREFILL_CHUNK for number in num_tokens)

    def _begin(self, request: Request, free: list[int]) -> None:
        """Take a row for a prompt that is read chunk by chunk."""
        [place], [owner] = self._place([request], free)
        self._held.forget([place.row])
        self._reserved[place.row] = len(request.prompt_ids)
        # What the draft could copy from another row may be gone by its turn.
        self._reading = _Reading(request, self._state_of([request]), place._replace(draft=Held()), owner)

    def _read_more(self) -> None:
        """Read the next chunk of the prompt that is being read; the last one admits it."""
        assert self._reading
        request, prompts, place, owner = self._reading
        num_tokens = place.target.num_tokens + PREFILL_CHUNK
        if num_tokens < len(request.prompt_ids):
            self.round.read(prompts, place, num_tokens=num_tokens, buckets=self._buckets)
            self._reading = self._reading._replace(place=place._replace(target=Held(num_tokens, place.row)))
            return
        self._reading = None
        del self._reserved[place.row]
        self._held.enter(place, request.prompt_ids)  # from now on
        self._admit([request], prompts, [place], [owner])

    def _state_of(self, requests: Sequence[Request]) -> BatchState:
        return BatchState.of(
            requests, num_slots=self._num_slots, num_rounds=self._num_rounds, table=self.round.uniforms, seed=self.seed
        )

    def _place(self, requests: Sequence[Request], free: Sequence[int]) -> tuple[list[PromptRow], list[RowCompletion]]:
        """Give each request a free row and a completion."""
        if self.reuses:
            places = self._held.place([request.prompt_ids for request in requests], free)
        else:
            places = [PromptRow(row, Held(), Held()) for row in free[: len(requests)]]
        forwards = forwards_per_prompt(self.round.target, [len(request.prompt_ids) for request in requests])
        return places, [
            RowCompletion(
                request=request, num_target_forwards=number, num_reused_tokens=place.target.num_tokens,
                has_bonus=self.round.has_bonus,
                stop_watch=stops.watch(request.prompt_ids) if (stops := request.stops or self.stops) else None,
            )
            for place, request, number in zip(places, requests, forwards, strict=True)
        ]  # fmt: skip

    def _admit(
        self, requests: Sequence[Request], prompts: BatchState, places: Sequence[PromptRow],
        owners: Sequence[RowCompletion],
    ) -> None:  # fmt: skip
        """Read these prompts, or what is left of them, and let their rows decode."""
        if is_first := not any(self._rows):  # all rows are new
            self._num_skipped = [0 for _ in self.round.drafters]  # so all drafters will have read them whole
        lengths, rows = [len(request.prompt_ids) for request in requests], [place.row for place in places]
        late = [source for source in range(len(self.round.drafters)) if not self.length.reads_at_once(source)]
        if rows == [*range(self.batch_size)] and not self.executor.keeps_state:
            self._state = prompts
        elif is_first:
            self._state = self._empty_state()
        self._use_steps(requests)
        self.round.prefill(
            self.executor, self._state, prompts, places, lengths=lengths, buckets=self._buckets, late=late,
            deliver=partial(self._launch, owners=[*owners], choice=DraftChoice(0), is_prefill=True),
        )  # fmt: skip
        if late and self.reuses:
            self._held.forget_drafts(rows)
        for source in late:
            self._unread[source].update(zip(rows, lengths, strict=True))
        if self._state is not prompts:
            self._state.put(to_device(rows, self._device), prompts)
        for row, owner in zip(rows, owners, strict=True):
            self._rows[row] = owner

    def _bucket(self, choice: DraftChoice) -> int:
        """Cache slots that the next round reads if it drafts by `choice`."""
        lengths = [len(owner.request.prompt_ids) + len(owner.token_ids) for owner in self._rows if owner]
        known = max([*lengths, *self._reserved.values()])
        unread = sum([pending.choice.num_tokens + 1 for pending in self._pending])
        return self._buckets.covering(known + unread + choice.num_tokens + 1 + self.round.num_ahead)

    def _launch(
        self, result: Tensor, owners: list[RowCompletion | None], choice: DraftChoice, *, is_prefill: bool
    ) -> None:
        passed = None
        if self._is_cuda:
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            result = host.copy_(result, non_blocking=True)
            passed = torch.cuda.Event()
            passed.record()
        self._pending.append(_PendingRound(result, owners, choice, is_prefill, passed))

    def _collect(self) -> list[Update]:
        pending = self._pending.popleft()
        if pending.passed:
            self._comm.wait(pending.passed)
        updates, observed = [], []
        results = pending.result.tolist()
        for owner, (*drafted, num_accepted, next_id, flags) in zip(pending.owners, results, strict=True):
            self.stopped |= bool(flags & STOP_REQUESTED)
            self.has_news |= bool(flags & NEWS)
            if owner and not owner.finish_reason:
                num_before, limit = len(owner.token_ids), owner.request.max_new_tokens
                if flags & NOT_A_NUMBER:
                    self._forget([self._free(owner, "stop")])
                    self._fail(owner.request, NumericError(f"token {num_before + 1}: {LOGITS_ARE_NAN}"))
                    continue
                new_ids, reason = self._up_to_end(owner, [*drafted[:num_accepted], next_id][: limit - num_before])
                num_new = len(new_ids)
                goes_on = bool(flags & GOES_ON)  # the next token was drafted as well
                num_drafted = min(num_accepted + goes_on, num_new)
                if not pending.is_prefill:
                    owner.num_target_forwards += 1
                    if self.round.drafters:
                        owner.accepted_lengths.append(num_drafted)
                        num_examined = self._num_examined(owner, pending.choice, len(drafted))
                        owner.draft_lengths.append(num_examined)
                        observed += [num_accepted] * (num_examined > 0)
                        owner.num_ahead = goes_on * self.round.num_ahead
                owner.token_ids += new_ids
                if reason or num_before + num_new == limit:
                    owner.ended_in_draft = num_new <= num_accepted + goes_on
                    row = self._free(owner, reason or "length")
                    target = self.round.target
                    if self.reuses and not self.round.tree and target.is_invariant and not target.keeps_states:
                        self._held.extend(row, owner.token_ids[:-1])  # the cache lacks the last one
                updates.append(Update(owner, new_ids, num_drafted))
        self.length.observe(pending.choice, observed)
        # A prompt takes the row that holds most of it, so rows are not in the order of prompts.
        return sorted(updates, key=lambda update: (update.completion.request.index, update.completion.request.sample))

    def _outgrew(self, owner: RowCompletion, choice: DraftChoice, *, num_ahead: int = 0) -> bool:
        """Whether a row, as far as it is known, and what is in flight are longer than a round drafts for."""
        longest = self.round.longest(choice) if self.round.limit else None
        return longest is not None and len(owner.request.prompt_ids) + len(owner.token_ids) + num_ahead > longest

    def _num_examined(self, owner: RowCompletion, choice: DraftChoice, num_drafted: int) -> int:
        """How many drafted tokens of a row a round could accept, before its new tokens are known."""
        if not choice.num_tokens or self._outgrew(owner, choice, num_ahead=owner.num_ahead):
            return 0
        return num_drafted if owner.has_bonus else owner.num_ahead + 1

    def _up_to_end(self, owner: RowCompletion, ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Cut what follows the first end-of-sequence token or completed stop, also inside a draft."""
        reason: FinishReason | None = None
        if self._to_length:
            return ids, reason
        if not (owner.request.ignores_eos or self._eos_ids.isdisjoint(ids)):
            ids = ids[: next(place for place, token in enumerate(ids, start=1) if token in self._eos_ids)]
            reason = "eos"
        if owner.stop_watch and (num_until_stop := owner.stop_watch.num_until_stop(ids)):
            ids, reason = ids[:num_until_stop], "stop"
        return ids, reason

    def _record_time(self, running: list[RowCompletion], seconds: float, *, round_s: float | None) -> None:
        """Add the time of one pass of the loop to all rows that ran in it; that of its round, if any, by parts."""
        share = 1 / max(len(running), 1)
        for completion in running:
            completion.busy_s += seconds
            completion.share_s += seconds * share
            if completion.token_ids and not completion.first_token_s:
                completion.first_token_s = completion.busy_s
        if round_s is not None:
            self.rounds_s += round_s
            self.num_rounds += 1
            draft_s, verify_s = self.clock.take()
            for part, part_s in zip(PARTS, (draft_s, verify_s, round_s - draft_s - verify_s), strict=True):
                for completion in running:
                    completion.part_s[part] += part_s * share
