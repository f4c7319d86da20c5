"""Drafts of structured text by turns: a schema with the draft and plain, and free text, at one and at eight clients.

    .venv/bin/python -m benchmarks.structured                  prints a table of ratios; --store keeps the figures
    .venv/bin/python -m benchmarks.structured SETTING=VALUE    of the server, such as speculation.num_draft_tokens=auto

One server answers all turns. A turn asks for eight completions or more with the draft, and for as many without
(`speculative: false`), one after the other, so that both share whatever else the machine does. Ratios are of tokens a
second, and of tokens a second of the server's own processor time, which other work on the machine hardly changes.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load import PLAIN, asked, server
from benchmarks.measured import Goal, Row, markdown, store, table_of_goals
from llama_ssp.reports.provenance import processor

CLIENTS, NUM_NEW_TOKENS, TEMPERATURE, REPEATS = (1, 8), 96, 0.8, {1: 1, 8: 3}
GOALS = {("schema", 1): 1.3, ("schema", 8): 1.0, ("free text", 8): 1.0}
"""The least ratio of tokens a second, with the draft over plain."""
_TEXT = {"type": "string", "maxLength": 24}
_INTEGER = {"type": "integer", "minimum": 0, "maximum": 9999}


def _object(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS: dict[str, tuple[str, dict[str, object]]] = {
    "person": ("a person = ", _object(name=_TEXT, age=_INTEGER, email=_TEXT)),
    "call": (
        "the call = ",
        _object(name={"enum": ["search", "open_file", "run_tests"]}, arguments=_object(path=_TEXT, line=_INTEGER)),
    ),
    "weather": ("the weather = ", _object(city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}, degrees=_INTEGER)),
    "order": (
        "the order = ",
        _object(items={"type": "array", "items": _object(sku=_TEXT, count=_INTEGER), "minItems": 2, "maxItems": 3}),
    ),
    "options": (
        "options = ",
        _object(verbose={"type": "boolean"}, retries=_INTEGER, mode={"enum": ["fast", "safe"]}, output=_TEXT),
    ),
    "point": ("points = ", {"type": "array", "items": _object(x=_INTEGER, y=_INTEGER), "minItems": 4, "maxItems": 6}),
    "function": (
        "def parse(self, value):\n    return ",
        _object(function_name=_TEXT, description=_TEXT, return_type={"enum": ["int", "str", "bool", "None"]}),
    ),
    "any": ("data = ", {"type": "object", "additionalProperties": _TEXT, "minProperties": 3, "maxProperties": 5}),
}


def body_of(kind: str, number: int) -> dict[str, Any]:
    """A request of a kind."""
    prompt, schema = [*SCHEMAS.values()][number % len(SCHEMAS)]
    how: dict[str, Any] = {"ignore_eos": True}
    if kind == "schema":
        how = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    return {"prompt": prompt, "max_tokens": NUM_NEW_TOKENS, "temperature": TEMPERATURE, **how}


def cpu_s(group: int) -> float:
    """Processor time of the processes of a group so far."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                found += int(words[11]) + int(words[12])
        except OSError:  # it has ended
            continue
    return found / os.sysconf("SC_CLK_TCK")


class Speeds(NamedTuple):
    """New tokens a second, and a second of the server's processor time; drafted tokens a text gained in a round."""

    wall: float
    cpu: float
    per_round: float


def speeds(port: int, group: int, bodies: Sequence[Mapping[str, object]], *, num_clients: int) -> Speeds:
    """The speeds of clients that share these bodies."""

    def client(number: int) -> list[int]:
        counted = [0, 0]
        for body in bodies[number::num_clients]:
            with asked(port, body) as answer:
                usage = json.loads(answer.read())["usage"]
            counted[0] += usage["completion_tokens"]
            counted[1] += usage["completion_tokens_details"]["rounds"]
        return counted

    began_s, began_cpu_s = time.perf_counter(), cpu_s(group)
    with ThreadPoolExecutor(num_clients) as pool:
        num_tokens, num_rounds = map(sum, zip(*pool.map(client, range(num_clients)), strict=True))
    took_s, took_cpu_s = time.perf_counter() - began_s, cpu_s(group) - began_cpu_s
    return Speeds(num_tokens / took_s, num_tokens / took_cpu_s, num_tokens / max(num_rounds, 1))


