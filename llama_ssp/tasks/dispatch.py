"""Imports and calls the code that a task's record names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from llama_ssp.config.registry import imported
from llama_ssp.config.schema import RunConfig
from llama_ssp.config.tasks import task_of
from llama_ssp.console.terminal import Terminal
from llama_ssp.distributed.world import World
from llama_ssp.session.jobs import PromptTask
from llama_ssp.session.session import Session

Task: TypeAlias = Callable[[Session, list[PromptTask]], None]
"""A task with loaded models, the same on every rank, for all jobs or for those of one typed prompt.

It raises InterruptedRun on every rank if stopped.
"""
MachineTask: TypeAlias = Callable[[RunConfig, World, Terminal], str | None]
"""A task without models, the same on every rank; returns the closing message for the user."""


def task_code(config: RunConfig) -> Task:
    """Import the code of a task with models; raises ConfigError if there is none."""
    code: Task = _imported(task_of(config).run, config)
    return code


def machine_task_code(config: RunConfig) -> MachineTask:
    """Import the code of a task without models; raises ConfigError if there is none."""
    code: MachineTask = _imported(task_of(config).run, config)
    return code


def check_task(config: RunConfig, folders: Sequence[Path], *, world_size: int) -> None:
    """Let the task check the checkpoints before loading; raises SspError if it cannot use them."""
    if named := task_of(config).check_files:
        _imported(named, config)(config, folders, world_size=world_size)


def conclude_task(session: Session) -> None:
    """Run the task's final step, on rank 0."""
    if named := task_of(session.config).finalize:
        _imported(named, session.config)(session)


def _imported(reference: str, config: RunConfig) -> Any:  # noqa: ANN401 - a function, typed by the record's field
    return imported(reference, setting=f"task={config.task.name}")
