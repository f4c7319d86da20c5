"""What has become of a request, and the request to stop that a signal makes."""

from dataclasses import dataclass, field
from typing import Literal

from llama_ssp.engine.state import Request
from llama_ssp.engine.stops import StopWatch
from llama_ssp.reports.lines import num_examined

FinishReason = Literal["length", "eos", "stop"]
PARTS = ("draft", "verify", "other")


@dataclass(kw_only=True)
class StopRequest:
    """Set by a signal handler; the loop passes it on with the next decision."""

    requested: bool = False


@dataclass(kw_only=True, slots=True)
class RowCompletion:
    """What has become of one request so far.

    Attributes:
        request: what was asked.
        token_ids: new tokens.
        num_target_forwards: forwards of the target that it took part in, its prefill included.
        accepted_lengths: for each speculative round, how many drafted tokens became text.
        num_draft_tokens: K; 0 without a draft.
        ended_in_draft: the last accepted token ended the row, so that nothing behind it was looked at.
        finish_reason: None while it is running.
        busy_s: time from the start of its prefill to its end, without what the consumer of the loop took.
        share_s: its equal share of its batch's time; the same as `busy_s` in a batch of one.
        part_s: its equal share of where the rounds spent their time: draft, verify, other.
        stop_watch: looks for texts that end it; None where there are none.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    ended_in_draft: bool = False
    finish_reason: FinishReason | None = None
    busy_s: float = 0.0
    share_s: float = 0.0
    part_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    stop_watch: StopWatch | None = None

    @property
    def examined_lengths(self) -> list[int]:
        """For each speculative round, what `reports.lines.num_examined` says of it."""
        room, examined = self.request.max_new_tokens - 1, []
        for number, num_accepted in enumerate(self.accepted_lengths, start=1):
            is_cut = self.ended_in_draft and number == len(self.accepted_lengths)
            examined.append(
                num_examined(
                    num_accepted=num_accepted,
                    num_draft_tokens=self.num_draft_tokens,
                    room=room,
                    ended_in_draft=is_cut,
                )
            )
            room -= num_accepted + 1
        return examined
