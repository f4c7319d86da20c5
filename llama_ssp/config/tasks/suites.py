"""Records of the suites of `task=evaluate` (`config.registry`): a module of `llama_ssp.evaluation` each, and plugins'.

A suite completes prompts in both modes. Its judge compares the completions, and may ask for the target's probabilities.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from llama_ssp.config.registry import Registry
from llama_ssp.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite.

    Attributes:
        name: value of `task.suite`.
        judge: returns the `reports.evaluation.Evaluation` of an `evaluation.evidence.Evidence`.
        scored: which completions of such pairs the target scores, token by token, before the judge is called.
        needs_sums: the draft scores the speculative ones too, and the judge has their sums (`evaluation.martingales`).
        prompts: makes the prompts; None for those of the user, or `task.default_prompts`.
        defaults: values of the run's settings, by dotted key, where neither the user nor a bundle has set one.
        settings: those of the task that this suite reads, apart from `suite` and `gate`.
        why_one_sample: why more than one sample of a prompt has no effect, a relative clause; empty if it has one.
        problems: yields the problems of a config.
    """

    name: str
    judge: Callable[[Any], Any]
    scored: Callable[[Any], Iterable[Any]] = lambda pairs: ()  # noqa: ARG005
    needs_sums: bool = False
    prompts: Callable[[RunConfig], Sequence[str]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    why_one_sample: str = ""
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()  # noqa: ARG005


SUITES: Registry[Suite] = Registry("llama_ssp.evaluation", "SUITE", setting="suite")
register, suites = SUITES.register, SUITES.all


def fill_in(config: RunConfig, defaults: Mapping[str, Any], explicit: frozenset[str]) -> None:
    """Set each key to its value unless it is in `explicit`, alone or with its group, or has another value already."""
    for key, value in defaults.items():
        group, _, name = key.rpartition(".")
        part: Any = config
        for each in filter(None, group.split(".")):
            part = getattr(part, each)
        if not {key, group} & explicit and getattr(part, name) == default_of(part, name):
            setattr(part, name, value)


def default_of(part: Any, name: str) -> object:  # noqa: ANN401 - any dataclass of settings
    """The default of a field."""
    entry = next(each for each in fields(part) if each.name == name)
    return entry.default if entry.default_factory is MISSING else entry.default_factory()
