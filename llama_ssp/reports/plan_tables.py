"""Prints plans, and plans of several machines, with rich: in a screen, or in full.

Ranks with equal figures share a column. Bytes are shown in GiB (in MiB if all are small), times in ms.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama_ssp.planning.memory import GIB, RankMemoryPlan
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.plan import Plan
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.drafters import DRAFTERS
from llama_ssp.storage.formats import NO_QUANTIZATION, formats
from llama_ssp.text.messages import counted, rounded, visible

MIB = 2**20
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
_WIDE = 72
"""Columns in which the heads of the times stand in one line."""
LEAST_SHOWN_MS = 0.005
SMALL_SHARE = 0.05
"""A share of the fullest rank's bytes: smaller items are one row, but for weights."""


class StandardOutput(Console):
    """Standard output; lines are wrapped for a terminal alone, or for $COLUMNS.

    Raises BrokenPipeError when its reader is gone, where rich would end the process.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=False, emoji=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def on_broken_pipe(self) -> None:
        """Let the caller end."""
        raise BrokenPipeError


def literal(text: str) -> str:
    """Escape text of settings and of catalogue entries: it must be neither markup nor control characters."""
    return escape(visible(text))


def short_name(quantization: str) -> str:
    """A storage format in tables and figures; a number format is its own name."""
    storage = formats().get(quantization)
    return (storage and storage.short_name) or quantization


def show(content: Plan | list[Plan], console: Console | None = None, *, is_full: bool = False) -> None:
    """Print a plan, or the plans of several machines, on a console or on standard output.

    With `is_full`, each plan shows all items of memory, the parts of a step and all notes.
    """
    console = console or StandardOutput()
    if isinstance(content, Plan):
        _print_plan(content, console, is_full=is_full)
        return
    _print_machines(content, console, is_full=is_full)
    for plan in content if is_full else ():
        _print_plan(plan, console, is_full=True)


def _print_plan(plan: Plan, console: Console, *, is_full: bool) -> None:
    first, *others = map(literal, [*plan.refusals, verdict(plan)])
    console.print(f"\n[bold]{first}[/bold]")
    for line in others:
        console.print(line)
    console.print(literal(headline(plan)))
    if plan.whole_run:
        console.print(literal(plan.whole_run))
    for part in (*_memory_table(plan, console, is_full=is_full), *_time_table(plan, console.width)):
        if part:
            console.print(part)
    for line in (*(_parts_of_step(plan) if is_full else ()), *_parts_of_round(plan), *_basis(plan)):
        console.print(literal(line))
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {literal(warning)}")
    for note in plan.notes:
        if is_full or note not in plan.details:
            console.print(f"[cyan]note:[/cyan] {literal(note)}")
    if not is_full:
        sums = ", the sums over ranks" * (len(plan.ranks) > 1)
        console.print(f"[dim]format=full has every item of memory, the parts of a step{sums}[/dim]")


def verdict(plan: Plan) -> str:
    """Say in one line whether it fits, how fast the asked mode is, and plain decoding if that is faster."""
    full, timed, usd = plan.fullest, plan.timing, plan.usd_per_million_tokens
    if not plan.fits:
        return f"does not fit: rank {full.rank} needs {full.room}"
    mode, token_s, ends, run_s = "plain", timed.plain_s, timed.plain_s_range, timed.plain_run_s
    if timed.speculative_s and timed.speculative_run_s:
        mode, token_s, ends, run_s = (
            "speculative",
            timed.speculative_s,
            timed.speculative_s_range,
            timed.speculative_run_s,
        )
    between = f" ({_ms(ends[0])} to {_ms(ends[1])})" if ends else ""
    faster = f"; plain takes {_ms(timed.plain_s)}" if timed.plain_s < token_s else ""
    fits, rate = "fits, tight" if full.is_tight else "fits", rounded(plan.spec.num_rows / run_s)
    price = "" if usd is None else f", {usd:.2f} USD per million tokens"
    return f"{fits}: {mode} {_ms(token_s)} ms/token{between}, {rate} tokens/s with prompts{faster}{price}"


def _ms(seconds: float) -> str:
    return rounded(1e3 * seconds)


def headline(plan: Plan) -> str:
    """Name models, machine and sizes in one line."""
    return _models(plan.spec, f" on {len(plan.ranks)} x {plan.hardware.gpu} ({plan.hardware.name})")


def _models(spec: PlanSpec, where: str = "") -> str:
    drafter = spec.free_draft
    if draft := spec.draft:
        ranks = spec.draft_ranks
        placed = f"on rank {ranks[0]}" if len(ranks) == 1 else f"{spec.draft_kind.name} over {len(ranks)} ranks"
        drafter = f"{_named(draft, spec.device)}{where and f' {placed}'}"
    length = f"tree {spec.tree.text}" if spec.tree else f"K={spec.length}"
    drafting = f", draft {drafter}, {length}" if drafter else ""
    about = "about " * spec.guesses_tokens
    sizes = f"batch {spec.batch_size}, {about}{spec.prompt_tokens} + {spec.max_new_tokens} tokens"
    return f"{_named(spec.target, spec.device)}{where}{drafting}; {sizes}"


def _named(model: PlannedModel, device: str) -> str:
    if model.quantization != NO_QUANTIZATION:
        return f"{model.label} {model.quantization}"
    if model.stored_format:
        return f"{model.label} {model.stored_format.name}"
    is_mixed = model.matrix_dtype(device) is not model.dtype
    return f"{model.label} {model.dtype.name}{' with 16-bit weights' if is_mixed else ''}"


def _memory_table(plan: Plan, console: Console, *, is_full: bool) -> tuple[str, Table]:
    """Return the title of the table of memory and the table itself.

    The title is a separate line, so that a narrow table does not break it. In the short form, the head of the first
    column replaces the title, unless there are replicas. If the console is too narrow for all kinds of ranks, the table
    shows the kinds that need most memory, and the title says so.
    """
    num_replicas = plan.spec.num_replicas
    ranks = plan.ranks[: len(plan.ranks) // num_replicas]
    unit, name = (MIB, "MiB") if max(rank.needed_bytes for rank in ranks) < SMALL_BYTES else (GIB, "GiB")
    replicas = f", the same in each of {num_replicas} replicas" if num_replicas > 1 else ""
    rows = _rows(ranks, unit, is_full=is_full)
    columns: dict[tuple[str, ...], list[RankMemoryPlan]] = {}
    for place, rank in enumerate(ranks):
        columns.setdefault(tuple(cells[place] for _, cells in rows), []).append(rank)
    by_need = sorted(columns, key=lambda cells: -columns[cells][0].needed_bytes)
    for number in range(len(columns), 0, -1):
        shown = {cells: ranks for cells, ranks in columns.items() if cells in by_need[:number]}
        fullest = f", the fullest {counted(number, 'kind')} of {len(columns)}" * (number < len(columns))
        title = f"Memory per rank, {name}{replicas}{fullest}" if is_full or replicas or fullest else ""
        table = _columns(shown, [label for label, _ in rows], "" if title else f"{name} per rank", has_heads=is_full)
        if table.__rich_measure__(console, console.options.update(width=_UNLIMITED)).maximum <= console.width:
            break
    return title, table


def _columns(
    columns: Mapping[tuple[str, ...], Sequence[RankMemoryPlan]], labels: Sequence[str], head: str, *, has_heads: bool
) -> Table:
    table = _narrow()
    table.add_column(head, no_wrap=True, min_width=max(map(len, ITEMS)))
    for members in columns.values():
        heads = {member.target_heads for member in members} if has_heads else set()
        shared = f"\n{'-'.join(map(str, sorted(heads)))} heads" if any(heads) else ""
        table.add_column(f"{_named_ranks([one.rank for one in members])}{shared}", justify="right", no_wrap=True)
    for number, label in enumerate(labels):
        table.add_row(label, *(column[number] for column in columns))
    return table


def _rows(ranks: Sequence[RankMemoryPlan], unit: int, *, is_full: bool) -> list[tuple[str, list[str]]]:
    """Labels and cells of the table of memory, of each rank."""
    rows = [(label, [amount(size, unit) for size in sizes]) for label, sizes in _items(ranks, is_full=is_full)]
    rows.append(("total", [f"[bold]{amount(rank.total_bytes, unit)}[/bold]" for rank in ranks]))
    sums = SUMS
    if not is_full:  # every rank has the same capacity
        peak = {"peak while loading": SUMS["peak while loading"]}
        sums = peak if any(rank.needed_bytes > rank.total_bytes for rank in ranks) else {}
        sums = sums | {f"free of {amount(ranks[0].capacity_bytes, unit)}": SUMS["free"]}
    rows += [(label, [amount(getattr(rank, item), unit) for rank in ranks]) for label, item in sums.items()]
    if not all(rank.fits and not rank.is_tight for rank in ranks):
        rows.append(("verdict", [_VERDICTS[rank.fits, rank.is_tight] for rank in ranks]))
    return rows


def _named_ranks(ranks: Sequence[int]) -> str:
    """A name such as "rank 0", "ranks 1-7", or for non-adjacent ranks "8 like rank 1"."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    return f"ranks {first}-{last}" if len(ranks) == last - first + 1 else f"{len(ranks)} like rank {first}"


