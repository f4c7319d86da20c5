"""The tasks of the core: their settings, checks and records. Imports no torch; each names its code."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast

from llama_ssp.catalogue import LOCAL
from llama_ssp.fields import made, setting
from llama_ssp.settings.drafters import drafts
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.settings.tasks import NoEffect, TaskSpec


@dataclass(kw_only=True)
class CompareConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, side by side."""

    name: str = "compare"
    default_prompts: list[str] = made(list, "prompts of a run without prompt= or prompts=.")
    picture: str | None = setting(None, "an .svg file that shows what the terminal showed.")


COMPARE = TaskSpec(
    config=CompareConfig,
    run="llama_ssp.run.tasks.compare:compare",
    needs_draft=True,
    has_both_modes=True,
    shares_baseline=True,
    shows_times=True,
    paths=("picture",),
    changeable=("picture",),
    finalize="llama_ssp.run.tasks.compare:draw",
)


class OutputFormat(Enum):
    """Output format of `task=generate` on standard output."""

    text = "text"
    jsonl = "jsonl"


@dataclass(kw_only=True)
class GenerateConfig(TaskConfig):
    """Completions only."""

    name: str = "generate"
    format: OutputFormat = setting(
        OutputFormat.text, "jsonl writes a line per completion, with the other fields of its prompt."
    )
    in_order: bool = setting(
        False, "true prints completions in the order of the prompts, not in that in which they end."
    )


GENERATE = TaskSpec(
    config=GenerateConfig,
    run="llama_ssp.run.tasks.generate:generate",
    shows_table=False,
)


@dataclass(kw_only=True)
class LatencyConfig(TaskConfig):
    """Milliseconds per token over a fixed list of one-sentence prompts."""

    name: str = "latency"
    default_prompts: list[str] = made(list, "prompts of a run without prompt= or prompts=.")
    num_warmup: int = setting(1, "other prompts, decoded before the clock starts.")
    store: bool = setting(
        False,
        "true stores the acceptance of the pair in measured_pairs.yaml of your own folder, and plans then take it.",
    )


def _problems_of_latency(config: RunConfig, _explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    models = {"model": config.model, "draft": config.draft.model}
    nameless = [f"{key}={LOCAL}" for key, model in models.items() if model and model.name == LOCAL]
    if not cast("LatencyConfig", config.task).store:
        return
    if not drafts(config.draft):
        yield NoEffect("task.store", "without a draft: give one with draft=NAME")
    elif config.is_synthetic:
        yield NoEffect("task.store", "with weights=synthetic, whose acceptance synthetic.agreement sets")
    elif nameless:
        yield (
            f"task.store=true stores a pair by the names of its models, and {' and '.join(nameless)} names any folder: "
            "write an entry of your own, model/NAME.yaml (docs/guides/models.md), or leave task.store out"
        )


LATENCY = TaskSpec(
    config=LatencyConfig,
    run="llama_ssp.run.tasks.latency:latency",
    reuses_prompts=False,
    shows_times=True,
    ranges=(("num_warmup", lambda n: n >= 0, "0 or more prompts"),),
    changeable=("store",),
    problems=_problems_of_latency,
    finalize="llama_ssp.run.tasks.latency:store_pair",
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


BENCHMARK = TaskSpec(
    config=BenchmarkConfig,
    run="llama_ssp.run.tasks.benchmark:benchmark",
    reuses_prompts=False,
    takes_turns=False,
    shows_times=True,
    ranges=(("repetitions", lambda n: n >= 1, "at least 1"),),
    check_files="llama_ssp.run.tasks.benchmark:check_peers",
    problems=_problems_of_benchmark,
    largest_cell=_largest_cell_of_benchmark,
    batch_size_setting="task.batch_sizes=[{}]",
)
