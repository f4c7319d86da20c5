"""The folder of a run while it is written: its lock, its finished lines, and files that are replaced atomically.

Only rank 0 opens a run folder; `runs` reads finished ones. docs/reference/runs.md lists its files. `run.opening` writes
the log files; `records` defines lines and summary.
"""

import errno
import fcntl
import json
import os
import platform
import stat
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, TypeVar

from llama_ssp.errors import FULL_DISK, ConfigError, SspError
from llama_ssp.reports.reading import read_settings
from llama_ssp.reports.records import PLAIN, CompletionLine, LineKey, LogProbLine, Result, Summary
from llama_ssp.settings.extensions import MORE
from llama_ssp.settings.tasks import TASKS
from llama_ssp.settings.weight_changes import CHANGES
from llama_ssp.text.messages import visible

MODELS_FILE, LOG_PROBS_FILE = "models.json", "logprobs.jsonl"
CHANGEABLE = (
    "run_dir",
    "resume",
    "quiet",
    "num_prompts",
    "logprobs",
    "prompt_logprobs",
    "timeouts",
    "hardware",
    "dry_run",
    "speculation.acceptance",
    "model.path",
    "draft.model.path",
)
"""Keys of a config, with all below them, that may change when a run is resumed; each task adds some of its own."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Error numbers of file systems without locks, as clusters have them."""
MOST_STATUS_BYTES = 4096
_MOST_CHANGED, _MOST_SHOWN_CHARS = 10, 200
"""Most changed settings that are named, and most characters shown of each value."""


class _HasKey(Protocol):
    @property
    def key(self) -> Hashable: ...
    @classmethod
    def from_json(cls, line: bytes) -> Self: ...


_Keyed = TypeVar("_Keyed", bound=_HasKey)


