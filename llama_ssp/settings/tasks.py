"""Tasks: their records, settings and checks, and the records of the suites of `task=evaluate`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, cast

from llama_ssp.settings.drafters import drafts
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.registry import Registry
from llama_ssp.settings.schema import RunConfig, TaskConfig, WeightsKind


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
    """One task."""

    # its settings. The default of their field `name` is the task's name in `task=`; `conf/task/NAME.yaml` has the
    # values, on top of `/schema/NAME@_here_`.
    config: type[TaskConfig]
    # `module:function` that runs the task on every rank: a `Task` of `run.pipeline`, or a `MachineTask` without models.
    run: str
    needs_models: bool = True  # False for a task that loads no models and writes no run folder.
    why_no_plan: str = "which reads no model"  # without models, why `dry_run` has no effect; a relative clause.
    needs_draft: bool = False  # a run without a draft is refused.
    has_both_modes: bool = False  # with a draft, it completes every prompt plainly and speculatively.
    takes_turns: bool = True  # its prompts may be conversations, whose later turns follow the answers to earlier ones.
    paths: tuple[str, ...] = ()  # settings that are paths, which the command line does not parse.
    # fills in settings of the run, apart from the keys that the user gave.
    fill_in: Callable[[RunConfig, frozenset[str]], None] = lambda config, explicit: None  # noqa: ARG005
    # the prompts of a run without `prompt=` and `prompts=`.
    prompts: Callable[[RunConfig], Sequence[str]] = default_prompts
    # yields the problems of a config and the keys that the user gave, and a `NoEffect` for a setting that has none,
    # which is a warning at a point of a sweep.
    problems: Callable[[RunConfig, frozenset[str]], Iterable[str | NoEffect]] = lambda config, explicit: ()  # noqa: ARG005
    # for a task that measures several sizes, and has a forecast for each, the config of the one that needs the most
    # memory, and its prompt tokens.
    largest_cell: Callable[[RunConfig], tuple[RunConfig, int]] | None = None
    batch_size_setting: str | None = None  # setting that advice suggests for a smaller batch; None for `batch_size`.
    shows_table: bool = True  # the table of completions is shown at the end.
    # `module:function` that checks the checkpoint folders before any weight is loaded, from the config, the folders and
    # `world_size`.
    check_files: str | None = None
    finalize: str | None = None  # `module:function` that rank 0 calls with the session at the end.

    @property
    def name(self) -> str:
        """The task's name in `task=`."""
        name = next(each.default for each in fields(self.config) if each.name == "name")
        assert isinstance(name, str), f"`name` of {self.config.__name__} needs a default: the task's name in `task=`"
        return name


TASKS: Registry[TaskSpec] = Registry(setting="task")
register, task_specs = TASKS.register, TASKS.all


def task_of(config: RunConfig) -> TaskSpec:
    """The task of a run; an unknown one raises ConfigError."""
    return TASKS.of(config.task.name)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite."""

    name: str  # value of `task.suite`.
    judge: Callable[[Any], Any]  # returns the `reports.records.Evaluation` of an `evaluation.evidence.Evidence`.
    # which completions of such pairs the target scores, token by token, before the judge is called.
    scored: Callable[[Any], Iterable[Any]] = lambda pairs: ()  # noqa: ARG005
    # the draft scores the speculative ones too, and the judge has their sums (`evaluation.martingales`).
    needs_sums: bool = False
    # makes the prompts; None for those of the user, or `task.default_prompts`.
    prompts: Callable[[RunConfig], Sequence[str]] | None = None
    # values of the run's settings, by dotted key, where neither the user nor a bundle has set one.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()  # those of the task that this suite reads, apart from `suite` and `gate`.
    # why more than one sample of a prompt has no effect, a relative clause; empty if it has one.
    why_one_sample: str = ""
    # yields the problems of a config.
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()  # noqa: ARG005


SUITES: Registry[Suite] = Registry(setting="suite", package="llama_ssp.evaluation", kind=Suite)
register_suite, suites = SUITES.register, SUITES.all


def fill_in(config: RunConfig, defaults: Mapping[str, Any], explicit: frozenset[str]) -> None:
    """Set each key to its value unless it is in `explicit`, alone or with its group, or has another value already."""
    for key, value in defaults.items():
        group, _, name = key.rpartition(".")
        part: Any = attrgetter(group)(config) if group else config
        if not {key, group} & explicit and getattr(part, name) == default_of(part, name):
            setattr(part, name, value)


def default_of(part: Any, name: str) -> object:  # noqa: ANN401 - any dataclass of settings
    """The default of a field."""
    entry = next(each for each in fields(part) if each.name == name)
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


@dataclass(kw_only=True)
class CompareConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, side by side."""

    name: str = "compare"
    default_prompts: list[str] = made(list, "prompts of a run without prompt= or prompts=.")
    picture: str | None = setting(None, "an .svg file that shows what the terminal showed.")


