"""Finished runs for tests of reports: on disk as a run leaves them, with figures that are easy to check."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from llama_ssp.reports.records import (
    CompletionLine,
    Forecast,
    Line,
    RankMemory,
    ResultFigures,
    ResultTable,
    RunFacts,
    StartUp,
    Summary,
)
from llama_ssp.reports.runs import Run
from llama_ssp.reports.summary import summarise
from llama_ssp.settings.schema import TaskConfig
from llama_ssp.settings.tasks import TASKS, TaskSpec

PLAIN = CompletionLine(
    index=0,
    sample=0,
    mode="plain",
    prompt="<b>p</b>",
    text="t",
    token_ids=[1] * 10,
    num_new_tokens=10,
    finish_reason="length",
    num_rounds=0,
    num_target_forwards=10,
    accepted_lengths=[],
    examined_lengths=[],
    ms=100.0,
    share_s=0.1,
)
FAST = replace(
    PLAIN,
    mode="speculative",
    num_rounds=3,
    num_target_forwards=4,
    accepted_lengths=[2, 0, 1],
    examined_lengths=[2, 1, 2],
    ms=40.0,
    share_s=0.04,
    draft_s=0.012,
    verify_s=0.018,
    other_s=0.003,
)


@dataclass(frozen=True, kw_only=True)
class ToyCell(Line):
    """A result of a task that there is not."""

    file: ClassVar[str] = "toys.jsonl"
    noun: ClassVar[str] = "cell"
    name: str
    ms_per_token: dict[str, float]
    forecast_ms_per_token: dict[str, float]

    @property
    def key(self) -> str:
        return self.name

    @property
    def figures(self) -> ResultFigures:
        return ResultFigures(self.name, 1, 64, self.ms_per_token, self.forecast_ms_per_token)

    @classmethod
    def on_screen(cls, results: Sequence["ToyCell"]) -> ResultTable:
        return ResultTable(("toys", "assis-"), ("toy",), [[cell.name] for cell in results])

    on_page = on_screen


@dataclass(kw_only=True)
class ToyConfig(TaskConfig):
    """Settings of that task."""

    name: str = "toys"


TOYS = TaskSpec(
    config=ToyConfig, run="toys:run", results="tests.helpers.runs:ToyCell", stores_acceptance="task.keep=true"
)


def with_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let that task be the only one with results of its own that stores the acceptance of pairs."""
    kept = {name: task for name, task in TASKS.all().items() if not (task.results or task.stores_acceptance)}
    monkeypatch.setattr(TASKS, "records", kept | {"toys": TOYS})


CELL = ToyCell(
    name="prompt 16", ms_per_token={"plain": 2.0, "speculative": 2.5}, forecast_ms_per_token={"plain": 600.5}
)
FACTS = RunFacts(
    task="compare",
    model="big",
    draft="small",
    placement={},
    world_size=2,
    seed=7,
    memory=[RankMemory(rank=rank, planned_bytes=3 << 30, measured_peak_bytes=2 << 30) for rank in range(2)],
    startup=StartUp(began_unix_s=1.8e9, composed_s=0.5, imported_s=4.0),
    forecast=Forecast(plain_ms_per_token=9.0, speculative_ms_per_token=4.5, speedup=2.0),
)


def summary(
    *lines: CompletionLine, model: str = "big", draft: str | None = "small", num_draft_tokens: int = 2
) -> Summary:
    return summarise(replace(FACTS, model=model, draft=draft), lines, num_draft_tokens=num_draft_tokens)


def run(*lines: CompletionLine, name: str = "s/0", model: str = "big", num_draft_tokens: int = 2) -> Run:
    """A run with such lines, whose draft is none if no line is speculative."""
    draft = "small" if any(line.mode == "speculative" for line in lines) else None
    found = summary(*lines, model=model, draft=draft, num_draft_tokens=num_draft_tokens)
    return Run(name=name, status="done", summary=found, lines=lines)


def write_run(folder: Path, *lines: CompletionLine, model: str = "big") -> Path:
    """A run folder as a finished run leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 7\n")
    (folder / "status").write_text("done\n")
    (folder / "run.jsonl").write_bytes(b"".join(line.to_json() for line in lines))
    (folder / "summary.json").write_text(json.dumps(asdict(summary(*lines, model=model))))
    return folder
