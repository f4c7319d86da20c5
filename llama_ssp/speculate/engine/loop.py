"""The host side of decoding: fills free rows, launches rounds, and reads their results a fixed lag later.

The lag is one round on a GPU, so that the device never waits for the host, and zero on the CPU. Every rank has the same
lag; otherwise ranks would leave the loop in different rounds. Results are only displayed, recorded, and used to free
rows: no round depends on them.

While rows decode, they wait for one chunk at a time: of new prompts, as many as fit into it or a part of one, or, by
turns, of texts that are scored in free rows.

    rows decode    | round | chunk | round | chunk | round |      of the target; the draft reads a prompt at once
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.architectures.engine import CATCH_UP_CHUNK, MOST_GRAPHED_BUCKETS, PREFILL_CHUNK
from llama_ssp.errors import NOTHING_ALLOWED, ConfigError, NumericError, SspError
from llama_ssp.models.prefill import Held, forwards_per_prompt
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.memory import exhaustion
from llama_ssp.speculate.engine.batch_space import BatchSpace
from llama_ssp.speculate.engine.clock import EventClock, HostClock
from llama_ssp.speculate.engine.completion import PARTS, FinishReason, RowCompletion, StopRequest, share_time
from llama_ssp.speculate.engine.held import PromptRow, Reuse
from llama_ssp.speculate.engine.lengths import FixedLength, num_chunks
from llama_ssp.speculate.engine.likelihoods import ScoredText, TokenScores, score_in_rows
from llama_ssp.speculate.engine.masks import Constraint
from llama_ssp.speculate.engine.results import Launched, RowResult, Update
from llama_ssp.speculate.engine.round import DraftChoice, Executor, Round
from llama_ssp.speculate.engine.rows import Backlog, RowTable, computed_rows
from llama_ssp.speculate.engine.state import BatchState, Request
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.speculate.engine.threads import Threads
from llama_ssp.speculate.engine.verifier import STOP_REQUESTED
from llama_ssp.speculate.sampling.draft import POINT_MASS, Law
from llama_ssp.speculate.sampling.row_steps import RowSteps

More = Callable[["Decoding", int], Sequence[Request] | None]
"""Called before each round with the number of free rows; returns new requests, or None when there will be no more."""
Failed = Callable[[Request, SspError], None]
"""Takes a request that ended by an error of its own."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that all completions of a run follow.

    Attributes:
        seed: the seed of their draws.
        stops: strings that end completions of requests without their own.
        stop_request: the request to end the run.
        reuses: False reads every prompt in full, to measure prefill.
    """

    seed: int
    stops: StopStrings | None = None
    stop_request: StopRequest = field(default_factory=StopRequest)
    reuses: bool = True


class _Reading(NamedTuple):
    """A prompt that is read chunk by chunk into a reserved row, while other rows decode."""

    request: Request
    prompts: BatchState
    place: PromptRow
    owner: RowCompletion


class _Scoring(NamedTuple):
    """Texts that are scored chunk by chunk in reserved rows."""

    rows: Sequence[int]
    chunks: Iterator[list[TokenScores | SspError]]
    deliver: Callable[[list[TokenScores | SspError]], None]


class Decoder:
    """Turns requests into completions, a batch of rows at a time.

    By default rounds run from Python, and each drafts the most tokens.

    Attributes:
        length: chooses what each round drafts.
        threads: chooses how many threads compute a round.
        constrain: begins the constraint of a request's text, if it has one.
        settings: the settings of runs that are started without settings.
        reuses_any_length: whether runs can reuse earlier texts up to any token.
        space: the caches and the batch, which all runs share.
        lag: rounds that are launched before the oldest one is read.
        picks_rows: whether a round can leave rows out without changing the bits of any text.
        reading_rows: number of rows whose computation in a plain round takes as long as reading the weights; infinite
            until it is measured.
        rounds_s, num_rounds: time and number of all rounds so far.
        stopped: whether the latest run ended because the deciding rank announced a stop.
    """

    def __init__(
        self,
        round_: Round,
        *,
        settings: RunSettings,
        batch_size: int,
        eos_ids: Sequence[int],
        reuse: Reuse,
        executor: Executor | None = None,
        length: FixedLength | None = None,
        threads: Threads | None = None,
        constrain: Callable[[Request], Constraint | None] | None = None,
    ) -> None:
        self.round, self.settings, self.batch_size = round_, settings, batch_size
        self.reuses_any_length, self.constrain = reuse.any_length, constrain
        self.executor = executor or Executor()
        self.length = length or FixedLength(round_.max_tokens_per_round - 1)
        self.threads = threads or Threads()
        self.eos_ids = frozenset(eos_ids)
        self.is_cuda = round_.target.device.type == "cuda"
        self.clock = EventClock() if self.is_cuda else HostClock()
        self.lag = 1 if self.is_cuda else 0
        self.picks_rows = (
            batch_size > 1 and reuse.any_length and not (self.executor.replays_addresses or round_.verifier.is_split)
        )
        self.space = BatchSpace(round_, self.executor, batch_size=batch_size, reuse=reuse)
        self.rounds_s, self.num_rounds, self.reading_rows = 0.0, 0, math.inf
        self.stopped = False

    def choose_by(self, length: FixedLength) -> None:
        """Let `length` choose what later rounds draft, once their costs are known."""
        self.length = length

    def run(
        self,
        requests: Sequence[Request],
        settings: RunSettings | None = None,
        *,
        to_length: bool = False,
        more: More | None = None,
        failed: Failed | None = None,
    ) -> Iterator[list[Update]]:
        """Decode all requests, in list order as rows become free.

        Call it under `torch.inference_mode()`: entering that mode in each round would cost as much as a draw. Prompt
        and new tokens must be within the models' contexts; `to_length` ignores end-of-sequence tokens and stop strings.
        `more` is called before each round, on all ranks alike, until it returns None.
        Yields the new tokens of each completion, one round at a time.

        If a row's logits are NaN, or memory is too small for a prompt, only that request ends, and `failed` is called
        with it. Without `failed`, no new request begins, and when the other rows have ended, every rank raises
        NumericError or CapacityError.
        """
        assert torch.is_inference_mode_enabled()
        settings = settings or self.settings
        self.space.make(requests, reuses=settings.reuses)
        self.stopped = False
        # Not kept: an unreferenced decoder is gone at once, with its caches.
        return Decoding(self, requests, settings, to_length=to_length, more=more, failed=failed).updates()

    def make_room(self, requests: Sequence[Request]) -> None:
        """Allocate caches for these and all earlier requests; call it first to avoid later reallocation."""
        self.space.make(requests, reuses=self.settings.reuses)

    def time_rounds(
        self, choices: Sequence[DraftChoice], *, num_slots: int, num_rows: int | None = None
    ) -> list[float]:
        """Run one round of each choice over vacant rows, all or some, reading `num_slots` slots, after `make_room`.

        Returns the seconds of each. The first two calls warm up executors; later ones measure.
        """
        state, bucket, clock = (
            self.space.for_timing(num_slots),
            self.space.buckets.covering(num_slots),
            type(self.clock)(),
        )

        if num_rows is not None:
            state = state.some(torch.arange(num_rows, device=state.lengths_B.device))

        def time_round(choice: DraftChoice) -> float:
            started = time.perf_counter()
            self.round.step(self.executor, state, choice=choice, bucket=bucket, clock=clock)
            if self.is_cuda:
                self.round.verifier.comm.finish()
            return time.perf_counter() - started

        with self.threads.in_use():
            while self.threads.is_undecided:
                self.threads.after_round((choices[0], bucket, len(state.lengths_B)), time_round(choices[0]))
            # Longer drafts first, whose results take the most room.
            order = sorted(range(len(choices)), key=lambda place: -choices[place].num_tokens)
            times = {place: time_round(choices[place]) for place in order}
            return [times[place] for place in range(len(choices))]

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Run rounds over vacant rows, so that none is traced or captured while rounds are timed.

        A run of one K captures the widths of the cache that these requests will read, as many as have graphs at a
        time; any other run gets one width.
        """
        self.make_room(requests)  # another decoder may have allocated the caches since
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        widths = {self.space.buckets.covering(longest)}
        if self.executor.replays_addresses and len(self.length.choices) == 1:
            shortest, ahead = min(len(request.prompt_ids) for request in requests), self.round.max_tokens_per_round
            widths = {self.space.buckets.covering(length) for length in range(shortest + ahead, longest + 2 * ahead)}
        for width in sorted(widths)[:MOST_GRAPHED_BUCKETS]:
            self.time_rounds(self.length.choices * 2, num_slots=width)


