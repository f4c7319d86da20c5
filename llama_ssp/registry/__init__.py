"""Registries of records by name: the core's, the extensions', and records that plugins `register`.

Records name code as `module:function` where it needs torch, so that they import nothing slow.
"""

import importlib
import os
import pkgutil
from typing import Any, Generic, Protocol, TypeVar

from llama_ssp import manifest
from llama_ssp.errors import ConfigError, SspError, unknown_name
from llama_ssp.text import messages

PLUGINS = "LLAMA_SSP_PLUGINS"  # Environment variable with the module names, separated by commas.


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Record = TypeVar("Record", bound=_Named)


class Registry(Generic[Record]):
    """The records of one kind; error messages begin with their `setting`.

    All values of type `kind` are records: those in `modules`, in the modules of packages among these, and in `records`
    of every extension. They are read when a record is first needed; records that plugins register replace them.
    """

    def __init__(self, *, setting: str, modules: tuple[str, ...] = (), kind: type[Record] | None = None) -> None:
        self.setting, self._kind = setting, kind
        self._unread = (*modules, *manifest.records_of_extensions()) if kind else ()
        self.records: dict[str, Record] = {}
        self._sorted: dict[str, Record] = {}

    def register(self, record: Record) -> None:
        """Add a record, or replace the one with the same name."""
        self.records[record.name] = record

    def all(self) -> dict[str, Record]:
        """All records by name, sorted by `order` if they have one, then by name."""
        if self._unread:
            self._read()
        if self._sorted != self.records:
            order = sorted(self.records.items(), key=lambda entry: (getattr(entry[1], "order", 0), entry[0]))
            self._sorted = dict(order)
        return self._sorted.copy()

    def find(self, name: str) -> Record | None:
        """The record of a name, if there is one."""
        if self._unread:
            self._read()
        return self.records.get(name)

    def of(self, name: str) -> Record:
        """The record of a name; an unknown one raises ConfigError."""
        # Plans ask thousands of times, and call nothing for that.
        if (self._unread or name not in self.records) and (problem := self.problem_of(name)):
            raise ConfigError(problem)
        return self.records[name]

    def problem_of(self, name: str, *, key: str | None = None) -> str | None:
        """An error sentence if no record has this name: of its extension, or of `key`, by default the setting."""
        if self._unread:
            self._read()
        if name in self.records:
            return None
        return manifest.absent(self.setting, name) or unknown_name(
            messages.key_of(key or self.setting), name, self.all()
        )

    def _read(self) -> None:
        unread, self._unread = self._unread, ()
        try:
            self._take(unread)
        except BaseException:  # later calls must not go on with some of the records
            self._unread = unread
            raise

    def _take(self, modules: tuple[str, ...]) -> None:
        for name in modules:
            module = importlib.import_module(name)
            inner = [f"{name}.{one.name}" for one in pkgutil.iter_modules(getattr(module, "__path__", ()))]
            for found in [module, *map(importlib.import_module, inner)]:
                for record in vars(found).values():
                    if self._kind and isinstance(record, self._kind):
                        self.records.setdefault(record.name, record)


def imported(reference: str, *, setting: str) -> Any:  # noqa: ANN401 - whatever the record names
    """Import the code that a record names as `module:attribute`; `setting` begins the ConfigError if there is none."""
    module, _, attribute = reference.partition(":")
    try:
        code = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting} needs {reference}, which cannot be imported: {error}") from error
    if code is None:
        raise ConfigError(f"{setting} needs {reference}, and {module} has no {attribute!r}")
    return code


def load_plugins() -> None:
    """Import the plugins, or raise ConfigError. Call before `compose`; repeated calls are harmless."""
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        try:
            importlib.import_module(name)
        except SspError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{PLUGINS} names {name}, which cannot be imported ({type(error).__name__}: {reason}): "
                "give modules that are on PYTHONPATH, separated by commas"
            ) from error
