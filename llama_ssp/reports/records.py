"""The records of a run, typed: lines of `run.jsonl`, results of tasks, and `summary.json`.

`folder` reads, writes and locks them; `summary` computes a summary from lines. docs/reference/runs.md has the meaning
of most fields. Names end in `_s` for seconds and contain `ms` for milliseconds.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

from llama_ssp.registry import imported
from llama_ssp.reports.reading import read_json, restore
from llama_ssp.settings.tasks import TASKS, TaskSpec
from llama_ssp.text.log_probs import CompletionLogProbs

SCHEMA_VERSION = 1
MOST_DRAFTED = 1024
"""Largest K of any run."""
PLAIN = "plain"
SPECULATIVE = "speculative"
DISTURBED = "†"
"""Marks a run whose machine was disturbed while it was timed."""
NOT_LOSSLESS = "‡"
"""Marks a run whose texts are not the target's: `speculation.forced_lengths`."""

LineKey: TypeAlias = tuple[int, str, int]
"""The (index, mode, sample) that identifies a finished completion when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a file of the run folder."""

    def to_json(self) -> bytes:
        """Return the line as UTF-8 with its line feed; lone surrogates become question marks."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """Read a line back; raises ValueError unless it is JSON with these fields and possible numbers."""
        return restore(cls, read_json(line))


@dataclass(frozen=True, kw_only=True)
class CompletionLine(Line):
    """One line of `run.jsonl`: one completion of one prompt.

    Attributes:
        examined_lengths: for each round, `completion.num_examined`.
        is_lossless: the text is the target's; false with `speculation.forced_lengths`.
        last_message: of a list of messages, the last one's fields without its content, which is `prompt`.
        share_s: wall time over the rows of the batch and the replicas; `ms / 1000` for one row without replicas.
    """

    index: int
    sample: int
    mode: str
    prompt: str
    text: str
    token_ids: list[int]
    num_new_tokens: int
    finish_reason: str
    num_rounds: int
    num_target_forwards: int
    accepted_lengths: list[int]
    examined_lengths: list[int]
    ms: float
    share_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    draft_lengths: list[int] | None = None
    turn: int = 0
    question_id: str | None = None
    category: str | None = None
    messages: list[dict[str, str]] | None = None
    last_message: dict[str, str] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    first_token_ms: float | None = None
    is_lossless: bool = True

    @property
    def key(self) -> LineKey:
        """Its key when a run is resumed."""
        return self.index, self.mode, self.sample

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """Read a line back; raises ValueError unless it is JSON with the fields above and possible numbers."""
        read = super().from_json(line)
        if read.mode not in {PLAIN, SPECULATIVE}:
            raise ValueError(f"mode holds {read.mode!r}")
        if read.finish_reason not in {"length", "eos", "stop"}:
            raise ValueError(f"finish_reason holds {reprlib.repr(read.finish_reason)}")
        if len(read.token_ids) != read.num_new_tokens:
            raise ValueError(f"token_ids has {len(read.token_ids)} of {read.num_new_tokens} new tokens")
        by_round = [read.accepted_lengths, read.examined_lengths]
        by_round += [] if read.draft_lengths is None else [read.draft_lengths]
        if any(len(lengths) != read.num_rounds for lengths in by_round):
            raise ValueError("its rounds do not add up")
        rounds = zip(*by_round, strict=True)
        if any(max(counts) > MOST_DRAFTED or 0 < counts[1] < counts[0] for counts in rounds):
            raise ValueError("it has an impossible round")
        return read


@dataclass(frozen=True, kw_only=True)
class LogProbLine(CompletionLogProbs, Line):
    """One line of `logprobs.jsonl`: the log-probabilities of one completion."""

    index: int
    mode: str
    sample: int

    @property
    def key(self) -> LineKey:
        """Its key when a run is resumed."""
        return self.index, self.mode, self.sample

    @property
    def num_top(self) -> tuple[float | None, float | None]:
        """Numbers of most probable tokens for new tokens and for the prompt's; None without figures."""
        new, given = (
            None if found is None else max((len(one.top) for one in found), default=math.inf)
            for found in (self.logprobs, self.prompt_logprobs)
        )
        return new, given

    @classmethod
    def of(cls, key: Sequence[object], figures: Mapping[str, object]) -> Self:
        """Return the line of a completion with this key and these log-probabilities; raises ValueError as `restore`."""
        return restore(cls, dict(zip(("index", "mode", "sample"), key, strict=True)) | dict(figures))


