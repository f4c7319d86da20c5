"""From the record of a task to its code: the one place that imports and calls it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from llama_ssp.config.registry import imported
from llama_ssp.config.schema import RunConfig
from llama_ssp.config.tasks.spec import task_of
from llama_ssp.distributed.world import World
from llama_ssp.session.session import PromptTask, Session


class Task(Protocol):
    """Does a task with the loaded models, on every rank alike."""

    def __call__(self, session: Session, jobs: list[PromptTask]) -> None:
        """Do it for some jobs: all of them, or those of one prompt that was typed.

        Raises:
            InterruptedRun: on every rank; somebody wished to stop.
        """
        ...


class MachineTask(Protocol):
    """Does a task that needs no models, on every rank alike."""

    def __call__(self, config: RunConfig, world: World) -> str | None:
        """Do it; returns what the user is told at the end."""
        ...


def task_code(config: RunConfig) -> Task:
    """Import the code of a task with models.

    Raises:
        ConfigError: there is no such code.
    """
    code: Task = _imported(task_of(config).run, config)
    return code


def machine_task_code(config: RunConfig) -> MachineTask:
    """Import the code of a task without models.

    Raises:
        ConfigError: there is no such code.
    """
    code: MachineTask = _imported(task_of(config).run, config)
    return code


def check_task(config: RunConfig, folders: Sequence[Path], *, world_size: int) -> None:
    """Let the task look at the checkpoints, before any weight is loaded.

    Raises:
        SspError: it cannot be done with them.
    """
    if named := task_of(config).check_files:
        _imported(named, config)(config, folders, world_size=world_size)


def conclude_task(session: Session) -> None:
    """Let the task have the last word, on rank 0."""
    if named := task_of(session.config).finalize:
        _imported(named, session.config)(session)


def _imported(reference: str, config: RunConfig) -> Any:  # noqa: ANN401 - a function of the kind that the record says
    return imported(reference, setting=f"task={config.task.name}")
