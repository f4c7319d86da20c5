"""The rules that decide how many drafted tokens are kept, and which token follows them.

The rules are pure functions on tensors, vectorised over rows; no value is read by the host. A `Rule` joins one with
the way its drafts are drawn, because a rule is lossless only for drafts drawn as it expects. What becomes of the
verdict (end of sequence, length limit) is decoding's matter.

Shapes: B sequences, K drafted tokens, T = K + 1 target positions, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llama_ssp.config.schema import RuleName, SamplingConfig, VerificationConfig
from llama_ssp.errors import ConfigError
from llama_ssp.sampling.logits import draw, processor
from llama_ssp.sampling.random import Draws

_HINT_OF_TARGET = 2.0**-50


class Draft(NamedTuple):
    """Drafted ids (B, K) and the probabilities (B, K, V) they were drawn from, after the processors; null if greedy."""

    ids_BK: Tensor
    probs_BKV: Tensor | None


class Verdict(NamedTuple):
    """How many drafted tokens are accepted, 0..K, and the token that follows them: resampled or bonus."""

    num_accepted_B: Tensor
    next_ids_B: Tensor


def verify_speculative(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Accept the longest prefix of the draft that keeps the target's distribution.

    Args:
        draft: ids and the probabilities they were drawn from.
        target_probs_BTV: the target's probabilities at K + 1 positions, after the same processors.
        draws: the numbers of this round; `accept_BK` and `residual_B` are used.

    Returns:
        The verdict. The next token comes from the residual, the positive part of target minus draft, at the first
        rejection, and from the target's own row after K acceptances or where rounding leaves no residual.

    Raises:
        ConfigError: the two distributions differ in vocabulary.

    Source: Chen et al. 2023, arXiv:2302.01318, Algorithm 2; Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    ids_BK, draft_probs_BKV = draft
    assert draft_probs_BKV is not None
    draft_size, target_size = draft_probs_BKV.shape[-1], target_probs_BTV.shape[-1]
    if draft_size != target_size:
        raise ConfigError(
            f"the draft has {draft_size} tokens and the target {target_size}: verification needs one vocabulary; "
            "choose a draft with the target's tokenizer"
        )
    ids_BK1 = ids_BK[..., None]
    target_at_BK = target_probs_BTV[:, :-1].gather(-1, ids_BK1)[..., 0]
    draft_at_BK = draft_probs_BKV.gather(-1, ids_BK1)[..., 0]
    num_accepted_B = _length_of_prefix(draws.accept_BK * draft_at_BK >= target_at_BK)

    # Arithmetic stands for conditions, and few kinds of operators for many: after a large forward each further kind has
    # to be fetched into the processor's caches again, which costs more than its work.
    num_draft_tokens = ids_BK.shape[1]
    target_row_BV = _row_at(target_probs_BTV, num_accepted_B)
    draft_row_BV = _row_at(draft_probs_BKV, num_accepted_B.clamp_max(num_draft_tokens - 1))
    is_rejected_B1 = (num_draft_tokens - num_accepted_B[:, None]).clamp_max_(1)
    residual_BV = (target_row_BV - draft_row_BV.mul_(is_rejected_B1)).clamp_min_(0)
    # Decides where rounding leaves no residual at all, and is lost in rounding elsewhere.
    residual_BV.add_(target_row_BV, alpha=_HINT_OF_TARGET)
    return Verdict(num_accepted_B, draw(residual_BV, draws.residual_B))


def verify_greedy(draft: Draft, target_logits_BTV: Tensor) -> Verdict:
    """Accept the drafted tokens that are the target's own best choice.

    Args:
        draft: ids; probabilities are not looked at.
        target_logits_BTV: the target's logits at K + 1 positions.

    Returns:
        The verdict; the next token is the best one after the accepted prefix.
    """
    best_BT = target_logits_BTV.argmax(-1)
    num_accepted_B = _length_of_prefix(best_BT[:, :-1] != draft.ids_BK)
    return Verdict(num_accepted_B, best_BT.gather(-1, num_accepted_B[:, None])[:, 0])


def _row_at(probs_BTV: Tensor, at_B: Tensor) -> Tensor:
    """Copy one position (B, V) of each row."""
    num_rows, num_positions, _ = probs_BTV.shape
    if num_rows > 1:
        at_B = at_B + torch.arange(0, num_rows * num_positions, num_positions, device=at_B.device)
    return probs_BTV.flatten(0, 1).index_select(0, at_B)


def _length_of_prefix(is_rejected_BK: Tensor) -> Tensor:
    """How many tokens stand before the first rejected one of each row: K when none is rejected."""
    num_rejected_BK = is_rejected_BK.cumsum(-1)
    return torch.searchsorted(num_rejected_BK, torch.ones_like(num_rejected_BK[:, :1]))[:, 0]


class Rule(Protocol):
    """How tokens are drawn from logits, and how a draft that was drawn so is verified."""

    def draw(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw one token per row, from a draft's or from the target's own logits.

        Returns:
            ids (B,), and the probabilities (B, V) they were drawn from, if the rule's verification needs them.
        """
        ...

    def verify(self, draft: Draft, target_logits_BTV: Tensor, *, draws: Draws) -> Verdict:
        """Judge a draft by the target's logits at K + 1 positions."""
        ...


class _Speculative:
    """Chen et al.'s rule on processed probabilities."""

    def __init__(self, process: Callable[[Tensor], Tensor]) -> None:
        self._process = process

    def draw(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        probs_BV = self._process(logits_BV)
        return draw(probs_BV, uniforms_B), probs_BV

    def verify(self, draft: Draft, target_logits_BTV: Tensor, *, draws: Draws) -> Verdict:
        return verify_speculative(draft, self._process(target_logits_BTV), draws=draws)


class _Greedy:
    """The best token everywhere; no number is used."""

    def draw(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, None]:  # noqa: ARG002
        return logits_BV.argmax(-1), None

    def verify(self, draft: Draft, target_logits_BTV: Tensor, *, draws: Draws) -> Verdict:  # noqa: ARG002
        return verify_greedy(draft, target_logits_BTV)


def make_rule(sampling: SamplingConfig, verification: VerificationConfig) -> Rule:
    """Choose the rule of a run.

    At temperature 0 `speculative` and `greedy` coincide.

    Raises:
        ConfigError: `greedy` at a temperature above 0, whose text would not have the target's distribution.
    """
    if sampling.temperature == 0:
        return _Greedy()
    if verification.rule is RuleName.greedy:
        raise ConfigError(
            f"verification=greedy with sampling.temperature={sampling.temperature:g} would not keep the target's "
            "distribution: greedy verification needs temperature 0 (sampling=greedy); "
            "verification=speculative keeps it at every temperature"
        )
    return _Speculative(processor(sampling))
