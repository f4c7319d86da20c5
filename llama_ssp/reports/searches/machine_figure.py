"""The figure of a comparison of machines: what a faster token costs, by number format and draft, and by machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.config.formats import formats
from llama_ssp.errors import ConfigError
from llama_ssp.reports.charts import COLOURS, GREY, MOST_LINES, Chart, Point, look

MOST_TIMES = 1.5
"""Choices that take more times the slowest one that is worth its price are not drawn: they would squeeze the others."""
Rows = Sequence[Mapping[str, Any]]


def draw_machines(comparison: Mapping[str, Any], file: Path) -> None:
    """Draw a comparison into a file.

    Raises ConfigError without matplotlib, if no choice that is left has a price, or if the file or its suffix is
    unusable.
    """
    priced = [row for row in comparison["machines"] if row["reason"] is None and row["usd_per_hour"] is not None]
    if not priced:
        raise ConfigError(
            f"figure={file} draws ms/token against the price, and nothing that is left has one: "
            "prices={NAME:USD_PER_HOUR} gives prices"
        )
    from llama_ssp.reports.plots import save  # noqa: PLC0415 - slow to import

    rows = "one row" if comparison["batch_size"] == 1 else f"{comparison['batch_size']} rows"
    try:
        charts = [time_by_price(priced), machines_worth_it(priced)]
        save(charts, file, headline=f"{comparison['model']}, {rows}: what a faster token costs")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def time_by_price(rows: Rows) -> Chart:
    """A line by number format, with a draft or without one, through its choices that no cheaper one of it beats."""
    chart = _chart(rows, "By number format and draft")
    kinds = dict.fromkeys((row["quantization"], row["draft"] is not None) for row in rows)
    colours = dict(zip(dict.fromkeys(name for name, _ in kinds), COLOURS, strict=False))
    for name, drafts in kinds:
        found = worth_it([row for row in rows if (row["quantization"], row["draft"] is not None) == (name, drafts)])
        colour, label = colours.get(name, COLOURS[-1]), f"{_short(name)}{', with a draft' if drafts else ''}"
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
    return f"{row['machine']} ({nodes}{replicas}{row['num_gpus']} {row['gpu']}, {_short(row['quantization'])})"


def _figures(row: Mapping[str, Any]) -> str:
    return f"{row['usd_per_hour']:.2f} USD/h, {row['ms_per_token']:.2f} ms/token"


def _short(name: str) -> str:
    storage = formats().get(name)
    return (storage and storage.short_name) or name
