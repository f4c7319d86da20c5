"""The target's probabilities of finished texts: how probable each new token was with the run's sampling.

For texts with roles the draft's probabilities are computed too, and `law` adds up the differences between the text
and the target's distribution.

The ranks of a target compute together; with replicas, each scores its share of the texts. Every prompt is read once
for all its texts. A forward has no more rows and positions than verification, so that it needs no more memory.

Shapes: B sequences, S slots, T positions of a forward, V vocabulary.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.architectures.engine import BUCKET_STEP, whole_steps
from llama_ssp.errors import InterruptedRun
from llama_ssp.extensions.evaluate.law import NUM_NEWEST, LawSums
from llama_ssp.extensions.evaluate.martingales import ANY_ROUNDS, CERTAIN, Role, Rounds, TextSums
from llama_ssp.models.cache import Taps
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.models.upload import to_device
from llama_ssp.run.session import Session
from llama_ssp.settings.drafters import drafter_of
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import RunConfig, SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.drafter import Drafter, check_declared
from llama_ssp.speculate.drafters.maker import make_drafters
from llama_ssp.speculate.engine.likelihoods import Law, log_probs_of
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.uniforms import PER_DRAW
from llama_ssp.terminal.progress import Pace

_SCORED, _LEAST_LEFT, _LEAST_COUNT = "scored by the target", 1e-5, 1e-3


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """A prompt and the new tokens after it, at least one of each.

    Attributes:
        roles: how each new token came about, for the sums of `TextScore`; empty for a text without them.
        stated: log-probabilities of tokens at each position, as the text's maker states them, without processors; only
            for a text with roles, and may be empty.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    roles: tuple[int, ...] = ()
    stated: tuple[Mapping[int, float], ...] = ()


class TextScore(NamedTuple):
    """The log-probability of every new token under the target, and for a text with roles its sums.

    For a text with roles, `expected` is the expectation of the sum of the log-probabilities.
    """

    log_probs: list[float]
    sums: TextSums | None = None
    expected: float = 0.0