class Decoding:
    """One run of a decoder: from requests that wait to completions that have ended.

    Attributes:
        rows: which completion decodes in which row.
        scoring: texts that are being scored; other texts wait until they are done.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        settings: RunSettings,
        *,
        to_length: bool,
        more: More | None,
        failed: Failed | None,
    ) -> None:
        self.decoder, self.round, self.space = decoder, decoder.round, decoder.space
        self.settings = settings
        self.rows = RowTable(decoder.batch_size)
        self.scoring: _Scoring | None = None
        self._to_length, self._more, self._failed = to_length, more, failed
        self._waiting, self._pending = deque(requests), deque[Launched]()
        self._unread = Backlog(len(self.round.drafters))
        self._reading: _Reading | None = None
        self._error: SspError | None = None
        self._has_news = self._reads_first = False
        self._comm = self.round.verifier.comm
        self._state: BatchState | None = None
        self._flying_rows: Sequence[int] = ()
        self._num_owed = 0  # plain-only rounds still due before the next speculative one

    def updates(self) -> Iterator[list[Update]]:
        """See `Decoder.run`."""
        decoder = self.decoder
        in_flight: Law = POINT_MASS
        was_round = True
        with decoder.threads.in_use():
            while not decoder.stopped and (self._refill() or not self.is_idle or self._more):
                if self.is_idle and not (self._waiting or self.scoring):
                    continue
                started = time.perf_counter()
                if self.settings.stop_request.requested:
                    self.round.verifier.announce(STOP_REQUESTED)
                was_round = not (
                    (self._waiting or self.rows.reserved)
                    and ((was_round and not self._num_owed) or not any(self.rows.owners))
                    and self._take_turn()
                )
                if was_round:
                    work, in_flight = self._launch(in_flight)
                running, launched = self.rows.decoding, time.perf_counter()
                if self._reading:
                    running.append(self._reading.owner)
                reads_prompts = bool(self._pending) and self._pending[0].is_prefill
                # Masks need the whole text before them.
                lag = 0 if self.round.masks and self._constraints_of(self.rows.owners) else decoder.lag
                updates = list[Update]()
                while len(self._pending) > lag:
                    updates += self._collect()
                ended = time.perf_counter()
                # A GPU still reads prompts when the round after them has been launched.
                round_s = (launched if reads_prompts else ended) - started if was_round else None
                by_part: dict[str, float] = {}
                if round_s is not None:
                    decoder.threads.after_round(work, round_s)
                    decoder.rounds_s += round_s
                    decoder.num_rounds += 1
                    draft_s, verify_s = decoder.clock.take()
                    by_part = dict(zip(PARTS, (draft_s, verify_s, round_s - draft_s - verify_s), strict=True))
                share_time(running, ended - started, by_part)
                if updates:
                    yield updates

    def _launch(self, in_flight: Law) -> tuple[Hashable, Law]:
        """Launch a round; returns a key of the computation, and the probabilities of tokens in flight after it."""
        assert self._state, "a round has rows"
        rows, choice = self._next() if self.decoder.picks_rows else (None, self._choose())
        state, owners = self._state, [*self.rows.owners]
        lengths = [len(owner.request.prompt_ids) + len(owner.token_ids) for owner in owners if owner]
        if rows is None:  # a round of all rows writes into vacant ones too, and after the texts that are read
            if not all(owners):
                self.space.held.forget(self.rows.free)
            for row, length in self.rows.reserved.items():
                state.vacate(row, length=length)
            lengths += self.rows.reserved.values()
        else:
            owners = [owners[row] for row in rows]
            state = state.some(to_device(rows, state.lengths_B.device))
        if self.round.steps:
            self._use_steps([owner.request for owner in owners if owner])
        known = max(lengths)
        unread = sum([pending.choice.num_tokens + 1 for pending in self._pending]) if self._pending else 0
        bucket = self.space.buckets.covering(known + unread + choice.num_tokens + 1 + self.round.num_ahead)
        if choice.num_tokens:
            in_flight = self._flying(in_flight, rows)
        result, following = self.round.step(
            self.decoder.executor,
            state,
            in_flight,
            choice=choice,
            bucket=bucket,
            clock=self.decoder.clock,
            constraints=self._constraints_of(owners) if self.round.masks else (),
        )
        if rows is not None:  # one that was there again has the same result
            self._state.take(state)
            num_live = len({*rows})
            owners[num_live:] = [None] * (len(rows) - num_live)
        self._pending.append(Launched.of(result, owners, choice, is_prefill=False))
        return (choice, bucket, len(owners)), following if choice.num_tokens else in_flight

    def _next(self) -> tuple[list[int] | None, DraftChoice]:
        """Return the rows that the next round computes (None for all), and what it drafts.

        Rows that never draft have plain rounds of their own. After each drafted round of the other rows there are as
        many plain rounds as fit into the time that these rows would have taken in the drafted round.
        """
        decoder, owners = self.decoder, self.rows.owners
        live = [row for row, owner in enumerate(owners) if owner]
        plain = [row for row, owner in enumerate(owners) if owner and owner.request.num_draft_tokens == 0]
        if self._num_owed and 0 < len(plain) < len(live):
            self._num_owed -= 1
            return computed_rows(plain, most=decoder.batch_size), DraftChoice(0)
        choice = self._choose()
        has_both = plain and choice.num_tokens
        num_positions = len(plain) * (choice.num_tokens + 1)
        self._num_owed = int(num_positions / (decoder.reading_rows + len(plain))) if has_both else 0
        if self._num_owed:
            live = [row for row in live if row not in plain]
        rows = computed_rows(live, most=decoder.batch_size)
        return (rows if self._num_owed or len(rows) < decoder.batch_size else None), choice

    def _flying(self, in_flight: Law, rows: Sequence[int] | None) -> Law:
        """Reorder the probabilities of tokens in flight to the rows of the next round.

        Rows that the last round left out have no tokens in flight, so their values do not matter.
        """
        rows = range(self.decoder.batch_size) if rows is None else rows
        before, self._flying_rows = self._flying_rows, rows
        if not isinstance(in_flight, Tensor) or [*before] == [*rows]:
            return in_flight
        places = {row: place for place, row in reversed([*enumerate(before)])}
        return in_flight.index_select(0, to_device([places.get(row, 0) for row in rows], in_flight.device))

    @property
    def is_idle(self) -> bool:
        """Whether no row decodes or is being read."""
        return not any(self.rows.owners) and self._reading is None

    def take_news(self) -> bool:
        """Whether the deciding rank has announced news since the last call."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def drop(self, indices: Collection[int]) -> None:
        """End requests with these indices, on all ranks alike, between two rounds."""
        if self._reading and self._reading.request.index in indices:
            self._release([self._reading.place.row])
            self._reading = None
        self._waiting = deque(request for request in self._waiting if request.index not in indices)
        for owner in self.rows.decoding:
            if owner.request.index in indices:
                self._free(owner, "stop")

    def score(
        self, texts: Sequence[ScoredText], *, num_top: int, deliver: Callable[[list[TokenScores | SspError]], None]
    ) -> None:
        """Score texts in free rows, on all ranks alike, a chunk between two rounds; `deliver` gets scores or errors."""
        rows, src = self.rows.free[: len(texts)], self.round.verifier.verify_rank
        self.space.held.forget(rows)
        self.rows.reserved.update(zip(rows, (len(text.ids) for text in texts), strict=True))
        chunks = score_in_rows(
            self.round.target, texts, rows, self.space.buckets, comm=self._comm, src=src, num_top=num_top
        )
        self.scoring = _Scoring(rows, chunks, deliver)

    def _choose(self) -> DraftChoice:
        """Choose what the next round drafts; a drafter that has not read all prompts reads them now if it drafts."""
        length = self.decoder.length
        keeps = False
        if len(length.choices) > 1:
            drafted = [owner.request for owner in self.rows.decoding if owner.request.num_draft_tokens != 0]
            length.num_rows = len(drafted)
            keeps = not self.round.verifier.rule.takes_best and any(request.keeps_lengths for request in drafted)
        choice = length.choose(self._unread.num_tokens)
        if keeps:
            choice = max(one for one in length.choices if not one.source)
        if (self.round.has_limit or self.round.steps) and all(
            owner.request.num_draft_tokens == 0 or self._outgrew(owner, choice) for owner in self.rows.decoding
        ):
            return DraftChoice(0)  # no row will be drafted for again, so that nothing is skipped
        if self.round.steps and self.round.may_shorten:
            mosts = [owner.request.num_draft_tokens for owner in self.rows.decoding]
            longest = max(choice.num_tokens if most is None else most for most in mosts)
            choice = choice._replace(num_tokens=min(choice.num_tokens, longest))
        if choice.num_tokens:
            if self._state and (unread := self._unread.take_prompts(choice.source)):
                self.round.read_late(
                    self.decoder.executor,
                    choice.source,
                    self._state,
                    [*unread],
                    lengths=[*unread.values()],
                    buckets=self.space.buckets,
                )
            num_skipped = self._unread.num_tokens[choice.source]
            choice = choice._replace(num_unread=2 + CATCH_UP_CHUNK * num_chunks(num_skipped))
        if self.round.drafters:
            self._unread.count(choice)
        return choice

    def _release(self, rows: Iterable[int]) -> None:
        """Make reserved rows free again."""
        for row in rows:
            del self.rows.reserved[row]
            if self._state and any(self.rows.owners):
                self._state.vacate(row)

    def _refill(self) -> bool:
        """Ask for more requests; returns whether any wait.

        Without `failed`, this raises the error of a row once all rows have ended.
        """
        if self._error and self.is_idle:
            raise self._error
        if self._more:
            found = self._more(self, len(self.rows.free) - len(self._waiting))
            self._waiting.extend(found or ())
            self._more = self._more if found is not None else None
        return bool(self._waiting)

    def _use_steps(self, requests: Sequence[Request]) -> None:
        """Let the next draws take the steps that these requests need, if rows have settings of their own."""
        if self.round.steps:
            samplings = [request.sampling for request in requests if request.sampling]
            limits = any(request.num_draft_tokens is not None for request in requests)
            few = self.decoder.executor.replays_addresses
            self.round.steps = RowSteps.of(samplings, limits=limits, few=few)

    def _fail(self, request: Request, error: SspError) -> None:
        """Let a request end by an error of its own."""
        if self._failed:
            self._failed(request, error)
        else:
            self._error = self._error or type(error)(f"prompt {request.index + 1}, {error}")
            self._waiting.clear()
            self._more = None

    def _forget(self, rows: Sequence[int]) -> None:
        """Forget the texts of rows, and clear what caches hold of them."""
        self.space.held.forget(rows)
        self.round.clear(rows)

    def _free(self, owner: RowCompletion, reason: FinishReason, *, in_draft: bool = False) -> int:
        """End a completion, and free its row; returns the row."""
        owner.end(reason, in_draft=in_draft)
        row = self.rows.leave(owner)
        self._unread.forget(row)
        if self._state:
            self._state.vacate(row)
        return row

    def _take_turn(self) -> bool:
        """Read a chunk of new prompts or score a chunk of texts, in turn; returns whether there was anything to do."""
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
        """Read new prompts into free rows; returns whether there was anything to read.

        If rows decode, this reads one chunk: several short prompts, or the next part of a long one. If none does, it
        reads as many prompts as there are free rows.
        """
        if not self._reading:
            waiting, free = self._waiting, self.rows.free
            most = min(len(waiting), len(free))
            if not most:
                return False
            if any(self.rows.owners):
                most = self._num_of_a_chunk([*islice(waiting, most)])
            if most:
                self._admit_new([waiting.popleft() for _ in range(most)])
                return True
            self._begin(waiting.popleft(), free)
        assert self._reading
        request, _, place, owner = self._reading
        if error := self._out_of_memory(self._read_more, [place], [owner]):
            self._reading = None
            self._release({place.row} & {*self.rows.reserved})
            self._fail(request, error)
        return True

    def _admit_new(self, requests: Sequence[Request]) -> None:
        """Read prompts together, or one by one if memory is too small for that."""
        places, owners = self._place(requests, self.rows.free)
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
            owner.end("stop")
        self._forget([place.row for place in places])  # the error no longer holds tensors
        return found

    def _num_of_a_chunk(self, requests: Sequence[Request]) -> int:
        """Number of requests, from the first on, whose prompts are read in one chunk."""
        num_tokens = accumulate(
            len(request.prompt_ids) - (self.space.held.num_held(request.prompt_ids) if self.settings.reuses else 0)
            for request in requests
        )
        return sum(number <= PREFILL_CHUNK for number in num_tokens)

    def _begin(self, request: Request, free: list[int]) -> None:
        """Take a row for a prompt that is read chunk by chunk."""
        [place], [owner] = self._place([request], free)
        self.space.held.forget([place.row])
        self.rows.reserved[place.row] = len(request.prompt_ids)
        # Tokens that the draft could copy from another row may be gone by its turn.
        self._reading = _Reading(request, self._state_of([request]), place._replace(draft=Held()), owner)

    def _read_more(self) -> None:
        """Read the next chunk of the prompt that is being read; the last one admits it."""
        assert self._reading
        request, prompts, place, owner = self._reading
        num_tokens = place.target.num_tokens + PREFILL_CHUNK
        if num_tokens < len(request.prompt_ids):
            self.round.read(prompts, place, num_tokens=num_tokens, buckets=self.space.buckets)
            self._reading = self._reading._replace(place=place._replace(target=Held(num_tokens, place.row)))
            return
        self._reading = None
        del self.rows.reserved[place.row]
        self.space.held.enter(place, request.prompt_ids)  # from now on
        self._admit([request], prompts, [place], [owner])

    def _state_of(self, requests: Sequence[Request]) -> BatchState:
        return self.space.state_of(requests, seed=self.settings.seed)

    def _place(self, requests: Sequence[Request], free: Sequence[int]) -> tuple[list[PromptRow], list[RowCompletion]]:
        """Give each request a free row and a completion."""
        if self.settings.reuses:
            places = self.space.place([request.prompt_ids for request in requests], free)
        else:
            places = [PromptRow(row, Held(), Held()) for row in free[: len(requests)]]
        forwards = forwards_per_prompt(self.round.target, [len(request.prompt_ids) for request in requests])
        constrain = self.decoder.constrain
        return places, [
            RowCompletion(
                request=request,
                num_target_forwards=number,
                num_reused_tokens=place.target.num_tokens,
                has_bonus=self.round.has_bonus,
                constraint=constrain(request) if constrain else None,
                stop_watch=stops.watch(request.prompt_ids) if (stops := request.stops or self.settings.stops) else None,
            )
            for place, request, number in zip(places, requests, forwards, strict=True)
        ]

    def _admit(
        self,
        requests: Sequence[Request],
        prompts: BatchState,
        places: Sequence[PromptRow],
        owners: Sequence[RowCompletion],
    ) -> None:
        """Read these prompts, or the rest of them, and let their rows decode."""
        if is_first := not any(self.rows.owners):
            self._unread.begin()
        lengths, rows = [len(request.prompt_ids) for request in requests], [place.row for place in places]
        executor = self.decoder.executor
        late = [source for source in range(len(self.round.drafters)) if not self.decoder.length.reads_at_once(source)]
        if rows == [*range(self.decoder.batch_size)] and not executor.replays_addresses:
            self._state = prompts
        elif is_first or not self._state:
            self._state = self.space.empty_state()
        self._use_steps(requests)
        self.round.prefill(
            executor,
            self._state,
            prompts,
            places,
            lengths=lengths,
            buckets=self.space.buckets,
            late=late,
            deliver=lambda result: self._pending.append(
                Launched.of(result, [*owners], DraftChoice(0), is_prefill=True)
            ),
            constraints=self._constraints_of(owners) if self.round.masks else (),
        )
        if late and self.settings.reuses:
            self.space.held.forget_drafts(rows)
        for source in late:
            self._unread.add_prompts(source, rows, lengths)
        if self._state is not prompts:
            self._state.put(to_device(rows, self.round.target.device), prompts)
        self.rows.take(rows, owners)

    def _collect(self) -> list[Update]:
        """Read the oldest round, and add to its completions."""
        pending = self._pending.popleft()
        found = pending.read(self._comm)
        self.decoder.stopped |= found.stops
        self._has_news |= found.has_news
        updates, observed = list[Update](), list[int]()
        for owner, result in zip(pending.owners, found.rows, strict=True):
            if not owner or owner.finish_reason:
                continue
            is_empty = bool(result.error == NOTHING_ALLOWED and owner.constraint)
            if result.error and not is_empty:
                self._forget([self._free(owner, "stop")])
                self._fail(owner.request, NumericError(f"token {len(owner.token_ids) + 1}: {result.error}"))
                continue
            num_examined = None
            if self.round.drafters and not pending.is_prefill:
                num_examined = self._num_examined(owner, pending.choice, result.num_drafted)
                observed += [result.num_accepted] * (num_examined > 0 or not result.num_drafted)
            update = self._extend(owner, result, num_examined, num_forwards=int(not pending.is_prefill))
            if is_empty and owner.constraint and not owner.finish_reason:
                reason = owner.constraint.problem or NOTHING_ALLOWED
                self._forget([self._free(owner, "stop")])
                self._fail(owner.request, ConfigError(f"token {len(owner.token_ids) + 1}: {reason}"))
                continue
            updates.append(update)
        self.decoder.length.observe(pending.choice, observed)
        # A prompt takes the row that holds most of it, so rows are not in the order of prompts.
        return sorted(updates, key=lambda update: (update.completion.request.index, update.completion.request.sample))

    def _extend(
        self, owner: RowCompletion, result: RowResult, num_examined: int | None, *, num_forwards: int
    ) -> Update:
        """Add new tokens to a completion, and free its row if it ends; for `num_examined` see `_num_examined`."""
        num_before, limit = len(owner.token_ids), owner.request.max_new_tokens
        ids = result.ids[:-1] if result.error else result.ids  # what was accepted before nothing was left
        new_ids, reason = self._up_to_end(owner, ids[: limit - num_before])
        if result.error and not reason and owner.constraint and owner.constraint.may_end:
            reason = "eos"
        num_new = len(new_ids)
        num_chosen_by_draft = result.num_accepted + result.goes_on
        num_drafted = min(num_chosen_by_draft, num_new)
        owner.extend(
            new_ids,
            num_forwards=num_forwards,
            num_accepted=num_drafted,
            num_examined=num_examined,
            num_ahead=result.goes_on * self.round.num_ahead,
        )
        if reason or num_before + num_new == limit:
            row = self._free(owner, reason or "length", in_draft=num_new <= num_chosen_by_draft)
            if self.settings.reuses and not self.round.tree and self.decoder.reuses_any_length:
                self.space.held.extend(row, owner.token_ids[:-1])  # the cache lacks the last one
            if self.settings.reuses:
                self.space.keep(row, len(owner.request.prompt_ids) + len(owner.token_ids) - 1)
        num_rejected = 0 if reason else max((num_examined or 0) - result.num_accepted, 0)
        return Update(owner, new_ids, num_drafted, result.rejected_ids[:num_rejected])

    def _outgrew(self, owner: RowCompletion, choice: DraftChoice, *, num_ahead: int = 0) -> bool:
        """Whether a row, with its tokens in flight, is longer than the rows that a round can draft for."""
        longest = self.round.longest(choice) if self.round.has_limit else None
        return longest is not None and len(owner.request.prompt_ids) + len(owner.token_ids) + num_ahead > longest

    def _num_examined(self, owner: RowCompletion, choice: DraftChoice, num_drafted: int) -> int:
        """Return how many drafted tokens of a row a round can accept at most, before the result is known."""
        if not choice.num_tokens or self._outgrew(owner, choice, num_ahead=owner.num_ahead):
            return 0
        number, most = num_drafted if owner.has_bonus else owner.num_ahead + 1, owner.request.num_draft_tokens
        return number if most is None else min(number, most)

    def _constraints_of(self, owners: Sequence[RowCompletion | None]) -> list[Constraint | None]:
        """The constraints of rows; empty if none has one."""
        found = [owner.constraint if owner else None for owner in owners]
        return found if any(found) else []

    def _up_to_end(self, owner: RowCompletion, ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Cut what follows the first end-of-sequence token or completed stop, also inside a draft."""
        reason: FinishReason | None = None
        if owner.constraint:
            return self._up_to_end_of(owner.constraint, owner, ids)
        if self._to_length:
            return ids, reason
        ends = {*owner.request.stop_ids, *(() if owner.request.ignores_eos else self.decoder.eos_ids)}
        if not ends.isdisjoint(ids):
            ids = ids[: next(place for place, token in enumerate(ids, start=1) if token in ends)]
            reason = "stop" if ids[-1] in owner.request.stop_ids else "eos"
        if owner.stop_watch and (num_until_stop := owner.stop_watch.num_until_stop(ids)):
            ids, reason = ids[:num_until_stop], "stop"
        return ids, reason

    def _up_to_end_of(
        self, constraint: Constraint, owner: RowCompletion, ids: list[int]
    ) -> tuple[list[int], FinishReason | None]:
        """Do what `_up_to_end` does for a text with a constraint.

        A stop counts only where the constraint lets the text end. Without an end-of-sequence token, the text also ends
        where no token may follow.
        """
        for number, token in enumerate(ids, start=1):
            if token in self.decoder.eos_ids:
                return ids[:number], "eos"
            constraint.extend(token)
            watched = bool(owner.stop_watch and owner.stop_watch.num_until_stop([token]))
            stops = watched or token in owner.request.stop_ids
            if (stops and constraint.may_end) or (not self.decoder.eos_ids and constraint.is_over):
                return ids[:number], "stop"
        return ids, None
