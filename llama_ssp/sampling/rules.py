"""The rules that decide how many drafted tokens are kept, and which token follows them.

The rules are pure functions on tensors, vectorised over rows; no value is read by the host. A `Rule` joins one with
the way its drafts are drawn, because a rule is lossless only for drafts drawn as it expects. What becomes of the
verdict (end of sequence, length limit) is decoding's matter.

Shapes: B sequences, K drafted tokens, T = K + 1 target positions, V vocabulary, P = 2 numbers of a draw.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.config.rules.rule import at_every_temperature, rule_of
from llama_ssp.config.schema import SamplingConfig, VerificationConfig
from llama_ssp.errors import ConfigError
from llama_ssp.sampling.processors import DRAW_UNITS, draw, draw_units, processor, rows_at
from llama_ssp.sampling.uniforms import Draws
from llama_ssp.shapes import static_shape

_HINT_OF_TARGET = 2.0**-50


class Draft(NamedTuple):
    """Drafted ids, and the probabilities they were drawn from, after the processors; null if greedy or a point mass.

    The last row of probabilities is zero: nothing was drafted there, and the residual is all of the target's.
    """

    ids_BK: Tensor
    probs_BTV: Tensor | None


class Verdict(NamedTuple):
    """How many drafted tokens are accepted, 0..K, and the token that follows them: resampled or bonus.

    `weights_B1` is what the next token was chosen by: NaN where logits behind the accepted tokens hold one.
    """

    num_accepted_B1: Tensor
    next_ids_B1: Tensor
    weights_B1: Tensor


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
    num_rows, num_positions, vocab_size = static_shape(target_probs_BTV)
    draft = _with_probs(draft, target_probs_BTV)
    target_at_BK1, draft_at_BK1 = _at_drafted(draft, target_probs_BTV)
    num_accepted_B1 = _length_of_prefix(draws.accept_BK[..., None] < target_at_BK1.div_(draft_at_BK1))

    # Few operators, and no conditions: after a large forward each further kind has to be fetched into the processor's
    # caches again, which costs more than its work.
    rows_B = rows_at(num_accepted_B1, num_rows=num_rows, num_positions=num_positions)
    target_row_BV = target_probs_BTV.flatten(0, 1).index_select(0, rows_B)
    draft_row_BV = _probs(draft).flatten(0, 1).index_select(0, rows_B)
    rest_BV = (target_row_BV - draft_row_BV).clamp_min_(0)
    next_ids_B1 = _draw_rest(rest_BV, target_row_BV, uniforms_BP=draws.residual_BP, vocab_size=vocab_size)
    return Verdict(num_accepted_B1, next_ids_B1, rest_BV.gather(1, next_ids_B1))


def verify_block(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Accept the longest prefix that passes as a whole; it keeps the target's distribution, and on average more tokens.

    With p_i the running product of target over draft probabilities, cut at 1 in every step, and S_i the sum of the
    positive part of p_i target - draft behind i tokens, i of them pass with probability S_i / (S_i + 1 - p_i). The
    longest that pass are accepted: a token that fails alone can be made up for by those that follow it.

    Args:
        draft: see `verify_speculative`.
        target_probs_BTV: see `verify_speculative`.
        draws: see `verify_speculative`.

    Returns:
        The verdict. The next token comes from the positive part of p target - draft behind the accepted tokens; behind
        all of them, and where rounding leaves none, from the target's own row.

    Raises:
        ConfigError: see `verify_speculative`.

    Source: Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    num_rows, num_positions, vocab_size = static_shape(target_probs_BTV)
    draft = _with_probs(draft, target_probs_BTV)
    target_at_BK1, draft_at_BK1 = _at_drafted(draft, target_probs_BTV)
    # The product cut at 1 in every step is the product over its largest value so far. In fp64, for a drafted token can
    # be 2^62 times as probable for the target.
    product_BT1 = pad(target_at_BK1.double().div_(draft_at_BK1).cumprod_(1), (0, 0, 1, 0), value=1.0)
    reach_BT1 = product_BT1.div_(product_BT1.cummax(1).values).to(target_probs_BTV.dtype)
    rest_BTV = (target_probs_BTV * reach_BT1).sub_(_probs(draft)).clamp_min_(0)

    # Nothing is left over where draft and target agree: 0 / 0 passes nothing there, and what follows passes surely.
    rest_BK, missing_BK = rest_BTV.sum(-1)[:, 1:], 1 - reach_BT1[:, 1:, 0]
    passes_BK = draws.accept_BK < rest_BK.div(missing_BK.add_(rest_BK))
    lengths_K = torch.arange(1, num_positions, device=target_probs_BTV.device)
    num_accepted_B1 = passes_BK.mul(lengths_K).amax(1, keepdim=True)

    rows_B = rows_at(num_accepted_B1, num_rows=num_rows, num_positions=num_positions)
    rest_BV, target_row_BV = (all_BTV.flatten(0, 1).index_select(0, rows_B) for all_BTV in (rest_BTV, target_probs_BTV))
    next_ids_B1 = _draw_rest(rest_BV, target_row_BV, uniforms_BP=draws.residual_BP, vocab_size=vocab_size)
    return Verdict(num_accepted_B1, next_ids_B1, rest_BV.gather(1, next_ids_B1))


def _with_probs(draft: Draft, target_probs_BTV: Tensor) -> Draft:
    """The draft with its probabilities; without any, it is a point mass: each drafted token has all of them."""
    if draft.probs_BTV is not None:
        return draft
    probs_BTV = torch.zeros_like(target_probs_BTV)
    probs_BTV[:, :-1].scatter_(-1, draft.ids_BK[..., None], 1.0)
    return Draft(draft.ids_BK, probs_BTV)


def _probs(draft: Draft) -> Tensor:
    """The probabilities of a draft that has them."""
    assert draft.probs_BTV is not None
    return draft.probs_BTV


def _at_drafted(draft: Draft, target_probs_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """How probable target and draft find each drafted token: twice (B, K, 1)."""
    draft_size, vocab_size = static_shape(_probs(draft))[-1], static_shape(target_probs_BTV)[-1]
    if draft_size != vocab_size:
        raise ConfigError(
            f"the draft has {draft_size} tokens and the target {vocab_size}: verification needs one vocabulary; "
            "choose a draft with the target's tokenizer"
        )
    ids_BK1 = draft.ids_BK[..., None]
    return target_probs_BTV.gather(-1, ids_BK1), _probs(draft).gather(-1, ids_BK1)


def _draw_rest(rest_BV: Tensor, target_row_BV: Tensor, *, uniforms_BP: Tensor, vocab_size: int) -> Tensor:
    """Draw from what is left of the target, or from all of it where rounding leaves nothing; spends `target_row_BV`."""
    # The hint of the target decides where there is no residual at all, and is lost in rounding elsewhere.
    units_BV = target_row_BV.mul_(_HINT_OF_TARGET * DRAW_UNITS).add_(rest_BV, alpha=DRAW_UNITS)
    return draw_units(units_BV, uniforms_BP, vocab_size=vocab_size)


def verify_greedy(draft: Draft, target_logits_BTV: Tensor) -> Verdict:
    """Accept the drafted tokens that are the target's own best choice.

    Args:
        draft: ids; probabilities are not looked at.
        target_logits_BTV: the target's logits at K + 1 positions.

    Returns:
        The verdict; the next token is the best one after the accepted prefix.
    """
    best_BT = target_logits_BTV.argmax(-1)  # a NaN is the largest
    largest_BT = target_logits_BTV.gather(-1, best_BT[..., None])[..., 0]
    num_accepted_B1 = _length_of_prefix((best_BT[:, :-1] == draft.ids_BK)[..., None])
    return Verdict(num_accepted_B1, best_BT.gather(-1, num_accepted_B1), largest_BT.gather(-1, num_accepted_B1))


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


class _OnProbabilities:
    """A rule on processed probabilities."""

    def __init__(self, process: Callable[[Tensor], Tensor], verify: Callable[..., Verdict]) -> None:
        self.process = process
        self._verify = verify

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor) -> tuple[Tensor, Tensor]:
        probs_BV = self.process(logits_BV)
        return draw(probs_BV, uniforms_BP), probs_BV

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        return self._verify(draft, target_BTV, draws=draws)


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

    At temperature 0 all rules coincide.

    Raises:
        ConfigError: `greedy` at a temperature above 0, whose text would not have the target's distribution.
    """
    if sampling.temperature == 0:
        return _Greedy()
    rule = rule_of(verification.rule)
    if not rule.needs_probs:
        *others, last = at_every_temperature()
        raise ConfigError(
            f"verification={rule.name} with sampling.temperature={sampling.temperature:g} would not keep the target's "
            f"distribution: {rule.name} verification needs temperature 0 (sampling=greedy); "
            f"{', '.join(others)} and {last} keep it at every temperature"
        )
    return _OnProbabilities(processor(sampling), rule.load_verify())
