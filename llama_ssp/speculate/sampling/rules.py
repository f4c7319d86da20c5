"""The rules that decide how many drafted tokens are accepted, and which token follows them.

The rules are pure functions on tensors, vectorised over rows; the host reads no value. A `Rule` combines a function
with the way its drafts are drawn, because a rule is lossless only for drafts drawn as it expects.

Where drafting overlaps verification (`verify_ahead`), the target scores K positions. A row with a block in flight has
K - 1 drafted tokens at the first positions, then the first token of the next block. Other rows have only the latter.

    in flight        | d1 | d2 | d3 | next |     K = 4: four examined
    none in flight   | next |                    one examined

No bonus token follows an accepted draft there: the rest of the next block is in flight already.

Shapes: B sequences, K drafted tokens, T = K + 1 target positions, V vocabulary, P = 2 uniforms per draw.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.ranks.comms import Reads
from llama_ssp.settings.rules import rule_of
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.by_row import ByRow
from llama_ssp.speculate.sampling.context import Context, Penalty, penalty
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.processors import DRAW_UNITS, processor, rows_after, scale_of
from llama_ssp.speculate.sampling.shards import WHOLE, Shard
from llama_ssp.speculate.sampling.uniforms import Draws, exponentials

_HINT_OF_TARGET = 2.0**-50


def verify_speculative(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws, shard: Shard = WHOLE) -> Verdict:
    """Accept the longest prefix of the draft that keeps the target's distribution.

    The target's probabilities are of K + 1 positions, after the same processors as the draft's. Both cover the tokens
    of `shard`; the ranks that share a vocabulary find the same verdict together. At the first rejection the next token
    is drawn from the residual, the positive part of target minus draft. After K acceptances, or if rounding leaves no
    residual, it is drawn from the target's row.

    Source: Chen et al. 2023, arXiv:2302.01318, Algorithm 2; Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    draft_probs_BTV = draft.drawn_law
    target_at_BK1, draft_at_BK1 = shard.at(draft.ids_BK, target_probs_BTV, draft_probs_BTV)
    num_accepted_B1 = (draws.accept_BK[..., None] < target_at_BK1.div_(draft_at_BK1)).cumprod(1).sum(1)

    # Few operators and no branches: after a large forward the CPU must load the code of each new operator into its
    # caches again, which costs more than the operator.
    target_row_BV, draft_row_BV = rows_after(num_accepted_B1, target_probs_BTV, draft_probs_BTV)
    rest_BV = (target_row_BV - draft_row_BV).clamp_min_(0)
    return draw_next(num_accepted_B1, rest_BV, target_row_BV, draws.residual_BP, shard)


