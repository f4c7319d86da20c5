"""Settings of `task=benchmark`, their checks, and its record; `tasks.benchmark` measures."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llama_ssp.config.drafts.drafter import drafts
from llama_ssp.config.schema import RunConfig, TaskConfig
from llama_ssp.config.tasks.spec import NoEffect, TaskSpec


@dataclass(kw_only=True)
class BenchmarkConfig(TaskConfig):
    """One table over all combinations of the three lists, measured alternately with transformers' own generation.

    Prompts of each length are cut from `default_prompts`, or from `prompt=` or `prompts=`.
    """

    name: str = "benchmark"
    num_draft_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    repetitions: int = 3
    peers: bool = True
    default_prompts: list[str] = field(default_factory=list)


def _problems(config: RunConfig, _explicit: frozenset[str]) -> Iterator[str]:
    task = config.task
    assert isinstance(task, BenchmarkConfig)
    for name in ("num_draft_tokens", "prompt_tokens", "batch_sizes"):
        values = getattr(task, name)
        if not values or min(values) < 1:
            yield f"task.{name}={values} must be a list of numbers of at least 1, for example [1,4]"
    if task.repetitions < 1:
        yield f"task.repetitions={task.repetitions} must be at least 1"
    if config.prompts == "-":
        yield "prompts=- has no effect on task=benchmark, whose prompts are cut from a text: give prompts=FILE"
    if config.placement.num_replicas > 1:
        yield "task=benchmark measures one replica of the models: leave placement.num_replicas out"
    contexts = [m.shape.max_position_embeddings for m in (config.model, config.draft.model) if m and m.shape]
    if contexts and task.prompt_tokens and max(task.prompt_tokens) + config.max_new_tokens > min(contexts):
        yield (
            f"task.prompt_tokens={task.prompt_tokens} with max_new_tokens={config.max_new_tokens} is more than the "
            f"context of {min(contexts)} tokens: {min(contexts) - config.max_new_tokens} at most would fit"
        )


def _without_effect(config: RunConfig, explicit: frozenset[str]) -> Iterator[NoEffect]:
    for given, instead in (("batch_size", "batch_sizes"), ("speculation.num_draft_tokens", "num_draft_tokens")):
        if given in explicit:
            yield NoEffect(given, f"on task=benchmark: give task.{instead}=[...]")
    if "task.num_draft_tokens" in explicit and not drafts(config.draft):
        yield NoEffect("task.num_draft_tokens", "without a draft: give one with draft=NAME")
    for given in ("num_samples", "ignore_eos", "stop_strings", "chat"):
        if given in explicit:
            yield NoEffect(given, "on task=benchmark")


def _largest_cell(config: RunConfig) -> tuple[RunConfig, int]:
    """The combination that needs the most memory, and its prompt tokens."""
    task = config.task
    assert isinstance(task, BenchmarkConfig)
    speculation = replace(config.speculation, num_draft_tokens=max(task.num_draft_tokens))
    return replace(config, batch_size=max(task.batch_sizes), speculation=speculation), max(task.prompt_tokens)


TASK = TaskSpec(
    config=BenchmarkConfig,
    run="llama_ssp.tasks.benchmark:benchmark",
    takes_turns=False,
    check_files="llama_ssp.session.peers:check_peers",
    problems=_problems,
    without_effect=_without_effect,
    largest_cell=_largest_cell,
    batch_size_setting="task.batch_sizes=[{}]",
)