def _items(ranks: Sequence[RankMemoryPlan], *, is_full: bool) -> Iterator[tuple[str, list[int]]]:
    """Items with their bytes on each rank; items that are small on every rank are one, unless in full."""
    sizes = {label: [getattr(rank, item) for rank in ranks] for label, item in ITEMS.items()}
    least = 0 if is_full else SMALL_SHARE * max(rank.total_bytes for rank in ranks)
    large = [label for label in sizes if any(sizes[label]) and (max(sizes[label]) >= least or "weights" in label)]
    small = [sizes[label] for label in sizes if label not in large]
    yield from ((label, sizes[label]) for label in large)
    if any(map(any, small)):
        yield "other items", [*map(sum, zip(*small, strict=True))]


_VERDICTS = {
    (False, False): "[red]too full[/red]",
    (True, True): "[yellow]fits, tight[/yellow]",
    (True, False): "[green]fits[/green]",
}


def amount(num_bytes: int, unit: int) -> str:
    """Bytes in a cell, by their unit."""
    if not num_bytes:
        return "[dim]-[/dim]"
    return "<0.01" if 0 < num_bytes < unit / 200 else f"{num_bytes / unit:.2f}"


def _time_table(plan: Plan, width: int) -> tuple[str, Table]:
    timed, rows, num_replicas = plan.timing, plan.spec.batch_size, plan.spec.num_replicas
    over = f"{'one row' if rows == 1 else f'{rows} rows'}{f' of each of {num_replicas} replicas' * (num_replicas > 1)}"
    title = f"Time after the first token; tokens/s over {over}, then with prompts"
    table = _narrow()
    names = "", "ms/token", "first token", "tokens/s", "with prompts"
    for name in (*names, "forecast speed-up") if plan.spec.drafts else names:
        head = name if width >= _WIDE else name.replace(" ", "\n")
        table.add_column(head, justify="right" if name else "left", no_wrap=True)
    colour = "green" if timed.gains else "red"
    gain = "" if timed.speedup is None else f"[{colour}]{timed.speedup:.2f}x[/{colour}]"
    plain = "plain", timed.plain_s, timed.plain_prefill_s, timed.plain_run_s, "[dim]-[/dim]"
    speculative = "speculative", timed.speculative_s, timed.prefill_s, timed.speculative_run_s, gain
    for mode, token_s, first_s, run_s, shown in (plain, speculative):
        if token_s and run_s:
            rates = (f"{plan.spec.num_rows / seconds:.1f}" for seconds in (token_s, run_s))
            table.add_row(mode, f"{1e3 * token_s:.2f}", f"{1e3 * first_s:.0f} ms", *rates, *[shown] * plan.spec.drafts)
    return title, table