register(
    TaskSpec(
        config=CompareConfig,
        run="llama_ssp.run.tasks.compare:compare",
        needs_draft=True,
        has_both_modes=True,
        paths=("picture",),
        finalize="llama_ssp.run.tasks.compare:draw",
    )
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


register(TaskSpec(config=GenerateConfig, run="llama_ssp.run.tasks.generate:generate", shows_table=False))


LOCAL = "local"  # The entry of the catalogue that stands for any folder.


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
    elif config.weights is WeightsKind.synthetic:
        yield NoEffect("task.store", "with weights=synthetic, whose acceptance synthetic.agreement sets")
    elif nameless:
        yield (
            f"task.store=true stores a pair by the names of its models, and {' and '.join(nameless)} names any folder: "
            "write an entry of your own, model/NAME.yaml (docs/guides/models.md), or leave task.store out"
        )


register(
    TaskSpec(
        config=LatencyConfig,
        run="llama_ssp.run.tasks.latency:latency",
        problems=_problems_of_latency,
        finalize="llama_ssp.run.tasks.latency:store_pair",
    )
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
    unread = dict.fromkeys(("num_samples", "ignore_eos", "stop_strings", "chat"), "on task=benchmark")
    unread["batch_size"] = "on task=benchmark: give task.batch_sizes=[...]"
    unread["speculation.num_draft_tokens"] = "on task=benchmark: give task.num_draft_tokens=[...]"
    if not drafts(config.draft):
        unread["task.num_draft_tokens"] = "without a draft: give one with draft=NAME"
    yield from (NoEffect(key, reason) for key, reason in unread.items() if key in explicit)


def _largest_cell_of_benchmark(config: RunConfig) -> tuple[RunConfig, int]:
    task = cast("BenchmarkConfig", config.task)
    speculation = replace(config.speculation, num_draft_tokens=max(task.num_draft_tokens))
    return replace(config, batch_size=max(task.batch_sizes), speculation=speculation), max(task.prompt_tokens)


register(
    TaskSpec(
        config=BenchmarkConfig,
        run="llama_ssp.run.tasks.benchmark:benchmark",
        takes_turns=False,
        check_files="llama_ssp.run.tasks.benchmark:check_peers",
        problems=_problems_of_benchmark,
        largest_cell=_largest_cell_of_benchmark,
        batch_size_setting="task.batch_sizes=[{}]",
    )
)


MOST_PROMPTS = 90 * 90  # All products of two numbers of two digits.


@dataclass(kw_only=True)
class EvaluateConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, compared by a suite that ends with a verdict."""

    name: str = "evaluate"
    suite: str = setting(
        "distribution",
        "distribution (do samples have one distribution; num_samples=500 of each prompt), agreement (is greedy text "
        "equal, up to near ties), or arithmetic (are products right equally often).",
    )
    gate: bool = setting(False, "true ends with exit code 1 if the suite fails, for CI.")
    num_prompts: int = setting(1000, "of suite=arithmetic, the products to compute.")
    margin: float = setting(0.1, "of suite=arithmetic; rates that differ by less count as equivalent.")
    near_tie: float | None = setting(
        None,
        "of suite=agreement; log-probabilities, in nats, that differ by no more may change their order. null takes "
        "0.001 in fp32, 0.1 in fp16 and 0.5 in bf16.",
    )
    default_prompts: list[str] = made(
        list, "prompts of suite=distribution and suite=agreement without prompt= or prompts=."
    )


def task_and_suite(config: RunConfig) -> tuple[EvaluateConfig, Suite]:
    """The task's settings and the record of its suite; an unknown one raises ConfigError."""
    task = cast("EvaluateConfig", config.task)
    return task, SUITES.of(task.suite)


def _fill_in_for_evaluate(config: RunConfig, explicit: frozenset[str]) -> None:
    if suite := SUITES.find(cast("EvaluateConfig", config.task).suite):
        fill_in(config, suite.defaults, explicit)


def _prompts_of_evaluate(config: RunConfig) -> Sequence[str]:
    _, suite = task_and_suite(config)
    return suite.prompts(config) if suite.prompts else default_prompts(config)


def _problems_of_evaluate(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("EvaluateConfig", config.task)
    if config.prompts == "-":
        yield "prompts=- has no effect on task=evaluate, which finds its prompts again when resumed: give prompts=FILE"
    suite = SUITES.find(task.suite)
    if suite is None:
        yield SUITES.problem_of(task.suite) or ""
        return
    yield from suite.problems(config)
    read = {"name", "suite", "gate", *suite.settings}
    for name in [each.name for each in fields(task) if each.name not in read and f"task.{each.name}" in explicit]:
        yield NoEffect(f"task.{name}", f"on suite={suite.name}")
    if suite.prompts:
        for name in [name for name in ("prompt", "prompts") if getattr(config, name) not in {None, "-"}]:
            yield NoEffect(name, f"on suite={suite.name}, which makes its own prompts")
    if suite.why_one_sample and config.num_samples > 1:
        yield NoEffect("num_samples", f"on suite={suite.name}, {suite.why_one_sample}")


register(
    TaskSpec(
        config=EvaluateConfig,
        run="llama_ssp.run.tasks.evaluate:evaluate",
        needs_draft=True,
        has_both_modes=True,
        fill_in=_fill_in_for_evaluate,
        prompts=_prompts_of_evaluate,
        problems=_problems_of_evaluate,
    )
)


@dataclass(kw_only=True)
class CalibrateConfig(TaskConfig):
    """Measure this machine without a checkpoint, and write a file of `conf/hardware`."""

    name: str = "calibrate"
    output: str | None = setting(
        None, "file to write; null writes hardware/this_machine.yaml, in conf of a checkout, else in your own folder."
    )


register(
    TaskSpec(
        config=CalibrateConfig,
        run="llama_ssp.run.tasks.calibrate:run",
        needs_models=False,
        why_no_plan="which reads no model and measures what plans are based on",
        paths=("output",),
    )
)
