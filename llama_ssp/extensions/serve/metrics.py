"""The answers of `/metrics`: counters of the server's own, and counters that tools read by the names of vLLM.

`vllm bench serve` and dashboards find times, tokens and the acceptance of drafts under these names, whatever the
engine.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from llama_ssp.extensions.serve.inbox import Inbox
from llama_ssp.extensions.serve.protocol import Answer
from llama_ssp.run.session import Session

_SECONDS = [base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5)]
GONE = 499
"""The status of a request whose client has gone, as proxies log it."""
_MS = [1e3 * seconds for seconds in _SECONDS if seconds < 1]
disable_created_metrics()  # type: ignore[no-untyped-call]  # tools would add their time stamps to the counts


class _Both(NamedTuple):
    """A counter or a histogram under two names: the server's own, and the one that vLLM has for it."""

    own: Any
    as_vllm: Any

    def add(self, number: float) -> None:
        for one in self:
            one.inc(number) if isinstance(one, Counter) else one.observe(number)


class Metrics:
    """Counts completions of a server as they end."""

    def __init__(self, session: Session, inbox: Inbox) -> None:
        registry = self._registry = CollectorRegistry()
        labels = {"model_name": session.config.model.label, "engine": "0"}
        named, by_seconds = partial(Gauge, registry=registry), partial(Histogram, registry=registry, buckets=_SECONDS)
        counted = partial(Counter, registry=registry)

        def as_vllm(name: str, purpose: str, *more: str, kind: Callable[..., Any] = counted) -> Any:  # noqa: ANN401 - of the library's kinds
            made = kind(f"vllm:{name}", purpose, [*labels, *more])
            return partial(made.labels, **labels) if more else made.labels(**labels)

        def both(own: str, name: str, purpose: str, kind: Callable[..., Any] = by_seconds) -> _Both:
            return _Both(kind(f"llama_ssp_{own}", purpose), as_vllm(name, purpose, kind=kind))

        for name in ("llama_ssp_waiting", "vllm:num_requests_waiting"):
            named(name, "completions that wait for a row").set_function(lambda: inbox.num_waiting)
        for name in ("llama_ssp_running", "vllm:num_requests_running"):
            named(name, "completions that decode").set_function(lambda: inbox.num_running)
        named("llama_ssp_rows", "rows of a batch").set(session.config.batch_size)
        self._prompt = both("prompt_tokens", "prompt_tokens", "tokens of prompts of ended completions", counted)
        self._new = both("new_tokens", "generation_tokens", "new tokens of ended completions", counted)
        self._by_key = counted("llama_ssp_key_tokens", "tokens of ended completions, by key", ["key", "kind"])
        self._reasons = as_vllm("request_success", "completions, by why they ended", "finished_reason")
        self._errors = counted("llama_ssp_errors", "requests that ended in an error, by its status", ["status"])
        accepted = "spec_decode_num_accepted_tokens"
        self._accepted = both("accepted_tokens", accepted, "drafted tokens that the target accepted", counted)
        self._rejected = counted("llama_ssp_rejected_tokens", "drafted tokens that the target rejected")
        of_rounds = "rounds of ended completions that the target examined a draft in"
        self._drafts = as_vllm("spec_decode_num_drafts", of_rounds)
        self._drafted = as_vllm("spec_decode_num_draft_tokens", "drafted tokens that it examined")
        self._by_place = as_vllm(f"{accepted}_per_pos", "the same, by their place in a draft", "position")
        self._first = both("first_token_seconds", "time_to_first_token_seconds", "from arrival to first token")
        self._waited = both("waiting_seconds", "request_queue_time_seconds", "from arrival to a row")
        purpose = "from arrival to the end of a completion"
        self._whole = both("request_seconds", "e2e_request_latency_seconds", purpose)
        self._ms = Histogram("llama_ssp_ms_per_token", "after the first token", registry=registry, buckets=_MS)
        name = "request_time_per_output_token_seconds"
        self._seconds = as_vllm(name, "after the first token, mean of a completion", kind=by_seconds)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        self._running = Histogram(
            "llama_ssp_running_rows", "rows that decode, at each new completion", registry=registry, buckets=sizes
        )
        self._ended_s, self._inbox = deque[float](maxlen=64), inbox
        if session.plan:
            timed = session.plan.timing
            for mode, seconds in (("plain", timed.plain_s), ("speculative", timed.speculative_s)):
                if seconds is not None:
                    named(f"llama_ssp_forecast_{mode}_ms_per_token", "when rows are full and long").set(1e3 * seconds)

    def began(self, *, waited_s: float) -> None:
        """Count a completion that got a row."""
        self._waited.add(waited_s)
        self._running.observe(self._inbox.num_running)

    def first_token(self, seconds: float) -> None:
        """Count a first token, `seconds` after its request."""
        self._first.add(seconds)

    def failed(self, status: int) -> None:
        """Count a request that ended in an error, or whose client has gone (499)."""
        self._errors.labels(str(status)).inc()
        if status >= GONE:
            self._reasons(finished_reason="abort" if status == GONE else "error").inc()

    def ended(self, answer: Answer, *, key: str, decoded_s: float, whole_s: float) -> None:
        """Count a completion that has ended, `decoded_s` after its first token and `whole_s` after its request."""
        assert answer.last
        num_new, accepted = len(answer.token_ids), answer.last.accepted_lengths
        # An end within a draft leaves fewer examined tokens than became text.
        examined = [max(pair) for pair in zip(accepted, answer.last.examined_lengths, strict=True) if any(pair)]
        self._ended_s.append(time.monotonic())
        for counter, kind, number in ((self._prompt, "prompt", len(answer.prompt_ids)), (self._new, "new", num_new)):
            counter.add(number)
            if key:
                self._by_key.labels(key, kind).inc(number)
        self._reasons(finished_reason="length" if answer.last.finish_reason == "length" else "stop").inc()
        self._accepted.add(sum(accepted))
        self._rejected.inc(answer.last.num_rejected)
        self._drafts.inc(len(examined))
        self._drafted.inc(sum(examined))
        for place in range(max(accepted, default=0)):
            self._by_place(position=str(place)).inc(sum(length > place for length in accepted))
        self._whole.add(whole_s)
        if num_new > 1:
            self._ms.observe(1e3 * decoded_s / (num_new - 1))
            self._seconds.observe(decoded_s / (num_new - 1))

    def retry_s(self) -> int:
        """Return the seconds after which another completion may wait, by the rate at which completions ended lately."""
        if len(self._ended_s) < 2:
            return 1
        rate = (len(self._ended_s) - 1) / max(time.monotonic() - self._ended_s[0], 1e-3)
        return max(1, min(round(1 / rate), 60))

    def page(self) -> bytes:
        """The text for Prometheus."""
        return generate_latest(self._registry)
