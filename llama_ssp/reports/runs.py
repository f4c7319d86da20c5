"""Finished runs, read back from their folders for a report, and their completions and cells as CSV.

Read-only: takes no lock and changes nothing in a run folder. `lines` defines lines and summary.
"""

import csv
import io
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.reports.lines import CompletionLine, Summary
from llama_ssp.reports.reading import MOST_BYTES, read_lines
from llama_ssp.reports.settings import MOST_CHARS, flat, read_settings
from llama_ssp.reports.sweeps.varying import Setting, varying
from llama_ssp.visible import visible

_MOST_STATUS_BYTES = 4096
_TEXTS = ("prompt", "text", "token_ids", "accepted_lengths", "examined_lengths", "draft_lengths", "messages", "fields")
_OWN_COLUMNS = ("task", "model", "draft", "ranks", "seed")
"""Facts that every table has, whether they vary or not."""
_NAMED_BY_FACTS = {"task.name", "model.name", "draft.kind", "draft.model.name"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with a summary, which covers only the finished part of an interrupted run.

    `status` and `settings`, by dotted keys, come from its folder; they are empty while the run writes its own report.
    """

    name: str
    status: str
    summary: Summary
    lines: tuple[CompletionLine, ...]
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, object]:
        """Its settings by dotted keys; models, draft and task by the names that reports show, and its ranks."""
        summary = self.summary
        named = {"task": summary.task, "model": summary.model, "draft": summary.draft or "none"}
        others = {key: value for key, value in self.settings.items() if key not in _NAMED_BY_FACTS}
        return {**named, "ranks": summary.world_size, **others}

    @property
    def num_draft_tokens(self) -> int:
        """K, or the largest one of a run that chooses it; 0 without a draft."""
        return len(self.summary.speculative.accepted_histogram) - 1 if self.summary.speculative else 0

    @property
    def drafting(self) -> str:
        """K as a text: a number, `auto` if each round has its own, or nothing without a draft."""
        return self.summary.speculative.drafting if self.summary.speculative else ""

    @property
    def pair(self) -> str:
        """Its models."""
        return f"{self.summary.model} + {self.summary.draft}" if self.summary.draft else self.summary.model


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read every run in the folders of runs or sweeps, and below them; raises ConfigError for a folder without a run.

    Returns readable runs in order of their paths, each once, and a sentence for each run without a summary or with a
    damaged file.
    """
    runs, missing = [], []
    seen = set[Path]()
    for folder in folders:
        try:
            found = sorted((file.parent for file in folder.rglob("config.yaml")), key=_by_number)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read ({error.strerror}): name the folder of a run") from error
        if not found:
            raise ConfigError(f"{folder} holds no run: a run's folder, with its config.yaml, or a sweep's is required")
        for path in found:
            if (resolved := path.resolve()) in seen:
                continue
            seen.add(resolved)
            name = visible(folder.name if path == folder else f"{folder.name}/{path.relative_to(folder)}")
            try:
                if (path / "summary.json").exists():
                    runs.append(read_run(path, name=name))
                else:
                    missing.append(f"{name} has no summary yet: {_status(path)}")
            except OSError as error:
                missing.append(f"{name} cannot be read: {error.strerror}")
            except ConfigError as error:
                missing.append(str(error))
    return runs, missing


def read_run(folder: Path, *, name: str) -> Run:
    """Read one run with a summary; raises ConfigError if a file is damaged, or of another version."""
    file = folder / "summary.json"
    try:
        _check_file(file, most_bytes=MOST_BYTES)
        summary = Summary.from_json(file.read_text(encoding="utf-8"))
        file = folder / "run.jsonl"
        _check_file(file)
        whole = file.read_bytes().rpartition(b"\n")[0]  # the rest after the last line feed was only half written
        lines = tuple(read_lines(whole, CompletionLine.from_json))
        file = folder / "config.yaml"
        _check_file(file, most_bytes=4 * MOST_CHARS)
        settings = flat(read_settings(file.read_text(encoding="utf-8")))
        file = folder / "status"
        status = _status(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read ({reason}): a run of this version is required") from error
    return Run(name=name, status=status, summary=summary, lines=lines, settings=settings)


def _check_file(file: Path, *, most_bytes: int | None = None) -> None:
    """Refuse files that never end, such as pipes, or that would fill the memory; raises OSError or ValueError."""
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a regular file")
    if most_bytes is not None and about.st_size > most_bytes:
        raise ValueError(f"it has {about.st_size} bytes, and at most {most_bytes} are allowed")


def varying_settings(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings that differ between runs; the seed stands last, since runs that differ in it are repeats."""
    found = varying([run.facts for run in runs])
    return sorted(found, key=lambda setting: setting.key == "seed")


def settings_of_rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return the cells that identify each run in a table: its name, models, ranks, seed and the settings that vary."""
    others = [setting for setting in varying_settings(runs) if setting.key not in _OWN_COLUMNS]
    rows = []
    for number, run in enumerate(runs):
        summary = run.summary
        row: dict[str, object] = {"run": run.name, "task": summary.task, "model": summary.model, "draft": summary.draft}
        row |= {"num_draft_tokens": run.num_draft_tokens, "world_size": summary.world_size, "seed": summary.seed}
        rows.append(row | {setting.key: setting.values[number] for setting in others})
    return rows


def to_csv(runs: Sequence[Run]) -> str:
    """Return all completions of all runs as one table, a row each, without texts."""
    known = settings_of_rows(runs)
    measured = [entry.name for entry in fields(CompletionLine) if entry.name not in _TEXTS]
    rows = []
    for facts, run in zip(known, runs, strict=True):
        for line in run.lines:
            row = {name: value for name, value in asdict(line).items() if name in measured}
            sums = {"num_accepted": sum(line.accepted_lengths), "num_examined": sum(line.examined_lengths)}
            rows.append(facts | row | sums)
    return csv_of([*known[0], *measured, "num_accepted", "num_examined"], rows)


def cells_to_csv(runs: Sequence[Run]) -> str:
    """Return the cells of all benchmarks as one table, a row each; empty without a benchmark."""
    rows = []
    for run in runs:
        for cell in run.summary.cells:
            row = {name: value for name, value in asdict(cell).items() if not isinstance(value, dict)}
            row |= {f"{name}_ms_per_token": value for name, value in cell.ms_per_token.items()}
            row |= {f"{name}_forecast_ms_per_token": value for name, value in cell.forecast_ms_per_token.items()}
            rows.append({"run": run.name} | row | cell.versions)
    return csv_of(dict.fromkeys(chain.from_iterable(rows)), rows) if rows else ""


def csv_of(columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Write rows as CSV; a missing value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _status(folder: Path) -> str:
    """Return the status on one line, with control characters visible; raises OSError if it cannot be read."""
    file = folder / "status"
    if not file.is_file():
        return "not started"
    with file.open("rb") as stream:
        status = stream.read(_MOST_STATUS_BYTES).decode("utf-8", errors="replace")
    return visible(" ".join(status.split()))


def _by_number(folder: Path) -> list[tuple[int, str]]:
    """Sort key that puts point 2 of a sweep before point 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in folder.parts]
