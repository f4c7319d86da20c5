"""Finished runs, read back from their folders for a report, and their completions and cells as tables.

Reads only: no lock is taken and nothing in a run folder changes. What a line and a summary hold is said in `lines`.
"""

import csv
import io
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.reports.lines import CompletionLine, Summary
from llama_ssp.reports.reading import MOST_BYTES
from llama_ssp.visible import visible

_MOST_STATUS_BYTES = 4096
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
        The runs that can be read, in order of their paths, and a sentence for each other one: it has no summary yet,
        or one of its files is damaged.

    Raises:
        ConfigError: a folder holds no run, or cannot be read.
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
    """Read one run that has a summary.

    Raises:
        ConfigError: a file is damaged, or of another version.
    """
    file = folder / "summary.json"
    try:
        _check_file(file, most_bytes=MOST_BYTES)
        summary = Summary.from_json(file.read_text(encoding="utf-8"))
        file = folder / "run.jsonl"
        _check_file(file)
        whole = file.read_bytes().rpartition(b"\n")[0]  # what follows the last line feed was only half written
        lines = tuple(CompletionLine.from_json(line) for line in whole.split(b"\n") if line)
        file = folder / "status"
        status = _status(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{file} cannot be read ({reason}): a run of this version is required") from error
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read ({error}): a run of this version is required") from error
    return Run(name=name, status=status, summary=summary, lines=lines)


def _check_file(file: Path, *, most_bytes: int | None = None) -> None:
    """Refuse what would never end, such as a pipe, or fill the memory.

    Raises:
        OSError: there is no such file.
        ValueError: it is no regular file, or too large.
    """
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is no regular file")
    if most_bytes is not None and about.st_size > most_bytes:
        raise ValueError(f"it has {about.st_size} bytes, and at most {most_bytes} are possible")


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


def _status(folder: Path) -> str:
    """Its sentence, visible and on one line.

    Raises:
        OSError: it cannot be read.
    """
    file = folder / "status"
    if not file.is_file():
        return "not started"
    with file.open("rb") as stream:
        said = stream.read(_MOST_STATUS_BYTES).decode("utf-8", errors="replace")
    return visible(" ".join(said.split()))


def _by_number(folder: Path) -> list[tuple[int, str]]:
    """Order points of a sweep as they were numbered: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in folder.parts]
