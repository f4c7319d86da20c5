"""Decodes requests on all ranks: rank 0 takes them from its inbox, and every rank runs the same decoder.

Ranks exchange nothing more per round: when rank 0 has news (new requests, or clients that have gone), it sets a flag of
the decision that all ranks get anyway (`verifier.NEWS`), and broadcasts the news before the next round. While no row
decodes, the others wait for a broadcast, at least one every second.

    rank 0    | round | round, flag | news | round | a chunk of scores | round |
    others    | round | round, flag | news | round | a chunk of scores | round |

For log-probabilities, the target reads prompt and completion once more, in free rows between rounds.
"""

import logging
import math
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

from llama_ssp.architectures.engine import PREFILL_CHUNK
from llama_ssp.errors import ConfigError, SspError
from llama_ssp.extensions.serve.inbox import Inbox, Part, RequestError, ServedRequest
from llama_ssp.extensions.serve.records import ServeTimeouts
from llama_ssp.extensions.serve.structures import Structures
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.session import Session
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.lengths import finder
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.likelihoods import ScoredText, TokenScores
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.masks import Begin, prepare_constraint
from llama_ssp.speculate.engine.results import Update
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.verifier import NEWS
from llama_ssp.text.log_probs import part as some_of

_log = logging.getLogger(__name__)
_BEAT_S, _SOON_S = 1.0, 0.01
_WARM_UP_TOKENS = 8
_INTERRUPTS = 2  # the second Ctrl-C does not wait for running requests


