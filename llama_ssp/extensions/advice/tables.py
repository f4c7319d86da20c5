"""Prints a search with rich: the settings that plan or run each of its choices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama_ssp.extensions.advice.search import Search
from llama_ssp.planning.memory import GIB
from llama_ssp.planning.plan import basis
from llama_ssp.planning.printed import command
from llama_ssp.reports.plan_tables import StandardOutput, amount, literal, short_name
from llama_ssp.storage.formats import formats

MOST_CHOICES = 5
"""Choices of a search that are printed; JSON has all of them."""
_WIDE = 100
"""Width of a console from which on a model and its format are printed in one line."""


def print_search(found: Search, console: Console | None = None, *, is_full: bool = False) -> None:
    """Print the best choices, or all, on a console or on standard output; choices that do not fit are struck out."""
    console = console or StandardOutput()
    choices, unit = found.choices, found.machine.unit
    shown, between = [*choices] if is_full else printed(choices), " " if console.width >= _WIDE else "\n"
    number = f"all {len(choices)}" if is_full else f"{len(shown)} of {len(choices)}, which format=full has"
    title = (
        f"Choices on {literal(found.machine.name)}, the fastest of each precision first: {number}. ms/token of a "
        f"completion after its first token, tokens/s over all rows and replicas, replicas x {unit}s of each, GiB of "
        "the fullest rank"
    )
    table = Table(padding=0, pad_edge=False, box=box.SIMPLE_HEAD)
    for name in ("#", "target", "draft", "K", f"{unit}s", "ms/token", "tokens/s", "gain", "GiB"):
        table.add_column(name, justify="left" if name in {"target", "draft"} else "right", no_wrap=True)
    overlap = f"overlaps,{between}untried" if found.machine.device == "cuda" else "overlaps"
    for choice in shown:
        table.add_row(*_row(choice, between, overlap))
    console.print(title)
    console.print(table)
    console.print(literal(basis(found.machine)))
    if overlap != "overlaps" and any(choice["overlaps"] for choice in shown):
        console.print("untried: drafting while the target verifies has never run on several GPUs")
    console.print("\nThese commands plan the choices, and with run in place of plan they run them:")
    for choice in shown:
        if choice["reason"] is None and (line := command("plan", *choice["settings"])):
            console.print(f"{choice['rank']:>4}  {escape(line)}", soft_wrap=True)


def printed(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the choices that a table shows: those of the asked model.

    If that does not fit, these are its choice that lacks least, and choices of the largest model that fits.
    """
    fitting = [choice for choice in choices if choice["reason"] is None]
    misfits = [choice for choice in choices if choice["reason"] is not None]
    asked = choices[0]["target"]
    known = [choice for choice in fitting if choice["target"] == fitting[0]["target"]]
    nearest = min(
        misfits, key=lambda choice: (choice["target"] != asked, choice["needed_bytes"] or math.inf), default=None
    )
    shown = [] if nearest is None or (known and known[0]["target"] == asked) else [nearest]
    best = {(choice["target"], choice["quantization"]): choice for choice in reversed(known)}
    firsts = [choice for choice in known if choice in best.values()]
    others = [choice for choice in known if choice not in firsts]
    return [*shown, *sorted([*firsts, *others][: MOST_CHOICES - len(shown)], key=lambda choice: choice["rank"])]


def _row(choice: Mapping[str, Any], between: str, overlap: str) -> list[str]:
    target = f"{literal(choice['target'])}{between}{short_name(choice['quantization'])}"
    quantization = choice["draft_quantization"]
    packed = short_name(quantization) if quantization in formats() else None
    kind = f"{choice['draft_kind']}, {overlap}" if choice["overlaps"] else choice["draft_kind"]
    way = " ".join(filter(None, (packed, kind)))
    draft = between.join(filter(None, (literal(choice["draft"] or "none"), way)))
    ranks = f"{choice['num_replicas']} x {choice['num_ranks']}".removeprefix("1 x ")
    needed, capacity = choice["needed_bytes"], choice["capacity_bytes"]
    if choice["reason"]:
        struck = [f"[strike]{name}[/strike]" for name in (target, draft)]
        shortage = "cannot be shared" if needed is None else f"{needed / GIB:.1f} of {capacity / GIB:.1f}"
        return ["", *struck, "", ranks, "", "", "", f"[red]{shortage}[/red]"]
    length = choice["tree"] or str(choice["num_draft_tokens"] or "")
    if choice["adapts"]:
        given = dict(setting.lstrip("+").split("=", 1) for setting in choice["settings"])
        length = given["speculation.num_draft_tokens"]
    room = f"[yellow]{amount(needed, GIB)} tight[/yellow]" if choice["is_tight"] else amount(needed, GIB)
    times = [f"{choice['ms_per_token']:.2f}", f"{choice['tokens_per_s']:.1f}", f"{choice['speedup']:.2f}x"]
    return [str(choice["rank"]), target, draft, length, ranks, *times, room]
