"""`task=evaluate`: its settings, checks and record. Each suite is a module of this package."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import cast

from llama_ssp.fields import made, setting
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.settings.tasks import SUITES, NoEffect, Suite, TaskSpec, default_prompts, fill_in


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
    num_prompts: int = setting(1000, "of suite=arithmetic, the products to compute.")
    margin: float = setting(0.1, "of suite=arithmetic; rates that differ by less count as equivalent.")
    near_tie: float | None = setting(
        None,
        "of suite=agreement; log-probabilities, in nats, that differ by no more may change their order. null takes "
        "0.001 in fp32, 0.1 in fp16 and 0.5 in bf16.",
    )
    default_prompts: list[str] = made(
        list, "prompts of suite=distribution and suite=agreement without prompt= or prompts=."
    )


def task_and_suite(config: RunConfig) -> tuple[EvaluateConfig, Suite]:
    """The task's settings and the record of its suite; an unknown one raises ConfigError."""
    task = cast("EvaluateConfig", config.task)
    return task, SUITES.of(task.suite)


def _fill_in_for_evaluate(config: RunConfig, explicit: frozenset[str]) -> None:
    if suite := SUITES.find(cast("EvaluateConfig", config.task).suite):
        fill_in(config, suite.defaults, explicit)


def _prompts_of_evaluate(config: RunConfig) -> Sequence[str]:
    _, suite = task_and_suite(config)
    return suite.prompts(config) if suite.prompts else default_prompts(config)


def _problems_of_evaluate(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("EvaluateConfig", config.task)
    if config.prompts == "-":
        yield "prompts=- has no effect on task=evaluate, which finds its prompts again when resumed: give prompts=FILE"
    suite = SUITES.find(task.suite)
    if suite is None:
        yield SUITES.problem_of(task.suite) or ""
        return
    yield from suite.problems(config)
    read = {"name", "suite", "gate", *suite.settings}
    for name in [each.name for each in fields(task) if each.name not in read and f"task.{each.name}" in explicit]:
        yield NoEffect(f"task.{name}", f"on suite={suite.name}")
    if suite.prompts:
        for name in [name for name in ("prompt", "prompts") if getattr(config, name) not in {None, "-"}]:
            yield NoEffect(name, f"on suite={suite.name}, which makes its own prompts")
    if suite.why_one_sample and config.num_samples > 1:
        yield NoEffect("num_samples", f"on suite={suite.name}, {suite.why_one_sample}")


EVALUATE = TaskSpec(
    config=EvaluateConfig,
    run="llama_ssp.run.tasks.evaluate:evaluate",
    needs_draft=True,
    has_both_modes=True,
    fill_in=_fill_in_for_evaluate,
    prompts=_prompts_of_evaluate,
    problems=_problems_of_evaluate,
)
