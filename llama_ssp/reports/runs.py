"""Finished runs, read back from their folders for a report, and their completions and cells as tables.

Reads only: no lock is taken and nothing in a run folder changes. What a line and a summary hold is said in `lines`.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports.lines import (
    SCHEMA_VERSION,
    BenchmarkRow,
    CompletionLine,
    Forecast,
    PlainSummary,
    RankMemory,
    SpeculativeSummary,
    StartUp,
    Summary,
)

_NESTED = {"plain": PlainSummary, "speculative": SpeculativeSummary, "forecast": Forecast, "startup": StartUp}
_TEXTS = ("prompt", "text", "token_ids", "accepted_lengths", "examined_lengths")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with a summary.

    Attributes:
        name: what a report calls it.
        status: what its folder said of it; empty while it writes its own report.
        summary: of the whole run, or of what an interrupted one has done.
        lines: its completions.
    """

    name: str
    status: str
    summary: Summary
    lines: tuple[CompletionLine, ...]

    @property
    def num_draft_tokens(self) -> int:
        """K; 0 where nothing was drafted."""
        return len(self.summary.speculative.accepted_histogram) - 1 if self.summary.speculative else 0

    @property
    def pair(self) -> str:
        """Its models."""
        return f"{self.summary.model} + {self.summary.draft}" if self.summary.draft else self.summary.model


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read every run in these folders and below them.

    Args:
        folders: of runs or of sweeps.

    Returns:
        The runs that have a summary, in order of their paths, and a sentence for each that has none.

    Raises:
        ConfigError: a folder holds no run, or a file of one is damaged.
    """
    runs, missing = [], []
    for folder in folders:
        try:
            found = sorted((file.parent for file in folder.rglob("config.yaml")), key=_by_number)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read ({error.strerror}): name the folder of a run") from error
        if not found:
            raise ConfigError(f"{folder} holds no run: a run's folder, with its config.yaml, or a sweep's is required")
        for path in found:
            name = folder.name if path == folder else f"{folder.name}/{path.relative_to(folder)}"
            if (path / "summary.json").exists():
                runs.append(read_run(path, name=name))
            else:
                missing.append(f"{name} has no summary yet: {_status(path)}")
    return runs, missing


def read_run(folder: Path, *, name: str) -> Run:
    """Read one run that has a summary.

    Raises:
        ConfigError: a file is damaged, or of another version.
    """
    file = folder / "summary.json"
    try:
        summary = _summary(json.loads(file.read_text(encoding="utf-8")))
        file = folder / "run.jsonl"
        whole = file.read_bytes().rpartition(b"\n")[0]  # what follows the last line feed was only half written
        lines = tuple(CompletionLine.from_json(line) for line in whole.split(b"\n") if line)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): a run of this version is required") from error
    return Run(name=name, status=_status(folder), summary=summary, lines=lines)


def to_csv(runs: Sequence[Run]) -> str:
    """All completions of all runs as one table, a row each, without texts."""
    facts = ["run", "task", "model", "draft", "num_draft_tokens", "world_size", "seed"]
    measured = [entry.name for entry in fields(CompletionLine) if entry.name not in _TEXTS]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*facts, *measured, "num_accepted", "num_examined"], lineterminator="\n")
    writer.writeheader()
    for run in runs:
        known = {name: getattr(run.summary, name, None) for name in facts}
        known |= {"run": run.name, "num_draft_tokens": run.num_draft_tokens}
        for line in run.lines:
            row = {name: value for name, value in asdict(line).items() if name in measured}
            sums = {"num_accepted": sum(line.accepted_lengths), "num_examined": sum(line.examined_lengths)}
            writer.writerow(known | row | sums)
    return text.getvalue()


def cells_to_csv(runs: Sequence[Run]) -> str:
    """The cells of all benchmarks as one table, a row each; empty where there is no benchmark."""
    rows = []
    for run in runs:
        for cell in run.summary.cells:
            row = {name: value for name, value in asdict(cell).items() if not isinstance(value, dict)}
            row |= {f"{name}_ms_per_token": value for name, value in cell.ms_per_token.items()}
            row |= {f"{name}_forecast_ms_per_token": value for name, value in cell.forecast_ms_per_token.items()}
            rows.append({"run": run.name} | row | cell.versions)
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(chain.from_iterable(rows))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _summary(document: dict[str, Any]) -> Summary:
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"its schema_version is {document['schema_version']}, not {SCHEMA_VERSION}")
    nested = {name: kind(**document[name]) for name, kind in _NESTED.items() if document.get(name) is not None}
    memory = [RankMemory(**rank) for rank in document["memory"]]
    cells = [BenchmarkRow(**cell) for cell in document.get("cells", [])]
    return Summary(**{**document, **nested, "memory": memory, "cells": cells})


def _status(folder: Path) -> str:
    file = folder / "status"
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else "not started"


def _by_number(folder: Path) -> list[tuple[int, str]]:
    """Order points of a sweep as they were numbered: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in folder.parts]
