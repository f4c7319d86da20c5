"""Prints a plan with rich from its document (docs/reference/plan-document.md); JSON needs no rich.

Ranks with equal figures share a column. Bytes are shown in GiB (in MiB if all are small), times in ms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from llama_ssp.config.formats.format import formats
from llama_ssp.config.schema import DraftLayout, DraftPlacement
from llama_ssp.errors import ConfigError
from llama_ssp.visible import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GIB, MIB = 2**30, 2**20
SMALL_BYTES = 4 * GIB
"""Tables below this are in MiB."""
ITEMS = {
    "weights, target": "target_weights_bytes",
    "weights, draft": "draft_weights_bytes",
    "cache, target": "target_cache_bytes",
    "cache, draft": "draft_cache_bytes",
    "logits and rule": "logits_bytes",
    "activations": "activations_bytes",
    "CUDA graphs": "graphs_bytes",
    "collectives": "collectives_bytes",
    "device context": "context_bytes",
    "allocator slack": "slack_bytes",
}
SUMS = {"peak while loading": "loading_peak_bytes", "capacity": "capacity_bytes", "free": "free_bytes"}
LEAST_SHOWN_MS = LEAST_SHOWN_HOURS = 0.005
MOST_CHOICES = 8
"""Choices per target that the search prints; JSON has all of them."""


def print_plan(plan: Mapping[str, Any], console: "Console | None" = None) -> None:
    """Print one plan document on a console, or on standard output; raises ConfigError if rich is not installed."""
    console = console or _console()
    console.print(f"\n[bold]{_literal(headline(plan))}[/bold]")
    console.print(_memory_table(plan))
    console.print(_room(plan))
    console.print(_time_table(plan))
    for line in _basis(plan):
        console.print(_literal(line))
    for warning in plan["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {_literal(warning)}")
    for note in plan["notes"]:
        console.print(f"[cyan]note:[/cyan] {_literal(note)}")


def headline(plan: Mapping[str, Any]) -> str:
    """Name models, machine and sizes in one line."""
    target, draft, job, machine = plan["target"], plan["draft"], plan["job"], plan["hardware"]
    num_ranks = len({rank["rank"] for rank in plan["memory"]})
    drafter = f"{_named(draft)} {_placed(draft)}" if draft else job["free_draft"]
    drafting = f", draft {drafter}, K={'auto' if job['adapts'] else job['num_draft_tokens']}" if drafter else ""
    sizes = f"batch {job['batch_size']}, {job['prompt_tokens']} + {job['max_new_tokens']} tokens"
    return f"{_named(target)} on {num_ranks} x {machine['gpu']} ({machine['name']}){drafting}; {sizes}"


def _named(model: Mapping[str, Any]) -> str:
    if model["quantization"] != "none":
        return f"{model['name']} {model['quantization']}"
    is_mixed = model["matrix_dtype"] != model["dtype"]
    return f"{model['name']} {model['dtype']}{' with 16-bit weights' if is_mixed else ''}"


def _placed(draft: Mapping[str, Any]) -> str:
    ranks = draft["ranks"]
    if len(ranks) == 1:
        return f"on rank {ranks[0]}"
    return f"{draft['kind']} over {len(ranks)} ranks{_whole(draft['kind'], draft['whole'])}"


def _whole(kind: str, whole: str | None) -> str:
    """What its ranks hold whole, where that is neither all of it nor the default."""
    default = DraftPlacement().whole.name
    return f", {whole} whole" if kind != DraftLayout.replicated.name and whole not in {None, default} else ""


def _memory_table(plan: Mapping[str, Any]) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - see the module

    num_replicas = plan["job"]["num_replicas"]
    groups = _groups(plan["memory"][: len(plan["memory"]) // num_replicas])
    small = max(rank["needed_bytes"] for _, rank in groups) < SMALL_BYTES
    unit, name = (MIB, "MiB") if small else (GIB, "GiB")
    replicas = f", the same in each of {num_replicas} replicas" if num_replicas > 1 else ""
    table = Table(title=f"Memory per rank, {name}{replicas}", title_justify="left", title_style="")
    table.add_column("", no_wrap=True, min_width=max(map(len, ITEMS)))
    for group, rank in groups:
        heads = f"\n{rank['target_heads']} heads" if rank["target_heads"] else ""
        table.add_column(f"{group}{heads}", justify="right", no_wrap=True)
    for label, item in ITEMS.items():
        if any(rank[item] for _, rank in groups):
            table.add_row(label, *(_amount(rank[item], unit) for _, rank in groups))
    table.add_section()
    table.add_row("total", *(f"[bold]{_amount(rank['total_bytes'], unit)}[/bold]" for _, rank in groups))
    for label, item in SUMS.items():
        table.add_row(label, *(_amount(rank[item], unit) for _, rank in groups))
    table.add_row("verdict", *("[green]fits[/green]" if rank["fits"] else "[red]too full[/red]" for _, rank in groups))
    return table


def _amount(num_bytes: int, unit: int) -> str:
    if not num_bytes:
        return "[dim]-[/dim]"
    return "<0.01" if 0 < num_bytes < unit / 200 else f"{num_bytes / unit:.2f}"


def _groups(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Group neighbouring ranks with equal figures, under names such as "rank 0" and "ranks 1-7"."""

    def figures(rank: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in rank.items() if key != "rank"]

    groups = []
    for _, members in groupby(ranks, key=figures):
        run = list(members)
        first, last = run[0]["rank"], run[-1]["rank"]
        groups.append((f"rank {first}" if first == last else f"ranks {first}-{last}", run[0]))
    return groups


