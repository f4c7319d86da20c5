"""Figures of a plan and of a search.

plan    memory of each rank under the line of its capacity, and ms/token by K with plain decoding; the fullest rank's
        memory and ms/token over the length of rows, also with a cache of 8 bits
search  ms/token of the asked model against GPUs, by number format, with and without a draft
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llama_ssp.extensions.reports.figures import COLOURS, GREY, look, panels, save, styled
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import GIB, fullest_rank
from llama_ssp.planning.plan import Plan
from llama_ssp.planning.timing import timing
from llama_ssp.reports.plan_tables import ITEMS, headline, short_name
from llama_ssp.storage.formats import OWN_DTYPE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
ITEM_COLOURS = (
    "#1f4e79",
    "#2e86c1",
    "#b9770e",
    "#f0b27a",
    "#7d3c98",
    "#c39bd3",
    "#7f8c8d",
    "#95a5a6",
    "#bdc3c7",
    "#d5d8dc",
)
RED, GREEN = COLOURS[4], COLOURS[2]


class Choices(Protocol):
    """The result of a search for a machine, as the page of the extension advice describes it."""

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
    """Draw the memory items of each rank under its capacity, ms/token by K, and both over the length of rows."""
    titles = "Memory per rank", "Time per token", "Memory over length", "Time over length"
    figure, (memory, by_k, *over_length) = panels(*titles, num_rows=2)
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
    _draw_lengths(plan, *over_length)
    return figure


_NUM_LENGTHS = 8


def _draw_lengths(plan: Plan, memory: "Axes", times: "Axes") -> None:
    """Draw bytes of the fullest rank, and ms/token, of rows up to the longest that fit or that were asked for."""
    spec, machine = plan.spec, plan.hardware
    narrow = replace(spec, target=replace(spec.target, cache_dtype="int8"))
    caches = {"cache in its own format": spec, "cache in int8": narrow}
    if spec.target.cache_dtype != OWN_DTYPE:
        caches = {f"cache in {spec.target.cache_dtype}": spec}
    longest = max(plan.largest_context, spec.prompt_tokens + spec.max_new_tokens)
    prompts = [longest * number // _NUM_LENGTHS - spec.max_new_tokens for number in range(1, _NUM_LENGTHS + 1)]
    for number, (label, one) in enumerate(caches.items()):
        of_lengths = [replace(one, prompt_tokens=prompt, mean_prompt_tokens=None) for prompt in prompts if prompt > 0]
        lengths = [each.prompt_tokens + each.max_new_tokens for each in of_lengths]
        memory.plot(
            lengths,
            [fullest_rank(each, machine).needed_bytes / GIB for each in of_lengths],
            **look(number),
            label=label,
        )
        timed = [timing(each, machine) for each in of_lengths]
        times.plot(lengths, [1e3 * each.plain_s for each in timed], **look(number), label=f"plain, {label}")
        drafted = [1e3 * each.speculative_s for each in timed if each.speculative_s is not None]
        if drafted:
            style = look(number) | {"linestyle": "--"}
            times.plot(lengths, drafted, **style, label=f"speculative, {label}")
    capacity = plan.ranks[0].capacity_bytes / GIB
    memory.axhline(capacity, color=RED, label=f"capacity {capacity:.1f} GiB")
    for axes, unit in ((memory, "GiB"), (times, "ms/token")):
        axes.set(xlabel="tokens of a row", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", nbins=5)


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
