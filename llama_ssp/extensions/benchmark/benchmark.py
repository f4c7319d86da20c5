"""`task=benchmark`: one table over K, prompt lengths and batch sizes, with transformers' own generation as a peer.

All candidates of a cell decode the same prompts with the same sampling, in turns. Milliseconds per token cover whole
completions, with prefill, over the tokens of all rows. A resumed run skips the cells in `benchmark.jsonl`.

The peer, transformers' generation, plain and assisted, gets the same prompts, sampling and number of drafted tokens, in
a constant schedule without early stops and without end-of-sequence tokens. It reads checkpoints, in one process.
"""

import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from llama_ssp.architectures.model_files import GENERATION_CONFIG_FILE
from llama_ssp.errors import CheckpointError, ConfigError, InterruptedRun
from llama_ssp.extensions.benchmark.cells import BenchmarkCell, CellKey
from llama_ssp.extensions.benchmark.records import BenchmarkConfig
from llama_ssp.planning.timing import timing
from llama_ssp.planning.weights import rank_shares, step_bytes
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.reports.provenance import git_commit, versions
from llama_ssp.reports.records import PLAIN, SPECULATIVE, Forecast
from llama_ssp.run.calibration import copy_bytes_per_s, interleave, median_ratio
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.prompts import reason_of
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session
from llama_ssp.run.tasks.dry_run import forecast
from llama_ssp.settings.drafters import SAME, draft_label, drafter_of, vocabulary_of
from llama_ssp.settings.fields import with_value
from llama_ssp.settings.processors import PROCESSORS, Processor, filters, numbers_of, penalties
from llama_ssp.settings.schema import RunConfig, SamplingConfig
from llama_ssp.settings.weight_changes import changes_of
from llama_ssp.speculate.engine.completion import RowCompletion, StopRequest
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request, count_equal_before
from llama_ssp.storage.formats import format_of
from llama_ssp.terminal.progress import Pace, RunProgress

GENERATE, ASSISTED = "generate", "assisted"
_PASS = "pass"
_STRIDE = 17
"""Tokens between the beginnings of a batch's prompts in the text."""


@dataclass(kw_only=True)
class Ours:
    """One of our decoders with its prompts, and its completions in counted repetitions."""

    decoder: Decoder
    prompts: Sequence[tuple[int, ...]]
    num_new_tokens: int
    done: list[list[RowCompletion]] = field(default_factory=list)

    @torch.inference_mode()
    def ms_per_token(self, repetition: int) -> float:
        """Complete all prompts; returns milliseconds per new token, including prefill; InterruptedRun if stopped."""
        settings = replace(self.decoder.settings, seed=repetition + 1)
        requests = [
            Request(index=index, prompt_ids=ids, max_new_tokens=self.num_new_tokens, num_equal_before=number)
            for index, (ids, number) in enumerate(zip(self.prompts, count_equal_before(self.prompts), strict=True))
        ]
        if repetition < 0:
            self.decoder.make_room(requests)
            self.decoder.warm_up(requests)
        self.decoder.round.forget_texts()  # greedy text is the same in every repetition
        started = time.perf_counter()
        last = [update.completion for updates in self.decoder.run(requests, settings) for update in updates]
        seconds = time.perf_counter() - started
        if self.decoder.stopped:
            raise _interrupted()
        completions = [*{found.request.index: found for found in last}.values()]
        if repetition >= 0:
            self.done.append(completions)
        return 1e3 * seconds / sum(len(completion.token_ids) for completion in completions)

    @property
    def tokens_per_round(self) -> float | None:
        """Mean over all speculative rounds that the length limit did not shorten; None without any."""
        counted = [
            length + 1
            for row in chain(*self.done)
            for length, examined in zip(row.accepted_lengths, row.examined_lengths, strict=True)
            if examined
        ]
        return statistics.mean(counted) if counted else None

    @property
    def rounds_ms(self) -> list[float]:
        """Mean time of a round or of a plain step in each repetition, in a batch of one."""
        return [
            1e3 * _rounds_s(done) / sum(len(row.accepted_lengths) or len(row.token_ids) - 1 for row in done)
            for done in self.done
        ]

    def shares(self, part: str) -> list[float]:
        """Return the share of the rounds' time that a part of them took, in each repetition."""
        return [sum(row.part_s[part] for row in done) / _rounds_s(done) for done in self.done]


