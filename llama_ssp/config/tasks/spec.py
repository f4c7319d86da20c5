"""Records of the tasks (`config.registry`), which the checks, the planner, the command line and the run read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from llama_ssp.config import tasks
from llama_ssp.config.registry import Registry
from llama_ssp.config.schema import RunConfig, TaskConfig


def default_prompts(config: RunConfig) -> Sequence[str]:
    """The setting `default_prompts` of the task; empty if it has none."""
    prompts: Sequence[str] = getattr(config.task, "default_prompts", ())
    return prompts


@dataclass(frozen=True)
class NoEffect:
    """A setting that was given and that this run does not read; `reason` goes on after "has no effect"."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} has no effect {self.reason}"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task.

    Attributes:
        config: its settings. The default of their field `name` is the task's name in `task=`; `conf/task/NAME.yaml` has
            the values, on top of `/schema/NAME@_here_`.
        run: `module:function` that runs the task on every rank: a `Task`, or without models a `MachineTask`, of
            `tasks.dispatch`.
        needs_models: False for a task that loads no models and writes no run folder.
        why_no_plan: without models, why `dry_run` has no effect; a relative clause.
        needs_draft: a run without a draft is refused.
        has_both_modes: with a draft, it completes every prompt plainly and speculatively; a resumed run of another task
            refuses plain lines.
        takes_turns: its prompts may be conversations, whose later turns follow the answers to earlier ones.
        paths: settings that are paths, which the command line does not parse.
        settle: fills in settings of the run; its second argument are the keys that the user gave, which stay.
        prompts: the prompts of a run without `prompt=` and `prompts=`.
        problems: yields the problems of a config; its second argument are the keys that the user gave.
        without_effect: yields the settings that have no effect, with the same arguments. They are problems too, but
            warnings at the points of a sweep.
        largest_cell: for a task that measures several sizes, the config of the one that needs the most memory, and its
            prompt tokens. The forecast of such a task is in its rows instead of its summary.
        batch_size_setting: setting that advice suggests for a smaller batch; None for `batch_size`.
        shows_table: whether the table of completions is shown at the end.
        check_files: `module:function` that checks the checkpoint folders before any weight is loaded; called with the
            config, the folders and `world_size`.
        finalize: `module:function` that rank 0 calls with the session at the end.
    """

    config: type[TaskConfig]
    run: str
    needs_models: bool = True
    why_no_plan: str = "which reads no model"
    needs_draft: bool = False
    has_both_modes: bool = False
    takes_turns: bool = True
    paths: tuple[str, ...] = ()
    settle: Callable[[RunConfig, frozenset[str]], None] = lambda config, explicit: None  # noqa: ARG005
    prompts: Callable[[RunConfig], Sequence[str]] = default_prompts
    problems: Callable[[RunConfig, frozenset[str]], Iterable[str]] = lambda config, explicit: ()  # noqa: ARG005
    without_effect: Callable[[RunConfig, frozenset[str]], Iterable[NoEffect]] = lambda config, explicit: ()  # noqa: ARG005
    largest_cell: Callable[[RunConfig], tuple[RunConfig, int]] | None = None
    batch_size_setting: str | None = None
    shows_table: bool = True
    check_files: str | None = None
    finalize: str | None = None

    @property
    def name(self) -> str:
        """The task's name in `task=`."""
        name = next(each.default for each in fields(self.config) if each.name == "name")
        assert isinstance(name, str), f"`name` of {self.config.__name__} needs a default: the task's name in `task=`"
        return name


TASKS: Registry[TaskSpec] = Registry(tasks.__name__, "TASK", setting="task")
register, task_specs = TASKS.register, TASKS.all


def task_of(config: RunConfig) -> TaskSpec:
    """The task of a run; an unknown one raises ConfigError."""
    return TASKS.of(config.task.name)
