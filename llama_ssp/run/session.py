"""One run from its prompts to its records: decode, show, record. All tasks use it.

Every rank decodes; only rank 0 has a run folder and a terminal that prints.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import product

import torch

from llama_ssp.architectures.engine import SHORT_PROMPTS
from llama_ssp.errors import InterruptedRun
from llama_ssp.planning.plan import Plan
from llama_ssp.ranks.cores import CoreTimes
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.ranks.memory import MemoryWatch
from llama_ssp.ranks.result_queue import ResultQueue
from llama_ssp.ranks.world import World
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine, Evaluation, LineKey
from llama_ssp.run.decoders import Models, are_reproducible, build_decoder
from llama_ssp.run.requests import PromptRequest, in_turns
from llama_ssp.run.startup import StartClock
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.engine.completion import RowCompletion, StopRequest
from llama_ssp.speculate.engine.loop import Decoder, Decoding, More, RunSettings
from llama_ssp.speculate.engine.results import Update
from llama_ssp.speculate.engine.text import IncrementalText, Piece
from llama_ssp.terminal.progress import Pace, RunProgress
from llama_ssp.terminal.terminal import Terminal
from llama_ssp.text.detokenize import decode_after

_WARMUP_TOKENS, _SHORT_PROMPT = 8, 16


class Viewer:
    """Shows completions as they come; this one shows nothing."""

    def begin(self, request: PromptRequest, mode: str) -> None:
        """Begin a completion; only called when streaming."""

    def show(self, pieces: list[Piece]) -> None:
        """Show new text of the open completion; only called when streaming."""

    def end(self, line: CompletionLine) -> None:
        """End a completion."""


@dataclass(eq=False, repr=False)
class Session:
    """The models of a run, its decoders, its records and its terminal.

    Attributes:
        folder: the run folder on rank 0; None on other ranks.
        finished: keys of the completions that earlier parts of this run recorded.
        num_prompts: None if prompts are typed one by one.
        plan: None for an unknown machine.
        evaluation: on rank 0, the verdict of a task that judges its completions; None before it is known.
        num_read_tokens, num_reused_tokens: of this rank's replica; see `PromptTokens`.
        experts_read_3: three sums over the completions of this run, see `Runner`; None if this rank holds no experts.
        has_gate: whether a failed evaluation ends the run with an error, once everything is recorded.
    """

    config: RunConfig
    _: KW_ONLY
    world: World
    models: Models
    terminal: Terminal
    folder: RunFolder | None
    finished: frozenset[LineKey]
    num_prompts: int | None
    plan: Plan | None
    start_clock: StartClock
    memory: MemoryWatch
    evaluation: Evaluation | None = field(default=None, init=False)
    has_gate: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.stop_request = StopRequest()
        self.decoders: dict[str, Decoder] = {}
        self.num_read_tokens = self.num_reused_tokens = 0
        counted_3 = self.models.target.experts_read_3
        self.experts_read_3 = None if counted_3 is None else torch.zeros_like(counted_3)
        self._warm: set[str] = set()
        self.again_ms_per_token: float | None = None
        self.progress: RunProgress | None = None
        self.began = CoreTimes.read(self.world.cores)

    @property
    def streams(self) -> bool:
        """Whether text is shown while it is generated: with one row at a time, and one replica."""
        return self.config.batch_size == self.config.placement.num_replicas == 1

    @property
    def is_reproducible(self) -> bool:
        """Whether the bits of logits depend on no draft, K, batch and number of threads."""
        return are_reproducible(self.models, self.config)

    @property
    def best_mode(self) -> str:
        """Speculative with a draft, else plain."""
        return SPECULATIVE if self.models.drafts else PLAIN

    def judge(self, evaluation: Evaluation | None, *, has_gate: bool) -> None:
        """Set the verdict on the run (None but on rank 0), and whether a failed one ends the run with an error."""
        self.evaluation, self.has_gate = evaluation, has_gate

    def heading(self, name: str, *, prompt: int, sample: int) -> None:
        """Begin a completion on the terminal; prompts and samples count from 0."""
        self.terminal.heading(
            name, prompt=prompt, num_prompts=self.num_prompts, sample=sample, num_samples=self.config.num_samples
        )

    def decoder(self, mode: str) -> Decoder:
        """The decoder of a mode, built on first use."""
        if mode not in self.decoders:
            self.decoders[mode] = build_decoder(
                self.models, self.config, speculative=mode == SPECULATIVE, stop_request=self.stop_request
            )
        return self.decoders[mode]

    @torch.inference_mode()
    def warm_up(self, requests: Sequence[PromptRequest], modes: Sequence[str], *, num_requests: int = 0) -> None:
        """Allocate caches for all requests and modes, and do now what would otherwise slow the first timed rounds.

        Each mode that is not warm yet decodes a few tokens for `num_requests` requests, or if that is 0 one token after
        the beginning of the first prompt. A prompt that a graph can read is decoded twice, since the second time
        captures the graph. Nothing is shown or recorded.
        """
        # All caches come first: one that grows for a later mode would drop an earlier one's graphs.
        decoders = {mode: self.ready_decoder(mode, requests) for mode in modes}
        for decoder in decoders.values():
            decoder.warm_up(requests)
        has_graphs = any(one.executor.replays_addresses and one.round.target.packs_prompts for one in decoders.values())
        first, most = requests[0], SHORT_PROMPTS[-1] if has_graphs else _SHORT_PROMPT
        brief = [
            replace(request, max_new_tokens=min(_WARMUP_TOKENS, request.max_new_tokens))
            for request in requests[:num_requests]
        ] or [replace(first, prompt_ids=first.prompt_ids[:most], max_new_tokens=1)]
        for mode, request in product([mode for mode in modes if mode not in self._warm], brief * (1 + has_graphs)):
            for _ in decoders[mode].run([request], to_length=True):
                pass
            decoders[mode].round.forget_texts()
        self._warm |= {*modes}

    def ready_decoder(self, mode: str, requests: Sequence[PromptRequest]) -> Decoder:
        """The decoder of a mode, with caches for all requests; see `make_ready`."""
        decoder = self.decoder(mode)
        make_ready(decoder, requests, self.config, comm=self.world.comm, folder=self.folder)
        return decoder

    @contextmanager
    def showing_progress(
        self, requests: Sequence[PromptRequest], modes: Sequence[str], *, shows_texts: bool
    ) -> Iterator[None]:
        """Show progress during the block, which completes requests in each mode; `shows_texts` if it prints."""
        num_done = {mode: sum(request.line_key(mode) in self.finished for request in requests) for mode in modes}
        paces = {mode: Pace(num_total=len(requests), num_done=num_done[mode]) for mode in modes}
        unit = "prompts" if self.config.num_samples == 1 else "completions"
        with self.terminal.decoding(
            paces, max_new_tokens=self.config.max_new_tokens, unit=unit, shows_texts=shows_texts
        ) as self.progress:
            yield

    @torch.inference_mode()
    def complete(
        self, requests: Sequence[PromptRequest], mode: str, viewer: Viewer, settings: RunSettings | None = None
    ) -> None:
        """Decode, show and record the requests without a record; one by one and streamed if the batch size is one.

        A later turn of a conversation needs the answers to the earlier turns in the same mode and sample: from requests
        of this call, or of an earlier one.

        Raises InterruptedRun on every rank, after the round in which the deciding rank stopped, and SspError on rank 0
        if the records cannot be written.
        """
        todo = [request for request in requests if request.line_key(mode) not in self.finished]
        for group in in_turns(todo, keeps_order=self.streams):
            whole = self.with_answers(group, mode)
            if mode not in self._warm:
                self.warm_up(whole, [mode])
            self.ready_decoder(mode, whole)
            if self.progress:
                self.progress.restart_clock()
            self._decode(whole, _Recorder(self, viewer, mode), settings)

    def _decode(
        self, requests: list[PromptRequest], recorder: "_Recorder", settings: RunSettings | None = None
    ) -> None:
        """Decode requests, a part on each replica; raises as `complete`."""
        decoder = self.decoder(recorder.mode)
        share, more = self._shared_out(requests, recorder)
        self._count_experts(-1)
        for updates in decoder.run(share, settings, more=more) if share else ():
            for update in updates:
                recorder.take(update)
        self._count_experts(1)
        if recorder.close(stopped=decoder.stopped):
            raise InterruptedRun.in_folder(self.config.run_dir)

    def _shared_out(
        self, requests: list[PromptRequest], recorder: "_Recorder"
    ) -> tuple[list[PromptRequest], More | None]:
        """Return this replica's first requests, which fill its rows, and a function that gets more for free rows."""
        num_replicas, exchange = self.config.placement.num_replicas, recorder.exchange
        if exchange is None:
            return requests, None
        num_first = num_replicas * self.config.batch_size
        first, rest = requests[:num_first], requests[num_first:]

        def more(_run: Decoding, number: int) -> list[PromptRequest] | None:
            if number < 1:
                return []
            start = exchange.claim(number)
            return rest[start : start + number] or None

        return first[self.models.mesh.number :: num_replicas], more if rest else None

    @torch.inference_mode()
    def measure_again(self, requests: Sequence[PromptRequest]) -> None:
        """Complete all requests plainly once more without recording them, and keep their time; raises as `complete`."""
        sums = [0.0, 0.0]
        for group in in_turns(requests, keeps_order=self.streams):
            whole = self.with_answers(group, PLAIN)
            self.warm_up(whole, [PLAIN], num_requests=1)
            self.ready_decoder(PLAIN, whole)
            self._decode(whole, _Timer(self, sums))
        ms, num_tokens = sums
        self.again_ms_per_token = ms / num_tokens if num_tokens else None  # on rank 0

    def _count_experts(self, sign: int) -> None:
        """Add the target's counts of experts to the run's (`sign` 1), or subtract them to leave a warm-up out (-1)."""
        counted_3 = self.models.target.experts_read_3
        if self.experts_read_3 is not None and counted_3 is not None:
            self.experts_read_3.add_(counted_3, alpha=sign)

    def with_answers(self, requests: Sequence[PromptRequest], mode: str) -> list[PromptRequest]:
        """Put the answers to earlier turns, which rank 0 has recorded, into the prompts of later ones."""
        if not any(request.source.earlier for request in requests):
            return [*requests]

        def answers() -> list[list[str]]:
            recorded = {line.key: line.text for line in self.folder.lines} if self.folder else {}
            return [
                [recorded[index, mode, request.sample] for index in request.earlier_indices] for request in requests
            ]

        all_answers = from_rank_0(self.world.comm, answers)
        maker = self.models.request_maker
        return [
            maker.with_answers(request, texts, self.config)
            for request, texts in zip(requests, all_answers, strict=True)
        ]


