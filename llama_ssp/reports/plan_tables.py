"""Prints plans, searches, and plans of several machines with rich, from their documents.

Ranks with equal figures share a column. Bytes are shown in GiB (in MiB if all are small), times in ms. A search has the
settings that plan or run each of its choices.
"""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama_ssp.settings.schema import ADAPTIVE
from llama_ssp.storage.formats import formats
from llama_ssp.words import rounded, visible

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
_UNLIMITED = 10**4
LEAST_SHOWN_MS = LEAST_SHOWN_HOURS = 0.005


class _Output(Console):
    """Standard output; lines are wrapped for a terminal alone, or for $COLUMNS.

    Raises BrokenPipeError when nobody reads any more, where rich would end the process.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=False, emoji=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _print_notes(console: Console, notes: Sequence[str], **how: Any) -> None:  # noqa: ANN401 - as `Console.print` has
    for note in notes:
        console.print(f"[cyan]note:[/cyan] {_literal(note)}", **how)


def _literal(text: str) -> str:
    """Escape text of settings and of catalogue entries: it must be neither markup nor control characters."""
    return escape(visible(text))


def short_name(quantization: str) -> str:
    """A storage format in tables and figures; a number format is its own name."""
    storage = formats().get(quantization)
    return (storage and storage.short_name) or quantization


def print_document(
    content: Mapping[str, Any], *, machine: str = "", unit: str = "", console: Console | None = None
) -> None:
    """Print the document of a plan, of a search, or of several plans on a console, or on standard output.

    A search also needs the name of its `machine`, and `unit`, what a rank runs on.
    """
    console = console or _Output()
    if "search" in content:
        _print_search(content, console, machine=machine, unit=unit)
    elif "plans" in content:
        _print_machines(content["plans"], console)
    else:
        _print_plan(content, console)


def _print_plan(plan: Mapping[str, Any], console: Console) -> None:
    console.print(f"\n[bold]{_literal(verdict(plan))}[/bold]")
    console.print(_literal(headline(plan)))
    for part in (*_memory_table(plan), _room(plan), *_time_table(plan)):
        console.print(part)
    for line in (*_times_of_parts(plan), *_basis(plan)):
        console.print(_literal(line))
    for warning in plan["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {_literal(warning)}")
    _print_notes(console, plan["notes"])


def verdict(plan: Mapping[str, Any]) -> str:
    """Say in one line whether it fits, its faster mode, how fast that is, and what tokens cost at a given price."""
    time = plan["time"]
    full = min(plan["memory"], key=lambda rank: rank["free_bytes"])
    usd = plan["usd_per_million_tokens"]
    if not plan["fits"]:
        needed, capacity = (f"{full[name] / GIB:.1f}" for name in ("needed_bytes", "capacity_bytes"))
        return f"does not fit: rank {full['rank']} needs {needed} of {capacity} GiB"
    mode = _faster_mode(time)
    ends = time[f"{mode}_ms_per_token_range"]
    between = f" ({rounded(ends[0])} to {rounded(ends[1])})" if ends else ""
    ms, rate = (rounded(time[f"{mode}_{name}"]) for name in ("ms_per_token", "run_tokens_per_s"))
    fits = "fits, tight" if plan["is_tight"] else "fits"
    return f"{fits}: {mode} {ms} ms/token{between}, {rate} tokens/s with prompts" + (
        "" if usd is None else f", {usd:.2f} USD per million tokens"
    )


def _faster_mode(time: Mapping[str, Any]) -> str:
    return "speculative" if (time["speedup"] or 0) > 1 else "plain"


def headline(plan: Mapping[str, Any]) -> str:
    """Name models, machine and sizes in one line."""
    machine, num_ranks = plan["hardware"], len({rank["rank"] for rank in plan["memory"]})
    return _job(plan, f" on {num_ranks} x {machine['gpu']} ({machine['name']})")


def _job(plan: Mapping[str, Any], where: str = "") -> str:
    target, draft, job = plan["target"], plan["draft"], plan["job"]
    drafter = f"{_named(draft)}{f' {_placed(draft)}' if where else ''}" if draft else job["free_draft"]
    length = f"tree {job['tree']}" if job["tree"] else f"K={'auto' if job['adapts'] else job['num_draft_tokens']}"
    drafting = f", draft {drafter}, {length}" if drafter else ""
    sizes = f"batch {job['batch_size']}, {job['prompt_tokens']} + {job['max_new_tokens']} tokens"
    return f"{_named(target)}{where}{drafting}; {sizes}"


def _named(model: Mapping[str, Any]) -> str:
    if model["quantization"] != "none":
        return f"{model['name']} {model['quantization']}"
    if model["stored_format"]:
        return f"{model['name']} {model['stored_format']}"
    is_mixed = model["matrix_dtype"] != model["dtype"]
    return f"{model['name']} {model['dtype']}{' with 16-bit weights' if is_mixed else ''}"


def _placed(draft: Mapping[str, Any]) -> str:
    ranks = draft["ranks"]
    return f"on rank {ranks[0]}" if len(ranks) == 1 else f"{draft['kind']} over {len(ranks)} ranks"


def _memory_table(plan: Mapping[str, Any]) -> tuple[str, Table]:
    """A title, which is a line of its own so that a narrow table does not break it, and the table."""
    num_replicas = plan["job"]["num_replicas"]
    groups = _groups(plan["memory"][: len(plan["memory"]) // num_replicas])
    ranks = [rank for _, rank in groups]
    unit, name = (MIB, "MiB") if max(rank["needed_bytes"] for rank in ranks) < SMALL_BYTES else (GIB, "GiB")
    replicas = f", the same in each of {num_replicas} replicas" if num_replicas > 1 else ""
    table = Table()
    table.add_column("", no_wrap=True, min_width=max(map(len, ITEMS)))
    for group, rank in groups:
        heads = f"\n{rank['target_heads']} heads" if rank["target_heads"] else ""
        table.add_column(f"{group}{heads}", justify="right", no_wrap=True)
    for label, item in ITEMS.items():
        if any(rank[item] for rank in ranks):
            table.add_row(label, *(_amount(rank[item], unit) for rank in ranks))
    table.add_section()
    table.add_row("total", *(f"[bold]{_amount(rank['total_bytes'], unit)}[/bold]" for rank in ranks))
    for label, item in SUMS.items():
        table.add_row(label, *(_amount(rank[item], unit) for rank in ranks))
    table.add_row("verdict", *(_VERDICTS[rank["fits"], rank["is_tight"]] for rank in ranks))
    return f"Memory per rank, {name}{replicas}", table


_VERDICTS = {
    (False, False): "[red]too full[/red]",
    (True, True): "[yellow]fits, tight[/yellow]",
    (True, False): "[green]fits[/green]",
}


def _amount(num_bytes: int, unit: int) -> str:
    if not num_bytes:
        return "[dim]-[/dim]"
    return "<0.01" if 0 < num_bytes < unit / 200 else f"{num_bytes / unit:.2f}"


def _groups(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Group neighbouring ranks with equal figures, under names such as "rank 0" and "ranks 1-7"."""
    groups = []
    for _, members in groupby(ranks, key=lambda rank: {**rank, "rank": None}):
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