def _room(plan: Mapping[str, Any]) -> str:
    if not plan["fits"]:
        return "[red]does not fit[/red]"
    job = plan["job"]
    return (
        f"still fits: batch up to {plan['largest_batch']} at {job['prompt_tokens'] + job['max_new_tokens']} tokens, "
        f"context up to {plan['largest_context']} at batch {job['batch_size']}"
    )


def _time_table(plan: Mapping[str, Any]) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - see the module

    time, rows = plan["time"], plan["job"]["batch_size"]
    table = Table(title="Time", title_justify="left", title_style="")
    for name in ("", "ms/token", "tokens/s", "speed-up", "of which"):
        table.add_column(name, justify="left" if name in {"", "of which"} else "right")
    plain = time["plain_ms_per_token"]
    table.add_row("plain", f"{plain:.2f}", f"{1e3 * rows / plain:.1f}", "", _parts(time["target_forward"]))
    if time["speculative_ms_per_token"] is not None:
        speculative, speedup = time["speculative_ms_per_token"], time["speedup"]
        colour = "green" if speedup > 1 else "red"
        table.add_row(
            "speculative",
            f"{speculative:.2f}",
            f"{1e3 * rows / speculative:.1f}",
            f"[{colour}]{speedup:.2f}x[/{colour}]",
            f"round {time['round_ms']:.1f} = {time['num_draft_tokens']} x {time['draft_step_ms']:.2f} draft, "
            f"verify {time['verify_ms']:.1f}, other {time['other_ms']:.2f}",
        )
    return table


def _parts(forward: Mapping[str, float]) -> str:
    names = ("matrices", "attention", "operators", "collectives", "offload")
    return ", ".join(f"{name} {forward[f'{name}_ms']:.2f}" for name in names if forward[f"{name}_ms"] >= LEAST_SHOWN_MS)


