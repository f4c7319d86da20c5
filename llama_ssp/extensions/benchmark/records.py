"""The records of measurements: their tasks, with settings and checks. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from llama_ssp.settings.drafters import drafts
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.settings.tasks import NoEffect, TaskSpec


@dataclass(kw_only=True)
class LatencyConfig(TaskConfig):
    """Milliseconds per token over a fixed list of one-sentence prompts."""

    name: str = "latency"
    default_prompts: list[str] = made(list, "prompts of a run without prompt= or prompts=.")
    num_warmup: int = setting(1, "other prompts, decoded before the clock starts.")


LATENCY = TaskSpec(
    config=LatencyConfig,
    run="llama_ssp.extensions.benchmark.latency:latency",
    reuses_prompts=False,
    shows_times=True,
    ranges=(("num_warmup", lambda n: n >= 0, "0 or more prompts"),),
)


@dataclass(kw_only=True)
class BenchmarkConfig(TaskConfig):
    """One table over all combinations of the three lists, measured alternately with transformers' own generation."""

    name: str = "benchmark"
    num_draft_tokens: list[int] = made(list, "values of K.")
    prompt_tokens: list[int] = made(list, "lengths of the prompt.")
    batch_sizes: list[int] = made(list, "sequences decoded together.")
    repetitions: int = setting(
        3, "measured repetitions of each cell, after one that is not counted; the table has medians."
    )
    peers: bool = setting(
        True,
        "false leaves out transformers, which needs one rank, files without an adapter, and weights not quantized by "
        "llama-ssp.",
    )
    default_prompts: list[str] = made(
        list, "text that prompts of each length are cut from, without prompt= or prompts=."
    )


def _problems_of_benchmark(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("BenchmarkConfig", config.task)
    for name in ("num_draft_tokens", "prompt_tokens", "batch_sizes"):
        values = getattr(task, name)
        if not values or min(values) < 1:
            yield f"task.{name}={values} must be a list of numbers of at least 1, for example [1,4]"
    if config.prompts == "-":
        yield "prompts=- has no effect on task=benchmark, whose prompts are cut from a text: give prompts=FILE"
    if config.placement.num_replicas > 1:
        yield "task=benchmark measures one replica of the models: leave placement.num_replicas out"
    limiting = (config.model, config.draft.model if config.speculation.overlap else None)
    contexts = [model.shape.max_position_embeddings for model in limiting if model and model.shape]
    if contexts and task.prompt_tokens and max(task.prompt_tokens) + config.max_new_tokens > min(contexts):
        yield (
            f"task.prompt_tokens={task.prompt_tokens} with max_new_tokens={config.max_new_tokens} is more than the "
            f"context of {min(contexts)} tokens: {min(contexts) - config.max_new_tokens} at most would fit"
        )
    names = ("num_samples", "ignore_eos", "stop_strings", "chat", "logprobs", "prompt_logprobs")
    unread = dict.fromkeys(names, "on task=benchmark")
    unread["batch_size"] = "on task=benchmark: give task.batch_sizes=[...]"
    unread["speculation.num_draft_tokens"] = "on task=benchmark: give task.num_draft_tokens=[...]"
    if not drafts(config.draft):
        unread["task.num_draft_tokens"] = "without a draft: give one with draft=NAME"
    yield from (NoEffect(key, reason) for key, reason in unread.items() if key in explicit)


def _largest_cell_of_benchmark(config: RunConfig) -> tuple[RunConfig, int]:
    task = cast("BenchmarkConfig", config.task)
    speculation = replace(config.speculation, num_draft_tokens=max(task.num_draft_tokens))
    return replace(config, batch_size=max(task.batch_sizes), speculation=speculation), max(task.prompt_tokens)


def _drafted_of_benchmark(config: RunConfig) -> Sequence[int | str]:
    return cast("BenchmarkConfig", config.task).num_draft_tokens or [config.speculation.num_draft_tokens]


BENCHMARK = TaskSpec(
    config=BenchmarkConfig,
    run="llama_ssp.extensions.benchmark.benchmark:benchmark",
    reuses_prompts=False,
    takes_turns=False,
    shows_times=True,
    ranges=(("repetitions", lambda n: n >= 1, "at least 1"),),
    check_files="llama_ssp.extensions.benchmark.benchmark:check_peers",
    problems=_problems_of_benchmark,
    largest_cell=_largest_cell_of_benchmark,
    drafted=_drafted_of_benchmark,
    results="llama_ssp.extensions.benchmark.cells:BenchmarkCell",
    batch_size_setting="task.batch_sizes=[{}]",
)