def _time_table(plan: Mapping[str, Any]) -> tuple[str, Table]:
    time, rows, num_replicas = plan["time"], plan["job"]["batch_size"], plan["job"]["num_replicas"]
    over = f"{'one row' if rows == 1 else f'{rows} rows'}{f' of each of {num_replicas} replicas' * (num_replicas > 1)}"
    title = f"Time: ms/token of a completion after its first token, tokens/s over {over}, then with their prompts"
    table = Table()
    for name in ("", "ms/token", "first token", "tokens/s", "with prompts", "speed-up"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for mode, first in (("plain", "plain_first_token_ms"), ("speculative", "first_token_ms")):
        if (ms := time[f"{mode}_ms_per_token"]) is not None:
            gain = time["speedup"] if mode == "speculative" else None
            colour = "green" if gain and gain > 1 else "red"
            shown = "" if gain is None else f"[{colour}]{gain:.2f}x[/{colour}]"
            rates = [f"{time[f'{mode}{name}_tokens_per_s']:.1f}" for name in ("", "_run")]
            table.add_row(mode, f"{ms:.2f}", f"{time[first]:.0f} ms", *rates, shown)
    return title, table


def _times_of_parts(plan: Mapping[str, Any]) -> list[str]:
    """Parts of a plain step and of a round, in lines: a terminal of 80 columns has no room next to the table."""
    time, tree = plan["time"], plan["job"]["tree"]
    forward = time["target_forward"]
    names = ("matrices", "attention", "operators", "collectives")
    parts = [f"{name} {forward[f'{name}_ms']:.2f}" for name in names if forward[f"{name}_ms"] >= LEAST_SHOWN_MS]
    lines = [f"plain step, ms: {', '.join(parts)}"] if parts else []
    if time["round_ms"] is not None:
        steps = f"{time['num_draft_tokens']} x {time['draft_step_ms']:.2f} draft"
        if tree:
            steps = f"draft of a tree {tree} {time['round_ms'] - time['verify_ms']:.2f}"
        lines.append(f"round of {time['round_ms']:.1f} ms: {steps}, verify {time['verify_ms']:.1f}")
    return lines


def _basis(plan: Mapping[str, Any]) -> list[str]:
    time = plan["time"]
    of_copy, of_sheet = 100 * time["copy_share"], 100 * time["limit_share"]
    reached = (
        f"plain decoding uses {of_copy:.0f} % of achievable memory bandwidth, {of_sheet:.0f} % of the data sheet's"
    )
    lines = [plan["basis"], *_ranges(time), reached]
    if time["tokens_per_round"] is not None:
        shown = {
            name: f"{time[name]:.2f}{_in_brackets(time[f'{name}_range'])}"
            for name in ("tokens_per_round", "acceptance")
        }
        gains = min(time["speculative_ms_per_token_by_k"], default=0.0) < time["plain_ms_per_token"]
        best, ends = time["best_num_draft_tokens"] if gains else None, time["best_num_draft_tokens_range"]
        between = f" ({ends[0]} to {ends[1]})" if ends and ends[0] < ends[1] else ""
        lines.append(
            f"{shown['tokens_per_round']} tokens per round at an acceptance of {shown['acceptance']}; "
            f"c = {time['cost_ratio']:.3f}{f'; best K = {best}{between}' if best else ''}"
        )
        if overlap := time["overlap"]:
            idle = (f"{model} idle {100 * overlap[f'{model}_idle_share']:.0f} %" for model in ("target", "draft"))
            dropped = f"{100 * overlap['dropped_share']:.0f} % of drafted tokens dropped"
            lines.append(f"drafting overlaps verification: {', '.join(idle)}, {dropped}")
        lines.append(f"acceptance: {time['acceptance_source']}")
    return lines


def _ranges(time: Mapping[str, Any]) -> Iterator[str]:
    """The 80 % ranges of a forecast, if it has any."""
    named = {"plain": "plain_ms_per_token", "speculative": "speculative_ms_per_token", "first token": "first_token_ms"}
    found = [
        f"{name} {rounded(ends[0])} to {rounded(ends[1])}"
        for name, key in named.items()
        if (ends := time[f"{key}_range"])
    ]
    if found:
        yield f"80 % ranges, ms: {', '.join(found)}"


def _in_brackets(found: Sequence[float] | None) -> str:
    return f" ({found[0]:.2f}-{found[1]:.2f})" if found else ""


class JobRow(NamedTuple):
    """A job of a sweep: its name, ms/token in its faster mode, and hours of decoding where they are known."""

    name: str
    fits: bool
    ms_per_token: float
    hours: float | None
    gpu_hours: float | None


def print_jobs(jobs: Sequence[JobRow], console: Console | None = None) -> None:
    """Print one table of all jobs of a sweep."""
    title = "All jobs; ms/token of a completion in its faster mode; hours of decoding at most, without loading"
    table = Table(show_footer=True)
    table.add_column("job", footer=f"{len(jobs)} jobs", overflow="fold")
    table.add_column("fits", footer=f"{sum(job.fits for job in jobs)} of {len(jobs)}", no_wrap=True)
    table.add_column("ms/token", justify="right", no_wrap=True)
    table.add_column("hours", justify="right", footer=_sum_of_hours([job.hours for job in jobs]), no_wrap=True)
    table.add_column("GPU-hours", justify="right", footer=_sum_of_hours([job.gpu_hours for job in jobs]), no_wrap=True)
    for job in jobs:
        verdict = "[green]yes[/green]" if job.fits else "[red]no[/red]"
        spent = [_shown_hours(job.hours), _shown_hours(job.gpu_hours)]
        table.add_row(_literal(job.name), verdict, f"{job.ms_per_token:.2f}", *spent)
    console = console or _Output()
    console.print(title)
    console.print(table)


def _sum_of_hours(hours: Sequence[float | None]) -> str:
    """The sum, if every job has its hours."""
    known = [each for each in hours if each is not None]
    return _shown_hours(sum(known) if len(known) == len(hours) else None)


def _shown_hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return "<0.01" if 0 < hours < LEAST_SHOWN_HOURS else f"{hours:.2f}"


MOST_CHOICES = 5
"""Choices of a search that are printed; JSON has all of them."""


def _print_search(content: Mapping[str, Any], console: Console, *, machine: str, unit: str) -> None:
    """The best choices, with what does not fit struck out."""
    choices = content["search"]
    title = (
        f"Choices on {_literal(machine)}, the fastest of each precision first: {MOST_CHOICES} of {len(choices)}, which "
        "format=json has. ms/token of a completion after its first token, tokens/s over all rows and replicas, "
        f"replicas x {unit}s of each, GiB of the fullest rank"
    )
    table = Table(padding=0, pad_edge=False, box=box.SIMPLE_HEAD)
    for name in ("#", "target", "draft", "K", f"{unit}s", "ms/token", "tokens/s", "gain", "GiB"):
        is_text = name in {"target", "draft"}
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    shown = printed(choices)
    for choice in shown:
        table.add_row(*_row(choice))
    console.print(title)
    console.print(table)
    console.print(_literal(content["basis"]))
    _print_notes(console, content["notes"], soft_wrap=True)
    console.print("\nThese commands plan the choices, and with run in place of plan they run them:")
    for choice in shown:
        if choice["reason"] is None:
            command = shlex.join(["llama-ssp", "plan", *choice["settings"]])
            console.print(f"{choice['rank']:>4}  {escape(command)}", soft_wrap=True)


def printed(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The choices that a table shows: of the asked model, or if it does not fit the nearest misfit and the others."""
    fitting = [choice for choice in choices if choice["reason"] is None]
    misfits = [choice for choice in choices if choice["reason"] is not None]
    asked = choices[0]["target"]
    of_asked = [choice for choice in fitting if choice["target"] == asked]
    nearest = min(
        misfits, key=lambda choice: (choice["target"] != asked, choice["needed_bytes"] or math.inf), default=None
    )
    known, shown = of_asked or fitting, [] if of_asked or nearest is None else [nearest]
    best = {(choice["target"], choice["quantization"]): choice for choice in reversed(known)}
    firsts = [choice for choice in known if choice in best.values()]
    others = [choice for choice in known if choice not in firsts]
    return [*shown, *sorted([*firsts, *others][: MOST_CHOICES - len(shown)], key=lambda choice: choice["rank"])]


def _shown_length(choice: Mapping[str, Any]) -> str:
    return ADAPTIVE if choice["adapts"] else choice["tree"] or str(choice["num_draft_tokens"] or "")


def _drafted(choice: Mapping[str, Any]) -> str:
    """The draft of a choice, and its storage format if it is quantized."""
    quantization = choice["draft_quantization"]
    packed = f" {short_name(quantization)}" if quantization in formats() else ""
    return _literal(choice["draft"] or "none") + packed


def _row(choice: Mapping[str, Any]) -> list[str]:
    target = f"{_literal(choice['target'])} {short_name(choice['quantization'])}"
    kind = f"{choice['draft_kind']}, overlaps" if choice["overlaps"] else choice["draft_kind"]
    draft = f"{_drafted(choice)} {kind or ''}".strip()
    ranks = f"{choice['num_replicas']} x {choice['num_ranks']}".removeprefix("1 x ")
    if choice["reason"]:
        struck = [f"[strike]{name}[/strike]" for name in (target, draft)]
        needed, capacity = choice["needed_bytes"], choice["capacity_bytes"]
        shortage = "cannot be shared" if needed is None else f"{needed / GIB:.1f} of {capacity / GIB:.1f}"
        return ["", *struck, "", ranks, "", "", "", f"[red]{shortage}[/red]"]
    k, room = _shown_length(choice), _amount(choice["needed_bytes"], GIB)
    room = f"[yellow]{room} tight[/yellow]" if choice["is_tight"] else room
    times = [f"{choice['ms_per_token']:.2f}", f"{choice['tokens_per_s']:.1f}", f"{choice['speedup']:.2f}x"]
    return [str(choice["rank"]), target, draft, k, ranks, *times, room]


def _print_machines(plans: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A row for the plan of each machine, in the order given."""
    names = ["machine", "ranks", "GiB of", "capacity", "plain", "speculative", "first token", "tokens/s"]
    has_price = any(plan["usd_per_million_tokens"] is not None for plan in plans)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for name in [*names, *["USD/M tokens"] * has_price]:
        table.add_column(name, justify="left" if name == "machine" else "right", overflow="fold")
    for plan in plans:
        table.add_row(*_machine_cells(plan), *[_usd(plan)] * has_price)
    console.print(
        f"\n{_literal(_job(plans[0]))}: ms/token of a completion, ms to its first token, tokens/s with prompts\n"
    )
    console.print(table)
    for basis, group in groupby(sorted(plans, key=lambda plan: plan["basis"]), key=lambda plan: plan["basis"]):
        console.print(_literal(f"{', '.join(plan['hardware']['name'] for plan in group)}: {basis}"))
    console.print("hardware= with one of them prints its plan, with ranges, warnings and notes")


def _machine_cells(plan: Mapping[str, Any]) -> list[str]:
    time, ranks = plan["time"], plan["memory"]
    full = min(ranks, key=lambda rank: rank["free_bytes"])
    colour = "red" if not plan["fits"] else "yellow" if plan["is_tight"] else "green"
    memory = [f"[{colour}]{full['needed_bytes'] / GIB:.1f}[/{colour}]", f"{full['capacity_bytes'] / GIB:.1f}"]
    name = _literal(plan["hardware"]["name"])
    if not plan["fits"]:
        return [name, str(len(ranks)), *memory, "[red]does not fit[/red]", "", "", ""]
    mode, speculative = _faster_mode(time), time["speculative_ms_per_token"]
    times = [f"{time['plain_ms_per_token']:.2f}", "" if speculative is None else f"{speculative:.2f}"]
    first = time["first_token_ms" if mode == "speculative" else "plain_first_token_ms"]
    return [name, str(len(ranks)), *memory, *times, f"{first:.0f}", f"{time[f'{mode}_run_tokens_per_s']:.0f}"]


def _usd(plan: Mapping[str, Any]) -> str:
    usd = plan["usd_per_million_tokens"]
    return "" if usd is None or not plan["fits"] else f"{usd:.2f}"