def verify_block(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws, shard: Shard = WHOLE) -> Verdict:
    """Accept the longest prefix that passes a joint test: lossless, with more accepted tokens on average.

    Let p_i be the running product of target over draft probabilities, clipped to 1 at every step, and S_i the sum of
    the positive part of p_i target - draft after i tokens. A prefix of i tokens passes with probability
    S_i / (S_i + 1 - p_i), and the longest passing prefix is accepted, even if a shorter one fails.
    The next token is drawn from the positive part of p target - draft after the accepted tokens, otherwise as by
    `verify_speculative`.

    Source: Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    draft_probs_BTV = draft.drawn_law
    target_at_BK1, draft_at_BK1 = shard.at(draft.ids_BK, target_probs_BTV, draft_probs_BTV)
    # The product clipped to 1 at every step equals the product over its largest value so far. It is computed in fp64,
    # because a drafted token can be 2^62 times as probable under the target.
    product_BT1 = pad(target_at_BK1.double().div_(draft_at_BK1).cumprod_(1), (0, 0, 1, 0), value=1.0)
    reach_BT1 = product_BT1.div_(product_BT1.cummax(1).values).to(target_probs_BTV.dtype)
    rest_BTV = (target_probs_BTV * reach_BT1).sub_(draft_probs_BTV).clamp_min_(0)

    # Nothing is left over where draft and target agree: 0 / 0 does not pass there, but a longer prefix surely does.
    rest_BK, missing_BK = shard.total(rest_BTV[:, 1:]), 1 - reach_BT1[:, 1:, 0]
    passes_BK = draws.accept_BK < rest_BK.div(missing_BK.add_(rest_BK))
    lengths_K = torch.arange(1, target_probs_BTV.shape[1], device=target_probs_BTV.device)
    num_accepted_B1 = passes_BK.mul(lengths_K).amax(1, keepdim=True)

    rest_BV, target_row_BV = rows_after(num_accepted_B1, rest_BTV, target_probs_BTV)
    verdict = draw_next(num_accepted_B1, rest_BV, target_row_BV, draws.residual_BP, shard)
    return verdict.noting(rest_BTV[:, 1:, 0])


def draw_next(
    node_B1: Tensor, rest_BV: Tensor, target_row_BV: Tensor, uniforms_BP: Tensor, shard: Shard = WHOLE
) -> Verdict:
    """Draw from the residual, or from the target if rounding leaves no residual; overwrites `target_row_BV`."""
    # A tiny fraction of the target decides if the residual is zero, and is lost in rounding otherwise.
    units_BV = target_row_BV.mul_(_HINT_OF_TARGET * DRAW_UNITS).add_(rest_BV, alpha=DRAW_UNITS)
    next_ids_B1 = shard.draw(units_BV, uniforms_BP, units=1.0)
    return Verdict(node_B1, next_ids_B1, rest_BV[:, :1])


class Rule:
    """Draws tokens from logits, and verifies drafts that were drawn that way.

    Args:
        process: makes probabilities of logits, after `penalize`; None at temperature 0.
        verify: verifies by these probabilities; None for a rule that takes the token with the largest score.
        races: whether each token runs a race with its probability as speed, by random numbers of its position alone.
            The winner is drawn from the probabilities (the exponential race, or Gumbel-max). A drafted token is
            accepted if it wins the target's race too, so the text is the same for every draft, and without one. Source:
            Daliri et al. 2024, arXiv:2408.07978.
        reads_best: whether a rule that takes the largest logit reads only `Reads.best`, if `shard` is whole.
        shard: the shard of the logits, probabilities and scores that this rank has.

    Attributes:
        reads: the part of a model's logits that it reads.
        needs_context: whether `draw` and `process` need the context of their positions.
        takes_best: whether it chooses the token with the largest score.
        goes_by_token: whether accepting a drafted token depends on no later token.
        is_by_row: whether rows have settings of their own.
    """

    def __init__(
        self,
        process: Callable[[Tensor], Tensor] | None,
        verify: Callable[..., Verdict] | None,
        *,
        penalize: Penalty | None = None,
        races: bool = False,
        reads_best: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        self._process, self._verify, self._penalize, self._races = process, verify, penalize, races
        self.shard, self._has_best = shard, reads_best or (verify is None and not shard.is_whole)
        self.reads = Reads.own if not shard.is_whole else Reads.best if reads_best else Reads.all
        self.needs_context = races or penalize is not None
        self.takes_best = verify is None
        self.goes_by_token = verify is None or verify is verify_speculative
        self.is_by_row = isinstance(penalize, ByRow)

    def draw(
        self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw one token after each position, from a draft's or from the target's logits.

        Returns ids (B, T), and the probabilities (B, T, V) they were drawn from, if verification needs them.
        """
        scores_BTV = self.process(logits_BTV, context)
        return self.choose(scores_BTV, uniforms_BTP), None if self.takes_best else scores_BTV

    def choose(self, scores_BTV: Tensor, uniforms_BTP: Tensor) -> Tensor:
        """Draw one token after each position (B, T) from the output of `process`."""
        if self._has_best:
            return scores_BTV[..., 1].long()
        if self.takes_best:
            return scores_BTV.argmax(-1)  # NaN counts as the largest
        ids_B1 = self.shard.draw(scores_BTV.flatten(0, 1), uniforms_BTP.flatten(0, 1))
        return ids_B1.view(scores_BTV.shape[:-1])

    def plain(self, scores_B1V: Tensor, uniforms_B1P: Tensor, node_B1: Tensor | None = None) -> Verdict:
        """Draw the token after a node, by default the root, as plain decoding does, from the output of `process`."""
        ids_B1 = self.choose(scores_B1V, uniforms_B1P)
        node_B1 = torch.zeros_like(ids_B1) if node_B1 is None else node_B1
        return Verdict(node_B1, ids_B1, self._weights(scores_B1V, ids_B1))

    def _weights(self, scores_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        """Return a weight (B, T) for each position of the output of `process`, NaN where `choose` cannot draw."""
        if self.takes_best and not self._has_best:
            return scores_BTV.gather(-1, ids_BT[..., None])[..., 0]
        return scores_BTV[..., 0]

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        """Process the target's logits for `verify`."""
        assert context or not self.needs_context
        if context and self._penalize:
            logits_BTV = self._penalize(logits_BTV, context)
        scores_BTV = self._process(logits_BTV) if self._process else logits_BTV
        if context and self._races:
            ids = self.shard.ids(logits_BTV.shape[-1])
            of_tokens = exponentials(context.keys_B, context.last_BT, vocab_size=len(ids), first_id=ids.start)
            scores_BTV = scores_BTV / of_tokens
        return self.shard.best(scores_BTV) if self.takes_best and not self.shard.is_whole else scores_BTV

    def process_allowed(
        self, logits_BTV: Tensor, context: Context | None, forbidden_BTV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Process the target's logits without forbidden tokens; returns also which positions (B, T) leave no token.

        At such a position every token has probability 0, so that no path continues there; the host ends a row that
        reaches it.
        """
        scores_BTV = self.process(logits_BTV.masked_fill(forbidden_BTV, float("-inf")), context)
        top_BT = scores_BTV[..., 0] if self._has_best else scores_BTV.amax(-1)
        nothing_BT = (top_BT == float("-inf")) | (top_BT.isnan() & ~logits_BTV.amax(-1).isnan())
        return scores_BTV if self.takes_best else scores_BTV.masked_fill(nothing_BT[..., None], 0.0), nothing_BT

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        """Verify a draft against the target's logits at K + 1 positions, as `process` returns them.

        The draft's distribution may cover the whole vocabulary, even if this rank has a shard.
        """
        if self._verify and not draft.is_certain:
            over = {} if self.shard.is_whole else {"shard": self.shard}
            return self._verify(draft._replace(law=self.shard.own(draft.drawn_law)), target_BTV, draws=draws, **over)
        uniforms_BTP = draws.plain_BTP
        if not self.takes_best:
            uniforms_BTP = draft.nodes.at_nodes(uniforms_BTP)[:, : target_BTV.shape[1]]
        chosen_BT = self.choose(target_BTV, uniforms_BTP)
        return draft.nodes.accept(draft.ids_BK, chosen_BT, self._weights(target_BTV, chosen_BT))

    def accepting(self, lengths_B1: Tensor, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        """Accept `lengths_B1` drafted tokens regardless of the target; draw the next token as plain decoding does."""
        index_B1V = lengths_B1[..., None].expand(-1, -1, target_BTV.shape[-1])
        places_B1 = lengths_B1.clamp_max(draws.plain_BTP.shape[1] - 1)  # one draw serves every place of a drawn draft
        uniforms_B1P = draws.plain_BTP.gather(1, places_B1[..., None].expand(-1, -1, draws.plain_BTP.shape[-1]))
        return self.plain(target_BTV.gather(1, index_B1V), uniforms_B1P, lengths_B1)

    def at_most(self, verdict: Verdict, most_B1: Tensor, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        """Accept no more than `most_B1` tokens of a chain, and none of a tree if that is 0.

        A row that would accept at least `most_B1` draws its next token as plain decoding does. This is lossless: the
        text up to there has the target's distribution, and whether more tokens would pass does not matter.
        """
        at_most_B1 = self.accepting(most_B1.clamp_max(target_BTV.shape[1] - 1), target_BTV, draws=draws)
        return verdict.where(verdict.node_B1 >= most_B1, at_most_B1)


class ForcedLengths:
    """Numbers of drafted tokens that rounds accept, to measure times at a given acceptance; the text is not lossless.

    A row's position in the list follows from its new tokens, so that rounds need no number of their own.

    Args:
        lengths: of successive rounds; after the last one, the first again.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        by_place = chain.from_iterable([length, *[0] * length] for length in lengths)
        self._by_place_S = torch.tensor([*by_place], device=device)

    def lengths(self, num_new_B: Tensor) -> Tensor:
        """Return the lengths (B, 1) of rounds that begin after `num_new_B` tokens, the first of them by the prefill."""
        return self._by_place_S[(num_new_B - 1) % len(self._by_place_S)][:, None]


def make_rule(
    sampling: SamplingConfig,
    verification: VerificationConfig,
    *,
    breaks_ties: bool = False,
    is_cut: bool = False,
    of_trees: Callable[..., Verdict] | None = None,
    shard: Shard = WHOLE,
) -> Rule:
    """Make the rule of a run; at temperature 0 all rules coincide, and `greedy` needs it (`settings.combinations`).

    For `breaks_ties` see `processor`. `is_cut` says that several ranks share the model whose logits the rule reads.
    `of_trees` verifies drawn trees, if drafts are trees. `shard` is that of the logits
    (`planning.spec.draws_over_shards`).
    """
    record = rule_of(verification.rule)
    penalize = penalty(sampling, shard)
    if sampling.by_row and sampling.temperature:
        penalize = ByRow()
    if sampling.temperature == 0:
        return Rule(None, None, penalize=penalize, reads_best=is_cut and sampling.takes_best, shard=shard)
    process = None if sampling.by_row else processor(sampling, breaks_ties=breaks_ties and record.needs_probs)
    if not shard.is_whole:
        assert not sampling.truncates, "a shard's law is a softmax"
        assert not sampling.by_row, "of all rows"
        process = partial(shard.softmax, scale=scale_of(sampling.temperature))
    if record.draws_by_position:
        return Rule(process, None, penalize=penalize, races=True, shard=shard)
    assert record.needs_probs, f"{record.name} verification needs temperature 0"
    return Rule(process, of_trees or record.load_verify(), penalize=penalize, shard=shard)


def verify_ahead(
    rule: Rule, in_flight: Draft, first: Draft, target_BKV: Tensor, *, ahead_B: Tensor, draws: Draws
) -> Verdict:
    """Examine the tokens in flight and the first token of the block that follows.

    The rule, whose `process` has made `target_BKV`, decides as in other rounds, once for K tokens and once for one. In
    rows where `ahead_B` is K - 1, that many tokens are in flight and the former counts; where it is 0, the latter. The
    probabilities of the tokens in flight are the first K - 1 rows.

    Returns:
        A verdict on the chain of these tokens. If all of them are accepted, the next token is the last of them again.
    """
    verdict = rule.verify(
        first, torch.cat([target_BKV[:, :1]] * 2, dim=1), draws=draws._replace(accept_BK=draws.accept_BK[:, :1])
    )
    if in_flight.ids_BK.shape[1]:
        # The bonus token, from any row, is dropped.
        target_BTV = torch.cat([target_BKV, target_BKV[:, -1:]], dim=1)
        whole = rule.verify(in_flight.followed_by(first), target_BTV, draws=draws)
        verdict = verdict.where(ahead_B[:, None] > 0, whole)
    next_ids_B1 = torch.where(verdict.node_B1 > ahead_B[:, None], first.ids_BK, verdict.next_ids_B1)
    return verdict._replace(next_ids_B1=next_ids_B1)