def _interrupted() -> InterruptedRun:
    return InterruptedRun("interrupted; the same command with this run_dir measures the cells that are left")


def _rounds_s(done: Sequence[RowCompletion]) -> float:
    return sum(sum(row.part_s.values()) for row in done)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A target in transformers and its assistant: a draft model, or arguments of `generate` for K drafted tokens."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    own_draft: Callable[[int], dict[str, object]] | None = None
    stop_request: StopRequest = field(default_factory=StopRequest)

    def check_stop(self, ids_BT: Tensor, *_scores: object, **_options: object) -> Tensor:
        """Let `generate`, which calls this stopping criterion after each step, go on; InterruptedRun if stopped."""
        if self.stop_request.requested:
            raise _interrupted()
        return torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)

    def ms_per_token(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        num_new_tokens: int,
        sampling: SamplingConfig,
        num_draft_tokens: int | None,
    ) -> float:
        """Complete the prompts; returns milliseconds per new token, including prefill.

        Plain prompts of one length are completed together, others one by one: the library assists one row only.
        `num_draft_tokens` is None for `generate` without an assistant. Raises InterruptedRun.
        """
        is_one_batch = num_draft_tokens is None and len({len(ids) for ids in prompts}) == 1
        batches = [list(prompts)] if is_one_batch else [[ids] for ids in prompts]
        options: dict[str, object] = {
            "max_new_tokens": num_new_tokens,
            **_in_transformers(sampling, penalties()),
            "do_sample": sampling.temperature > 0,
            "stopping_criteria": [self.check_stop],
        }
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, **_in_transformers(sampling, filters())}
        if num_draft_tokens and self.draft:
            self.draft.generation_config.num_assistant_tokens = num_draft_tokens
            options["assistant_model"] = self.draft
        elif num_draft_tokens:
            options |= self.own_draft(num_draft_tokens) if self.own_draft else {}
        num_tokens, started = 0, time.perf_counter()
        for rows in batches:
            ids_BT = torch.tensor(rows, device=self.target.device)
            mask_BT = torch.ones_like(ids_BT)
            out_BT = self.target.generate(ids_BT, attention_mask=mask_BT, **options)  # type: ignore[operator]
            num_tokens += out_BT[:, ids_BT.shape[1] :].numel()
        return 1e3 * (time.perf_counter() - started) / num_tokens


def _in_transformers(sampling: SamplingConfig, some: Sequence[Processor]) -> dict[str, float | None]:
    """The arguments of `generate` for some processors."""
    found = {one.name: one.in_transformers.off for one in some if one.in_transformers}
    return found | {one.name: number for one, number in numbers_of(sampling, some) if one.in_transformers}


def _has_peers(config: RunConfig, *, world_size: int) -> bool:
    """Whether a benchmark also measures transformers.

    It does on one rank, with files that are read as they are, and with processors that transformers has.
    """
    entries = [config.model, *([config.draft.model] if config.draft.model else [])]
    is_whole = not any(format_of(entry.quantization).is_quantized or changes_of(entry) for entry in entries)
    is_requested = isinstance(config.task, BenchmarkConfig) and config.task.peers
    rest = config.sampling
    for one in PROCESSORS.all().values():
        rest = with_value(rest, one.name, one.off) if one.in_transformers else rest
    is_known = not (rest.truncates or rest.penalizes)
    return is_requested and world_size == 1 and config.reads_files and is_whole and is_known


def check_peers(config: RunConfig, folders: Sequence[Path], *, world_size: int) -> None:
    """Before loading, raise CheckpointError if transformers is measured and refuses a generation config."""
    if not _has_peers(config, world_size=world_size):
        return
    for file in filter(Path.is_file, (folder / GENERATION_CONFIG_FILE for folder in folders)):
        try:
            GenerationConfig.from_pretrained(file.parent, local_files_only=True)
        except Exception as error:  # it checks some values and crashes on others
            raise CheckpointError(
                f"transformers, which this benchmark measures too, refuses {file} ({reason_of(error)}): copy or "
                "download it again, or set task.peers=false"
            ) from error