def _basis(plan: Mapping[str, Any]) -> list[str]:
    time = plan["time"]
    of_copy, of_sheet, prefill_ms = 100 * time["copy_share"], 100 * time["limit_share"], time["prefill_ms"]
    reached = f"plain decoding reaches {of_copy:.0f} % of the speed of a copy, {of_sheet:.0f} % of the data sheet's"
    lines = [f"{reached}; prompt {prefill_ms:.0f} ms"]
    if time["tokens_per_round"] is not None:
        lines.append(
            f"{time['tokens_per_round']:.2f} tokens per round at an acceptance of {time['acceptance']:.2f} "
            f"({time['acceptance_source']}); c = {time['cost_ratio']:.3f}; best K = {time['best_num_draft_tokens']}"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job of a sweep.

    Attributes:
        ms_per_token: of its faster mode.
        hours: of its decoding; None if they are not known.
        num_gpus: 0 on CPUs.
    """

    name: str
    fits: bool
    ms_per_token: float
    hours: float | None
    num_gpus: int

    @property
    def gpu_hours(self) -> float | None:
        """The hours of all its GPUs."""
        return self.hours * self.num_gpus if self.hours is not None and self.num_gpus else None


def print_jobs(jobs: Sequence[JobRow], console: "Console | None" = None) -> None:
    """Print one table of all jobs of a sweep; raises ConfigError if rich is not installed."""
    console = console or _console()
    from rich.table import Table  # noqa: PLC0415 - see the module

    title = "All jobs; ms/token of the faster mode; hours of decoding at most, without loading"
    table = Table(title=title, title_justify="left", title_style="", show_footer=True)
    hours, gpu_hours = ([getattr(job, name) for job in jobs] for name in ("hours", "gpu_hours"))
    table.add_column("job", footer=f"{len(jobs)} jobs", overflow="fold")
    table.add_column("fits", footer=f"{sum(job.fits for job in jobs)} of {len(jobs)}", no_wrap=True)
    table.add_column("ms/token", justify="right", no_wrap=True)
    table.add_column("hours", justify="right", footer=_sum_of_hours(hours), no_wrap=True)
    table.add_column("GPU-hours", justify="right", footer=_sum_of_hours(gpu_hours), no_wrap=True)
    for job in jobs:
        verdict = "[green]yes[/green]" if job.fits else "[red]no[/red]"
        spent = [_shown_hours(job.hours), _shown_hours(job.gpu_hours)]
        table.add_row(_literal(job.name), verdict, f"{job.ms_per_token:.2f}", *spent)
    console.print(table)


def _sum_of_hours(hours: Sequence[float | None]) -> str:
    """The sum, if every job has its hours."""
    known = [each for each in hours if each is not None]
    return _shown_hours(sum(known) if len(known) == len(hours) else None)


def _shown_hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return "<0.01" if 0 < hours < LEAST_SHOWN_HOURS else f"{hours:.2f}"


def print_search(choices: Sequence[Mapping[str, Any]], *, machine: str, console: "Console | None" = None) -> None:
    """Print the ranking by target, with what does not fit struck out; raises ConfigError if rich is not installed."""
    console = console or _console()
    from rich.table import Table  # noqa: PLC0415 - see the module

    machine = _literal(machine)
    title = f"Choices on {machine}, the fastest {MOST_CHOICES} of each target; # ranks all, GiB are the fullest rank's"
    table = Table(title=title, title_justify="left", title_style="")
    for name in ("#", "target", "draft", "K", "ms/token", "gain", "GiB"):
        table.add_column(name, justify="left" if name in {"target", "draft"} else "right", no_wrap=True)
    for target in dict.fromkeys(choice["target"] for choice in choices):
        chosen = [choice for choice in choices if choice["target"] == target]
        fitting = [choice for choice in chosen if choice["reason"] is None]
        misfits = _one_per_precision([choice for choice in chosen if choice["reason"] is not None])
        for choice in [*fitting[:MOST_CHOICES], *misfits]:
            table.add_row(*_search_row(choice))
        table.add_section()
    console.print(table)


def _one_per_precision(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each precision, the choice that comes closest to fitting."""
    nearest: dict[str, Mapping[str, Any]] = {}
    for choice in sorted(choices, key=lambda choice: choice["needed_bytes"] or 0):
        nearest.setdefault(choice["quantization"], choice)
    return list(nearest.values())


def _search_row(choice: Mapping[str, Any]) -> list[str]:
    storage = formats().get(choice["quantization"])
    target = f"{_literal(choice['target'])} {(storage and storage.short_name) or choice['quantization']}"
    kind = choice["draft_kind"]
    draft = f"{_literal(choice['draft'])} {kind}{_whole(kind, choice['draft_whole'])}" if choice["draft"] else "none"
    if choice["reason"]:
        struck = [f"[strike]{name}[/strike]" for name in (target, draft)]
        needed, capacity = choice["needed_bytes"], choice["capacity_bytes"]
        shortage = "cannot be shared" if needed is None else f"{needed / GIB:.1f} of {capacity / GIB:.1f}"
        return ["", *struck, "", "", "", f"[red]{shortage}[/red]"]
    k, room = str(choice["num_draft_tokens"] or ""), _amount(choice["needed_bytes"], GIB)
    return [str(choice["rank"]), target, draft, k, f"{choice['ms_per_token']:.2f}", f"{choice['speedup']:.2f}x", room]


def _literal(text: str) -> str:
    """Escape text of settings and of catalogue entries: it must be neither markup nor control characters."""
    from rich.markup import escape  # noqa: PLC0415 - see the module

    return escape(visible(text))


def _console() -> "Console":
    try:
        from rich.console import Console  # noqa: PLC0415 - see the module
    except ImportError as error:
        raise ConfigError("format=table needs rich: pip install rich, or use format=json") from error

    class Output(Console):
        """Raises BrokenPipeError when nobody reads any more; rich would end the process."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Output(highlight=False, soft_wrap=False, emoji=False)
