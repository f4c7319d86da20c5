"""Figures of a plan and of a search.

plan    memory of each rank under the line of its capacity, and ms/token by K with plain decoding
search  ms/token of the asked model against GPUs, by number format, with and without a draft
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import GIB
from llama_ssp.planning.plan import Plan
from llama_ssp.reports.plan_tables import ITEMS, headline, short_name
from llama_ssp.rooms.reports.figures import COLOURS, GREY, look, panels, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
ITEM_COLOURS = (
    "#1f4e79", "#2e86c1", "#b9770e", "#f0b27a", "#7d3c98", "#c39bd3", "#7f8c8d", "#95a5a6", "#bdc3c7", "#d5d8dc",
)  # fmt: skip
RED, GREEN = COLOURS[4], COLOURS[2]


class Choices(Protocol):
    """What a search has found for a machine, as the page of the room advice describes it."""

    @property
    def machine(self) -> HardwareConfig:
        """The machine."""

    @property
    def choices(self) -> Sequence[Mapping[str, Any]]:
        """Uses of it, the best first."""


def draw(content: Plan | Choices, file: Path) -> None:
    """Draw a plan or a search into a file; raises ConfigError if the file or its suffix is unusable."""
    with styled():
        figure = draw_plan(content) if isinstance(content, Plan) else draw_search(content)
    save(figure, file)


def draw_plan(plan: Plan) -> "Figure":
    """Draw the memory items of each rank under its capacity, and ms/token by K with plain decoding."""
    figure, (memory, by_k) = panels("Memory per rank", "Time per token")
    figure.suptitle(headline(plan), y=1.02)
    ranks, bottoms = plan.ranks, [0.0] * len(plan.ranks)
    for (label, item), colour in zip(ITEMS.items(), ITEM_COLOURS, strict=True):
        sizes = [getattr(rank, item) / GIB for rank in ranks]
        if any(sizes):
            memory.bar([rank.rank for rank in ranks], sizes, bottom=bottoms, color=colour, label=label)
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    capacity = ranks[0].capacity_bytes / GIB
    memory.axhline(capacity, color=RED, label=f"capacity {capacity:.1f} GiB")
    memory.set(xlabel="rank", ylabel="GiB")
    memory.locator_params(axis="x", integer=True)

    plain, speculative = 1e3 * plan.timing.plain_s, [1e3 * seconds for seconds in plan.timing.by_num_draft_tokens]
    by_k.axhline(plain, color=GREY, linestyle="--", label=f"plain, {plain:.1f} ms")
    if best := plan.timing.best_num_draft_tokens:
        by_k.plot(range(1, len(speculative) + 1), speculative, "o-", color=COLOURS[0], label="speculative")
        fastest = speculative[best - 1]
        by_k.plot(best, fastest, "o", color=GREEN, label=f"best: K={best}, {fastest:.1f} ms")
    by_k.set(xlabel="K, drafted tokens per round", ylabel="ms/token")
    by_k.set_ylim(bottom=0)
    by_k.locator_params(axis="x", integer=True)
    return figure


def draw_search(found: Choices) -> "Figure":
    """Draw the fastest choice of the asked model for every size of a replica: a line by number format and draft."""
    target = found.choices[0]["target"]
    figure, (axes,) = panels(f"{target} on {found.machine.name}")
    asked = [one for one in found.choices if one["target"] == target and one["ms_per_token"] is not None]
    for style, rows in _by_kind(asked):
        fastest: dict[int, float] = {}
        for one in rows:
            size, ms = one["num_ranks"], one["ms_per_token"]
            fastest[size] = min(ms, fastest.get(size, ms))
        axes.plot(sorted(fastest), [fastest[size] for size in sorted(fastest)], **style)
    axes.set(xlabel=f"{found.machine.unit}s of a replica", ylabel="ms/token of a completion")
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
