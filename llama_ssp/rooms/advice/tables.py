"""Prints a search with rich: the settings that plan or run each of its choices."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama_ssp.planning.memory import GIB
from llama_ssp.planning.plan import basis
from llama_ssp.reports.plan_tables import StandardOutput, amount, literal, short_name
from llama_ssp.rooms.advice.search import Search
from llama_ssp.settings.schema import ADAPTIVE
from llama_ssp.storage.formats import formats

MOST_CHOICES = 5
"""Choices of a search that are printed; JSON has all of them."""


def print_search(found: Search, console: Console | None = None) -> None:
    """Print the best choices on a console or on standard output, with what does not fit struck out."""
    console = console or StandardOutput()
    choices, unit = found.choices, found.machine.unit
    title = (
        f"Choices on {literal(found.machine.name)}, the fastest of each precision first: {MOST_CHOICES} of "
        f"{len(choices)}, which format=json has. ms/token of a completion after its first token, tokens/s over all "
        f"rows and replicas, replicas x {unit}s of each, GiB of the fullest rank"
    )
    table = Table(padding=0, pad_edge=False, box=box.SIMPLE_HEAD)
    for name in ("#", "target", "draft", "K", f"{unit}s", "ms/token", "tokens/s", "gain", "GiB"):
        is_text = name in {"target", "draft"}
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    shown = printed(choices)
    for choice in shown:
        table.add_row(*_row(choice))
    console.print(title)
    console.print(table)
    console.print(literal(basis(found.machine)))
    console.print("\nThese commands plan the choices, and with run in place of plan they run them:")
    for choice in shown:
        if choice["reason"] is None:
            command = shlex.join(["llama-ssp", "plan", *choice["settings"]])
            console.print(f"{choice['rank']:>4}  {escape(command)}", soft_wrap=True)


def printed(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The choices of a table: of the asked model, or if it does not fit, the nearest misfit and all fitting ones."""
    fitting = [choice for choice in choices if choice["reason"] is None]
    misfits = [choice for choice in choices if choice["reason"] is not None]
    asked = choices[0]["target"]
    of_asked = [choice for choice in fitting if choice["target"] == asked]
    nearest = min(
        misfits, key=lambda choice: (choice["target"] != asked, choice["needed_bytes"] or math.inf), default=None
    )
    known, shown = of_asked or fitting, [] if of_asked or nearest is None else [nearest]
    best = {(choice["target"], choice["quantization"]): choice for choice in reversed(known)}
    firsts = [choice for choice in known if choice in best.values()]
    others = [choice for choice in known if choice not in firsts]
    return [*shown, *sorted([*firsts, *others][: MOST_CHOICES - len(shown)], key=lambda choice: choice["rank"])]


def _row(choice: Mapping[str, Any]) -> list[str]:
    target = f"{literal(choice['target'])} {short_name(choice['quantization'])}"
    quantization = choice["draft_quantization"]
    packed = short_name(quantization) if quantization in formats() else None
    kind = f"{choice['draft_kind']}, overlaps" if choice["overlaps"] else choice["draft_kind"]
    draft = " ".join(filter(None, (literal(choice["draft"] or "none"), packed, kind)))
    ranks = f"{choice['num_replicas']} x {choice['num_ranks']}".removeprefix("1 x ")
    needed, capacity = choice["needed_bytes"], choice["capacity_bytes"]
    if choice["reason"]:
        struck = [f"[strike]{name}[/strike]" for name in (target, draft)]
        shortage = "cannot be shared" if needed is None else f"{needed / GIB:.1f} of {capacity / GIB:.1f}"
        return ["", *struck, "", ranks, "", "", "", f"[red]{shortage}[/red]"]
    length = ADAPTIVE if choice["adapts"] else choice["tree"] or str(choice["num_draft_tokens"] or "")
    room = f"[yellow]{amount(needed, GIB)} tight[/yellow]" if choice["is_tight"] else amount(needed, GIB)
    times = [f"{choice['ms_per_token']:.2f}", f"{choice['tokens_per_s']:.1f}", f"{choice['speedup']:.2f}x"]
    return [str(choice["rank"]), target, draft, length, ranks, *times, room]
