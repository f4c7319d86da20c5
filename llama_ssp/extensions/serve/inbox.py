"""Inbox between HTTP's thread and the decoder's thread of rank 0: new completions, dropped ones, results."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.likelihoods import ScoredText
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.text.log_probs import TokenLogprob


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRequest(Request):
    """A completion that a client asked for; without new tokens only its prompt is scored.

    Attributes:
        num_top: number of the most probable tokens whose log-probabilities are wanted; None for no log-probabilities.
        scores_prompt: whether log-probabilities of the prompt's tokens are wanted too.
        shows_stop: whether the text keeps the stop string or token that ended it.
        arrived_s: when the inbox of rank 0 got the request, by that rank's monotonic clock.
    """

    num_top: int | None = None
    scores_prompt: bool = False
    shows_stop: bool = False
    arrived_s: float = 0.0

    def text(self, new_ids: Sequence[int] = ()) -> ScoredText:
        """Prompt and completion, as they are scored."""
        num_given = 1 if self.scores_prompt else len(self.prompt_ids)
        return ScoredText(ids=(*self.prompt_ids, *new_ids), num_given=num_given)

    def as_json(self) -> dict[str, Any]:
        """Its fields as JSON holds them, unprepared: biases as pairs, since keys would become texts."""
        sampling, default = self.sampling or SamplingConfig(), whole(SamplingConfig)()
        changed = {name: value for name, value in vars(sampling).items() if value != getattr(default, name)}
        changed["logit_bias"] = [*sampling.logit_bias.items()]
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return given | {"sampling": changed, "stops": self.stops and self.stops.texts, "begin": None}

    @classmethod
    def from_json(cls, given: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> "ServedRequest":
        """The request of these fields."""
        stops = given["stops"] and StopStrings(tokenizer, given["stops"])
        sampling = whole(SamplingConfig)(**given["sampling"] | {"logit_bias": dict(given["sampling"]["logit_bias"])})
        made = {name: tuple(given[name]) for name in ("prompt_ids", "stop_ids")}
        return cls(**given | made | {"sampling": replace(sampling, eos_ids=tuple(sampling.eos_ids)), "stops": stops})


class Part(NamedTuple):
    """New tokens of a completion, and at its end a reason.

    Attributes:
        waited_s: in the first part, which has no tokens, how long the completion has waited for a row.
        num_drafted, rejected_ids: those of the tokens' round; see `Update`.
        accepted_lengths, examined_lengths: at the end, for each round the number of drafted tokens that became text,
            and of those that the target examined.
        num_reused_tokens: at the end, the number of tokens of the prompt that the target's cache held.
        logprobs: at the end, log-probabilities under the model, and those of the prompt's tokens, if requested.
        error: the error that has ended the completion, if one did.
    """

    new_ids: Sequence[int] = ()
    finish_reason: str | None = None
    num_drafted: int = 0
    rejected_ids: Sequence[int] = ()
    accepted_lengths: Sequence[int] = ()
    examined_lengths: Sequence[int] = ()
    num_reused_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    error: "RequestError | None" = None
    waited_s: float | None = None

    @classmethod
    def failed(cls, error: "RequestError") -> Self:
        """The last part of a completion that an error has ended."""
        return cls(finish_reason="error", error=error)

    @property
    def num_rejected(self) -> int:
        """Number of examined drafted tokens that did not become text."""
        of_rounds = zip(self.accepted_lengths, self.examined_lengths, strict=True)
        return sum(max(num_examined - num_accepted, 0) for num_accepted, num_examined in of_rounds)


ENDED = "shutdown"


class RequestError(Exception):
    """A request that is refused; `param` names its field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    @classmethod
    def ending(cls) -> "RequestError":
        """Make the error of a server that ends."""
        return cls("the server ends", status=503, code=ENDED)

    def body(self) -> dict[str, object]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientId(NamedTuple):
    """Who asks: the name of a key, and an address; each may be empty."""

    key: str = ""
    address: str = ""


NOBODY = ClientId()


@dataclass(eq=False)
class _Taker:
    """The receiver of a completion's parts; the `num_left` new tokens that it may still get count for its client."""

    take: Callable[[Part], None]
    client: ClientId
    num_left: int = 0


