"""Settings and record of `task=latency`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.config.drafts.drafter import drafts
from llama_ssp.config.schema import ModelConfig, RunConfig, TaskConfig, WeightsKind
from llama_ssp.config.tasks.spec import NoEffect, TaskSpec

LOCAL = "local"
"""The entry of the catalogue that stands for any folder."""


@dataclass(kw_only=True)
class LatencyConfig(TaskConfig):
    """Milliseconds per token over a fixed list of one-sentence prompts; `store` keeps the acceptance of the pair."""

    name: str = "latency"
    default_prompts: list[str] = field(default_factory=list)
    num_warmup: int = 1
    store: bool = False


def _problems(config: RunConfig, _explicit: frozenset[str]) -> Iterator[str]:
    task = config.task
    assert isinstance(task, LatencyConfig)
    if task.num_warmup < 0:
        yield f"task.num_warmup={task.num_warmup} must be 0 or more prompts"
    nameless = [f"{key}={LOCAL}" for key, model in _models(config) if model.name == LOCAL]
    if task.store and nameless and not _has_nothing_to_store(config):
        yield (
            f"task.store=true stores a pair by the names of its models, and {' and '.join(nameless)} names any folder: "
            "write an entry of your own, model/NAME.yaml (docs/guides/models.md), or leave task.store out"
        )


def _without_effect(config: RunConfig, _explicit: frozenset[str]) -> Iterator[NoEffect]:
    task = config.task
    assert isinstance(task, LatencyConfig)
    if task.store and (reason := _has_nothing_to_store(config)):
        yield NoEffect("task.store", reason)


def _has_nothing_to_store(config: RunConfig) -> str:
    """Why a run measures no acceptance of its pair; empty if it does."""
    if not drafts(config.draft):
        return "without a draft: give one with draft=NAME"
    if config.weights is WeightsKind.synthetic:
        return "with weights=synthetic, whose acceptance synthetic.agreement sets"
    return ""


def _models(config: RunConfig) -> list[tuple[str, ModelConfig]]:
    return [("model", config.model), *([("draft", config.draft.model)] if config.draft.model else [])]


TASK = TaskSpec(
    config=LatencyConfig,
    run="llama_ssp.tasks.latency:latency",
    problems=_problems,
    without_effect=_without_effect,
    finalize="llama_ssp.tasks.latency:store_pair",
)