def load_peer(folder: Path, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a checkpoint with transformers alone, for a constant schedule without early stops."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.eval().to(device)
    model.generation_config.update(
        eos_token_id=None, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return model


def benchmark(session: Session, requests: list[PromptRequest]) -> None:
    """Measure and record every cell that is not recorded yet.

    All prompts, concatenated and repeated, are the text that a cell's prompts are cut from. On every rank, raises
    ConfigError if the recorded cells were measured with another text, and InterruptedRun; cells so far are kept.
    """
    task, folder = session.config.task, session.folder
    assert isinstance(task, BenchmarkConfig)
    text = [token for request in requests for token in request.prompt_ids]

    def recorded() -> list[CellKey]:
        if folder and any(cell.text_sha256 != _digest(text) for cell in folder.results):
            raise ConfigError(
                f"run_dir={folder.path} holds cells that were measured with another text: "
                "give the old prompts to measure the cells that are left, or name another run_dir"
            )
        return [cell.key for cell in folder.results] if folder else []

    measured = {tuple(key) for key in from_rank_0(session.world.comm, recorded)}
    all_drafted: list[int | None] = [*task.num_draft_tokens] if session.models.drafts else [None]
    cells = [cell for cell in product(task.prompt_tokens, task.batch_sizes, all_drafted) if cell not in measured]
    if not cells:
        return
    peers = _peers(session)
    names = (name for _, num_rows, drafted in cells for name in _candidates(drafted, batch_size=num_rows, peers=peers))
    paces = {name: Pace(num_total=number * task.repetitions) for name, number in Counter(names).items()}
    longest = max(task.batch_sizes) * session.config.max_new_tokens
    with session.terminal.decoding(paces, max_new_tokens=longest, unit="runs", shows_texts=False) as progress:
        for cell in cells:
            measured_cell = _measure(session, text, cell, peers=peers, progress=progress)
            if folder:
                folder.append_result(measured_cell)


def _digest(text: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(text)).encode()).hexdigest()


def cut(text: Sequence[int], *, num_prompts: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Cut prompts of one length out of an endlessly repeated text, each beginning a little later."""
    places = range(0, _STRIDE * num_prompts, _STRIDE)
    return [tuple(text[(place + offset) % len(text)] for offset in range(num_tokens)) for place in places]


def _peers(session: Session) -> Peers | None:
    if not _has_peers(session.config, world_size=session.world.comm.size):
        return None
    drafting = session.config.draft
    # The library takes two tokenizers for one where their vocabularies are of one size, and then refuses to assist.
    # Nor does it take a head, which is no model by itself.
    has_head = any(source.origin.shape.is_head for source in session.models.sources)
    num_models = 1 if vocabulary_of(drafting) is not SAME or has_head else 2
    target, *drafts = (
        load_peer(source.origin.folder, dtype=source.dtype or source.origin.dtype, device=session.world.device)
        for source in session.models.sources[:num_models]
    )
    of_library = drafter_of(drafting).of_library
    own_draft = partial(of_library, drafting) if of_library else None
    draft = drafts[0] if drafts else None
    return Peers(target=target, draft=draft, own_draft=own_draft, stop_request=session.stop_request)


def _candidates(num_draft_tokens: int | None, *, batch_size: int, peers: Peers | None) -> list[str]:
    # The library assists one row at a time.
    is_assisted = num_draft_tokens and batch_size == 1 and peers and (peers.draft or peers.own_draft)
    named = {PLAIN: True, SPECULATIVE: num_draft_tokens, GENERATE: peers, ASSISTED: is_assisted}
    return [name for name, is_candidate in named.items() if is_candidate]


def _measure(
    session: Session, text: Sequence[int], cell: CellKey, *, peers: Peers | None, progress: RunProgress
) -> BenchmarkCell:
    config, task = session.config, session.config.task
    assert isinstance(task, BenchmarkConfig)
    prompt_tokens, batch_size, num_draft_tokens = cell
    prompts = cut(text, num_prompts=batch_size, num_tokens=prompt_tokens)
    speculation = replace(config.speculation, num_draft_tokens=num_draft_tokens or 1)
    config = replace(config, batch_size=batch_size, speculation=speculation, ignore_eos=True, stop_strings=[])
    names = _candidates(num_draft_tokens, batch_size=batch_size, peers=peers)
    num_new_tokens = config.max_new_tokens
    build = partial(build_decoder, session.models, config, stop_request=session.stop_request)
    ours = {
        mode: Ours(decoder=build(speculative=mode == SPECULATIVE), prompts=prompts, num_new_tokens=num_new_tokens)
        for mode in (PLAIN, SPECULATIVE)
        if mode in names
    }
    candidates: dict[str, Callable[[int], float]] = {mode: run.ms_per_token for mode, run in ours.items()}
    if peers:
        run = partial(peers.ms_per_token, prompts, num_new_tokens=num_new_tokens, sampling=config.sampling)
        candidates[GENERATE] = lambda _repetition: run(num_draft_tokens=None)
        candidates[ASSISTED] = lambda _repetition: run(num_draft_tokens=num_draft_tokens)
    num_tokens = batch_size * num_new_tokens

    def measure(name: str, repetition: int) -> float:
        progress.restart_clock()
        ms = candidates[name](repetition)
        if repetition >= 0:
            progress.advance(name, num_tokens)
            progress.end(name, num_tokens=num_tokens, ms=ms * num_tokens)
        return ms

    timed: dict[str, Callable[[int], float]] = {name: partial(measure, name) for name in names}
    timed[_PASS] = lambda _repetition: 1e3 * _pass_s(session)
    ms = interleave(timed, num_repetitions=task.repetitions)
    pass_ms, has_steps = ms.pop(_PASS), num_new_tokens > 1
    steps_ms = [ms_of_one * batch_size for ms_of_one in ours[PLAIN].rounds_ms] if has_steps else []
    fast = ours.get(SPECULATIVE) if has_steps else None
    expected = Forecast()
    if session.plan:
        drafted = num_draft_tokens or 1
        spec = replace(session.plan.spec, batch_size=batch_size, prompt_tokens=prompt_tokens, num_draft_tokens=drafted)
        expected = forecast(timing(spec, session.plan.hardware))
    expected_ms = {PLAIN: expected.plain_ms_per_token, SPECULATIVE: expected.speculative_ms_per_token}
    return BenchmarkCell(
        model=config.model.label,
        draft=draft_label(config.draft),
        dtype=config.model.dtype.name,
        quantization=config.model.quantization,
        world_size=session.world.comm.size,
        temperature=config.sampling.temperature,
        max_new_tokens=num_new_tokens,
        num_draft_tokens=num_draft_tokens,
        prompt_tokens=prompt_tokens,
        batch_size=batch_size,
        ms_per_token={name: statistics.median(values) for name, values in ms.items()},
        forecast_ms_per_token={mode: ms / batch_size for mode, ms in expected_ms.items() if ms is not None},
        tokens_per_round=fast.tokens_per_round if fast else None,
        other_share=statistics.median(fast.shares("other")) if fast else None,
        copy_share=median_ratio(pass_ms, steps_ms) if session.plan and has_steps else None,
        text_sha256=_digest(text),
        versions=versions(),
        git_commit=git_commit(),
    )


def _pass_s(session: Session) -> float:
    """Return the seconds that reading a rank's weights for one forward of the target takes, at the speed of a copy."""
    if session.plan is None:
        return 0.0
    spec = session.plan.spec
    shares = rank_shares(spec.target, num_ranks=len(spec.layout.scoring_ranks), backend=spec.backend)
    most_bytes = max(step_bytes(held, spec.target, device=spec.device) for held in shares)
    return most_bytes / copy_bytes_per_s(session.world.device)
