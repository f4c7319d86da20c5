"""The figure of a plan: memory of each rank under the line of its capacity, and ms/token by K with plain decoding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports.charts import COLOURS, GREY, Chart
from llama_ssp.reports.plans.table import GIB, ITEMS, headline

ITEM_COLOURS = (
    "#1f4e79", "#2e86c1", "#b9770e", "#f0b27a", "#7d3c98", "#c39bd3", "#7f8c8d", "#95a5a6", "#bdc3c7", "#d5d8dc",
)  # fmt: skip
RED, GREEN = COLOURS[4], COLOURS[2]
HALF_BAR = 0.375


def draw_plan(plan: Mapping[str, Any], file: Path) -> None:
    """Draw a plan into a file; raises ConfigError without matplotlib, or if the file or its suffix is unusable."""
    from llama_ssp.reports.plots import save  # noqa: PLC0415 - slow to import

    try:
        save([memory_by_rank(plan), time_by_k(plan)], file, headline=headline(plan))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def memory_by_rank(plan: Mapping[str, Any]) -> Chart:
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


def time_by_k(plan: Mapping[str, Any]) -> Chart:
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
