"""The page of a first hour: stores the lines of its tar, from which `benchmarks.readme` writes a table."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import store

Row = dict[str, Any]
_SHOWN = ("plain_ms", "speculative_ms", "speedup", "share_of_copy", "gb_per_s", "us")


def store_tar(packed: Path) -> Path:
    """Append the steps of a first hour to the results, with the versions and the commit that made them."""
    with tarfile.open(packed) as archive:
        [name] = [each for each in archive.getnames() if each.endswith("/results.jsonl")]
        lines = archive.extractfile(name)
        assert lines
        steps: dict[str, Row] = {row["name"]: row for row in map(json.loads, lines)}
    made_by: Row = {}
    for row in steps.get("facts-machine", {"figures": []})["figures"]:
        made_by |= {key: row[key] for key in ("versions", "git_commit", "processor", "gpu") if key in row}
    return store("first_hour", made_by | {"steps": [*steps.values()]})


def text(rows: Sequence[Row]) -> str:
    """The newest first hour of each kind of GPU, as tables."""
    newest = {row.get("gpu", "no GPU"): row for row in rows}
    return "\n\n".join(f"{_title(gpu, row)}\n\n{_table(row['steps'])}" for gpu, row in newest.items())


def _title(gpu: str, row: Row) -> str:
    return f"On {gpu}, torch {row['versions']['torch']}, {row['time']}:"


def _table(steps: Sequence[Row]) -> str:
    lines = [f"| {row['name']} | {row['result']} | {_cell(row)} |" for row in steps]
    return "\n".join(["| step | result | |", "|---|---|---|", *lines])


def _cell(row: Row) -> str:
    """The reason of a step that did not pass; else the best of each figure that it has several of."""
    if row["reason"]:
        return str(row["reason"]).replace("|", "/").replace("\n", " ")[:160]
    found = {key: [each[key] for each in row["figures"] if each.get(key) is not None] for key in _SHOWN}
    return ", ".join(
        f"{key} {max(values) if key == 'gb_per_s' else min(values):.3g}" for key, values in found.items() if values
    )