class Service:
    """The decoder of a server on one rank; `inbox` is rank 0's, `length` the most tokens of a row."""

    def __init__(self, session: Session, inbox: Inbox | None, *, length: int) -> None:
        self._session, self._inbox = session, inbox
        self._comm, self._tokenizer = session.world.comm, session.models.tokenizer
        self._vocabulary = session.models.request_maker.vocabulary
        # Texts whose last parts wait for scores.
        self._unscored: deque[tuple[ScoredText, ServedRequest, Part]] = deque()
        # Requests that wait until all ranks have prepared the structures of their texts.
        self._structures, self._unprepared = Structures(), deque[tuple[ServedRequest, Future[Begin | None]]]()
        self._drains_until = math.inf
        config = replace(session.config, sampling=SamplingConfig(temperature=1.0, by_row=True))
        self._decoder = build_decoder(session.models, config, speculative=session.models.drafts)
        if (chooser := finder()) and may_choose(self._decoder):  # up to the K of the settings
            speculation = replace(config.speculation, num_draft_tokens=chooser.name)
            config = replace(config, speculation=speculation)
        longest = Request(index=0, prompt_ids=(0,), max_new_tokens=length - 1)
        make_ready(self._decoder, [longest], config, comm=self._comm, folder=session.folder)

    def warm_up(self) -> None:
        """Complete a few tokens, so that the first request does not wait for traces or captures."""
        request = Request(index=0, prompt_ids=(0,), max_new_tokens=_WARM_UP_TOKENS, sampling=SamplingConfig())
        for _ in range(1 + self._decoder.executor.replays_addresses):
            deque(self._decoder.run([request], to_length=True), maxlen=0)
        self._decoder.round.forget_texts()

    def run(self) -> None:
        """Decode until the inbox is closed and empty; a signal closes it, and ends running requests after a while."""
        for updates in self._decoder.run([], more=self._more, failed=self._fail):
            for update in updates:
                self._take(update)
        self._structures.close()

    def _take(self, update: Update) -> None:
        """Pass new tokens on; a completion whose log-probabilities are wanted ends only with these."""
        done, request = update.completion, cast("ServedRequest", update.completion.request)
        part = Part(update.new_ids, done.finish_reason, update.num_drafted, update.rejected_ids)
        if done.finish_reason:
            part = part._replace(
                accepted_lengths=done.accepted_lengths,
                examined_lengths=done.examined_lengths,
                num_reused_tokens=done.num_reused_tokens,
            )
            if request.num_top is not None:
                self._unscored.append((request.text(done.token_ids), request, part))
                return
        self._deliver(request, part)

    def _deliver(self, request: Request, part: Part) -> None:
        if self._inbox:
            self._inbox.deliver(request.index, part)

    def _fail(self, request: Request, error: SspError) -> None:
        """Answer a request with the error that ended this request alone, since it is impossible or a model fails."""
        status = 400 if isinstance(error, ConfigError) else 500
        self._deliver(request, Part.failed(RequestError(str(error), status=status)))

    def _more(self, run: Decoding, num_rows: int) -> list[Request] | None:
        """Drop requests whose clients have gone, score texts, and return new requests; see `loop.More`."""
        if self._unscored and num_rows > 0 and not run.scoring:
            num_rows -= self._score(run, num_rows)
        has_news = run.take_news() if self._comm.size > 1 else self._has_news(num_rows)
        found: list[Request] = self._prepared(is_idle=run.is_idle) if self._unprepared else []
        if run.is_idle or has_news:
            num_free = num_rows - len(found)
            new, dropped, is_over = from_rank_0(self._comm, lambda: self._news(num_free))
            run.drop(dropped)
            self._unscored = deque(one for one in self._unscored if one[1].index not in dropped)
            self._unprepared = deque(one for one in self._unprepared if one[0].index not in dropped)
            found = [request for request in found if request.index not in dropped]
            if is_over:
                return None
            for request in (ServedRequest.from_json(given, self._tokenizer) for given in new):
                if request.max_new_tokens and request.sampling and constraint_asked(request.sampling):
                    prepare = partial(prepare_constraint, request.sampling, self._vocabulary)
                    self._unprepared.append((request, self._structures.submit(request.sampling, prepare)))
                elif request.max_new_tokens:
                    found.append(request)
                else:
                    self._unscored.append((request.text(), request, Part(finish_reason="length")))
        run.round.verifier.announce(NEWS if self._has_news(num_rows - len(found)) else 0)
        return found

    def _prepared(self, *, is_idle: bool) -> list[Request]:
        """The requests whose structures all ranks have prepared; where no row decodes, wait a little for the first."""
        futures = [preparing for _, preparing in self._unprepared]
        if is_idle:
            wait(futures, timeout=_SOON_S, return_when=FIRST_COMPLETED)
        states = ("failed" if one.done() and one.exception() else "done" if one.done() else "open" for one in futures)
        all_states = [text.split() for text in self._comm.gather_text(" ".join(states))]
        found, left = list[Request](), deque[tuple[ServedRequest, Future[Begin | None]]]()
        for (request, preparing), *of_ranks in zip(self._unprepared, *all_states, strict=True):
            if "open" in of_ranks:
                left.append((request, preparing))
            elif "failed" in of_ranks:
                error = preparing.exception()
                unknown = SspError("the structure of the text could not be prepared")
                self._fail(request, error if isinstance(error, SspError) else unknown)
            else:
                found.append(replace(request, begin=preparing.result()))
        self._unprepared = left
        return found

    def _has_news(self, num_rows: int) -> bool:
        """Whether rank 0 has news for all ranks; False on the other ranks."""
        return self._inbox is not None and (self._is_over(self._inbox) or self._inbox.has_news(num_rows))

    def _is_over(self, inbox: Inbox) -> bool:
        """Whether the closed inbox is empty, or its time after a signal is over."""
        if self._session.stop_request.requested and self._drains_until == math.inf:
            inbox.close()
            timeouts = self._session.config.timeouts
            assert isinstance(timeouts, ServeTimeouts), "every run has the timeouts of extensions"
            self._drains_until = time.monotonic() + timeouts.drain_s
        has_time = time.monotonic() <= self._drains_until and self._session.stop_request.num_interrupts < _INTERRUPTS
        return inbox.is_closed and (inbox.is_empty or not has_time)

    def _news(self, num_rows: int) -> tuple[list[dict[str, Any]], list[int], bool]:
        """Return what rank 0 tells the others: new requests, numbers of requests to drop, and whether the server ends.

        If nothing runs or waits, this waits for a request, at most `_BEAT_S`.
        """
        assert self._inbox, "rank 0 has one"
        stops = self._session.stop_request.requested or self._inbox.is_closed
        may_wait = num_rows == self._decoder.batch_size and not (self._unscored or self._unprepared or stops)
        new, dropped = self._inbox.take(num_rows, wait_s=_BEAT_S if may_wait else 0.0)
        is_over = self._is_over(self._inbox)
        return [request.as_json() for request in new], [*dropped, *(self._inbox.give_up() if is_over else ())], is_over

    def _score(self, run: Decoding, num_rows: int) -> int:
        """Begin to score texts in up to `num_rows` rows: texts of one chunk, or a longer one; returns their number."""
        longest = accumulate((len(text.ids) for text, *_ in self._unscored), max)
        num_of_a_chunk = sum(number * length <= PREFILL_CHUNK for number, length in enumerate(longest, start=1))
        some = [self._unscored.popleft() for _ in range(min(max(num_of_a_chunk, 1), num_rows))]

        def deliver(found: list[TokenScores | SspError]) -> None:
            for (_, request, part), scores in zip(some, found, strict=True):
                if isinstance(scores, SspError):
                    self._fail(request, scores)
                    continue
                logprobs = some_of(scores.model, slice(None), num_top=request.num_top or 0)
                self._deliver(request, part._replace(logprobs=logprobs))

        num_top = max(request.num_top or 0 for _, request, _ in some)
        run.score([text for text, *_ in some], num_top=num_top, deliver=deliver)
        return len(some)


def may_choose(decoder: Decoder) -> bool:
    """Whether rounds may draft fewer tokens than K; GPUs have graphs for this one K, for which memory is planned."""
    round_ = decoder.round
    is_fixed = round_.tree or round_.num_ahead or round_.verifier.forced or decoder.executor.replays_addresses
    return bool(round_.drafters) and not is_fixed


def check_layout(session: Session, asking: str) -> None:
    """Raise ConfigError for a placement whose rank 0 could not answer; `asking` says what needs it."""
    layout, size = session.models.mesh.layout, session.world.comm.size
    if layout.verify_rank or (layout.splits_batch and session.config.batch_size < size):
        raise ConfigError(
            f"{asking} answers on rank 0, which has to verify a row of each round: place target and draft so that "
            "rank 0 has a part of both, with batch_size of at least the number of ranks"
        )
