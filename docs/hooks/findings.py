"""The list of findings, newest first, made of the pages in `docs/findings`."""

import re
from dataclasses import dataclass
from datetime import date

from docs.hooks.repository import ROOT

FOLDER = ROOT / "docs" / "findings"
_INTRODUCTION = (
    "What was measured, tried and found out, newest first; failures too. Each page has a question, a method, a result "
    "and a decision. Figures are ratios within one run on a shared two-core machine without a GPU, unless a page says "
    "otherwise."
)
_NAME = re.compile(r"(\d{4}-\d\d-\d\d)-[a-z0-9-]+")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One page: its date is the beginning of its name, its title its first heading."""

    day: date
    title: str
    file: str


def findings() -> list[Finding]:
    """Return every finding, newest first.

    Raises:
        ValueError: a file is not named `YYYY-MM-DD-title.md` or does not open with a heading.
    """
    found = []
    for path in sorted(FOLDER.glob("*.md")):
        named = _NAME.fullmatch(path.stem)
        heading, _, _ = path.read_text(encoding="utf-8").partition("\n")
        if not named or not heading.startswith("# "):
            raise ValueError(f"{path.name}: a finding is named YYYY-MM-DD-title.md and opens with a heading")
        found.append(Finding(day=date.fromisoformat(named[1]), title=heading.removeprefix("# "), file=path.name))
    return sorted(found, key=lambda finding: (-finding.day.toordinal(), finding.title.lower()))


def index_page() -> str:
    """Make the page that lists all findings by day."""
    lines = ["# Findings", _INTRODUCTION]
    days = sorted({finding.day for finding in findings()}, reverse=True)
    for day in days:
        lines.append(f"## {day.isoformat()}")
        lines.append("\n".join(f"- [{each.title}]({each.file})" for each in findings() if each.day == day))
    return "\n\n".join(lines) + "\n"


def navigation() -> list[object]:
    """Return the entries of the findings in mkdocs' own form."""
    return ["findings/index.md", *({each.title: f"findings/{each.file}"} for each in findings())]
