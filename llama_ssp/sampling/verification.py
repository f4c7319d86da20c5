"""The rules that decide how many drafted tokens are kept, and which token follows them.

The rules are pure functions on tensors, vectorised over rows; no value is read by the host. A `Rule` joins one with
the way its drafts are drawn, because a rule is lossless only for drafts drawn as it expects. What becomes of the
verdict (end of sequence, length limit) is decoding's matter.

Shapes: B sequences, K drafted tokens, T = K + 1 target positions, V vocabulary, P = 2 numbers of a draw.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from llama_ssp.config.schema import RuleName, SamplingConfig, VerificationConfig
from llama_ssp.errors import ConfigError
from llama_ssp.recorded import sizes
from llama_ssp.sampling.logits import DRAW_UNITS, draw, draw_units, processor, rows_at
from llama_ssp.sampling.random import Draws

_HINT_OF_TARGET = 2.0**-50


class Draft(NamedTuple):
    """Drafted ids, and the probabilities they were drawn from, after the processors; null if greedy.

    The last row of probabilities is zero: nothing was drafted there, and the residual is all of the target's.
    """

    ids_BK: Tensor
    probs_BTV: Tensor | None


class Verdict(NamedTuple):
    """How many drafted tokens are accepted, 0..K, and the token that follows them: resampled or bonus."""

    num_accepted_B1: Tensor
    next_ids_B1: Tensor


def verify_speculative(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Accept the longest prefix of the draft that keeps the target's distribution.

    Args:
        draft: ids and the probabilities they were drawn from.
        target_probs_BTV: the target's probabilities at K + 1 positions, after the same processors.
        draws: the numbers of this round; `accept_BK` and `residual_BP` are used.

    Returns:
        The verdict. The next token comes from the residual, the positive part of target minus draft, at the first
        rejection, and from the target's own row after K acceptances or where rounding leaves no residual.

    Raises:
        ConfigError: the two distributions differ in vocabulary.

    Source: Chen et al. 2023, arXiv:2302.01318, Algorithm 2; Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    ids_BK, draft_probs_BTV = draft
    assert draft_probs_BTV is not None
    num_rows, num_positions, vocab_size = sizes(target_probs_BTV)
    draft_size = sizes(draft_probs_BTV)[-1]
    if draft_size != vocab_size:
        raise ConfigError(
            f"the draft has {draft_size} tokens and the target {vocab_size}: verification needs one vocabulary; "
            "choose a draft with the target's tokenizer"
        )
    ids_BK1 = ids_BK[..., None]
    target_at_BK1 = target_probs_BTV.gather(-1, ids_BK1)
    draft_at_BK1 = draft_probs_BTV.gather(-1, ids_BK1)
    num_accepted_B1 = _length_of_prefix(draws.accept_BK[..., None] < target_at_BK1.div_(draft_at_BK1))

    # Few operators, and no conditions: after a large forward each further kind has to be fetched into the processor's
    # caches again, which costs more than its work.
    rows_B = rows_at(num_accepted_B1, num_rows=num_rows, num_positions=num_positions)
    target_row_BV = target_probs_BTV.flatten(0, 1).index_select(0, rows_B)
    draft_row_BV = draft_probs_BTV.flatten(0, 1).index_select(0, rows_B)
    rest_BV = (target_row_BV - draft_row_BV).clamp_min_(0)
    # The hint of the target decides where rounding leaves no residual at all, and is lost in rounding elsewhere.
    units_BV = target_row_BV.mul_(_HINT_OF_TARGET * DRAW_UNITS).add_(rest_BV, alpha=DRAW_UNITS)
    return Verdict(num_accepted_B1, draw_units(units_BV, draws.residual_BP, vocab_size=vocab_size))


def verify_greedy(draft: Draft, target_logits_BTV: Tensor) -> Verdict:
    """Accept the drafted tokens that are the target's own best choice.

    Args:
        draft: ids; probabilities are not looked at.
        target_logits_BTV: the target's logits at K + 1 positions.

    Returns:
        The verdict; the next token is the best one after the accepted prefix.
    """
    best_BT = target_logits_BTV.argmax(-1)
    num_accepted_B1 = _length_of_prefix((best_BT[:, :-1] == draft.ids_BK)[..., None])
    return Verdict(num_accepted_B1, best_BT.gather(-1, num_accepted_B1))


def _length_of_prefix(is_accepted_BK1: Tensor) -> Tensor:
    """How many tokens (B, 1) stand before the first rejected one of each row: K when none is rejected."""
    return is_accepted_BK1.cumprod(1).sum(1)


class Rule(Protocol):
    """How tokens are drawn from logits, and how a draft that was drawn so is verified."""

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw one token per row, from a draft's or from the target's own logits.

        Returns:
            ids (B, 1), and the probabilities (B, V) they were drawn from, if the rule's verification needs them.
        """
        ...

    def process(self, logits: Tensor) -> Tensor:
        """Turn the target's logits into what `verify` looks at; a part of its forward, as it is of a draft's step."""
        ...

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        """Judge a draft by what `process` made of the target's logits at K + 1 positions."""
        ...


class _Speculative:
    """Chen et al.'s rule on processed probabilities."""

    def __init__(self, process: Callable[[Tensor], Tensor]) -> None:
        self.process = process

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor) -> tuple[Tensor, Tensor]:
        probs_BV = self.process(logits_BV)
        return draw(probs_BV, uniforms_BP), probs_BV

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        return verify_speculative(draft, target_BTV, draws=draws)


class _Greedy:
    """The best token everywhere; no number is used."""

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor) -> tuple[Tensor, None]:  # noqa: ARG002
        return logits_BV.argmax(-1, keepdim=True), None

    def process(self, logits: Tensor) -> Tensor:
        return logits

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:  # noqa: ARG002
        return verify_greedy(draft, target_BTV)


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
