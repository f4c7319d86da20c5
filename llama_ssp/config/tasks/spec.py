"""What a task is: one record of facts, which the checks, the planner, the command line and the run read.

A task lives in one module of this package, whose `TASK` is its record. Code outside the package adds one with
`register`; `config.plugins` imports it. Nothing here imports torch: the record names the task's code as
`module:function`, and `tasks.dispatch` imports it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from llama_ssp.config import tasks
from llama_ssp.config.registry import Registry
from llama_ssp.config.schema import RunConfig, TaskConfig


def no_problems(_config: RunConfig, _explicit: frozenset[str]) -> Iterable[str]:
    """Accept every config."""
    return ()


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Facts about one task.

    Attributes:
        config: its settings. The default of their field `name` is what `task=` calls it; `conf/task/NAME.yaml` has the
            values, on top of `/schema/NAME@_here_`.
        run: `module:function` that does the task on every rank, a `Task` or without models a `MachineTask` of
            `tasks.dispatch`.
        needs_models: False for a task of the machine alone. It loads no models and writes no run folder.
        why_no_plan: without models, why `dry_run` has no effect; a relative clause.
        needs_draft: a run without a draft is refused.
        paths: settings that are paths; the command line takes them as they are typed.
        problems: says what is wrong with a config; its second argument are the keys that the user gave.
        largest_cell: for a task that measures several sizes, returns the config of the one that needs the most memory,
            and the tokens of its prompts. The summary of such a task has no forecast; its rows have.
        batch_size_setting: how advice says a smaller batch; None where `batch_size` itself has an effect.
        shows_table: whether the table of completions is shown at the end.
        check_files: `module:function` that looks at the folders of the checkpoints before any weight is loaded; it is
            given the config, the folders and `world_size`; None for nothing.
        finalize: `module:function` that rank 0 calls with the session after the last line; None for nothing.
    """

    config: type[TaskConfig]
    run: str
    needs_models: bool = True
    why_no_plan: str = "which reads no model"
    needs_draft: bool = False
    paths: tuple[str, ...] = ()
    problems: Callable[[RunConfig, frozenset[str]], Iterable[str]] = no_problems
    largest_cell: Callable[[RunConfig], tuple[RunConfig, int]] | None = None
    batch_size_setting: str | None = None
    shows_table: bool = True
    check_files: str | None = None
    finalize: str | None = None

    @property
    def name(self) -> str:
        """What `task=` calls it."""
        name = next(each.default for each in fields(self.config) if each.name == "name")
        assert isinstance(name, str), f"`name` of {self.config.__name__} needs a default: what `task=` calls the task"
        return name


TASKS: Registry[TaskSpec] = Registry(tasks.__name__, "TASK", setting="task")
register, task_specs = TASKS.register, TASKS.all


def task_of(config: RunConfig) -> TaskSpec:
    """The task of a run.

    Raises:
        ConfigError: there is no task of this name.
    """
    return TASKS.of(config.task.name)
