"""Prints a comparison of machines with rich from its document (docs/reference/plan-document.md)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from llama_ssp.config.formats import formats
from llama_ssp.reports.plans.table import literal, standard_output
from llama_ssp.reports.searches.table import shown_length

if TYPE_CHECKING:
    from rich.console import Console

MISSING = "-"
_ORDER = {"latency": "the fastest first", "throughput": "most tokens/s first", "price": "the cheapest token first"}
_LEFT = ("machine", "weights", "draft")
_COLUMNS = (*_LEFT[:1], "GPUs", "replicas", *_LEFT[1:], "K", "ms\n/token", "tokens\n/s", "USD/h", "USD/M\ntokens")


def print_machines(comparison: Mapping[str, Any], console: "Console | None" = None) -> None:
    """Print the best choice of each machine, and what is left out; raises ConfigError if rich is not installed."""
    console = console or standard_output()
    from rich import box  # noqa: PLC0415 - JSON needs no rich
    from rich.table import Table  # noqa: PLC0415 - JSON needs no rich

    rows = comparison["machines"]
    left = [row for row in rows if row["reason"] is None]
    shown = left if len({row["machine"] for row in rows}) == 1 else list(_best(left))
    console.print(f"\n[bold]{_title(comparison)}[/bold]\n")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for name in _COLUMNS:
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=name != "draft", vertical="bottom", overflow="fold")
    for row in shown:
        table.add_row(*_cells(row))
    if shown:
        console.print(table)
    for line in _lines(comparison, shown):
        console.print(line, soft_wrap=True)


def _title(comparison: Mapping[str, Any]) -> str:
    models, rows = literal(comparison["model"]), comparison["batch_size"]
    order = _ORDER[comparison["objective"]]
    return f"{models}, batch {rows}: {order}; ms/token of a completion, tokens/s of all replicas"


def _best(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The best choice of each machine, and the best one that does not quantize; `rows` are in order."""
    known: dict[str, set[bool]] = {}
    for row in rows:
        is_quantized = row["quantization"] in formats()
        seen = known.setdefault(row["machine"], set())
        if not seen or (not is_quantized and False not in seen):
            yield row
        seen.add(is_quantized)


def _cells(row: Mapping[str, Any]) -> list[str]:
    storage = formats().get(row["quantization"])
    weights = ((storage and storage.short_name) or row["quantization"]) + (" tight" if row["is_tight"] else "")
    nodes = row["num_nodes"]
    gpus = str(row["num_gpus"]) if nodes == 1 else f"{nodes} x {row['num_gpus'] // nodes}"
    price, million = row["usd_per_hour"], row["usd_per_million_tokens"]
    return [
        literal(row["machine"]), gpus, str(row["num_replicas"]), weights, literal(row["draft"] or "none"),
        shown_length(row),
        f"{row['ms_per_token']:.2f}", f"{row['tokens_per_s']:.0f}",
        MISSING if price is None else f"{price:.2f}", MISSING if million is None else f"{million:.2f}",
    ]  # fmt: skip


def _lines(comparison: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What stands below the table: settings of the first row, prices, notes, and the machines left out."""
    if shown:
        yield f"the first row: {literal(' '.join(shown[0]['settings']))}"
    dates = sorted({price["date"] for price in comparison["prices"].values() if price["date"]})
    if dates:
        months = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        yield f"USD: on-demand list prices of {months}; prices={{NAME:USD_PER_HOUR}} replaces them"
    yield from map(literal, comparison["basis"])
    for note in comparison["notes"]:
        yield f"[cyan]note:[/cyan] {literal(note)}"
    named = {row["machine"] for row in shown}
    nearest: dict[str, Mapping[str, Any]] = {}
    for row in comparison["machines"]:
        if row["machine"] not in named and _is_nearer(row, nearest.get(row["machine"])):
            nearest[row["machine"]] = row
    for name, row in sorted(nearest.items()):
        which = f"{name} ({row['num_gpus']} x {row['gpu']}): {row['reason']}"
        yield f"[dim]left out:[/dim] {literal(which)}"


def _is_nearer(row: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    """Whether a choice comes closer to what is required than the known one: with a time, else with less to hold."""
    if known is None or (row["ms_per_token"] is None) != (known["ms_per_token"] is None):
        return known is None or row["ms_per_token"] is not None
    if row["ms_per_token"] is not None:
        return False  # those with a time are in order
    return (row["needed_bytes"] or 0) < (known["needed_bytes"] or 0)