class RunFolder(AbstractContextManager["RunFolder"]):
    """An open run folder: its path, completions, results of the task; a context manager that releases the lock.

    `is_locked` is false on a file system without locks, where another run with the folder is not noticed.
    """

    def __init__(self, path: Path, config_yaml: str, results: type[Any] | None = None) -> None:
        """Create the folder, or reopen it to resume its run, and mark it as running.

        Raises ConfigError if another run uses the folder, it belongs to another config, or its files are damaged;
        SspError if it cannot be written.
        """
        self.path = path
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
        self._lock, self.is_locked = _locked(path / "lock")
        try:
            self._keep_config(config_yaml)
            self.lines = self._recover("run.jsonl", CompletionLine, made="completion")
            self.results: list[Any] = self._recover(results.file, results, made=results.noun) if results else []
            figures = self._recover(LOG_PROBS_FILE, LogProbLine, made="figures")
            self.scored = {line.key: line.num_top for line in figures}
            self.write_status("running")
            with _explained(path / "run.jsonl"):
                (path / "run.jsonl").touch()
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> frozenset[LineKey]:
        """Keys of the completions in the folder, which a resumed run skips."""
        return frozenset(line.key for line in self.lines)

    def disturbed_before(self, baseline: str | None) -> str | None:
        """Return what disturbed an earlier part of this run, or the run of its baseline; None if nothing did."""
        own = [self.path] if self.lines or self.results else []
        for folder in (*own, *map(Path, [baseline] if baseline else [])):
            file = folder / "summary.json"
            with suppress(ValueError):
                if file.exists() and (found := Summary.from_json(_read(file).decode()).disturbed):
                    return found
        return None

    def append(self, line: CompletionLine) -> None:
        """Write a finished completion to disk; raises SspError if the disk fails, and the run can be resumed."""
        _append(self.path / "run.jsonl", line.to_json())
        self.lines.append(line)

    def append_log_probs(self, lines: Sequence[LogProbLine]) -> None:
        """Write the log-probabilities of completions to disk; raises SspError as `append` does."""
        _append(self.path / LOG_PROBS_FILE, b"".join(line.to_json() for line in lines))
        self.scored |= {line.key: line.num_top for line in lines}

    def check_log_probs(self, *asked: int | None) -> None:
        """Raise ConfigError if earlier figures are fewer than `logprobs` and `prompt_logprobs` ask for now."""
        for known in self.scored.values():
            if any(new is not None and (old is None or old < new) for old, new in zip(known, asked, strict=True)):
                raise ConfigError(
                    f"{self.path / LOG_PROBS_FILE} holds fewer log-probabilities than logprobs= and prompt_logprobs= "
                    "ask for now: give the earlier values, or remove the file to have all made again"
                )

    def take_over(self, folder: Path) -> None:
        """Copy the plain completions of another run that this one lacks; raises ConfigError if they are damaged."""
        file = folder / "run.jsonl"
        whole = _read(file).rpartition(b"\n")[0] if file.exists() else b""
        try:
            others = read_lines(whole, CompletionLine)
        except ValueError as error:
            raise ConfigError(f"{file} cannot be shared: {error}") from None
        for line in [line for line in others if line.mode == PLAIN and line.key not in self.finished]:
            self.append(line)

    def append_result(self, result: Result) -> None:
        """Write a result of the task to disk; raises SspError as `append` does."""
        _append(self.path / type(result).file, result.to_json())
        self.results.append(result)

    def read_kept(self, name: str) -> str | None:
        """Return the content of a file such as `models.json`, None without it; raises SspError if reading fails."""
        file = self.path / name
        return _read(file).decode("utf-8", errors="replace") if file.exists() else None

    def write_kept(self, name: str, content: str) -> None:
        """Write a file such as `models.json`; raises SspError if the disk fails."""
        _write_whole(self.path / name, content)

    def append_kept(self, name: str, content: str) -> None:
        """Append to a file such as those of `write_kept`; raises SspError as `append` does."""
        _append(self.path / name, content.encode())

    def put_in_order(self) -> None:
        """Sort `run.jsonl` by prompt and sample after a run with replicas; on SspError the file is unchanged."""
        self.lines.sort(key=lambda line: (line.index, line.sample))
        self.write_kept("run.jsonl", b"".join(line.to_json() for line in self.lines).decode())

    def write_status(self, status: str) -> None:
        """Set `status` to "running", "done" or "interrupted"; raises SspError if the disk fails."""
        _write_status(self.path, status)

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`; raises SspError if the disk fails."""
        self.write_kept("summary.json", json.dumps(asdict(summary), indent=2) + "\n")

    def close(self) -> None:
        """Release the folder for other runs."""
        self._lock.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _keep_config(self, config_yaml: str) -> None:
        """Write the config of a new folder, or compare it with an old folder's."""
        old_yaml = self.read_kept("config.yaml")
        if old_yaml is None:
            self.write_kept("config.yaml", config_yaml)
            return
        try:
            changes = _changes(read_settings(old_yaml), read_settings(config_yaml))
        except ValueError:
            file = self.path / "config.yaml"
            raise ConfigError(f"{file} is damaged; name another run_dir, or restore it to resume this one") from None
        if changes:
            raise ConfigError(
                f"run_dir={self.path} belongs to another config ({'; '.join(changes)}); "
                "give the same settings to resume it, or name another run_dir"
            )

    def _recover(self, name: str, kind: type[_Keyed], *, made: str) -> list[_Keyed]:
        """Read the finished lines, and cut off a half-written last one."""
        file = self.path / name
        if not file.exists():
            return []
        whole, _, torn = _read(file).rpartition(b"\n")
        if torn:
            with _explained(file):
                os.truncate(file, len(whole) + 1 if whole else 0)
        try:
            return read_lines(whole, kind)
        except ValueError as error:
            raise ConfigError(
                f"{file} cannot be resumed: {error}; "
                f"remove such a line to have its {made} made again, or name another run_dir"
            ) from None


def _changes(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Describe each setting that must not change and has changed, in a clause.

    A list that the old settings do not have counts as empty there.
    """
    old = {key: value for key, value in new.items() if value == []} | old
    tasks = filter(None, (TASKS.find(str(settings.get("task.name"))) for settings in (old, new)))
    files = [f"{entry}.{name}" for entry in ("model", "draft.model") for name in CHANGES.all()]
    of_extensions = [name for more in MORE.all().values() for name in more.changeable]
    changeable = [*CHANGEABLE, *of_extensions, *files, *(f"task.{name}" for task in tasks for name in task.changeable)]
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(f"{key}.".startswith(f"{parent}.") for parent in changeable)
    ]

    def shown(value: object) -> str:
        return json.dumps(value, default=str)[:_MOST_SHOWN_CHARS]

    clauses = [
        f"{key[:_MOST_SHOWN_CHARS]} was {shown(old.get(key))} and is now {shown(new.get(key))}"
        for key in changed[:_MOST_CHANGED]
    ]
    return clauses + ([f"{len(changed) - _MOST_CHANGED} more"] if len(changed) > _MOST_CHANGED else [])


def read_lines(whole: bytes, kind: type[_Keyed]) -> list[_Keyed]:
    """Read the lines of a file; ValueError names one that cannot be read, or has the key of an earlier one."""
    entries, first = list[_Keyed](), dict[Hashable, int]()
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line:
            continue
        try:
            entries.append(kind.from_json(line))
        except ValueError as error:
            raise ValueError(f"line {number} is damaged: {error}") from None
        if (earlier := first.setdefault(entries[-1].key, number)) != number:
            raise ValueError(f"line {number} repeats line {earlier}")
    return entries


def read_status(run_dir: Path) -> str:
    """Return the `status` of a run folder; raises SspError if it cannot be read."""
    return _read(run_dir / "status").decode("utf-8", errors="replace").strip()


def write_failure(run_dir: Path, *, exit_code: int, sentence: str) -> None:
    """Set `status` to the failing exit code and sentence, on any rank if rank 0 is lost; SspError if the disk fails."""
    _write_status(run_dir, f"{exit_code}: {visible(sentence)}")


def _write_status(run_dir: Path, status: str) -> None:
    """Write `status`; on a full disk, overwrite the old file in place, which needs no further block of the disk."""
    file = run_dir / "status"
    try:
        _write_whole(file, f"{status}\n")
    except SspError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL_DISK and file.is_file()):
            raise
        with _explained(file), file.open("r+b") as stream:
            stream.write(status.encode(errors="replace")[: MOST_STATUS_BYTES - 1] + b"\n")
            stream.truncate()
            stream.flush()
            os.fsync(stream.fileno())


def _locked(file: Path) -> tuple[BinaryIO, bool]:
    """Take the lock, if the file system has locks; the kernel releases it when this process ends, however it ends."""
    is_locked = True
    with _explained(file), ExitStack() as closing:
        lock = closing.enter_context(file.open("a+b"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read(200).decode(errors="replace").strip() or "another job"
            raise ConfigError(
                f"run_dir={file.parent} is in use by {owner}; wait for its end, or name another run_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_locked = False
        lock.truncate(0)
        os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
        closing.pop_all()
    return lock, is_locked


def _append(file: Path, line: bytes) -> None:
    with _explained(file), file.open("ab") as stream:
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())


def _write_whole(file: Path, text: str) -> None:
    """Replace a file atomically: a reader, or a crash, sees the old text or the new one."""
    draft = file.with_name(file.name + ".tmp")
    with _explained(file):
        try:
            with draft.open("w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            draft.unlink(missing_ok=True)  # a part of it would waste space on a full disk
            raise
        draft.replace(file)
        with suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(file.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "name a run_dir that can be written"
        if error.errno in FULL_DISK:
            remedy = "free some space and give the same command with this run_dir to resume"
        raise SspError(f"cannot use {file}: {(error.strerror or str(error)).lower()}; {remedy}") from error


def _read(file: Path) -> bytes:
    with _explained(file):
        return read_regular(file)


def read_regular(file: Path, *, most_bytes: int | None = None) -> bytes:
    """Read a regular file of limited size; refuse pipes, which may never end, and files that would fill the memory."""
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(None, "it is not a regular file")
    if most_bytes is not None and about.st_size > most_bytes:
        raise ValueError(f"it has {about.st_size} bytes, and at most {most_bytes} are allowed")
    return file.read_bytes()
