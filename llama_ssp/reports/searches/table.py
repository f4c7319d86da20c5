"""Prints the choices of a search with rich, and the settings that plan or run each of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_ssp.config.formats import formats
from llama_ssp.config.schema import ADAPTIVE
from llama_ssp.reports.plans.table import GIB, amount, literal, standard_output

if TYPE_CHECKING:
    from rich.console import Console

MOST_CHOICES = 8
"""Choices per target that are printed; JSON has all of them."""
OTHERS_WIDTH = 100
"""Width of the table without its column of settings. Narrower terminals have a list of them below the table."""
SETTINGS = "add to the command"


def print_search(
    choices: Sequence[Mapping[str, Any]],
    *,
    machine: str, unit: str, basis: str, notes: Sequence[str] = (), console: "Console | None" = None,
) -> None:  # fmt: skip
    """Print the ranking by target, with what does not fit struck out; raises ConfigError if rich is not installed.

    `unit` is what a rank runs on, `basis` a sentence about the times, and `notes` are others.
    """
    console = console or standard_output()
    from rich import box  # noqa: PLC0415 - see `plans.table`
    from rich.table import Table  # noqa: PLC0415 - see `plans.table`

    title = (
        f"Choices on {literal(machine)}, the fastest {MOST_CHOICES} of each target and the fastest of each precision. "
        "ms/token of a completion after its first token, tokens/s over all rows and replicas, replicas x "
        f"{unit}s of each, GiB of the fullest rank"
    )
    table = Table(title=title, title_justify="left", title_style="", padding=0, pad_edge=False, box=box.SIMPLE_HEAD)
    is_wide = console.width >= OTHERS_WIDTH + max((len(_settings(choice)) for choice in choices), default=0)
    headings = ("#", "target", "draft", "K", f"{unit}s", "ms/token", "tokens/s", "gain", "GiB")
    for name in (*headings, *([SETTINGS] if is_wide else [])):
        is_text = name in {"target", "draft", SETTINGS}
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name not in {"target", "draft"})
    shown = []
    for target in dict.fromkeys(choice["target"] for choice in choices):
        rows = printed([choice for choice in choices if choice["target"] == target])
        for choice in rows:
            table.add_row(*_row(choice), *([_settings(choice)] if is_wide else []))
        table.add_section()
        shown += rows
    console.print(table)
    console.print(literal(basis))
    for note in notes:
        console.print(f"[cyan]note:[/cyan] {literal(note)}", soft_wrap=True)
    if not is_wide:
        console.print(f"\nTo plan or run a choice, {SETTINGS}:")
        for choice in shown:
            if choice["reason"] is None:
                console.print(f"{choice['rank']:>4}  {_settings(choice)}", soft_wrap=True)


def printed(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The choices of one target that a table shows: the fastest, also of each precision, and the nearest misfits."""
    fitting = [choice for choice in choices if choice["reason"] is None]
    misfits = [choice for choice in choices if choice["reason"] is not None]
    fits_somehow = {choice["quantization"] for choice in fitting}
    nearest: dict[str, Mapping[str, Any]] = {}
    for choice in sorted(misfits, key=lambda choice: choice["needed_bytes"] or 0):
        if choice["quantization"] not in fits_somehow:
            nearest.setdefault(choice["quantization"], choice)
    fastest = {choice["quantization"]: choice for choice in reversed(fitting)}.values()
    others = [choice for choice in fitting[MOST_CHOICES:] if choice in fastest]
    return [*fitting[:MOST_CHOICES], *others, *nearest.values()]


def _settings(choice: Mapping[str, Any]) -> str:
    return literal(" ".join(choice["settings"]))


def shown_length(choice: Mapping[str, Any]) -> str:
    """K of a choice in a table; empty without a draft."""
    return ADAPTIVE if choice["adapts"] else str(choice["num_draft_tokens"] or "")


def _row(choice: Mapping[str, Any]) -> list[str]:
    storage = formats().get(choice["quantization"])
    target = f"{literal(choice['target'])} {(storage and storage.short_name) or choice['quantization']}"
    kind = f"{choice['draft_kind']}, overlaps" if choice["overlaps"] else choice["draft_kind"]
    draft = f"{literal(choice['draft'])} {kind}" if choice["draft"] else "none"
    ranks = f"{choice['num_replicas']} x {choice['num_ranks']}".removeprefix("1 x ")
    if choice["reason"]:
        struck = [f"[strike]{name}[/strike]" for name in (target, draft)]
        needed, capacity = choice["needed_bytes"], choice["capacity_bytes"]
        shortage = "cannot be shared" if needed is None else f"{needed / GIB:.1f} of {capacity / GIB:.1f}"
        return ["", *struck, "", ranks, "", "", "", f"[red]{shortage}[/red]"]
    k, room = shown_length(choice), amount(choice["needed_bytes"], GIB)
    room = f"[yellow]{room} tight[/yellow]" if choice["is_tight"] else room
    times = [f"{choice['ms_per_token']:.2f}", f"{choice['tokens_per_s']:.1f}", f"{choice['speedup']:.2f}x"]
    return [str(choice["rank"]), target, draft, k, ranks, *times, room]
