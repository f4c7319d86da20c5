"""Finished runs, read back from their folders, and the settings that differ between them.

A sweep over `model=` changes every figure of the model's entry too: settings that follow from a name are left out, so
that a reader finds the name alone.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.reports.folder import MOST_STATUS_BYTES, read_lines, read_regular
from llama_ssp.reports.measures import RunMeasures, measure
from llama_ssp.reports.reading import MOST_BYTES, MOST_CHARS, read_settings
from llama_ssp.reports.records import CompletionLine, Summary
from llama_ssp.settings.tasks import task_specs
from llama_ssp.text.messages import visible

_NAMED_BY_FACTS = {"task.name", "model.name", "draft.kind", "draft.model.name"}
SEED = "seed"
"""The setting in which repetitions differ."""
NO_VALUE = ""
"""Value of a setting that a run does not have."""
_NEVER_SHOWN = re.compile(r"(run_dir|dry_run|quiet|task\.picture|timeouts\..*)$")
"""Settings that change no figure."""
_NAMES = {
    "speculation.num_draft_tokens": "K",
    "hardware.name": "hardware",
    "placement.target.kind": "placement",
    "placement.draft.kind": "draft placement",
}
_ENTRIES = (("model.", "model"), ("draft.", "draft"), ("hardware.", "hardware.name"), ("task.", "task"))
"""Groups whose entries fix several settings, and the settings that name the entry."""
_DESCRIPTION = re.compile(r"hardware\.|(draft\.)?model\.(?!(name|path|adapter|dtype|quantization|cache_dtype)$)")
"""Fields of an entry that describe it: all but the ones that a sweep varies."""
_LONGEST_TEXT = 40


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
        return named | {"ranks": summary.world_size} | others

    @cached_property
    def measures(self) -> RunMeasures:
        """Its measurements with their intervals."""
        return measure(self.lines)

    @property
    def num_draft_tokens(self) -> int:
        """K, or the largest one of a run that chooses it; 0 without a draft."""
        return len(self.summary.speculative.accepted_histogram) - 1 if self.summary.speculative else 0

    @property
    def pair(self) -> str:
        """Its models."""
        return f"{self.summary.model} + {self.summary.draft}" if self.summary.draft else self.summary.model


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read every run in the folders of runs or sweeps, and below them; raises ConfigError for a folder without a run.

    Returns readable runs in order of their paths, each once, and a sentence for each run without a summary or with a
    damaged file.
    """
    runs, missing, seen = [], [], set[Path]()
    for folder in folders:
        try:
            found = sorted((file.parent for file in folder.rglob("config.yaml")), key=_in_order)
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
        summary = Summary.from_json(read_regular(file, most_bytes=MOST_BYTES).decode())
        file = folder / "run.jsonl"
        whole = read_regular(file).rpartition(b"\n")[0]  # the rest after the last line feed was only half written
        lines = tuple(read_lines(whole, CompletionLine))
        file = folder / "config.yaml"
        settings = read_settings(read_regular(file, most_bytes=4 * MOST_CHARS).decode())
        file = folder / "status"
        status = _status(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read ({reason}): a run of this version is required") from error
    return Run(name=name, status=status, summary=summary, lines=lines, settings=settings)


def _status(folder: Path) -> str:
    """Return the status on one line, with control characters visible; raises OSError if it cannot be read."""
    file = folder / "status"
    if not file.is_file():
        return "not started"
    with file.open("rb") as stream:
        status = stream.read(MOST_STATUS_BYTES).decode("utf-8", errors="replace")
    return visible(" ".join(status.split()))


def _in_order(folder: Path) -> list[tuple[int, str]]:
    """Sort key that puts point 2 of a sweep before point 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in folder.parts]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that differs between runs: its dotted key, a short name of its own, and its value in each run."""

    key: str
    name: str
    values: tuple[object, ...]

    @property
    def texts(self) -> list[str]:
        """Its values as a user writes them, shortened."""
        return [_shown(value) for value in self.values]


def varying_settings(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings that differ between runs, in the order of the first run that has them.

    The seed stands last, since runs that differ in it are repeats.
    """
    facts = [run.facts for run in runs]
    keys = dict.fromkeys(key for run in facts for key in run if not _NEVER_SHOWN.match(key))
    columns = {key: tuple(run.get(key, NO_VALUE) for run in facts) for key in keys}
    changing = {key: values for key, values in columns.items() if len(set(map(_identity, values))) > 1}
    kept = sorted((key for key in changing if not _follows(key, changing)), key=lambda key: key == SEED)
    return [Setting(key=key, name=_short_name(key, kept), values=changing[key]) for key in kept]


def drifts_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return how much more time shared plain completions took when they were made again at the end of a sweep.

    The values are shares (0.1 is 10 % more), by the folder of the run that made the completions first.
    """
    again = ((run.summary.baseline, run.summary.plain) for run in runs)
    return {
        made.folder: made.ms_per_token / plain.ms_per_token - 1
        for made, plain in again
        if made and made.ms_per_token and plain and plain.ms_per_token
    }


def names_of(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the heads of the columns that name runs, and each run's cells: its number with marks, varying settings."""
    settings = varying_settings(runs)
    numbers = [f"{number}{run.summary.marks}" for number, run in enumerate(runs, start=1)]
    names = zip(numbers, *(setting.texts for setting in settings), strict=True)
    return ["#", *(setting.name for setting in settings)], [[*of_run] for of_run in names]


def _identity(value: object) -> str:
    return json.dumps(value, default=str)


def _shown(value: object) -> str:
    text = visible(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else _identity(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _follows(key: str, changing: Mapping[str, tuple[object, ...]]) -> bool:
    """Whether a setting follows from the name of an entry, such as a model, that changes as well.

    Such settings are descriptions of the entry, and settings that other entries do not have.
    """
    entries = [*_ENTRIES, *(("task.", f"task.{task.variant}") for task in task_specs().values() if task.variant)]
    if key in {name for _, name in entries} or not (_DESCRIPTION.match(key) or NO_VALUE in changing[key]):
        return False
    return any(key.startswith(group) and name in changing for group, name in entries)


def _short_name(key: str, keys: Sequence[str]) -> str:
    """Return the shortest ending of a key that no other key has."""
    if key in _NAMES:
        return _NAMES[key]
    parts, others = key.split("."), [other.split(".") for other in keys if other != key]
    num = next(n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others))
    return visible(" ".join(parts[-num:]).replace("_", " "))
