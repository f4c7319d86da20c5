"""Figures of a plan, of a search and of a comparison of machines.

plan        memory of each rank under the line of its capacity, and ms/token by K with plain decoding
search      ms/token of the asked model against GPUs, by number format, with and without a draft
comparison  what a faster token costs, by number format and draft, and by machine
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports.charts import COLOURS, GREY, MOST_LINES, Chart, Point, look
from llama_ssp.reports.plan_tables import GIB, ITEMS, headline, short_name

Rows = Sequence[Mapping[str, Any]]
ITEM_COLOURS = (
    "#1f4e79", "#2e86c1", "#b9770e", "#f0b27a", "#7d3c98", "#c39bd3", "#7f8c8d", "#95a5a6", "#bdc3c7", "#d5d8dc",
)  # fmt: skip
RED, GREEN = COLOURS[4], COLOURS[2]
HALF_BAR = 0.375


def draw(content: Mapping[str, Any], file: Path, *, machine: str = "", unit: str = "") -> None:
    """Draw the document of a plan, a search or a comparison into a file; a search needs `machine` and `unit`.

    Raises ConfigError without matplotlib, if the file or its suffix is unusable, and if no choice of a comparison that
    is left has a price.
    """
    from llama_ssp.reports.plots import save  # noqa: PLC0415 - slow to import

    if "search" in content:
        choices = content["search"]
        title, charts = f"{choices[0]['target']} on {machine}", [time_by_ranks(choices, unit=unit)]
    elif "machines" in content:
        priced = [row for row in content["machines"] if row["reason"] is None and row["usd_per_hour"] is not None]
        if not priced:
            raise ConfigError(
                f"figure={file} draws ms/token against the price, and nothing that is left has one: "
                "prices={NAME:USD_PER_HOUR} gives prices"
            )
        rows = "one row" if content["batch_size"] == 1 else f"{content['batch_size']} rows"
        title = f"{content['model']}, {rows}: what a faster token costs"
        charts = [time_by_price(priced), machines_worth_it(priced)]
    else:
        title, charts = headline(content), [_memory_by_rank(content), _time_by_k(content)]
    try:
        save(charts, file, headline=title)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def _memory_by_rank(plan: Mapping[str, Any]) -> Chart:
    """Stack the memory items of each rank, under its capacity."""
    ranks = plan["memory"]
    capacity = ranks[0]["capacity_bytes"] / GIB
    fullest = max(sum(rank[item] for item in ITEMS.values()) for rank in ranks) / GIB
    chart = Chart(
        title="Memory per rank", x_label="rank", y_label="GiB",
        highest_x=len(ranks), highest_y=max(capacity, fullest),
        x_names={place + 0.5: str(rank["rank"]) for place, rank in enumerate(ranks)},
    )  # fmt: skip
    for middle, rank in zip(chart.x_names or {}, ranks, strict=True):
        bottom = 0.0
        for (label, item), colour in zip(ITEMS.items(), ITEM_COLOURS, strict=True):
            if size := rank[item] / GIB:
                says = f"rank {rank['rank']}: {size:.2f} GiB, {label}"
                ends = (middle - HALF_BAR, middle + HALF_BAR)
                chart.bar(*ends, bottom + size, colour, says=says, name=label, bottom=bottom)
                bottom += size
    chart.line([(0, capacity), (len(ranks), capacity)], RED, name=f"capacity {capacity:.1f} GiB")
    return chart


def _time_by_k(plan: Mapping[str, Any]) -> Chart:
    """Show ms/token by K, marking the best, and plain decoding."""
    time = plan["time"]
    plain, by_k = time["plain_ms_per_token"], time["speculative_ms_per_token_by_k"]
    ks = range(1, len(by_k) + 1)
    chart = Chart(
        title="Time per token", x_label="K, drafted tokens per round" if by_k else "", y_label="ms/token",
        highest_x=len(by_k) + 0.5, highest_y=max(plain, *by_k, 0), x_names={float(k): str(k) for k in ks},
    )  # fmt: skip
    chart.line([(0, plain), (len(by_k) + 0.5, plain)], GREY, name=f"plain, {plain:.1f} ms", dashed=True)
    if by_k:
        best = time["best_num_draft_tokens"]
        chart.line([*zip(ks, by_k, strict=True)], COLOURS[0], name="speculative")
        for k, ms in zip(ks, by_k, strict=True):
            name = f"best: K={best}, {ms:.1f} ms" if k == best else ""
            chart.dot(k, ms, GREEN if name else COLOURS[0], says=f"K={k}: {ms:.1f} ms/token", name=name)
    return chart


def time_by_ranks(choices: Rows, *, unit: str) -> Chart:
    """The fastest choice for every size of a replica: a line by number format, dashed without a draft."""
    asked = [one for one in choices if one["target"] == choices[0]["target"] and one["ms_per_token"] is not None]
    sizes = sorted({one["num_ranks"] for one in asked})
    names = list(dict.fromkeys(one["quantization"] for one in asked))
    asked.sort(key=lambda one: (names.index(one["quantization"]), not one["draft"]))
    lines = {kind: _fastest(found) for kind, found in _by_kind(asked).items()}
    chart = Chart(
        title="Time per token", x_label=f"{unit}s of a replica", y_label="ms/token of a completion",
        highest_x=max(sizes, default=1) + 0.5,
        highest_y=max((ms for points in lines.values() for _, ms in points), default=1.0),
        x_names={float(size): str(size) for size in sizes},
    )  # fmt: skip
    for (label, colour, drafts), points in lines.items():
        chart.line(points, colour, name=label, dashed=not drafts)
        for size, ms in points:
            chart.dot(size, ms, colour, says=f"{size:.0f} {unit}{'' if size == 1 else 's'}, {label}: {ms:.2f} ms/token")
    return chart


def _by_kind(rows: Rows) -> dict[tuple[str, str, bool], list[Mapping[str, Any]]]:
    """The rows of each line, under its label, its colour, by the number format, and whether they have a draft."""
    colours = dict(zip(dict.fromkeys(row["quantization"] for row in rows), COLOURS, strict=False))
    lines: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        name, drafts = row["quantization"], row["draft"] is not None
        label = f"{short_name(name)}{', with a draft' if drafts else ''}"
        lines.setdefault((label, colours.get(name, COLOURS[-1]), drafts), []).append(row)
    return lines


def _fastest(choices: Rows) -> list[Point]:
    """The least ms/token by ranks of a replica."""
    least: dict[int, float] = {}
    for one in choices:
        size, ms = one["num_ranks"], one["ms_per_token"]
        least[size] = min(ms, least.get(size, ms))
    return [(float(size), ms) for size, ms in sorted(least.items())]


MOST_TIMES = 1.5
"""Choices that take more times the slowest one that is worth its price are not drawn: they would squeeze the others."""


def time_by_price(rows: Rows) -> Chart:
    """A line by number format, with a draft or without one, through its choices that no cheaper one of it beats."""
    chart = _chart(rows, "By number format and draft")
    for (label, colour, drafts), kind in _by_kind(rows).items():
        found = worth_it(kind)
        chart.line([_place(row) for row in found], colour, name=label, dashed=not drafts)
        for row in found:
            chart.dot(*_place(row), colour, says=f"{_named(row)}, {label}: {_figures(row)}")
    return chart


def machines_worth_it(rows: Rows) -> Chart:
    """The choices that no other one beats at its price or below, by name; others are grey, but for the slowest."""
    best = worth_it(rows)
    shown = [row for row in rows if row["ms_per_token"] <= MOST_TIMES * best[0]["ms_per_token"]]
    chart = _chart(shown, "Worth their price")
    for row in shown:
        if row not in best:
            chart.dot(*_place(row), GREY, says=f"{_named(row)}: {_figures(row)}", name="slower at this price")
    for number, row in enumerate(best):
        colour, shape = look(number)
        name = _named(row) if number < MOST_LINES else ""
        chart.dot(*_place(row), colour, says=f"{_named(row)}: {_figures(row)}", name=name, shape=shape)
    return chart


def worth_it(rows: Rows) -> list[Mapping[str, Any]]:
    """The choices that are faster than all at their price or below, the cheapest first."""
    found: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["usd_per_hour"], row["ms_per_token"])):
        if not found or row["ms_per_token"] < found[-1]["ms_per_token"]:
            found.append(row)
    return found


def _chart(rows: Rows, title: str) -> Chart:
    return Chart(
        title=title, x_label="USD per hour of all that is rented", y_label="ms/token of a completion",
        highest_x=max(row["usd_per_hour"] for row in rows), highest_y=max(row["ms_per_token"] for row in rows),
    )  # fmt: skip


def _place(row: Mapping[str, Any]) -> Point:
    return row["usd_per_hour"], row["ms_per_token"]


def _named(row: Mapping[str, Any]) -> str:
    """The machine, the replicas and their GPUs, and the weights."""
    nodes = f"{row['num_nodes']} nodes, " if row["num_nodes"] > 1 else ""
    replicas = f"{row['num_replicas']} x " if row["num_replicas"] > 1 else ""
    return f"{row['machine']} ({nodes}{replicas}{row['num_gpus']} {row['gpu']}, {short_name(row['quantization'])})"


def _figures(row: Mapping[str, Any]) -> str:
    return f"{row['usd_per_hour']:.2f} USD/h, {row['ms_per_token']:.2f} ms/token"
