"""Verification rules: their records, which the planner, the checks and `sampling.rules` read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from llama_ssp.registry import Registry, imported
from llama_ssp.text.messages import said

DEFAULT, AT_ZERO = "speculative", "greedy"  # The default rule, and the rule at temperature 0, where all rules coincide.


@dataclass(frozen=True, kw_only=True)
class RuleRecord:
    """One verification rule."""

    name: str  # value of `verification.rule`.
    order: int = 100  # position in lists of rules.
    # `module:function` with the arguments of `sampling.rules.verify_speculative`; None for a rule that uses logits, at
    # temperature 0 only.
    verify: str | None
    # it needs no probabilities at any temperature: numbers of its position alone draw a token.
    draws_by_position: bool = False
    has_trees: bool = False  # of a drawn tree, `sampling.trees` accepts a path in place of `verify`.
    over_shards: bool = False  # `verify` takes `shard`, so that ranks which share a model need not gather its logits.
    keeps_all_rows: bool = False  # it keeps the vocabulary's fp32 numbers of every position instead of one.
    more_kernels: int = 0  # launched kernels in addition to `speculative`.
    more_passes: int = 0  # passes over a position's probabilities in addition to `speculative`.

    @property
    def needs_probs(self) -> bool:
        """Whether it needs the draft's probabilities."""
        return self.verify is not None

    @property
    def samples(self) -> bool:
        """Whether it keeps the target's distribution at every temperature."""
        return self.needs_probs or self.draws_by_position

    def load_verify(self) -> Callable[..., Any]:
        """Import `verify`."""
        assert self.verify is not None
        return cast("Callable[..., Any]", imported(self.verify, setting=f"verification.rule={self.name}"))


RULES: Registry[RuleRecord] = Registry(setting="verification.rule")
register, rules, rule_of = RULES.register, RULES.all, RULES.of


def at_every_temperature() -> list[str]:
    """Settings for the rules that keep the target's distribution at every temperature."""
    return [said("verification", name) for name, rule in rules().items() if rule.samples]


# Token by token. Source: arXiv:2302.01318, Algorithm 2; arXiv:2211.17192, Algorithm 1.
register(
    RuleRecord(
        name=DEFAULT,
        order=0,
        verify="llama_ssp.speculate.sampling.rules:verify_speculative",
        over_shards=True,
        has_trees=True,
    )
)
# Accepts or rejects the draft as a whole. Source: arXiv:2403.10444, Algorithm 2.
register(
    RuleRecord(
        name="block",
        order=1,
        verify="llama_ssp.speculate.sampling.rules:verify_block",
        over_shards=True,
        has_trees=True,
        keeps_all_rows=True,
        more_kernels=12,
        more_passes=8,
    )
)
# Accepts drafted tokens that equal the target's most probable token.
register(RuleRecord(name=AT_ZERO, order=2, verify=None))
# One seed, one text, whatever drafts: every token wins a race of its own position. Source: arXiv:2408.07978.
register(RuleRecord(name="coupled", order=3, verify=None, draws_by_position=True, keeps_all_rows=True, more_passes=6))