@dataclass(eq=False)
class Inbox:
    """Waiting and decoding completions; all methods may be called from any thread.

    Clients get rows in turn. The next completion is one of the key that has had the fewest tokens so far, in prompts
    and new text, and of the address that has had the fewest among this key's addresses. So neither many requests nor
    long prompts of one client make other clients wait. Until a completion that is decoded ends, it counts with all
    tokens that it may get. A new key or client begins with the count of the one that has had the fewest.

    Attributes:
        most_waiting: the most completions that may wait; more are refused.
        is_closed: whether all new completions are refused.
    """

    most_waiting: int
    is_closed: bool = False
    _waiting: dict[ClientId, deque[ServedRequest]] = field(default_factory=dict)
    _had: dict[str | ClientId, int] = field(default_factory=dict)
    _dropped: list[int] = field(default_factory=list)
    _takers: dict[int, _Taker] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for a row."""
        return sum(map(len, [*self._waiting.values()]))

    @property
    def num_running(self) -> int:
        """Number of completions that the decoder has."""
        with self._changed:
            return len(self._takers) - self.num_waiting

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits or decodes."""
        return not self._takers

    def close(self) -> None:
        """Refuse new completions from now on."""
        self.is_closed = True

    def put(
        self, completions: Sequence[ServedRequest], take: Callable[[int, Part], None], *, client: ClientId = NOBODY
    ) -> list[int]:
        """Add completions of a client, and number them by `index`; returns the numbers.

        `take` gets the place of each completion in the sequence, with its parts. Raises RequestError, and adds none, if
        the inbox is closed or too many completions would wait.
        """
        with self._changed:
            if self.is_closed:
                raise RequestError.ending()
            if len(completions) > self.most_waiting:
                reason = f"{len(completions)} completions are asked for, and at most {self.most_waiting} may wait"
                raise RequestError(f"{reason}: ask for fewer", param="n" if completions[-1].sample else "prompt")
            if self.num_waiting + len(completions) > self.most_waiting:
                reason = f"{self.most_waiting} completions wait for a row already: ask again"
                raise RequestError(reason, status=429, code="rate_limit_exceeded")
            numbers = [next(self._numbers) for _ in completions]
            if client not in self._waiting:
                self._begin(client)
                self._waiting[client] = deque()
            for place, (number, completion) in enumerate(zip(numbers, completions, strict=True)):
                self._takers[number] = _Taker(partial(take, place), client)
                self._waiting[client].append(replace(completion, index=number, arrived_s=time.monotonic()))
            self._changed.notify()
        return numbers

    def _begin(self, client: ClientId) -> None:
        """Forget counts of clients and keys that have gone; a new client begins with the smallest count."""
        clients = {taker.client for taker in self._takers.values()}
        keys = {one.key for one in clients}
        among: list[tuple[str | ClientId, set[Any]]] = [
            (client.key, keys),
            (client, {one for one in clients if one.key == client.key}),
        ]
        begun = {
            new: max(self._had.get(new, 0), min((self._had[one] for one in there), default=0)) for new, there in among
        }
        self._had = {one: self._had[one] for one in clients | keys} | begun

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget completions whose client has gone."""
        with self._changed:
            self._dropped += [number for number in numbers if self._forget(number)]
            left = {
                client: deque(one for one in waiting if one.index in self._takers)
                for client, waiting in self._waiting.items()
            }
            self._waiting = {client: waiting for client, waiting in left.items() if waiting}
            self._changed.notify()

    def give_up(self) -> list[int]:
        """Tell all receivers that the server ends; returns the numbers of completions that waited or were decoded."""
        with self._changed:
            takers, self._takers = self._takers, {}
            self._waiting.clear()
        for taker in takers.values():
            taker.take(Part.failed(RequestError.ending()))
        return [*takers]

    def has_news(self, num_rows: int) -> bool:
        """Whether `take` would return anything."""
        return bool(self._dropped or (self._waiting and num_rows > 0))

    def take(self, num_rows: int, *, wait_s: float) -> tuple[list[ServedRequest], list[int]]:
        """The next completions for `num_rows` free rows, and numbers to drop; waits up to `wait_s` for any."""
        with self._changed:
            if not self.has_news(num_rows):
                self._changed.wait(wait_s)
            taken = [self._next() for _ in range(min(num_rows, self.num_waiting))]
            dropped, self._dropped = self._dropped, []
        for one in taken:
            self.deliver(one.index, Part(waited_s=time.monotonic() - one.arrived_s))
        return taken, dropped

    def _next(self) -> ServedRequest:
        """Take the next completion."""
        client = min(self._waiting, key=lambda client: (self._had[client.key], self._had[client]))
        taken = self._waiting[client].popleft()
        self._count(client, len(taken.prompt_ids) + taken.max_new_tokens)
        self._takers[taken.index].num_left = taken.max_new_tokens
        if not self._waiting[client]:
            del self._waiting[client]
        return taken

    def deliver(self, number: int, part: Part) -> None:
        """Pass a part to the receiver of a completion, if it still waits."""
        with self._changed:
            if taker := self._takers.get(number):
                taker.num_left -= len(part.new_ids)
                if part.finish_reason:
                    self._forget(number)
        if taker:
            taker.take(part)

    def _forget(self, number: int) -> _Taker | None:
        """End a completion, if it has not ended: its client has not had the tokens that are left."""
        if taker := self._takers.pop(number, None):
            self._count(taker.client, -taker.num_left)
        return taker

    def _count(self, client: ClientId, num_tokens: int) -> None:
        """Count tokens for a client and for its key."""
        for one in (client.key, client):
            self._had[one] += num_tokens
