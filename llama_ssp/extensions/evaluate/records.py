"""The records of evaluation: its task with settings and checks, and the registry of suites. Imports no torch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from llama_ssp.extensions.evaluate.audit.records import AUDIT, AUDIT_COMMAND, SWAPS  # noqa: F401 - registries read them
from llama_ssp.registry import Registry
from llama_ssp.settings.fields import made, setting, with_value
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.settings.tasks import NoEffect, TaskSpec, default_of, default_prompts

if TYPE_CHECKING:  # plans need none of them
    from llama_ssp.extensions.evaluate.martingales import TextSums
    from llama_ssp.reports.records import Evaluation, LineKey
    from llama_ssp.reports.summary import CompletionPair


@dataclass(kw_only=True)
class EvaluateConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, compared by a suite that ends with a verdict."""

    name: str = "evaluate"
    suite: str = setting(
        "distribution",
        "distribution (do samples have one distribution; num_samples=500 of each prompt), agreement (is greedy text "
        "equal, up to near ties), or arithmetic (are products right equally often).",
    )
    gate: bool = setting(False, "true ends with exit code 1 if the suite fails, for CI.")
    margin: float = setting(0.1, "of suite=arithmetic; rates that differ by less count as equivalent.")
    near_tie: float | None = setting(
        None,
        "of suite=agreement; log-probabilities, in nats, that differ by no more may change their order. null takes "
        "0.001 in fp32, 0.1 in fp16 and 0.5 in bf16.",
    )
    default_prompts: list[str] = made(
        list, "prompts of suite=distribution and suite=agreement without prompt= or prompts=."
    )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All pairs of a run, in order of prompts and samples.

    Attributes:
        log_probs: for each scored text, the natural log-probability of every new token under the target.
        sums: sums of the speculative texts, if the suite needs them.
        apart: total variation between the run's processors and transformers' warpers, if the suite needs sums.
        out_of_reach: faults that no text of the run can show.
        is_reproducible: whether the bits of logits did not depend on the draft.
    """

    config: RunConfig
    pairs: "Sequence[CompletionPair]"
    log_probs: "Mapping[LineKey, Sequence[float]]"
    sums: "Sequence[TextSums]" = ()
    apart: float = 0.0
    out_of_reach: "Sequence[str]" = ()
    is_reproducible: bool = False


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite."""

    name: str  # value of `task.suite`.
    judge: "Callable[[Evidence], Evaluation]"
    # which completions of such pairs the target scores, token by token, before the judge is called.
    scored: Callable[[Any], Iterable[Any]] = lambda _pairs: ()
    # the draft scores the speculative ones too, and the judge has their sums (`martingales`).
    needs_sums: bool = False
    # the prompts; by default the user's, or `task.default_prompts`.
    prompts: Callable[[RunConfig], Sequence[str]] = default_prompts
    # values of the run's settings, by dotted key, where neither the user nor a bundle has set one.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()  # the task's settings that this suite reads, apart from `suite` and `gate`.
    # why more than one sample of a prompt has no effect, a relative clause; empty if it has one.
    why_one_sample: str = ""
    # yields the problems of a config.
    problems: Callable[[RunConfig], Iterable[str]] = lambda _config: ()


SUITES: Registry[Suite] = Registry(setting="suite", modules=("llama_ssp.extensions.evaluate.suites",), kind=Suite)
register_suite = SUITES.register


def task_and_suite(config: RunConfig) -> tuple[EvaluateConfig, Suite]:
    """Return the task's settings and the record of its suite; raises ConfigError for an unknown suite."""
    task = cast("EvaluateConfig", config.task)
    return task, SUITES.of(task.suite)


def _fill_in(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """Set each default of the suite unless its key or group is in `explicit`, or a bundle has set another value."""
    suite = SUITES.find(cast("EvaluateConfig", config.task).suite)
    for key, value in suite.defaults.items() if suite else ():
        group, _, name = key.rpartition(".")
        part: Any = attrgetter(group)(config) if group else config
        if not {key, group} & explicit and getattr(part, name) == default_of(part, name):
            config = with_value(config, key, value)
    return config


def _problems(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("EvaluateConfig", config.task)
    if config.prompts == "-":
        yield "prompts=- has no effect on task=evaluate, which finds its prompts again when resumed: give prompts=FILE"
    suite = SUITES.find(task.suite)
    if suite is None:
        yield SUITES.problem_of(task.suite) or ""
        return
    yield from suite.problems(config)
    read = {"name", "suite", "gate", *suite.settings}
    for name in [entry.name for entry in fields(task) if entry.name not in read and f"task.{entry.name}" in explicit]:
        yield NoEffect(f"task.{name}", f"on suite={suite.name}")
    if suite.prompts is not default_prompts:
        for name in [name for name in ("prompt", "prompts") if getattr(config, name) not in {None, "-"}]:
            yield NoEffect(name, f"on suite={suite.name}, which makes its own prompts")
    if suite.why_one_sample and config.num_samples > 1:
        yield NoEffect("num_samples", f"on suite={suite.name}, {suite.why_one_sample}")


EVALUATE = TaskSpec(
    config=EvaluateConfig,
    run="llama_ssp.extensions.evaluate.task:evaluate",
    needs_draft=True,
    has_both_modes=True,
    keeps_taps=True,
    ranges=(
        ("margin", lambda m: 0 < m < 1, "a difference of two rates, between 0 and 1, for example 0.1"),
        ("near_tie", lambda t: 0 <= t < math.inf, "0 or more nats, or {null} for the number format's own"),
    ),
    changeable=("gate", "margin", "near_tie"),
    variant="suite",
    failure="an evaluation with gate=true failed",
    former={"eval": "task=evaluate suite=arithmetic"},
    fill_in=_fill_in,
    prompts=lambda config: task_and_suite(config)[1].prompts(config),
    problems=_problems,
)
