"""Prints the choices of a search with rich, and the settings that plan or run each of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_ssp.config.formats.format import formats
from llama_ssp.reports.plan_table import GIB, amount, literal, standard_output

if TYPE_CHECKING:
    from rich.console import Console

MOST_CHOICES = 8
"""Choices per target that are printed; JSON has all of them."""
WIDE = 170
"""Columns of a terminal in which the settings have a column; otherwise they are a list below the table."""
HEADINGS = ("#", "target", "draft", "K", "GPUs", "ms/token", "tokens/s", "gain", "GiB")


def print_search(
    choices: Sequence[Mapping[str, Any]], *, machine: str, basis: str, console: "Console | None" = None
) -> None:
    """Print the ranking by target, with what does not fit struck out; raises ConfigError if rich is not installed."""
    console = console or standard_output()
    from rich.table import Table  # noqa: PLC0415 - see `plan_table`

    title = (
        f"Choices on {literal(machine)}, the fastest {MOST_CHOICES} of each target. ms/token of a completion after its "
        "first token, tokens/s over all rows and replicas, GPUs as replicas x GPUs of each, GiB of the fullest rank"
    )
    table = Table(title=title, title_justify="left", title_style="", padding=(0, 1, 0, 0), pad_edge=False)
    is_wide = console.width >= WIDE
    for name in (*HEADINGS, *(["add to the command"] if is_wide else [])):
        is_text = name in {"target", "draft", "add to the command"}
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    shown = []
    for target in dict.fromkeys(choice["target"] for choice in choices):
        rows = printed([choice for choice in choices if choice["target"] == target])
        for choice in rows:
            table.add_row(*_row(choice), *([_settings(choice)] if is_wide else []))
        table.add_section()
        shown += rows
    console.print(table)
    console.print(literal(basis))
    if not is_wide:
        console.print("\nTo plan or run a choice, add to the command:")
        for choice in shown:
            if choice["reason"] is None:
                console.print(f"{choice['rank']:>4}  {_settings(choice)}", soft_wrap=True)


def printed(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The choices of one target that a table shows: the fastest, and the nearest misfit of each precision."""
    fitting = [choice for choice in choices if choice["reason"] is None]
    misfits = [choice for choice in choices if choice["reason"] is not None]
    fits_somehow = {choice["quantization"] for choice in fitting}
    nearest: dict[str, Mapping[str, Any]] = {}
    for choice in sorted(misfits, key=lambda choice: choice["needed_bytes"] or 0):
        if choice["quantization"] not in fits_somehow:
            nearest.setdefault(choice["quantization"], choice)
    return [*fitting[:MOST_CHOICES], *nearest.values()]


def _settings(choice: Mapping[str, Any]) -> str:
    return literal(" ".join(choice["settings"]))


def _row(choice: Mapping[str, Any]) -> list[str]:
    storage = formats().get(choice["quantization"])
    target = f"{literal(choice['target'])} {(storage and storage.short_name) or choice['quantization']}"
    draft = f"{literal(choice['draft'])} {choice['draft_kind']}" if choice["draft"] else "none"
    gpus = f"{choice['num_replicas']} x {choice['num_ranks']}".removeprefix("1 x ")
    if choice["reason"]:
        struck = [f"[strike]{name}[/strike]" for name in (target, draft)]
        needed, capacity = choice["needed_bytes"], choice["capacity_bytes"]
        shortage = "cannot be shared" if needed is None else f"{needed / GIB:.1f} of {capacity / GIB:.1f}"
        return ["", *struck, "", gpus, "", "", "", f"[red]{shortage}[/red]"]
    k, room = str(choice["num_draft_tokens"] or ""), amount(choice["needed_bytes"], GIB)
    room = f"[yellow]{room} tight[/yellow]" if choice["is_tight"] else room
    times = [f"{choice['ms_per_token']:.2f}", f"{choice['tokens_per_s']:.1f}", f"{choice['speedup']:.2f}x"]
    return [str(choice["rank"]), target, draft, k, gpus, *times, room]