class Scorer:
    """Scores texts of one prompt after the other, `batch_size` rows at a time.

    Args:
        target: the target; all its ranks must make the same calls.
        longest: the most tokens of a prompt and its text.
        num_positions: T, positions of a forward.
        drafter: computes the draft's probabilities for texts with roles; all its ranks must make the same calls.
            Without a drafter, the target's probabilities are used in their place.
        reports: whether this rank has both models' probabilities; other ranks take part and get empty scores.
        taps: the target's taps, if the drafter is a head.
        rounds: how the texts with roles were decoded.

    Attributes:
        expected_V: how often each token was expected in all texts with roles so far.
    """

    def __init__(
        self,
        target: Runner,
        log_probs: Law,
        *,
        batch_size: int,
        longest: int,
        num_positions: int,
        drafter: Drafter | None = None,
        reports: bool = True,
        taps: Taps | None = None,
        rounds: Rounds = ANY_ROUNDS,
    ) -> None:
        self._target, self._log_probs = target, log_probs
        self._drafter, self._reports, self._taps = drafter, reports, taps
        self._rounds, self.expected_V = rounds, torch.zeros(1, dtype=torch.float64, device=target.device)
        self._batch_size, self._num_positions = batch_size, num_positions
        num_slots = whole_steps(longest + num_positions)
        target.allocate(batch_size=batch_size, capacity=num_slots)
        if taps:
            taps.allocate(batch_size=batch_size, num_slots=num_slots)
        if drafter:
            drafter.allocate(batch_size=batch_size, num_slots=num_slots)
        self._buckets = Buckets(step=BUCKET_STEP[target.device.type], num_slots=num_slots)

    def score(self, texts: Sequence[SampledText]) -> Iterator[list[TextScore]]:
        """Yield, batch by batch, the scores of the texts, which have one prompt, and either all roles or none."""
        prompt_ids, device = texts[0].prompt_ids, self._target.device
        rows, length = range(self._batch_size), len(prompt_ids)
        prompt_BS = torch.tensor([prompt_ids], device=device).expand(len(rows), -1)
        lengths_B = torch.full((len(rows),), length, device=device)
        prompts = Prompts(prompt_BS, lengths_B, [length] * len(rows), longest=length)
        first_BV = read_prompts(self._target, prompts, rows=rows, buckets=self._buckets, taps=self._taps)
        for start in range(0, len(texts), len(rows)):
            if start and self._target.is_recurrent:  # states after the prompt are gone
                read_prompts(self._target, prompts, rows=rows, buckets=self._buckets, taps=self._taps)
            batch = texts[start : start + len(rows)]
            filled = [*batch, *[SampledText(prompt_ids=prompt_ids, token_ids=())] * (len(rows) - len(batch))]
            ids, roles = zip(*((text.prompt_ids + text.token_ids, text.roles) for text in filled), strict=True)
            tokens_BS, roles_BT = (
                pad_sequence([torch.tensor(row, dtype=torch.int64) for row in of_all], batch_first=True).to(device)
                for of_all in (ids, roles)
            )
            drafter = self._drafter if batch[0].roles else None
            if drafter:
                drafter.prefill(prompts, rows=rows, buckets=self._buckets)
            law = LawSums(len(rows), device, self._rounds) if batch[0].roles and self._reports else None
            begins_BS = _round_starts(roles_BT, first=length) if law and self._rounds.penalizes else None
            values, means = [tokens_BS.new_empty(len(rows), 0)], [tokens_BS.new_empty(len(rows), 0)]
            stated = [text.stated for text in filled] if any(text.stated for text in batch) else None
            ends_B1 = to_device([len(text.prompt_ids) + len(text.token_ids) for text in filled], device)[:, None]
            scored = self._log_probs_of(tokens_BS, first_BV, length=length, begins_BS=begins_BS, stated=stated)
            for place, (log_probs_BV, forgetful_BV, stated_BV) in enumerate(scored, start=length):
                next_B1 = tokens_BS[:, place, None]
                if self._reports:
                    values.append(log_probs_BV.gather(1, next_B1))
                    if law:
                        means.append((log_probs_BV.exp() * log_probs_BV).sum(1, keepdim=True))
                        here_BV = log_probs_BV.exp() * (place < ends_B1)
                        self.expected_V = self.expected_V + here_BV.sum(0, dtype=torch.float64)
                if batch[0].roles and (place > length or batch[0].roles[0] != Role.unused):
                    drafted_BV, vocab_size = None, log_probs_BV.shape[-1]
                    if drafter and place > length:
                        drafted_BV = self._draft(drafter, tokens_BS, place, first=length, vocab_size=vocab_size)
                    if law:
                        law.add(
                            next_B1,
                            log_probs_BV.exp(),
                            log_probs_BV.exp() if drafted_BV is None else drafted_BV,
                            roles_B=roles_BT[:, place - length],
                            newest_BN=tokens_BS[:, max(0, place - NUM_NEWEST) : place],
                            forgetful_BV=None if forgetful_BV is None else forgetful_BV.exp(),
                            stated_BV=None if stated_BV is None else stated_BV.exp(),
                        )
            sums = law.of_texts() if law else [None] * len(batch)
            numbers = (torch.cat(one, dim=1).tolist() for one in (values, means))
            found = zip(*numbers, batch, sums, strict=False)
            yield [
                TextScore(row[: len(text.token_ids)], of_text, sum(mean[: len(text.token_ids)]))
                for row, mean, text, of_text in found
            ]

    def _log_probs_of(
        self,
        tokens_BS: Tensor,
        first_BV: Tensor,
        *,
        length: int,
        begins_BS: Tensor | None,
        stated: Sequence[Sequence[Mapping[int, float]]] | None,
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """The log-probabilities (B, V) after the prompt, whose cache is filled, and after each new token but the last.

        Penalties are computed for one position at a time, without the drafted tokens, which decoding penalizes too.
        With `begins_BS` (see `_round_starts`) this also yields log-probabilities whose penalties ignore the round's
        earlier tokens, and with `stated` those that the texts' maker states, after the processors.
        """
        num_slots = tokens_BS.shape[1]
        bucket = self._buckets.covering(num_slots)
        logits_BTV, last, rows = first_BV[:, None], length - 1, _rows(tokens_BS, length, num_given=length)
        while True:
            for logits_B1V in logits_BTV.split(1, dim=1):
                context = rows.before(torch.full_like(tokens_BS[:, :1], last))
                forgetful_BV = stated_BV = None
                if stated and self._reports:
                    place = last + 1 - length
                    tops = [of_text[place] if place < len(of_text) else {} for of_text in stated]
                    stated_BV = self._log_probs(_as_stated(logits_B1V, tops), context)[:, 0]
                if begins_BS is not None:
                    forgetful = rows.before(begins_BS[:, last + 1 - length, None] - 1)
                    forgetful_BV = self._log_probs(logits_B1V, forgetful)[:, 0]
                log_probs_B1V = self._log_probs(logits_B1V, context) if self._reports else logits_B1V
                yield log_probs_B1V[:, 0], forgetful_BV, stated_BV
                last += 1
            if last == num_slots - 1:
                return
            stop = min(last + self._num_positions, num_slots - 1)
            positions_BT = torch.arange(last, stop, device=tokens_BS.device).expand(self._batch_size, -1)
            logits_BTV = self._target.forward(tokens_BS[:, last:stop], positions_BT, bucket=bucket, taps=self._taps)

    def _draft(self, drafter: Drafter, tokens_BS: Tensor, length: int, *, first: int, vocab_size: int) -> Tensor:
        """The draft's probabilities (B, V) of the token after `length` tokens; a certain proposal has 1."""
        uniforms_BKP = torch.full((self._batch_size, 1, PER_DRAW), 0.5, dtype=torch.float64, device=tokens_BS.device)
        rows = _rows(tokens_BS.clone(), length, num_given=first)  # the drafter writes into the tokens
        draft = drafter.propose(
            rows, num_tokens=1, uniforms_BKP=uniforms_BKP, bucket=self._buckets.covering(length + 1)
        )
        check_declared(draft, is_certain=self._rounds.rule == CERTAIN and not self._rounds.widths)
        return draft.probs_like(torch.empty(self._batch_size, 2, vocab_size, device=tokens_BS.device))[:, 0]


def _as_stated(logits_B1V: Tensor, tops: Sequence[Mapping[int, float]]) -> Tensor:
    """Return log-probabilities (B, 1, V): `tops` gives some of them, and the others share the rest as logits say."""
    log_probs_B1V = logits_B1V.log_softmax(-1)
    for log_probs_V, top in zip(log_probs_B1V[:, 0], tops, strict=True):
        if top:
            ids, values = (torch.tensor([*of_top], device=log_probs_V.device) for of_top in (top, top.values()))
            left, stated = (1 - given.exp().sum() for given in (log_probs_V[ids], values))
            log_probs_V.add_((stated.clamp_min(_LEAST_LEFT) / left.clamp_min(_LEAST_LEFT)).log())
            log_probs_V[ids] = values.to(log_probs_V.dtype)
    return log_probs_B1V


def _round_starts(roles_BT: Tensor, *, first: int) -> Tensor:
    """Return the index of the first token of each new token's round; the first new token has index `first`."""
    places_BT = torch.arange(first, first + roles_BT.shape[1], device=roles_BT.device).expand_as(roles_BT)
    goes_on_BT = pad(roles_BT[:, :-1] == Role.accepted, (1, 0))
    return places_BT.masked_fill(goes_on_BT, 0).cummax(1).values


def _rows(tokens_BS: Tensor, length: int, *, num_given: int) -> Rows:
    """Make rows of equally long texts after equally long prompts; their keys are not used."""
    lengths_B = torch.full_like(tokens_BS[:, 0], length)
    return Rows(tokens_BS, lengths_B, torch.zeros_like(lengths_B), torch.full_like(lengths_B, num_given))


@torch.inference_mode()
def score(
    session: Session,
    texts: Sequence[SampledText],
    *,
    rounds: Rounds,
    sampling: SamplingConfig | None = None,
    expected: dict[int, float] | None = None,
) -> list[TextScore]:
    """Return the scores of every text, the same on every rank; none for no texts.

    Texts with roles get sums; without a draft, only those that need none. `sampling` is by default the run's. Every
    rank must give the same texts. `expected` is filled with how often each token was expected in the texts, where that
    is informative. Shows its progress. Raises InterruptedRun on every rank if stopped.
    """
    mesh, config = session.models.mesh, session.config
    config = replace(config, sampling=sampling or config.sampling)
    share = list(enumerate(texts))[mesh.number :: config.placement.num_replicas]
    taps = session.models.make_taps()
    has_rounds = any(text.roles[1:] for text in texts)
    drafter = _drafter(session, config, taps) if has_rounds and session.models.drafts else None
    is_reporting = mesh.replica.rank == mesh.layout.verify_rank
    scorer = None
    if texts and (mesh.target or drafter):
        scorer = Scorer(
            session.models.target,
            log_probs_of(config.sampling),
            batch_size=config.batch_size,
            longest=max(len(text.prompt_ids) + len(text.token_ids) for text in texts),
            num_positions=config.most_draft_tokens + 1,
            drafter=drafter,
            reports=is_reporting,
            taps=taps if drafter else None,
            rounds=rounds,
        )
    found: list[tuple[int, TextScore]] = []
    paces, stopped = {_SCORED: Pace(num_total=len(share))}, False
    with session.terminal.decoding(
        paces, max_new_tokens=config.max_new_tokens, unit="texts", shows_texts=False
    ) as progress:
        for _, of_prompt in groupby(share, key=lambda entry: (entry[1].prompt_ids, bool(entry[1].roles))):
            entries = list(of_prompt)
            scores = scorer.score([text for _, text in entries]) if scorer else repeat([TextScore([])] * len(entries))
            for start in range(0, 0 if stopped else len(entries), config.batch_size):
                stopped = any(mesh.replica.gather_text("stop" if session.stop_request.requested else ""))
                if stopped:
                    break
                batch, began_s = entries[start : start + config.batch_size], time.perf_counter()
                values = next(scores)
                ms = 1e3 * (time.perf_counter() - began_s) / len(batch)
                for (number, text), scored in zip(batch, values, strict=False):
                    found.append((number, scored))
                    progress.advance(_SCORED, len(text.token_ids))
                    progress.end(_SCORED, num_tokens=len(text.token_ids), ms=ms)
    counts = enumerate(scorer.expected_V.tolist() if scorer and is_reporting and expected is not None else [])
    counted = [(token, number) for token, number in counts if number > _LEAST_COUNT]
    gathered = session.world.comm.gather_text(json.dumps([stopped, found if is_reporting else [], counted]))
    results = [json.loads(text) for text in gathered]
    if any(was_stopped for was_stopped, _, _ in results):
        raise InterruptedRun.in_folder(config.run_dir)
    if expected is not None:
        expected.update(sum((Counter(dict(of_rank)) for *_, of_rank in results), Counter[int]()))
    rows = sorted(row for _, found, _ in results for row in found)
    return [TextScore(log_probs, sums and TextSums(*sums), mean) for _, (log_probs, sums, mean) in rows]


def _drafter(session: Session, config: RunConfig, taps: Taps | None) -> Drafter:
    """Make the run's first drafter, with probabilities; all ranks of a replica must call it together."""
    models, config = session.models, replace(config, verification=VerificationConfig(rule=DEFAULT))
    config = replace(config, speculation=replace(config.speculation, overlap=False, tree=None))
    config = replace(config, draft=drafter_of(config.draft).alone(config.draft))  # a score depends on no other text
    drafter, *_ = make_drafters(
        config, mesh=models.mesh, target=models.target, runner=models.draft, taps=taps, prepared=models.prepared
    )
    return drafter
