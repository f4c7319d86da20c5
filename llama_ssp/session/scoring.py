"""The target's probabilities of finished texts: how probable each new token was, as the run samples.

The ranks of a target compute together; with replicas, each scores its share of the texts. Every prompt is read once
for all its texts. A forward has no more rows and positions than verification, so that it needs no more memory.

Shapes: B sequences, S slots, T positions of a forward, V vocabulary.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from llama_ssp.architectures.sizes import BUCKET_STEP, whole_steps
from llama_ssp.config.schema import SamplingConfig
from llama_ssp.console.progress import Pace
from llama_ssp.errors import InterruptedRun
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.context import Context
from llama_ssp.sampling.penalties import penalty
from llama_ssp.sampling.processors import processor
from llama_ssp.session.session import Session

_LEAST_PROBABILITY = 1e-30
"""Stands for 0: rounding can move a token out of the most probable ones that sampling keeps."""
LogProbs = Callable[[Tensor, Context], Tensor]
"""Maps logits (B, T, V) and their context to log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """A prompt and the new tokens after it, at least one of each."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def log_probs_of(sampling: SamplingConfig) -> LogProbs:
    """Compose the log-probabilities that tokens are drawn with; those of temperature 1 for greedy text."""
    penalize = penalty(sampling)
    process = processor(sampling) if sampling.temperature > 0 else None

    def log_probs(logits_BTV: Tensor, context: Context) -> Tensor:
        if penalize:
            logits_BTV = penalize(logits_BTV, context)
        if process is None:
            return logits_BTV.log_softmax(-1)
        return process(logits_BTV).clamp_min(_LEAST_PROBABILITY).log()

    return log_probs


class Scorer:
    """Scores texts of one prompt after the other, `batch_size` rows at a time.

    Args:
        target: all ranks of the model must make the same calls.
        longest: the most tokens of a prompt and its text.
        num_positions: T, positions of a forward.
    """

    def __init__(
        self, target: Runner, log_probs: LogProbs, *, batch_size: int, longest: int, num_positions: int
    ) -> None:
        self._target, self._log_probs = target, log_probs
        self._batch_size, self._num_positions = batch_size, num_positions
        num_slots = whole_steps(longest + num_positions)
        target.allocate(batch_size=batch_size, capacity=num_slots)
        self._buckets = Buckets(step=BUCKET_STEP[target.device.type], num_slots=num_slots)

    def score(self, texts: Sequence[SampledText]) -> Iterator[list[list[float]]]:
        """Yield, batch by batch, the log-probability of each new token of the texts, which have one prompt."""
        prompt_ids, device = texts[0].prompt_ids, self._target.device
        length = len(prompt_ids)
        prompt_BS = torch.tensor([prompt_ids], device=device).expand(self._batch_size, -1)
        lengths_B = torch.full((self._batch_size,), length, device=device)
        prompts = Prompts(prompt_BS, lengths_B, [length] * self._batch_size, longest=length)
        first_BV = read_prompts(self._target, prompts, rows=range(self._batch_size), buckets=self._buckets)
        for start in range(0, len(texts), self._batch_size):
            batch = texts[start : start + self._batch_size]
            num_new = max(len(text.token_ids) for text in batch)
            tokens_BS = torch.zeros(self._batch_size, length + num_new, dtype=torch.int64)
            tokens_BS[:, :length] = prompt_BS
            for row, text in enumerate(batch):
                tokens_BS[row, length : length + len(text.token_ids)] = torch.tensor(text.token_ids)
            values = self._of_rows(tokens_BS.to(device), first_BV, length=length).tolist()
            yield [row[: len(text.token_ids)] for row, text in zip(values, batch, strict=False)]

    def _of_rows(self, tokens_BS: Tensor, first_BV: Tensor, *, length: int) -> Tensor:
        """The log-probabilities (B, T) of all tokens after the prompt, whose cache is filled."""
        num_slots = tokens_BS.shape[1]
        parts_BT = [self._pick(first_BV[:, None], tokens_BS, last=length - 1)]
        bucket = self._buckets.covering(num_slots)
        for start in range(length, num_slots - 1, self._num_positions):
            stop = min(start + self._num_positions, num_slots - 1)
            positions_BT = torch.arange(start, stop, device=tokens_BS.device).expand(self._batch_size, -1)
            logits_BTV = self._target.forward(tokens_BS[:, start:stop], positions_BT, bucket=bucket)
            parts_BT.append(self._pick(logits_BTV, tokens_BS, last=start))
        return torch.cat(parts_BT, dim=1)

    def _pick(self, logits_BTV: Tensor, tokens_BS: Tensor, *, last: int) -> Tensor:
        """The log-probabilities of the tokens after positions `last`, `last` + 1, ..., whose logits are given."""
        num_positions = logits_BTV.shape[1]
        last_BT = torch.arange(last, last + num_positions, device=tokens_BS.device).expand(self._batch_size, -1)
        context = Context(tokens_BS, torch.zeros_like(tokens_BS[:, 0]), last_BT)
        wanted_BT1 = tokens_BS[:, last + 1 : last + 1 + num_positions, None]
        return self._log_probs(logits_BTV, context).gather(-1, wanted_BT1)[..., 0]


@torch.inference_mode()
def score(session: Session, texts: Sequence[SampledText]) -> list[list[float]]:
    """Return the log-probability of every new token under the target, the same on every rank; none for no texts.

    Every rank gives the same texts. Shows its progress. Raises InterruptedRun on every rank if stopped.
    """
    mesh, config = session.models.mesh, session.config
    share = list(enumerate(texts))[mesh.number :: config.placement.num_replicas]
    scorer = None
    if mesh.target and texts:
        scorer = Scorer(
            session.models.target, log_probs_of(config.sampling), batch_size=config.batch_size,
            longest=max(len(text.prompt_ids) + len(text.token_ids) for text in texts),
            num_positions=config.speculation.most_draft_tokens + 1,
        )  # fmt: skip
    found: list[tuple[int, list[float]]] = []
    pace = Pace(num_wanted=len(share))
    stopped = False
    with session.terminal.decoding(
        {"scored by the target": pace}, max_new_tokens=config.max_new_tokens, unit="texts", shows_texts=False
    ) as progress:
        for _, of_prompt in groupby(share, key=lambda entry: entry[1].prompt_ids):
            entries = list(of_prompt)
            scores = scorer.score([text for _, text in entries]) if scorer else None
            for start in range(0, len(entries), config.batch_size):
                stopped = stopped or _is_stopped(session)
                if stopped:
                    break
                batch, began_s = entries[start : start + config.batch_size], time.perf_counter()
                values = next(scores) if scores else [[] for _ in batch]
                seconds = time.perf_counter() - began_s
                found += [(number, row) for (number, _), row in zip(batch, values, strict=True)]
                for _, text in batch:
                    progress.advance("scored by the target", len(text.token_ids))
                    progress.end("scored by the target", num_tokens=len(text.token_ids), ms=1e3 * seconds / len(batch))
    is_reporting = mesh.target is not None and mesh.target.rank == 0
    told = session.world.comm.gather_text(json.dumps([stopped, found if is_reporting else []]))
    results = [json.loads(text) for text in told]
    if any(was_stopped for was_stopped, _ in results):
        raise InterruptedRun.in_folder(config.run_dir)
    by_number = {number: row for _, rows in results for number, row in rows}
    return [by_number[number] for number in range(len(texts))]


def _is_stopped(session: Session) -> bool:
    """Whether the deciding rank of this replica has a request to stop, the same on all its ranks."""
    mesh = session.models.mesh
    flag_1 = torch.tensor([int(session.stop_request.requested)], device=session.world.device)
    return bool(mesh.replica.read(mesh.replica.broadcast(flag_1, src=mesh.layout.verify_rank)))
