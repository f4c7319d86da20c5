"""Settings and record of `task=latency`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.config.schema import RunConfig, TaskConfig
from llama_ssp.config.tasks.spec import TaskSpec


@dataclass(kw_only=True)
class LatencyConfig(TaskConfig):
    """Milliseconds per token over a fixed list of one-sentence prompts."""

    name: str = "latency"
    default_prompts: list[str] = field(default_factory=list)
    num_warmup: int = 1


def _problems(config: RunConfig, _explicit: frozenset[str]) -> Iterator[str]:
    task = config.task
    assert isinstance(task, LatencyConfig)
    if task.num_warmup < 0:
        yield f"task.num_warmup={task.num_warmup} must be 0 or more prompts"


TASK = TaskSpec(config=LatencyConfig, run="llama_ssp.tasks.latency:latency", problems=_problems)
