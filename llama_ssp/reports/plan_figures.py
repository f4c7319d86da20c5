"""Figures of a plan, of a search and of a comparison of machines.

plan        memory of each rank under the line of its capacity, and ms/token by K with plain decoding
search      ms/token of the asked model against GPUs, by number format, with and without a draft
comparison  what a faster token costs, by number format and draft, and by machine
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports.plan_tables import GIB, ITEMS, headline, short_name
from llama_ssp.reports.plots import COLOURS, GREY, MOST_LINES, look, panels, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
ITEM_COLOURS = (
    "#1f4e79", "#2e86c1", "#b9770e", "#f0b27a", "#7d3c98", "#c39bd3", "#7f8c8d", "#95a5a6", "#bdc3c7", "#d5d8dc",
)  # fmt: skip
RED, GREEN = COLOURS[4], COLOURS[2]
MOST_TIMES = 1.5
"""Choices that take more times the slowest one that is worth its price are not drawn: they would squeeze the others."""


def draw(content: Mapping[str, Any], file: Path, *, machine: str = "", unit: str = "") -> None:
    """Draw the document of a plan, a search or a comparison into a file; a search needs `machine` and `unit`.

    Raises ConfigError if the file or its suffix is unusable, and if no choice of a comparison that is left has a price.
    """
    with styled():
        if "search" in content:
            figure = draw_search(content["search"], machine=machine, unit=unit)
        elif "machines" in content:
            priced = [row for row in content["machines"] if row["reason"] is None and row["usd_per_hour"] is not None]
            if not priced:
                raise ConfigError(
                    f"figure={file} draws ms/token against the price, and nothing that is left has one: "
                    "prices={NAME:USD_PER_HOUR} gives prices"
                )
            rows = "one row" if content["batch_size"] == 1 else f"{content['batch_size']} rows"
            figure = draw_machines(priced, title=f"{content['model']}, {rows}: what a faster token costs")
        else:
            figure = draw_plan(content)
    try:
        save(figure, file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def draw_plan(plan: Mapping[str, Any]) -> "Figure":
    """Draw the memory items of each rank under its capacity, and ms/token by K with plain decoding."""
    figure, (memory, by_k) = panels("Memory per rank", "Time per token")
    figure.suptitle(headline(plan), y=1.02)
    ranks, bottoms = plan["memory"], [0.0] * len(plan["memory"])
    for (label, item), colour in zip(ITEMS.items(), ITEM_COLOURS, strict=True):
        sizes = [rank[item] / GIB for rank in ranks]
        if any(sizes):
            memory.bar([rank["rank"] for rank in ranks], sizes, bottom=bottoms, color=colour, label=label)
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    capacity = ranks[0]["capacity_bytes"] / GIB
    memory.axhline(capacity, color=RED, label=f"capacity {capacity:.1f} GiB")
    memory.set(xlabel="rank", ylabel="GiB")
    memory.locator_params(axis="x", integer=True)

    time = plan["time"]
    plain, speculative = time["plain_ms_per_token"], time["speculative_ms_per_token_by_k"]
    by_k.axhline(plain, color=GREY, linestyle="--", label=f"plain, {plain:.1f} ms")
    if speculative:
        best = time["best_num_draft_tokens"]
        by_k.plot(range(1, len(speculative) + 1), speculative, "o-", color=COLOURS[0], label="speculative")
        fastest = speculative[best - 1]
        by_k.plot(best, fastest, "o", color=GREEN, label=f"best: K={best}, {fastest:.1f} ms")
    by_k.set(xlabel="K, drafted tokens per round", ylabel="ms/token")
    by_k.set_ylim(bottom=0)
    by_k.locator_params(axis="x", integer=True)
    return figure


def draw_search(choices: Rows, *, machine: str, unit: str) -> "Figure":
    """Draw the fastest choice of the asked model for every size of a replica: a line by number format and draft."""
    target = choices[0]["target"]
    figure, (axes,) = panels(f"{target} on {machine}")
    asked = [one for one in choices if one["target"] == target and one["ms_per_token"] is not None]
    for style, rows in _by_kind(asked):
        fastest: dict[int, float] = {}
        for one in rows:
            size, ms = one["num_ranks"], one["ms_per_token"]
            fastest[size] = min(ms, fastest.get(size, ms))
        axes.plot(sorted(fastest), [fastest[size] for size in sorted(fastest)], **style)
    axes.set(xlabel=f"{unit}s of a replica", ylabel="ms/token of a completion")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    return figure


def _by_kind(rows: Rows) -> Iterator[tuple[dict[str, Any], Rows]]:
    """Yield the look of each line and its rows: coloured by number format, dashed without a draft."""
    formats = list(dict.fromkeys(row["quantization"] for row in rows))
    for number, name in enumerate(formats):
        for has_draft in (False, True):
            if found := [row for row in rows if (row["quantization"], bool(row["draft"])) == (name, has_draft)]:
                label = f"{short_name(name)}{', with a draft' * has_draft}"
                yield look(number) | {"linestyle": "-" if has_draft else "--", "label": label}, found


def draw_machines(rows: Rows, *, title: str) -> "Figure":
    """Draw what no cheaper choice beats: by number format and draft, and of all choices, with the names of machines."""
    figure, (by_format, by_machine) = panels("By number format and draft", "Worth their price")
    figure.suptitle(title, y=1.02)
    for style, of_kind in _by_kind(rows):
        by_format.plot(*_places(worth_it(of_kind)), **style)
    best = worth_it(rows)
    slower = [row for row in rows if row not in best and row["ms_per_token"] <= MOST_TIMES * best[0]["ms_per_token"]]
    if slower:
        by_machine.plot(*_places(slower), "o", color=GREY, label="slower at this price")
    for number, row in enumerate(best):
        name = _named(row) if number < MOST_LINES else None
        by_machine.plot(*_places([row]), linestyle="none", label=name, **look(number))
    for axes in figure.axes:
        axes.set(xlabel="USD per hour of all that is rented", ylabel="ms/token of a completion")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    return figure


def worth_it(rows: Rows) -> list[Mapping[str, Any]]:
    """The choices that are faster than all at their price or below, the cheapest first."""
    found: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["usd_per_hour"], row["ms_per_token"])):
        if not found or row["ms_per_token"] < found[-1]["ms_per_token"]:
            found.append(row)
    return found


def _places(rows: Rows) -> tuple[list[float], list[float]]:
    return [row["usd_per_hour"] for row in rows], [row["ms_per_token"] for row in rows]


def _named(row: Mapping[str, Any]) -> str:
    """The machine, the replicas and their GPUs, and the weights."""
    nodes = f"{row['num_nodes']} nodes, " if row["num_nodes"] > 1 else ""
    replicas = f"{row['num_replicas']} x " if row["num_replicas"] > 1 else ""
    return f"{row['machine']} ({nodes}{replicas}{row['num_gpus']} {row['gpu']}, {short_name(row['quantization'])})"
