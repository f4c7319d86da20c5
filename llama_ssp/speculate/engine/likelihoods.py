"""Scores given texts under the target: the log-probability of each token, and whether greedy decoding would choose it.

Several texts go through the target at once, sorted by length, in chunks. Nothing is sampled here.

    text     | given ............ | scored ........ |
    inputs   0                                    T       all tokens but the last one
    logits                        ^ of the input before the first scored token, up to the last input

Shapes: B sequences, T inputs of a chunk, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.architectures.engine import BUCKET_STEP, PREFILL_CHUNK, whole_steps
from llama_ssp.errors import LOGITS_ARE_NAN, NumericError
from llama_ssp.models.prefill import Buckets
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm

_MOST_LOGITS = 2**26
"""Logits of a chunk, 256 MiB in fp32; a large vocabulary shortens the chunks."""


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """A text to score, of at least two tokens, of which the first `num_given`, at least one, are not scored."""

    ids: Sequence[int]
    num_given: int = 1


class TokenScores(NamedTuple):
    """Log-probability at temperature 1 of each token that is not given, in nats, and whether it is the best one.

    Greedy decoding would choose the best one: no other has a larger logit.
    """

    log_probs: list[float]
    are_best: list[bool]


def log_likelihoods(
    target: Runner, texts: Sequence[ScoredText], *, batch_size: int, comm: Comm, src: int
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
        scores_2BT = _score(target, [texts[place] for place in places], buckets, comm=comm, src=src)
        if bool(scores_2BT.isnan().any()):
            raise NumericError(f"scoring a text: {LOGITS_ARE_NAN}")
        for place, log_probs, are_best in zip(places, *scores_2BT.tolist(), strict=True):
            scored = slice(texts[place].num_given - 1, len(texts[place].ids) - 1)
            yield place, TokenScores(log_probs[scored], [bool(is_best) for is_best in are_best[scored]])


@torch.inference_mode()
def _score(target: Runner, texts: Sequence[ScoredText], buckets: Buckets, *, comm: Comm, src: int) -> Tensor:
    """The log-probability of the token after each input, and 1 if it is the best (2, B, T); 0 where none is wanted."""
    ids_BS = pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True).to(target.device)
    rows_B = torch.arange(len(texts), device=target.device)
    num_inputs, first_wanted = ids_BS.shape[1] - 1, min(text.num_given for text in texts) - 1
    chunk = max(1, min(PREFILL_CHUNK, _MOST_LOGITS // (len(texts) * target.vocab_size)))
    scores_2BT = torch.zeros(2, len(texts), num_inputs, device=target.device)
    for start in range(0, num_inputs, chunk):
        stop = min(start + chunk, num_inputs)
        # Of a chunk before every scored token only the cache is wanted.
        first = min(max(first_wanted, start), stop - 1)
        positions_BT = torch.arange(start, stop, device=target.device).expand(len(texts), -1)
        logits_BTV = target.forward(
            ids_BS[:, start:stop], positions_BT, bucket=buckets.covering(stop),
            score_positions_BR=positions_BT[:, first - start :] - start, cache_rows_B=rows_B,
        )  # fmt: skip
        if logits_BTV.shape[-1]:  # a stand-in has none
            chosen_BT = logits_BTV.gather(-1, ids_BS[:, first + 1 : stop + 1, None])[..., 0]
            scores_2BT[0, :, first:stop] = chosen_BT - logits_BTV.logsumexp(-1)
            scores_2BT[1, :, first:stop] = chosen_BT >= logits_BTV.amax(-1)
    return comm.read(comm.broadcast(scores_2BT, src=src))
