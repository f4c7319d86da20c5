"""The formats of reports of finished runs: the registry of their records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llama_ssp.registry import Registry, imported

if TYPE_CHECKING:  # slow to import
    from llama_ssp.reports.runs import Run


@dataclass(frozen=True, kw_only=True)
class ReportFormat:
    """One format.

    Attributes:
        name: `llama-ssp report --table=NAME` prints a format without a file.
        write: `module:function` with the arguments of `text`; it raises ConfigError if a package is missing.
        file: its name in the folder of a report; None for a format that is printed.
        purpose: what this file of a run's own folder shows, for `--help`; empty if only reports have it.
        remedy: what a run says after the reason why it could not write the file.
        order: the format's position in lists of formats.
    """

    name: str
    write: str
    file: str | None = None
    purpose: str = ""
    remedy: str = ""
    order: int = 9

    def text(self, runs: "Sequence[Run]", missing: Sequence[str] = ()) -> str:
        """Write the runs; `missing` are sentences about runs that cannot be read."""
        return str(imported(self.write, setting=f"the format {self.name}")(runs, missing))


FORMATS: Registry[ReportFormat] = Registry(setting="report format", kind=ReportFormat)
register = FORMATS.register
