"""Space of a batch: slots of its caches, the texts that they hold, and the state that runs share."""

from collections.abc import Sequence

from llama_ssp.architectures.engine import BUCKET_STEP, whole_steps
from llama_ssp.models.prefill import Buckets, Held
from llama_ssp.speculate.engine.held import HeldTexts, PromptRow, Reuse
from llama_ssp.speculate.engine.round import Executor, Round
from llama_ssp.speculate.engine.spare import SpareRows
from llama_ssp.speculate.engine.state import BatchState, Request
from llama_ssp.speculate.sampling.by_row import NUM_SETTINGS


class BatchSpace:
    """The sizes of caches and batches, which grow with the requests.

    Attributes:
        buckets: the widths of the caches that rounds read.
        bucket_step: slots between two widths, where rounds read no lengths.
        held: the texts that rows of the caches hold.
    """

    def __init__(self, round_: Round, executor: Executor, *, batch_size: int, reuse: Reuse) -> None:
        self._round, self._executor, self._batch_size, self._reuse = round_, executor, batch_size, reuse
        self._num_spare = reuse.num_spare * (not reuse.from_states)
        self._spare = SpareRows(round_.target, round_.taps, self._num_spare, reuse.spare)
        self._is_cuda = round_.target.device.type == "cuda"
        self.bucket_step = BUCKET_STEP["cuda" if self._is_cuda else "cpu"]
        self._most_ahead = round_.max_tokens_per_round + round_.num_ahead
        self._num_slots = self._num_rounds = 0
        self._num_uses = -1
        self._kept: BatchState | None = None
        self.buckets, self.held = Buckets(step=self.bucket_step, num_slots=0), HeldTexts(batch_size, step=1)

    def make(self, requests: Sequence[Request], *, reuses: bool) -> None:
        """Allocate caches for these and all earlier requests; unless `reuses`, forget the texts that rows hold."""
        longest = most_new = 0
        for request in requests:
            most_new = max(most_new, request.max_new_tokens)
            longest = max(longest, len(request.prompt_ids) + request.max_new_tokens)
        self._num_slots = max(self._num_slots, whole_steps(longest + self._most_ahead))
        self._num_rounds = max(self._num_rounds, most_new + 1)
        by_length = self._is_cuda and self._round.reads_by_length
        self.buckets = Buckets(step=self._num_slots if by_length else self.bucket_step, num_slots=self._num_slots)
        target = self._round.target
        others_came = target.num_uses != self._num_uses
        self._round.allocate(batch_size=self._batch_size, num_slots=self._num_slots)
        self._executor.make_room()
        self._num_uses = target.num_uses
        if others_came or not reuses:
            self.held = HeldTexts(
                self._batch_size,
                step=self._reuse.step,
                from_states=self._reuse.from_states,
                num_spare=self._num_spare,
                num_tapped=self._reuse.num_tapped,
            )

    def keep(self, row: int, num_read: int) -> None:
        """Copy the text of a row that has ended to a spare row; the row has read `num_read` tokens."""
        self.held.end(row, num_read)
        if found := self.held.keep(row):
            spare, num_tokens = found
            self._spare.keep(row, spare - self._batch_size, num_tokens)

    def place(self, prompts: Sequence[tuple[int, ...]], free: Sequence[int]) -> list[PromptRow]:
        """Give each prompt a free row, and copy to it what a spare row holds of the prompt; see `HeldTexts.place`."""
        places = self.held.place(prompts, free)
        for number, place in enumerate(places):
            num_tokens, source, _ = place.target
            if num_tokens and source >= self._batch_size:
                self._spare.fetch(source - self._batch_size, place.row, num_tokens)
                places[number] = place._replace(target=Held(num_tokens, place.row))
        return places

    def empty_state(self) -> BatchState:
        """Return the previous run's batch if the executor needs the same tensors and the sizes fit; else a new one."""
        num_slots, num_rounds = sizes = self._num_slots, self._num_rounds
        if self._kept and sizes == (self._kept.tokens_BS.shape[1], self._kept.uniforms_BMN.shape[1]):
            self._kept.vacate(slice(None))
            return self._kept
        state = BatchState.empty(
            self._batch_size,
            num_slots=num_slots,
            num_rounds=num_rounds,
            table=self._round.uniforms,
            num_settings=NUM_SETTINGS if self._round.steps else 0,
        )
        self._kept = state if self._executor.replays_addresses else None
        return state

    def for_timing(self, num_slots: int) -> BatchState:
        """A batch of vacant rows that cost as much as rows of `num_slots`; caches hold no texts afterwards."""
        self.held.forget(range(self._batch_size))
        state = self.empty_state()
        if self._is_cuda and self._round.reads_by_length:
            state.vacate(slice(None), length=max(num_slots - self._most_ahead, 2))
        return state

    def state_of(self, requests: Sequence[Request], *, seed: int) -> BatchState:
        """A batch of the prompts of requests."""
        return BatchState.of(
            requests, num_slots=self._num_slots, num_rounds=self._num_rounds, table=self._round.uniforms, seed=seed
        )
