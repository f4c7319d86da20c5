"""Figures of plans, drawn with matplotlib, which nothing else needs.

Left: what fills each GPU, stacked, under the line of its capacity. Right: ms/token by K, beside plain decoding.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports.plan_table import GIB, ITEMS, headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#1f4e79", "#2e86c1", "#b9770e", "#f0b27a", "#7d3c98", "#c39bd3", "#7f8c8d", "#95a5a6", "#bdc3c7", "#d5d8dc",
)  # fmt: skip


def draw_plan(plan: Mapping[str, Any], file: Path) -> None:
    """Draw a plan into a file; its suffix chooses the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - see the module
    except ImportError as error:
        raise ConfigError("figure= needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    memory, time = figure.subplots(1, 2, width_ratios=(3, 2))
    _memory_bars(memory, plan)
    _time_by_k(time, plan)
    figure.suptitle(headline(plan), fontsize=10)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def _memory_bars(axes: "Axes", plan: Mapping[str, Any]) -> None:
    ranks = plan["memory"]
    names = [str(rank["rank"]) for rank in ranks]
    below = [0.0] * len(ranks)
    for (label, item), colour in zip(ITEMS.items(), COLOURS, strict=True):
        sizes = [rank[item] / GIB for rank in ranks]
        if any(sizes):
            axes.bar(names, sizes, bottom=below, label=label, color=colour, width=0.75)
            below = [start + size for start, size in zip(below, sizes, strict=True)]
    capacity = ranks[0]["capacity_bytes"] / GIB
    axes.axhline(capacity, color="#c0392b", linewidth=1.5)
    axes.annotate(f"capacity {capacity:.1f} GiB", (0, capacity), xycoords=("axes fraction", "data"), xytext=(4, 3),
                  textcoords="offset points", color="#c0392b", fontsize=8)  # fmt: skip
    axes.set(xlabel="rank", ylabel="GiB", title="Memory per GPU", ylim=(0, 1.1 * max(capacity, *below)))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)


def _time_by_k(axes: "Axes", plan: Mapping[str, Any]) -> None:
    time = plan["time"]
    plain, by_k = time["plain_ms_per_token"], time["speculative_ms_per_token_by_k"]
    axes.axhline(plain, color="#7f8c8d", linestyle="--", label=f"plain, {plain:.1f} ms")
    if by_k:
        best = time["best_num_draft_tokens"]
        axes.plot(range(1, len(by_k) + 1), by_k, color="#1f4e79", marker="o", markersize=4, label="speculative")
        axes.plot(
            [best],
            [by_k[best - 1]],
            "o",
            color="#1e8449",
            markersize=9,
            label=f"best: K={best}, {by_k[best - 1]:.1f} ms",
        )
        axes.set_xticks(range(1, len(by_k) + 1))
    axes.set(
        xlabel="K, drafted tokens per round",
        ylabel="ms/token",
        title="Time per token",
        ylim=(0, 1.15 * max(plain, *by_k, 0)),
    )
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
