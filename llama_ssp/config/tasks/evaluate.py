"""Settings of `task=evaluate`, their checks, and its record; the suites are in `llama_ssp.evaluation`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from llama_ssp.config.schema import RunConfig, TaskConfig
from llama_ssp.config.tasks.spec import NoEffect, TaskSpec, default_prompts
from llama_ssp.config.tasks.suites import SUITES, Suite, fill_in, suites

MOST_PROMPTS = 90 * 90
"""All products of two numbers of two digits."""
_OF_ALL_SUITES = {"name", "suite", "gate"}


@dataclass(kw_only=True)
class EvaluateConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, compared by a suite that ends with a verdict."""

    name: str = "evaluate"
    suite: str = "distribution"
    gate: bool = False
    num_prompts: int = 1000
    margin: float = 0.1
    near_tie: float | None = None
    default_prompts: list[str] = field(default_factory=list)


def task_and_suite(config: RunConfig) -> tuple[EvaluateConfig, Suite]:
    """The task's settings and the record of its suite; an unknown one raises ConfigError."""
    task = config.task
    assert isinstance(task, EvaluateConfig)
    return task, SUITES.of(task.suite)


def _settle(config: RunConfig, explicit: frozenset[str]) -> None:
    assert isinstance(config.task, EvaluateConfig)
    if suite := suites().get(config.task.suite):
        fill_in(config, suite.defaults, explicit)


def _prompts(config: RunConfig) -> Sequence[str]:
    _, suite = task_and_suite(config)
    return suite.prompts(config) if suite.prompts else default_prompts(config)


def _problems(config: RunConfig, _explicit: frozenset[str]) -> Iterator[str]:
    task = config.task
    assert isinstance(task, EvaluateConfig)
    if not 1 <= task.num_prompts <= MOST_PROMPTS:
        yield f"task.num_prompts={task.num_prompts} must be at least 1 and at most {MOST_PROMPTS}, for example 1000"
    if not 0 < task.margin < 1:
        yield f"task.margin={task.margin} must be a difference of two rates, between 0 and 1, for example 0.1"
    if task.near_tie is not None and not 0 <= task.near_tie < float("inf"):
        yield f"task.near_tie={task.near_tie} must be 0 or more nats, or null for the number format's own"
    if config.prompts == "-":
        yield "prompts=- has no effect on task=evaluate, which finds its prompts again when resumed: give prompts=FILE"
    if problem := SUITES.problem_of(task.suite):
        yield problem
    else:
        yield from suites()[task.suite].problems(config)


def _without_effect(config: RunConfig, explicit: frozenset[str]) -> Iterator[NoEffect]:
    task = config.task
    assert isinstance(task, EvaluateConfig)
    suite = suites().get(task.suite)
    if suite is None:
        return
    for name in [each.name for each in fields(task) if each.name not in _OF_ALL_SUITES.union(suite.settings)]:
        if f"task.{name}" in explicit:
            yield NoEffect(f"task.{name}", f"on suite={suite.name}")
    if suite.prompts:
        for name in [name for name in ("prompt", "prompts") if getattr(config, name) not in {None, "-"}]:
            yield NoEffect(name, f"on suite={suite.name}, which makes its own prompts")
    if suite.why_one_sample and config.num_samples > 1:
        yield NoEffect("num_samples", f"on suite={suite.name}, {suite.why_one_sample}")


TASK = TaskSpec(
    config=EvaluateConfig,
    run="llama_ssp.tasks.evaluate:evaluate",
    needs_draft=True,
    has_both_modes=True,
    settle=_settle,
    prompts=_prompts,
    problems=_problems,
    without_effect=_without_effect,
)
