"""The answers of `/metrics`: counters of the server's own, and counters that tools read by the names of vLLM.

`vllm bench serve` and dashboards find the acceptance of drafts under these names, whatever the engine.
"""

import time
from collections import deque
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from llama_ssp.rooms.serve.inbox import Inbox
from llama_ssp.rooms.serve.protocol import Answer
from llama_ssp.run.session import Session

_SECONDS = [base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5)]
_MS = [1e3 * seconds for seconds in _SECONDS if seconds < 1]
disable_created_metrics()  # type: ignore[no-untyped-call]  # tools would add their time stamps to the counts


class Metrics:
    """Counts completions of a server as they end."""

    def __init__(self, session: Session, inbox: Inbox) -> None:
        registry = self._registry = CollectorRegistry()
        labels = {"model_name": session.config.model.label, "engine": "0"}
        named, by_seconds = partial(Gauge, registry=registry), partial(Histogram, registry=registry, buckets=_SECONDS)
        counted = partial(Counter, registry=registry)

        def as_vllm(name: str, purpose: str, *more: str) -> Counter:
            return counted(f"vllm:{name}", purpose, [*labels, *more])

        for name in ("llama_ssp_waiting", "vllm:num_requests_waiting"):
            named(name, "completions that wait for a row").set_function(lambda: inbox.num_waiting)
        for name in ("llama_ssp_running", "vllm:num_requests_running"):
            named(name, "completions that decode").set_function(lambda: inbox.num_running)
        named("llama_ssp_rows", "rows of a batch").set(session.config.batch_size)
        self._prompt = counted("llama_ssp_prompt_tokens", "tokens of prompts of ended completions")
        self._new = counted("llama_ssp_new_tokens", "new tokens of ended completions")
        self._accepted = counted("llama_ssp_accepted_tokens", "drafted tokens that the target accepted")
        self._rejected = counted("llama_ssp_rejected_tokens", "drafted tokens that the target rejected")
        drafts = as_vllm("spec_decode_num_drafts", "rounds of ended completions that the target examined a draft in")
        self._drafts = drafts.labels(**labels)
        self._drafted = as_vllm("spec_decode_num_draft_tokens", "drafted tokens that it examined").labels(**labels)
        accepted = as_vllm("spec_decode_num_accepted_tokens", "drafted tokens that it accepted")
        self._accepted_as_vllm = accepted.labels(**labels)
        by_place = as_vllm("spec_decode_num_accepted_tokens_per_pos", "the same, by their place in a draft", "position")
        self._by_place = partial(by_place.labels, **labels)
        self._first = by_seconds("llama_ssp_first_token_seconds", "from arrival to first token")
        self._waited = by_seconds("llama_ssp_waiting_seconds", "from arrival to a row")
        self._whole = by_seconds("llama_ssp_request_seconds", "from arrival to the end of a completion")
        self._ms = Histogram("llama_ssp_ms_per_token", "after the first token", registry=registry, buckets=_MS)
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
        self._waited.observe(waited_s)
        self._running.observe(self._inbox.num_running)

    def first_token(self, seconds: float) -> None:
        """Count a first token, `seconds` after its request."""
        self._first.observe(seconds)

    def ended(self, answer: Answer, *, decoded_s: float, whole_s: float) -> None:
        """Count a completion that has ended, `decoded_s` after its first token and `whole_s` after its request."""
        assert answer.last
        num_new, accepted = len(answer.token_ids), answer.last.accepted_lengths
        # An end within a draft leaves fewer examined tokens than became text.
        examined = [max(pair) for pair in zip(accepted, answer.last.examined_lengths, strict=True) if any(pair)]
        self._ended_s.append(time.monotonic())
        self._prompt.inc(len(answer.prompt_ids))
        self._new.inc(num_new)
        self._accepted.inc(sum(accepted))
        self._rejected.inc(answer.last.num_rejected)
        self._drafts.inc(len(examined))
        self._drafted.inc(sum(examined))
        self._accepted_as_vllm.inc(sum(accepted))
        for place in range(max(accepted, default=0)):
            self._by_place(position=str(place)).inc(sum(length > place for length in accepted))
        self._whole.observe(whole_s)
        if num_new > 1:
            self._ms.observe(1e3 * decoded_s / (num_new - 1))

    def retry_s(self) -> int:
        """Seconds after which a waiting place is free again, by the rate at which completions ended lately."""
        if len(self._ended_s) < 2:  # noqa: PLR2004 - a rate needs two
            return 1
        rate = (len(self._ended_s) - 1) / max(time.monotonic() - self._ended_s[0], 1e-3)
        return max(1, min(round(1 / rate), 60))

    def page(self) -> bytes:
        """The text for Prometheus."""
        return generate_latest(self._registry)
