"""The records of tasks, which stand with their code, and of files whose lines a task does not complete itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from llama_ssp.errors import LostRankError
from llama_ssp.registry import Registry
from llama_ssp.settings.extensions import Range
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.text.messages import key_of


def default_prompts(config: RunConfig) -> Sequence[str]:
    """The setting `default_prompts` of the task; empty if it has none."""
    prompts: Sequence[str] = getattr(config.task, "default_prompts", ())
    return prompts


@dataclass(frozen=True)
class NoEffect:
    """A setting that was given but is not read in this run; `reason` continues the sentence after "has no effect"."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{key_of(self.key)} has no effect {self.reason}"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task."""

    # its settings. The default of their field `name` is the task's name in `task=`; `conf/task/NAME.yaml` has the
    # values, on top of `/schema/NAME@_here_`.
    config: type[TaskConfig]
    # `module:function` that runs the task on every rank: a `Task` of `run.pipeline`, or a `MachineTask` without models.
    run: str
    needs_models: bool = True  # False for a task that loads no models and writes no run folder.
    why_no_plan: str = "which reads no model"  # without models, why `dry_run` has no effect; a relative clause.
    # whether a run takes prompts of the command line.
    reads_prompts: Callable[[RunConfig], bool] = lambda _config: True
    needs_draft: bool = False  # a run without a draft is refused.
    has_both_modes: bool = False  # with a draft, it completes every prompt plainly and speculatively.
    shares_baseline: bool = False  # points of a sweep take over plain completions of earlier ones.
    reuses_prompts: bool = True  # False for a task that measures how long prompts are read.
    takes_turns: bool = True  # its prompts may be conversations, whose later turns follow the answers to earlier ones.
    has_own_sampling: bool = False  # requests have sampling settings of their own.
    keeps_taps: bool = False  # it reads texts with a draft head apart from decoding them, by taps of all tokens.
    shows_times: bool = False  # it shows times, for which `speculation.forced_lengths` may make other texts.
    paths: tuple[str, ...] = ()  # settings that are paths, which the command line does not parse.
    ranges: tuple[Range, ...] = ()  # of its settings, whose keys stand without `task.`.
    changeable: tuple[str, ...] = ()  # settings that may change when a run is resumed: no completion depends on them.
    variant: str | None = None  # setting that says which kind of such a run it is: reports show it where it differs.
    # fills in settings of the run, apart from the keys that the user gave.
    fill_in: Callable[[RunConfig, frozenset[str]], RunConfig] = lambda config, _explicit: config
    # the prompts of a run without `prompt=` and `prompts=`.
    prompts: Callable[[RunConfig], Sequence[str]] = default_prompts
    # yields the problems of a config and the keys that the user gave, and a `NoEffect` for a setting that has none,
    # which is a warning at a point of a sweep.
    problems: Callable[[RunConfig, frozenset[str]], Iterable[str | NoEffect]] = lambda _config, _explicit: ()
    # for a task that measures several sizes, and has a forecast for each, the config of the one that needs the most
    # memory, and its prompt tokens.
    largest_cell: Callable[[RunConfig], tuple[RunConfig, int]] | None = None
    # the numbers of drafted tokens of its rounds.
    drafted: Callable[[RunConfig], Sequence[int | str]] = lambda config: [config.speculation.num_draft_tokens]
    # `module:class` of what it measures beyond completions, a `reports.records.Result`.
    results: str | None = None
    stores_acceptance: str | None = None  # setting with which it stores the acceptance of its pair, which plans take.
    batch_size_setting: str | None = None  # setting that advice suggests for a smaller batch; None for `batch_size`.
    shows_table: bool = True  # the table of completions is shown at the end.
    # `module:function` that checks the checkpoint folders before any weight is loaded, from the config, the folders and
    # `world_size`.
    check_files: str | None = None
    finalize: str | None = None  # `module:function` that rank 0 calls with the session at the end.
    # what the user of a run that has lost a rank does, a clause.
    if_lost: str = LostRankError.remedy
    failure: str = ""  # what ends such a run with exit code 1, a clause of `--help`.
    former: Mapping[str, str] = field(default_factory=dict)  # words of the first llama-ssp, and the settings for them.

    @property
    def name(self) -> str:
        """The task's name in `task=`."""
        name = next(entry.default for entry in fields(self.config) if entry.name == "name")
        assert isinstance(name, str), f"`name` of {self.config.__name__} needs a default: the task's name in `task=`"
        return name


TASKS: Registry[TaskSpec] = Registry(setting="task", modules=("llama_ssp.run.tasks.records",), kind=TaskSpec)
register, task_specs = TASKS.register, TASKS.all


def task_of(config: RunConfig) -> TaskSpec:
    """The task of a run; an unknown one raises ConfigError."""
    return TASKS.of(config.task.name)


def drafted_of(config: RunConfig) -> Sequence[int | str]:
    """The numbers of drafted tokens of a run's rounds."""
    return (TASKS.find(config.task.name) or TaskSpec(config=TaskConfig, run="")).drafted(config)


@dataclass(frozen=True, kw_only=True)
class RequestFile:
    """A kind of file whose lines are requests, which code of its own answers in place of the task.

    Attributes:
        name: a field of its lines; if the extension that reads such files is missing, errors on this field name it.
        purpose: what it is for, in the help of `prompts`.
        output: the file of the run folder with the answers.
        is_one: returns whether the prompts of a run are such a file.
        problems: yields problems of a run with such a file, as those of a task.
        run: `module:function` that answers the lines on every rank: a `Task` of `run.pipeline`, called without
            requests.
    """

    name: str
    purpose: str
    output: str
    is_one: Callable[[RunConfig], bool]
    problems: Callable[[RunConfig, frozenset[str]], Iterable[str | NoEffect]]
    run: str


REQUEST_FILES: Registry[RequestFile] = Registry(setting="prompts", kind=RequestFile)


def request_file(config: RunConfig) -> RequestFile | None:
    """Return the kind of request file that `prompts` of a run names; None if its prompts are no such file."""
    return next((kind for kind in REQUEST_FILES.all().values() if kind.is_one(config)), None)


def draws_by_row(config: RunConfig) -> bool:
    """Whether requests of a run have sampling settings of their own."""
    task = TASKS.find(config.task.name)
    return bool(config.sampling.by_row or (task and task.has_own_sampling) or request_file(config))


@dataclass(frozen=True, kw_only=True)
class ServedField:
    """A field of served requests that OpenAI's API does not have.

    Attributes:
        name: its name in the body.
        kind: the kind of its value: "a number", "a whole number", "true or false", "a text" or "an object". Other words
            are not checked: `read` checks such a value.
        read: `module:function` that takes the value and the request, and returns the request with the field applied;
            raises ConfigError for a value that it refuses.
    """

    name: str
    kind: str
    read: str


SERVED_FIELDS: Registry[ServedField] = Registry(setting="field", kind=ServedField)


def default_of(part: Any, name: str) -> object:  # noqa: ANN401 - any dataclass of settings
    """The default of a field."""
    entry = next(entry for entry in fields(part) if entry.name == name)
    return entry.default if entry.default_factory is MISSING else entry.default_factory()