@dataclass(frozen=True, kw_only=True)
class PlainSummary:
    """Results of plain decoding."""

    ms_per_token: float | None
    tokens_per_s: float | None
    num_target_forwards: int
    first_token_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculativeSummary(PlainSummary):
    """Results of speculative decoding."""

    num_rounds: int
    tokens_per_round: float | None
    acceptance_rate: float | None
    accepted_histogram: list[int]
    draft_s: float
    verify_s: float
    other_s: float
    drafted_histogram: list[int] | None = None
    accepted_by_position: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory: on a CPU anonymous resident bytes, on a GPU all bytes in use (`ranks.memory`)."""

    rank: int
    planned_bytes: int | None = None
    measured_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Numbers of prompt tokens of completions: those that the target read, and those that its cache held already."""

    num_read: int = 0
    num_reused: int = 0


@dataclass(frozen=True, kw_only=True)
class ExpertsRead:
    """Mean number of distinct experts of a layer that a verification read, and the number that plans expect."""

    num_read: float
    num_expected: float


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """Seconds from the start of rank 0 to the end of each step; null for a step that was not reached.

    A run starts with its process; a later point of a sweep starts after the point before it. `checked_s` ends the
    checks of checkpoints and prompts and the plan. The first token may follow a warm-up; typed prompts and tasks with
    results of their own have none.
    """

    began_unix_s: float
    composed_s: float | None = None
    imported_s: float | None = None
    joined_s: float | None = None
    checked_s: float | None = None
    loaded_s: float | None = None
    first_token_s: float | None = None


class ResultTable(NamedTuple):
    """A table of results: the sentences above it, its columns, and a row of texts for each result."""

    sentences: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class ResultFigures(NamedTuple):
    """Figures of a result: its name in a report, what it counts, and times in ms/token by mode or other candidate."""

    name: str
    num_prompts: int
    num_new_tokens: int
    measured: Mapping[str, float]
    forecast: Mapping[str, float]


class PointOverK(NamedTuple):
    """A result as a point of a figure over K: its panel, its curve, K, and a value with the ends of its interval."""

    panel: str
    line: str
    num_draft_tokens: int
    value: float
    low: float
    high: float


class Result(Protocol):
    """A line of what a task measures beyond completions (`TaskSpec.results`): a dataclass of simple types.

    `Line` reads and writes it. `file` and `noun`, of the class, are its file in the run folder, and what one is called;
    `key` identifies it when a run is resumed. A result with a `point` is drawn by `llama-ssp report figure=FILE`.
    """

    file: ClassVar[str]
    noun: ClassVar[str]

    @property
    def figures(self) -> ResultFigures:
        """Figures that every task's results have."""

    def to_json(self) -> bytes:
        """Return the line."""

    @classmethod
    def on_screen(cls, results: "Sequence[Any]") -> ResultTable:
        """Lay out results for a terminal."""

    @classmethod
    def on_page(cls, results: "Sequence[Any]") -> ResultTable:
        """Lay out results for a report."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Characters whose tokens were drafted and accepted, or chosen by the target."""

    text: str
    drafted: bool


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """One completion for the report: the end of its prompt, and its text in spans."""

    index: int
    sample: int
    mode: str
    prompt: str
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure of an evaluation, with the ends of its interval if it has one; all can be negative."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def within(cls, name: str, value: float, interval: tuple[float, float]) -> "Measure":
        """A figure with its interval."""
        return cls(name=name, value=value, low=interval[0], high=interval[1])

    @property
    def cells(self) -> list[str]:
        """The figure as a row of a table: name, value, interval."""
        interval = "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"
        return [self.name, f"{self.value:.4g}", interval]


