"""Scores given texts under the target: log-probabilities of each token, and the most probable ones in its place.

Several texts go through the target at once, sorted by length, in chunks. Nothing is sampled here.

    text     | given ............ | scored ........ |
    inputs   0                                    T       all tokens but the last one
    logits                        ^ of the input before the first scored token, up to the last input

Shapes: B sequences, T inputs of a chunk, L laws, the model's and the draws', N most probable tokens,
C = 1 + 2 N figures of a token, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.architectures.engine import BUCKET_STEP, scored_positions, whole_steps
from llama_ssp.errors import LOGITS_ARE_NAN, NumericError, SspError
from llama_ssp.models.prefill import Buckets
from llama_ssp.models.runner import Runner
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.context import Context, Rows, penalty
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.text.log_probs import TokenLogprob, TopLogprob

Law = Callable[[Tensor, Context], Tensor]
"""Maps logits (B, T, V), left unchanged, and their context to the log-probabilities that tokens are drawn with."""
_LEAST = 1e-30
"""Stands for the probability 0: rounding can move a token out of the most probable ones that sampling keeps."""
_NEVER = math.log(_LEAST) + 1
"""Tokens with a smaller log-probability are never drawn."""
_OF_LAW = 4
"""Chunks have this many times fewer positions for a law, whose processors make more tensors (..., V)."""


def log_probs_of(sampling: SamplingConfig) -> Law:
    """Compose the log-probabilities that tokens are drawn with; at temperature 1 for greedy text."""
    penalize = penalty(sampling)
    process = processor(sampling) if sampling.temperature > 0 else None

    def log_probs(logits_BTV: Tensor, context: Context) -> Tensor:
        if penalize:
            logits_BTV = penalize(logits_BTV, context)
        return logits_BTV.log_softmax(-1) if process is None else process(logits_BTV).clamp_min(_LEAST).log()

    return log_probs


def law_of(sampling: SamplingConfig) -> Law | None:
    """Return the distribution that a run draws from, as log-probabilities.

    None if it is the model's own, and for greedy text, which is not drawn.
    """
    is_own = sampling.temperature == 1.0 and not (sampling.truncates or sampling.penalizes)
    return None if is_own or sampling.temperature == 0 else log_probs_of(sampling)


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """A text of at least two tokens to score; the first `num_given`, at least one, are not scored.

    Its first `num_prompt` tokens are the prompt, as penalties see it; None for `num_given`.
    """

    ids: Sequence[int]
    num_given: int = 1
    num_prompt: int | None = None


class TokenScores(NamedTuple):
    """Scores of each scored token at temperature 1.

    `drawn` holds scores under the distribution of the draws, if it is another one, without tokens of probability 0.
    """

    model: list[TokenLogprob]
    drawn: list[TokenLogprob] | None = None


def log_likelihoods(
    target: Runner,
    texts: Sequence[ScoredText],
    *,
    batch_size: int,
    comm: Comm,
    src: int,
    num_top: int = 0,
    law: Law | None = None,
) -> Iterator[tuple[int, TokenScores]]:
    """Score texts with the target, the longest first.

    Every rank of `comm` must exhaust it together, with the same arguments, and gets the same scores. It replaces the
    target's cache, so no decoder may be in the middle of a run.

    Args:
        target: this rank's slice of it, or a stand-in.
        texts: each within the context of the target.
        batch_size: the most texts of a forward.
        comm: the ranks that want the scores.
        src: the rank in `comm` whose logits count; it holds a slice of the target.
        num_top: N, how many of the most probable tokens are wanted; less than 2^24 of a vocabulary.
        law: of the draws, which is scored too.

    Yields:
        The place of a text in `texts`, and its scores.

    Raises:
        NumericError: logits are NaN.
    """
    if not texts:
        return
    order = sorted(range(len(texts)), key=lambda place: len(texts[place].ids), reverse=True)
    capacity = whole_steps(len(texts[order[0]].ids) - 1)
    target.allocate(batch_size=min(batch_size, len(texts)), capacity=capacity)
    buckets = Buckets(step=BUCKET_STEP["cuda" if target.device.type == "cuda" else "cpu"], num_slots=capacity)
    for begin in range(0, len(order), batch_size):
        places = order[begin : begin + batch_size]
        some, rows = [texts[place] for place in places], range(len(places))
        for found in score_in_rows(target, some, rows, buckets, comm=comm, src=src, num_top=num_top, law=law):
            for place, scores in zip(places, found, strict=False):
                if isinstance(scores, SspError):
                    raise scores
                yield place, scores


@torch.inference_mode()
def score_in_rows(
    target: Runner,
    texts: Sequence[ScoredText],
    rows: Sequence[int],
    buckets: Buckets,
    *,
    comm: Comm,
    src: int,
    num_top: int = 0,
    law: Law | None = None,
) -> Iterator[list[TokenScores | SspError]]:
    """Score texts in rows of the target's cache, one each, which has room for them; see `log_likelihoods`.

    Yields an empty list after each chunk but the last, and then all scores, NumericError for a text with NaN scores.
    Other rows may be computed in between.
    """
    ids_BS = to_device(pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True), target.device)
    rows_B = to_device(rows, target.device)
    num_inputs, first_wanted = ids_BS.shape[1] - 1, min(text.num_given for text in texts) - 1
    chunk = scored_positions(len(texts), target.vocab_size * (_OF_LAW if law else 1))
    prompts_B = to_device([text.num_prompt or text.num_given for text in texts], target.device)
    of_texts = Rows(ids_BS, prompts_B, torch.zeros_like(prompts_B), prompts_B)
    # Of the token after each input, under the model and under the law; 0 where none is wanted.
    num_laws, num_figures = 2 if law else 1, 1 + 2 * num_top
    scores_BTLC = torch.zeros(len(texts), num_inputs, num_laws, num_figures, device=target.device)
    for start in range(0, num_inputs, chunk):
        if start:
            yield []
        stop = min(start + chunk, num_inputs)
        # Of a chunk before every scored token only the cache is wanted.
        first = min(max(first_wanted, start), stop - 1)
        positions_BT = torch.arange(start, stop, device=target.device).expand(len(texts), -1)
        logits_BTV = target.forward(
            ids_BS[:, start:stop],
            positions_BT,
            bucket=buckets.covering(stop),
            score_positions_BR=positions_BT[:, first - start :] - start,
            cache_rows_B=rows_B,
        )
        if logits_BTV.shape[-1]:  # a stand-in has none
            next_BT1 = ids_BS[:, first + 1 : stop + 1, None]
            figures = [_figures(logits_BTV, next_BT1, num_top)]
            if law:
                drawn_BTV = law(logits_BTV, of_texts.before(positions_BT[:, first - start :]))
                figures.append(_figures(drawn_BTV, next_BT1, num_top))
            scores_BTLC[:, first:stop] = torch.stack(figures, dim=2)
    scores_BTLC = comm.read(comm.broadcast(scores_BTLC, src=src))
    found = list[TokenScores | SspError]()
    for text, whole_TLC in zip(texts, scores_BTLC, strict=True):
        scores_TLC, leasts = whole_TLC[text.num_given - 1 : len(text.ids) - 1], (-math.inf, _NEVER)
        if bool(scores_TLC.isnan().any()):
            found.append(NumericError(f"scoring a text: {LOGITS_ARE_NAN}"))
            continue
        of_laws = zip(scores_TLC.unbind(1), leasts, strict=False)
        ids = text.ids[text.num_given :]
        found.append(TokenScores(*(_read(ids, *one, num_top=num_top) for one in of_laws)))
    yield found


def _read(ids: Sequence[int], scores_TC: Tensor, above: float, *, num_top: int) -> list[TokenLogprob]:
    """Return the scores of the tokens `ids` of a text, with the best tokens whose log-probability is above `above`."""
    found = []
    for token, (logprob, *row) in zip(ids, scores_TC.tolist(), strict=True):
        pairs = zip(map(int, row[:num_top]), row[num_top:], strict=True)
        top = [TopLogprob(token=other, logprob=value) for other, value in pairs if value > above]
        found.append(TokenLogprob(token=token, logprob=logprob, top=top))
    return found


def _figures(logits_BTV: Tensor, next_BT1: Tensor, num_top: int) -> Tensor:
    """The log-probability of the next token, the N most probable tokens, and their log-probabilities: (B, T, C)."""
    total_BT1 = logits_BTV.logsumexp(-1, keepdim=True)
    parts = [logits_BTV.gather(-1, next_BT1) - total_BT1]
    if num_top:
        top = logits_BTV.topk(min(num_top, logits_BTV.shape[-1]))
        missing = (0, num_top - top.values.shape[-1])
        parts += [pad(top.indices.float(), missing), pad(top.values - total_BT1, missing, value=-math.inf)]
    return torch.cat(parts, dim=-1)