class _Recorder:
    """Shows completions of this replica as they are decoded, and records them; on rank 0, those of all replicas."""

    def __init__(self, session: Session, viewer: Viewer, mode: str) -> None:
        self._session, self._viewer, self.mode = session, viewer, mode
        self._text: IncrementalText | None = None  # of the completion that is streamed
        self.exchange: ResultQueue | None = None
        if session.config.placement.num_replicas > 1:
            watch, patience_s = session.world.watch, session.config.timeouts.decode_s
            self.exchange = ResultQueue(session.models.mesh, watch=watch, patience_s=patience_s)

    def take(self, update: Update) -> None:
        """Count and show the new tokens of a completion of this replica; record the completion when it has ended."""
        session, completion = self._session, update.completion
        if session.num_prompts is not None:
            session.start_clock.reach("first_token_s")
        if session.progress:
            session.progress.advance(self.mode, len(update.new_ids))
        if session.streams and session.folder:
            if self._text is None:
                request = _of_prompt(completion)
                self._text = IncrementalText(session.models.tokenizer, request.prompt_ids)
                self._viewer.begin(request, self.mode)
            self._viewer.show(self._text.push(update.new_ids, num_accepted=update.num_drafted))
            if completion.finish_reason:
                self._viewer.show(self._text.flush())
                self._text = None
        if completion.finish_reason:
            self._enter(completion)

    def _enter(self, completion: RowCompletion) -> None:
        """Record a completion of this replica, or send it to rank 0, and record other replicas' completions."""
        session, exchange = self._session, self.exchange
        session.memory.sample()
        session.num_reused_tokens += completion.num_reused_tokens
        session.num_read_tokens += len(completion.request.prompt_ids) - completion.num_reused_tokens
        if session.folder:
            self._keep(to_line(session, completion, self.mode))
            for text in exchange.fetch() if exchange else ():
                self._keep_text(text)
        elif exchange:
            exchange.tell(to_line(session, completion, self.mode).to_json().decode())

    def close(self, *, stopped: bool) -> bool:
        """Wait for all replicas; returns whether this one, or any, was stopped."""
        return self.exchange.end(stopped=stopped, take=self._keep_text) if self.exchange else stopped

    def _keep_text(self, text: str) -> None:
        line = CompletionLine.from_json(text.encode())
        if self._session.progress:
            self._session.progress.advance(line.mode, line.num_new_tokens)
        self._keep(line)

    def _keep(self, line: CompletionLine) -> None:
        assert self._session.folder, "only rank 0 keeps lines"
        self._session.folder.append(line)
        self._viewer.end(line)
        if self._session.progress:
            self._session.progress.end(line.mode, num_tokens=line.num_new_tokens, ms=line.ms)