MEASURE_COLUMNS = ["", "value", "95 % interval"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The verdict of a task that judges its completions by a suite of checks.

    Attributes:
        reason: a clause that says why it passed or failed.
        unseen: faults that so few tokens would hardly show, with their chances.
    """

    suite: str
    passed: bool
    reason: str
    measures: list[Measure]
    unseen: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The verdict in a few words; if it passed on few tokens, with the faults that they would hardly show."""
        but = f", but could not have found {', '.join(self.unseen)}" if self.passed and self.unseen else ""
        return f"suite={self.suite} {'passed' if self.passed else 'failed'}{but}"

    @property
    def sentence(self) -> str:
        """The verdict and its reason, without a full stop."""
        return f"{self.outcome}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """Time of one rank in rounds that overlap drafting and verification, in this part of the run.

    Attributes:
        waited_s: the part of the rounds' time in which the rank waited for the other model.
        draft_cpu_s: how long its thread ran while it drafted; 0 on ranks of the target.
    """

    rank: int
    rounds_s: float
    waited_s: float
    num_rounds: int = 0
    draft_cpu_s: float = 0.0

    @property
    def worked_s(self) -> float:
        """The time without the waiting."""
        return self.rounds_s - self.waited_s


@dataclass(frozen=True, kw_only=True)
class OverlapSummary:
    """Results of drafting that overlaps verification.

    Attributes:
        target_idle_share, draft_idle_share: mean over the ranks of a model, of the last part of a resumed run; None
            without rounds.
        num_dropped_tokens: drafted tokens that did not become text.
        ranks: the times that the shares are made from.
    """

    target_idle_share: float | None
    draft_idle_share: float | None
    num_drafted_tokens: int
    num_dropped_tokens: int
    ranks: list[RankActivity]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan's forecast for whole completions of a run, prompts included; null without a plan.

    `tokens_per_round` and its range are given only if texts of such prompts were measured (`Acceptance.is_of_texts`).
    """

    plain_ms_per_token: float | None = None
    speculative_ms_per_token: float | None = None
    speedup: float | None = None
    tokens_per_round: float | None = None
    tokens_per_round_range: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Plain completions of another point of a sweep.

    Attributes:
        folder: of the point that made them.
        ms_per_token: of the same completions, made again by the last point that has them; else None.
    """

    folder: str
    ms_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The part of a summary that does not follow from a run's lines.

    Attributes:
        tree: `speculation.tree`; None for chains.
        forced_lengths: `speculation.forced_lengths`; its texts are not lossless.
        point: the run's place in a sweep, with the settings in which its points differ.
        weights: the setting.
        baseline: where plain completions are from, if not from this run.
        machine: processors or GPUs of the ranks.
        disturbed: what disturbed the machine while it was timed; None if nothing was noticed.
        reproducible: the bits of logits did not depend on draft, K, batch and threads.
    """

    task: str
    model: str
    draft: str | None
    tree: str | None = None
    forced_lengths: list[int] = field(default_factory=list)
    point: str | None = None
    weights: str = "checkpoint"
    baseline: Baseline | None = None
    disturbed: str | None = None
    machine: str | None = None
    reproducible: bool = False
    placement: dict[str, Any]
    world_size: int
    seed: int
    forecast: Forecast = field(default_factory=Forecast)
    memory: list[RankMemory]
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    experts: ExpertsRead | None = None
    startup: StartUp | None = None


@dataclass(frozen=True, kw_only=True)
class Summary(RunFacts):
    """All of `summary.json`; `plain`, `speculative` and `speedup` are null for a mode that did not run.

    `cells` holds the results of a task beyond completions, which count among its prompts and new tokens.
    `startup`, `prompt_tokens` and `experts` describe the last part of a resumed run. `evaluation` is the verdict of
    a task that has one, `excerpts` are a few completions for the report.
    """

    schema_version: int = SCHEMA_VERSION
    num_prompts: int
    num_new_tokens: int
    versions: dict[str, str | None]
    git_commit: str | None
    plain: PlainSummary | None
    speculative: SpeculativeSummary | None
    speedup: float | None
    overlap: OverlapSummary | None = None
    cells: list[Any] = field(default_factory=list)
    evaluation: Evaluation | None = None
    excerpts: list[Excerpt] = field(default_factory=list)

    @property
    def drafting(self) -> str:
        """The draft's form: `K = 4`, `K = auto` if each round has its own, or `tree 2x2x1`; empty without a draft."""
        if not self.speculative:
            return ""
        is_chosen, most = self.speculative.drafted_histogram, len(self.speculative.accepted_histogram) - 1
        return f"tree {self.tree}" if self.tree else f"K = {'auto' if is_chosen else most}"

    @property
    def caveat(self) -> str:
        """A clause for texts that are not the target's; empty for others."""
        lengths = self.forced_lengths
        return f"not lossless: speculation.forced_lengths={lengths} says what rounds accept" if lengths else ""

    @property
    def marks(self) -> str:
        """The marks of the run in tables and figures, each after a space."""
        marks = {DISTURBED: self.disturbed, NOT_LOSSLESS: self.forced_lengths}
        return "".join(f" {mark}" for mark, is_marked in marks.items() if is_marked)

    @classmethod
    def from_json(cls, text: str) -> "Summary":
        """Read `summary.json` back; raises ValueError if it is not JSON, of another version, or impossible."""
        content = read_json(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if not isinstance(content, dict) or version != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {reprlib.repr(version)}, not {SCHEMA_VERSION}")
        summary = restore(cls, content)
        if summary.cells:
            if problem := TASKS.problem_of(summary.task):
                raise ValueError(problem)
            kind = kind_of_results(TASKS.of(summary.task))
            if kind is None:
                raise ValueError(f"task={summary.task} has no cells")
            cells = [restore(kind, cell, where=f"cells[{place}].") for place, cell in enumerate(summary.cells)]
            summary = replace(summary, cells=cells)
        fast = summary.speculative
        if fast and not 1 <= len(fast.accepted_histogram) - 1 <= MOST_DRAFTED:
            raise ValueError("speculative.accepted_histogram should hold a count for each of 0..K accepted tokens")
        return summary


def kind_of_results(task: TaskSpec) -> type[Any] | None:
    """The class of a task's results, a `Result`; None for a task that measures completions alone."""
    return imported(task.results, setting=f"task={task.name}") if task.results else None
