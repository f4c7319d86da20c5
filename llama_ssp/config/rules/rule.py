"""What a rule is: one record of facts, which the planner, the checks and `sampling.rules` read.

A rule lives in one module of this package, whose `RULE` is its record. Code outside the package adds one with
`register`; `verification.rule=NAME` then works as with the rules here. Nothing here imports torch: a record names its
function as `module:function`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llama_ssp.config import rules as package
from llama_ssp.config.registry import Registry, imported

DEFAULT, AT_ZERO = "speculative", "greedy"
"""The rule of a run that names none, and the rule at temperature 0, where all rules coincide."""


@dataclass(frozen=True, kw_only=True)
class RuleRecord:
    """Facts about one rule.

    Attributes:
        name: what `verification.rule` is set to.
        order: where lists of rules show it, the smallest first.
        verify: `module:function` that maps a draft and the target's probabilities to a verdict, as
            `sampling.rules.verify_speculative` does; None for a rule that judges by logits, at temperature 0 alone.
        keeps_all_rows: it keeps a row of fp32 numbers for each position, not for one alone.
        more_kernels, more_passes: kernels that it launches, and how often it reads or writes a row of probabilities,
            beyond those of `speculative`.
    """

    name: str
    order: int = 100
    verify: str | None
    keeps_all_rows: bool = False
    more_kernels: int = 0
    more_passes: int = 0

    @property
    def needs_probs(self) -> bool:
        """Whether it needs the probabilities that a draft was drawn from; it then works at every temperature."""
        return self.verify is not None

    def load_verify(self) -> Callable[..., Any]:
        """Import the function of a rule that has one."""
        assert self.verify is not None
        found: Callable[..., Any] = imported(self.verify, setting=f"verification.rule={self.name}")
        return found


RULES: Registry[RuleRecord] = Registry(package.__name__, "RULE", setting="verification.rule")
register, rules, rule_of, problem_of = RULES.register, RULES.all, RULES.of, RULES.problem_of


def at_every_temperature() -> list[str]:
    """The rules that keep the target's distribution at every temperature, as settings."""
    return [f"verification={name}" for name, rule in rules().items() if rule.needs_probs]