class _Timer(_Recorder):
    """Adds up milliseconds and new tokens of completions, on rank 0 for all replicas, and records nothing."""

    def __init__(self, session: Session, sums: list[float]) -> None:
        super().__init__(session, Viewer(), PLAIN)
        self._sums = sums

    def take(self, update: Update) -> None:
        """Add the time of a completion of this replica at its end, or send it to rank 0."""
        if update.completion.finish_reason:
            figures = json.dumps([1e3 * update.completion.busy_s, len(update.completion.token_ids)])
            if self._session.folder:
                self._keep_text(figures)
            elif self.exchange:
                self.exchange.tell(figures)

    def _keep_text(self, text: str) -> None:
        self._sums[:] = map(sum, zip(self._sums, json.loads(text), strict=True))


def _of_prompt(completion: RowCompletion) -> PromptRequest:
    assert isinstance(completion.request, PromptRequest), "a session decodes no other requests"
    return completion.request


def to_line(session: Session, completion: RowCompletion, mode: str) -> CompletionLine:
    """Return the line of `run.jsonl` for a completion.

    Its `share_s` is divided by the number of replicas, which share the wall time. If the run chooses K, the line has
    the K of each round.
    """
    request, part_s, config = _of_prompt(completion), completion.part_s, session.config
    prompt, speculates = request.source, mode == SPECULATIVE
    return CompletionLine(
        index=request.index,
        sample=request.sample,
        mode=mode,
        prompt=prompt.text,
        text=decode_after(session.models.tokenizer, request.prompt_ids, completion.token_ids),
        token_ids=completion.token_ids,
        num_new_tokens=len(completion.token_ids),
        finish_reason=str(completion.finish_reason),
        num_rounds=len(completion.accepted_lengths),
        num_target_forwards=completion.num_target_forwards,
        accepted_lengths=completion.accepted_lengths,
        examined_lengths=completion.examined_lengths,
        ms=completion.busy_s * 1e3,
        share_s=completion.share_s / config.placement.num_replicas,
        **{f"{part}_s": seconds for part, seconds in part_s.items()},
        draft_lengths=completion.draft_lengths if speculates and config.speculation.chooser else None,
        turn=len(prompt.earlier),
        question_id=prompt.question_id,
        category=prompt.category,
        messages=prompt.messages,
        last_message=prompt.last_message,
        fields=dict(prompt.fields),
        first_token_ms=completion.first_token_s * 1e3,
        is_lossless=not (speculates and config.speculation.forced_lengths),
    )