def measure(settings: Sequence[str], *, num_turns: int, clients: Sequence[int], kinds: Sequence[str]) -> list[Row]:
    """Ask by turns; the first turn of each cell warms the server up and does not count."""
    cells = []
    with server("model=tiny", "draft=tiny-draft", *settings) as (port, group):
        for kind, number in [(kind, number) for kind in kinds for number in clients]:
            found: dict[str, list[Speeds]] = defaultdict(list)
            for turn in range(-1, num_turns):
                first = (turn + 1) * len(SCHEMAS) * REPEATS[number]
                bodies = [body_of(kind, first + place) for place in range(len(SCHEMAS) * REPEATS[number])]
                ways: list[tuple[str, dict[str, Any]]] = [("draft", {}), ("plain", PLAIN)]
                for name, more in ways if turn % 2 else reversed(ways):
                    speed = speeds(port, group, [body | more for body in bodies], num_clients=number)
                    found[name] += [speed] * (turn >= 0)
            by_turn = [
                (drafted.wall / plain.wall, drafted.cpu / plain.cpu)
                for drafted, plain in zip(found["draft"], found["plain"], strict=True)
            ]
            wall, cpu = (sorted(column) for column in zip(*by_turn, strict=True))
            cells.append(
                {
                    "kind": kind,
                    "clients": number,
                    "wall": [round(ratio, 3) for ratio in wall],
                    "cpu": [round(ratio, 3) for ratio in cpu],
                    "per_round": round(statistics.mean(speed.per_round for speed in found["draft"]), 2),
                    **{
                        name: round(statistics.median(speed.wall for speed in those), 1)
                        for name, those in found.items()
                    },
                }
            )
            print(json.dumps(cells[-1]), flush=True)
    return cells


def text(row: Row) -> str:
    """A table of the cells, and one of the goals."""
    heads = [
        "kind",
        "clients",
        "plain, tokens/s",
        "draft",
        "ratio of turns, median and range",
        "of CPU time",
        "tokens a round",
    ]
    lines, goals = list[list[object]](), list[Goal]()
    for cell in row["cells"]:
        wall, cpu = (statistics.median(cell[name]) for name in ("wall", "cpu"))
        spread = f"{wall:.2f} ({cell['wall'][0]:.2f} to {cell['wall'][-1]:.2f})"
        lines.append(
            [cell["kind"], cell["clients"], cell["plain"], cell["draft"], spread, f"{cpu:.2f}", cell["per_round"]]
        )
        if least := GOALS.get((cell["kind"], cell["clients"])):
            goals.append(Goal(f"{cell['kind']}, {cell['clients']} clients, plain / draft", 1 / wall, 1 / least))
    what = f"`tiny` with `tiny-draft`, {len(SCHEMAS)} schemas, temperature {TEMPERATURE}, {row['processor']}; server"
    return f"{markdown(heads, lines)}\n\n{what}: {row['settings'] or 'its own settings'}\n\n{table_of_goals(goals)}"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="of the server")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    parser.add_argument("--kinds", nargs="*", default=["schema", "free text"])
    parser.add_argument("--store", action="store_true", help="keep the figures")
    given = parser.parse_args()
    loads = [os.getloadavg()[0]]
    cells = measure(given.settings, num_turns=given.turns, clients=given.clients, kinds=given.kinds)
    row: Row = {"settings": " ".join(given.settings), "cells": cells, "loads": [*loads, os.getloadavg()[0]]}
    print(text(row | {"processor": processor()}))
    if given.store:
        store("structured", row)


if __name__ == "__main__":
    main()
