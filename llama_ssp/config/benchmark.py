"""The settings of `task=benchmark`, and what they must satisfy; what is measured is said in `tasks.benchmark`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.config.schema import DrafterKind, RunConfig, TaskConfig, TaskName


@dataclass(kw_only=True)
class BenchmarkConfig(TaskConfig):
    """One table over all combinations of the three lists, ours and transformers' own generation in turns.

    Prompts of each length are cut from `default_prompts`, or from what `prompt=` or `prompts=` give.
    """

    name: TaskName = TaskName.benchmark
    num_draft_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    repetitions: int = 3
    peers: bool = True
    default_prompts: list[str] = field(default_factory=list)


def problems_of(config: RunConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Say what is wrong with a benchmark; nothing for other tasks."""
    task = config.task
    if not isinstance(task, BenchmarkConfig):
        return
    for name in ("num_draft_tokens", "prompt_tokens", "batch_sizes"):
        values = getattr(task, name)
        if not values or min(values) < 1:
            yield f"task.{name}={values} must be a list of numbers of at least 1, for example [1,4]"
    if task.repetitions < 1:
        yield f"task.repetitions={task.repetitions} must be at least 1"
    if config.prompts == "-":
        yield "prompts=- has no effect on task=benchmark, whose prompts are cut from a text: give prompts=FILE"
    if config.placement.num_replicas > 1:
        yield "task=benchmark measures one copy of the models: leave placement.num_replicas out"
    yield from _without_effect(config, explicit)
    contexts = [m.shape.max_position_embeddings for m in (config.model, config.draft.model) if m and m.shape]
    if contexts and task.prompt_tokens and max(task.prompt_tokens) + config.max_new_tokens > min(contexts):
        yield (
            f"task.prompt_tokens={task.prompt_tokens} with max_new_tokens={config.max_new_tokens} is more than the "
            f"context of {min(contexts)} tokens: {min(contexts) - config.max_new_tokens} at most would fit"
        )


def _without_effect(config: RunConfig, explicit: frozenset[str]) -> Iterator[str]:
    for given, instead in (("batch_size", "batch_sizes"), ("speculation.num_draft_tokens", "num_draft_tokens")):
        if given in explicit:
            yield f"{given} has no effect on task=benchmark: give task.{instead}=[...]"
    if "task.num_draft_tokens" in explicit and config.draft.kind is DrafterKind.none:
        yield "task.num_draft_tokens has no effect without a draft: give one with draft=NAME"
    for given in ("num_samples", "ignore_eos", "stop_strings", "chat"):
        if given in explicit:
            yield f"{given} has no effect on task=benchmark"
