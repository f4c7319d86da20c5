"""The state of one request, and the stop request of a signal handler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llama_ssp.speculate.engine.masks import Constraint
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.text import StopWatch

FinishReason = Literal["length", "eos", "stop"]
PARTS = ("draft", "verify", "other")


@dataclass(kw_only=True)
class StopRequest:
    """A request to stop, set by a signal handler; the loop sends it to other ranks with the next decision.

    Attributes:
        num_interrupts: how often Ctrl-C asked.
    """

    requested: bool = False
    num_interrupts: int = 0

    def ask(self, *, by_interrupt: bool = False) -> bool:
        """Ask for a stop; returns whether this is the first time."""
        self.num_interrupts += by_interrupt
        is_first, self.requested = not self.requested, True
        return is_first

    def settle(self, *, is_agreed: bool) -> None:
        """Set `requested` to whether the ranks have agreed to stop."""
        self.requested = is_agreed


@dataclass(kw_only=True, slots=True)
class RowCompletion:
    """One request and its result so far.

    Attributes:
        num_target_forwards: forwards of the target for this row, including those that read its prompt.
        num_reused_tokens: tokens of its prompt that the target's cache held already.
        accepted_lengths, draft_lengths: for each speculative round, the drafted tokens that became text, and all of
            them.
        ended_in_draft: whether the last accepted token ended the row, so that the tokens after it were not verified.
        finish_reason: None while it is running.
        busy_s: time from the start of its prefill to its end, without the time of the loop's consumer.
        first_token_s: `busy_s` when its first token was known; 0 before.
        share_s: its equal share of its batch's time; equal to `busy_s` in a batch of one.
        part_s: its equal share of the rounds' time, by part.
        has_bonus: see `Round`.
        num_ahead: tokens in flight when the next round begins; see `overlap`.
        constraint: restricts the tokens that may follow; None if any token may.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_reused_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    ended_in_draft: bool = False
    finish_reason: FinishReason | None = None
    busy_s: float = 0.0
    first_token_s: float = 0.0
    share_s: float = 0.0
    part_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    stop_watch: StopWatch | None = None
    has_bonus: bool = True
    num_ahead: int = 0
    constraint: Constraint | None = None

    def end(self, reason: FinishReason, *, in_draft: bool = False) -> None:
        """Set why the completion ends, and whether its last token was a drafted one."""
        self.finish_reason, self.ended_in_draft = reason, in_draft

    def extend(
        self, new_ids: Sequence[int], *, num_forwards: int, num_accepted: int, num_examined: int | None, num_ahead: int
    ) -> None:
        """Add the new tokens of a round, which ran the target `num_forwards` times for this row.

        If the round drafted (`num_examined` is not None), its accepted and examined drafted tokens are recorded too,
        and `num_ahead` tokens are in flight.
        """
        self.token_ids += new_ids
        self.num_target_forwards += num_forwards
        if num_examined is not None:
            self.accepted_lengths.append(num_accepted)
            self.draft_lengths.append(num_examined)
            self.num_ahead = num_ahead

    @property
    def examined_lengths(self) -> list[int]:
        """The number of drafted tokens of each speculative round that count in the acceptance rate.

        These are the accepted ones and the first rejected one; of the tokens after the end of a row inside a draft,
        none counts. A round that the length limit could cut has 0: the limit shortens long acceptances but not short
        ones, so that counting them would bias the rate.
        """
        room, examined = self.request.max_new_tokens - 1, []
        rounds = zip(self.accepted_lengths, self.draft_lengths, strict=True)
        for number, (num_accepted, num_drafted) in enumerate(rounds, start=1):
            most = num_drafted + self.has_bonus
            ends_here = self.ended_in_draft and number == len(self.accepted_lengths)
            num_examined = num_accepted if ends_here else min(num_accepted + 1, num_drafted)
            examined.append(num_examined if room >= most else 0)
            room -= min(num_accepted + 1, most)
        return examined


def share_time(running: Sequence[RowCompletion], seconds: float, by_part: Mapping[str, float]) -> None:
    """Add the time of a pass of the loop, and of its round's parts, to all rows that ran in it."""
    share = 1 / max(len(running), 1)
    for row in running:
        row.busy_s += seconds
        row.share_s += seconds * share
        if row.token_ids and not row.first_token_s:
            row.first_token_s = row.busy_s
        for part, part_s in by_part.items():
            row.part_s[part] += part_s * share