def _narrow() -> Table:
    """A table with a rule below its head alone, which leaves room in a terminal of 80 columns, and 24 lines."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)


def _parts_of_step(plan: Plan) -> Iterator[str]:
    """Parts of a plain step in a line: a terminal of 80 columns has no room next to the table."""
    timed = plan.timing
    ms = {name.removesuffix("_s"): 1e3 * seconds for name, seconds in vars(timed.target_forward).items()}
    ms["draw"] = 1e3 * (timed.plain_s - timed.target_forward.total_s)
    if parts := [f"{name} {one:.2f}" for name, one in ms.items() if one >= LEAST_SHOWN_MS]:
        yield f"plain step, ms: {', '.join(parts)}"


def _parts_of_round(plan: Plan) -> Iterator[str]:
    timed, tree = plan.timing, plan.spec.tree
    if timed.round_s and timed.verify_s and timed.num_draft_tokens:
        drafting_ms = timed.overlap["draft_ms"] if timed.overlap else 1e3 * (timed.round_s - timed.verify_s)
        steps = f"{timed.num_draft_tokens} x {drafting_ms / timed.num_draft_tokens:.2f} draft"
        if tree or plan.spec.free_draft:
            step = f"draft of a tree {tree.text}" if tree else DRAFTERS.of(str(plan.spec.free_draft)).step_name
            steps = f"{step} {drafting_ms:.2f}"
        share = f" (c = {timed.cost_ratio:.3f})" if timed.cost_ratio else ""
        yield f"round of {1e3 * timed.round_s:.1f} ms: {steps}{share}, verify {1e3 * timed.verify_s:.1f}"


def _basis(plan: Plan) -> Iterator[str]:
    timed, acceptance = plan.timing, plan.timing.acceptance
    yield plan.basis
    ranges = {
        "plain": timed.plain_s_range,
        "speculative": timed.speculative_s_range,
        "first token": timed.prefill_s_range,
    }
    if found := [f"{name} {_ms(ends[0])} to {_ms(ends[1])}" for name, ends in ranges.items() if ends]:
        gain = timed.speedup_range
        of_gain = f", gain {gain[0]:.2f}x to {gain[1]:.2f}x, middle {math.sqrt(gain[0] * gain[1]):.2f}x" if gain else ""
        yield f"80 % ranges, ms: {', '.join(found)}{of_gain}"
    if acceptance is None or timed.tokens_per_round is None:
        return
    between = f" ({acceptance.ends[0]:.2f}-{acceptance.ends[1]:.2f})" if acceptance.ends else ""
    tokens, ends = f"{timed.tokens_per_round:.2f}", timed.tokens_per_round_range
    tokens += f" ({ends[0]:.2f}-{ends[1]:.2f})" if ends else ""
    gains = min(timed.by_num_draft_tokens, default=0.0) < timed.plain_s
    best = f"; best K = {timed.best_num_draft_tokens}" if gains and timed.knows_best_k and not plan.spec.tree else ""
    yield f"{tokens} tokens per round{best}; acceptance {acceptance.probability:.2f}{between}: {acceptance.source}"
    if overlap := timed.overlap:
        idle = (f"{model} idle {100 * overlap[f'{model}_idle_share']:.0f} %" for model in ("target", "draft"))
        dropped = f"{100 * overlap['dropped_share']:.0f} % of drafted tokens dropped"
        yield f"drafting overlaps verification: {', '.join(idle)}, {dropped}"


def _print_machines(plans: Sequence[Plan], console: Console, *, is_full: bool) -> None:
    """Print a row for the plan of each machine, in the order given."""
    drafts = plans[0].spec.drafts
    modes = ["plain", *["speculative"] * drafts]
    names = ["machine", "ranks", "GiB\nof", "capacity", *modes, "first\ntoken", "tokens/s"]
    has_price = any(plan.usd_per_million_tokens is not None for plan in plans)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for name in [*names, *["USD/M\ntokens"] * has_price]:
        table.add_column(name, justify="left" if name == "machine" else "right", no_wrap=name != "machine")
    for plan in plans:
        table.add_row(*_machine_cells(plan))
    meaning = "ms/token of a completion, ms to its first token, tokens/s with prompts"
    for refusal in plans[0].refusals:
        console.print(f"\n[bold]{literal(refusal)}[/bold]")
    console.print(f"\n{literal(_models(plans[0].spec))}: {meaning}\n")
    console.print(table)
    for rests_on, group in groupby(sorted(plans, key=lambda plan: plan.basis), key=lambda plan: plan.basis):
        console.print(literal(f"{', '.join(plan.hardware.name for plan in group)}: {rests_on}"))
    if not is_full:
        console.print("hardware= with one of them prints its plan, with ranges, warnings and notes")


def _machine_cells(plan: Plan) -> Iterator[str]:
    timed, full, usd = plan.timing, plan.fullest, plan.usd_per_million_tokens
    colour = "red" if not plan.fits else "yellow" if full.is_tight else "green"
    yield from (literal(plan.hardware.name), str(len(plan.ranks)))
    yield from (f"[{colour}]{full.needed_bytes / GIB:.1f}[/{colour}]", f"{full.capacity_bytes / GIB:.1f}")
    if not plan.fits:
        yield "[red]does not fit[/red]"
        return
    yield f"{1e3 * timed.plain_s:.2f}"
    if plan.spec.drafts:
        yield "" if timed.speculative_s is None else f"{1e3 * timed.speculative_s:.2f}"
    yield f"{1e3 * (timed.prefill_s if timed.gains else timed.plain_prefill_s):.0f}"
    yield f"{plan.spec.num_rows / timed.best_run_s:.0f}"
    if usd is not None:
        yield f"{usd:.2f}"
