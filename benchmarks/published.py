"""The planner against published speeds: writes docs/benchmarks/published.md.

    python -m benchmarks.published

Constants are fitted here and nowhere else: the time of a kernel, and what a sum takes more inside a step, from
gpt-fast's four Llama-2-7B bf16 rows on A100, the time to read weights of 8 and of 4 bits from its rows of these
formats, and that of an operator launched from Python from one plain row of transformers. Everything else is of data
sheets.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import yaml

from benchmarks.measured import markdown, page_of, show
from llama_ssp import catalogue
from llama_ssp.architectures.engine import Kernels
from llama_ssp.architectures.family import inventory
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.acceptance import acceptance_of
from llama_ssp.planning.forwards import LIBRARY_SHARE
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import FIRST, Ends, decoding_error, timing
from llama_ssp.settings.backends import backend_of
from llama_ssp.settings.drafters import VOCABULARIES
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.storage.formats import NO_QUANTIZATION, READ_SLOWDOWN, format_of

A100 = "8xa100_80gb"


class Measure(Enum):
    """What a row measures: tokens/s of all rows while they decode, with their prompts, or ms to the first token."""

    decoding = "tokens/s"
    run = "tokens/s with prompts"
    first = "first token, ms"


class Source(NamedTuple):
    """A page that states speeds of a machine, and what is left out of it."""

    name: str
    page: str
    left_out: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published speed; `engine` is set where a source has several, `by_library` in transformers, layers in a row.

    Ranks sum by a kernel of their engine, or `by_nccl`.
    """

    source: Source
    value: float
    model: str
    quantization: str = "none"
    machine: str = A100
    num_gpus: int = 1
    batch_size: int = 1
    prompt_tokens: int = 5
    max_new_tokens: int = 200
    measure: Measure = Measure.decoding
    engine: str = ""
    by_library: bool = False
    by_nccl: bool = False
    is_fitted: bool = False


CONTENT = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


def _rows() -> Iterator[Row]:
    for page in CONTENT["sources"]:
        source = Source(page["name"], page["page"], page.get("left_out", "none"))
        for given in page["rows"]:
            fields: dict[str, Any] = page.get("common", {}) | given
            if "per_gpu" in fields:
                fields["value"] = fields.get("num_gpus", 1) * fields.pop("per_gpu")
            elif "ms" in fields:
                fields["value"] = 1e3 / fields.pop("ms")
            elif "s" in fields:
                fields["value"] = fields["batch_size"] * fields["max_new_tokens"] / fields.pop("s")
            measure = Measure[fields.pop("measure", Measure.decoding.name)]
            yield Row(source=source, measure=measure, **fields)


ROWS = (*_rows(),)

COST_RATIOS = (
    (2, "sharded", 0.126),
    (4, "sharded", 0.150),
    (8, "sharded", 0.190),
    (4, "one_rank", 0.36),
    (8, "one_rank", 0.60),
)
OTHER_ENGINES = Kernels(layer=12, library_layer=12, frame=8, draw=17, verify=38)
TRANSFORMERS_13B_MS = 31.9


@dataclass(frozen=True)
class Pair:
    """A published pair; `draft_ms` is the draft's published time per token, None where the planner must forecast it."""

    name: str
    target: str
    draft: str
    num_draft_tokens: int
    plain_ms: float
    speculative_ms: float
    draft_ms: float | None = None
    machine: str | None = None


PAIRS = [Pair(**pair) for pair in CONTENT["pairs"]]


def job(
    target: str, num_gpus: int, *, draft: str | None = None, kind: str = "one_rank", eager: bool = False
) -> PlanSpec:
    """A job at batch 1 with a prompt of five tokens, as gpt-fast measures."""
    ranks = tuple(range(num_gpus))
    drafting = planned_model(catalogue.load(draft), device="cuda") if draft else None
    return PlanSpec(
        target=planned_model(catalogue.load(target), device="cuda"),
        draft=drafting,
        vocabulary=VOCABULARIES.of("own" if draft == "gpt_neo_1.3B" else "same"),
        target_ranks=ranks,
        draft_kind=DraftLayout[kind],
        draft_ranks=(ranks if kind == "sharded" else ranks[:1]) if draft else (),
        num_draft_tokens=4,
        acceptance=None,
        batch_size=1,
        prompt_tokens=5,
        max_new_tokens=200,
        cuda_graphs=not eager,
        device="cuda",
        other_kernels=OTHER_ENGINES,
    )


def machine_of(name: str, *, by_nccl: bool = False) -> HardwareConfig:
    """A machine whose ranks sum as those of other engines do, by a kernel of their own unless by NCCL."""
    machine = hardware.load(name)
    return machine if by_nccl else replace(machine, sums=machine.own_sums)


def later(machine: HardwareConfig, wait_s: float) -> HardwareConfig:
    """The machine with sums that take longer for each doubling of their ranks."""
    sums = [replace(one, s=one.s + wait_s * math.log2(one.num_ranks)) for one in machine.sums]
    return replace(machine, sums=sums)


def fitted(machine: HardwareConfig) -> tuple[float, float, float]:
    """Fit the times of a kernel, of a doubling of ranks, and of a launch.

    The first two to the 7B rows: least squares of the relative errors, linear in both.
    """
    without = replace(machine, kernel_s=0.0)
    rows = []
    for row in ROWS:
        if not row.is_fitted or row.quantization != NO_QUANTIZATION or row.measure is not Measure.decoding:
            continue
        planned, tokens_per_s = job(row.model, row.num_gpus), row.value
        base = timing(planned, without).plain_s
        kernel = timing(planned, replace(without, kernel_s=1.0)).plain_s - base
        wait = timing(planned, later(without, 1.0)).plain_s - base
        rows.append((kernel * tokens_per_s, wait * tokens_per_s, 1 - base * tokens_per_s))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    kernel_s, wait_s = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    plain = job("llama2_13B", 1, eager=True)
    base = timing(plain, replace(machine, launch_s=0.0)).plain_s
    for_one = timing(plain, as_library(replace(machine, launch_s=1.0))).plain_s - base
    launch_s = (TRANSFORMERS_13B_MS / 1e3 - base) / for_one
    return kernel_s, wait_s, launch_s


def fitted_slowdown(bits: int, machine: HardwareConfig) -> float:
    """Fit the time to read packed weights, relative to a copy, to the 7B row of these bits."""
    row = next(row for row in ROWS if row.is_fitted and row.quantization == f"int{bits}_weight_only")
    planned, storage = planned_model(catalogue.load(row.model), device="cuda"), format_of(row.quantization)
    held = inventory(planned.shape)
    copied_bytes = held.num_layers * sum(storage.packing.matrix_bytes(size, 2) for size in held.products)
    copy_s = copied_bytes / machine.read_bytes_per_s
    return READ_SLOWDOWN[bits] + (1 / row.value - 1 / forecast_of(row)) / copy_s


def as_library(machine: HardwareConfig) -> HardwareConfig:
    """The machine as the library's modules use it, which launch more operators than the lean decoder."""
    return replace(machine, launch_s=LIBRARY_SHARE[machine.device] * machine.launch_s)


def job_of(row: Row) -> PlanSpec:
    """The job of a row."""
    planned = job(row.model, row.num_gpus, eager=row.by_library)
    target = replace(planned.target, quantization=row.quantization, by_library=row.by_library)
    planned = replace(
        planned,
        target=target,
        batch_size=row.batch_size,
        prompt_tokens=row.prompt_tokens,
        max_new_tokens=row.max_new_tokens,
    )
    if row.by_library:
        ranks = planned.target_ranks
        return replace(planned, backend=backend_of("accelerate"), target_ranks=ranks[:1], spare_devices=ranks[1:])
    return planned


@cache
def forecast_of(row: Row) -> float:
    """The forecast of a row, in its measure."""
    timed = timing(job_of(row), machine_of(row.machine, by_nccl=row.by_nccl))
    if row.measure is Measure.first:
        return 1e3 * timed.plain_prefill_s
    return row.batch_size / (timed.plain_s if row.measure is Measure.decoding else timed.plain_run_s)


def times_forecast(row: Row) -> float:
    """The published time over the forecast one."""
    ratio = row.value / forecast_of(row)
    return ratio if row.measure is Measure.first else 1 / ratio


@cache
def range_of(row: Row) -> Ends:
    """The factors of the range that a plan gives a row."""
    planned, machine = job_of(row), machine_of(row.machine, by_nccl=row.by_nccl)
    error = decoding_error(planned, machine, timing(planned, machine).plain_s)
    assert error, "a plan for a GPU has a range"
    return FIRST if row.measure is Measure.first else error


def judged() -> list[Row]:
    """All rows that give no constant."""
    return [row for row in ROWS if not row.is_fitted]


def is_held(row: Row) -> bool:
    """Whether its range holds a row."""
    low, high = range_of(row)
    return low <= times_forecast(row) <= high


def kind_of(row: Row) -> str:
    """What a row says of the planner: `fitted`, of the same source as a fitted one, or a forecast."""
    if row.is_fitted:
        return "fitted"
    has_constants = {other.source for other in ROWS if other.is_fitted}
    return "same source" if row.source in has_constants or row.by_library else "forecast"


def row_table(source: Source) -> str:
    """The rows of a source."""
    lines = []
    for row in ROWS:
        if row.source is not source:
            continue
        low, high = range_of(row)
        held = "" if row.is_fitted else f"{low:.2f} to {high:.2f}{'' if is_held(row) else ': **outside**'}"
        model = f"{row.model} {row.quantization}".removesuffix(" none")
        lines.append(
            (
                " ".join(filter(None, (model, row.engine))),
                f"{row.num_gpus} x {hardware.load(row.machine).gpu}",
                row.batch_size,
                f"{row.prompt_tokens} + {row.max_new_tokens}",
                row.measure.value,
                f"{row.value:.4g}",
                f"{forecast_of(row):.4g}",
                f"{times_forecast(row):.2f}",
                held,
                kind_of(row),
            )
        )
    heads = ["model", "GPUs", "rows", "tokens", "", "published", "forecast", "time / forecast", "range", ""]
    return markdown(heads, lines)


def share_table() -> str:
    """How many rows are in their ranges, and the median error, by what they say of the planner."""
    lines = []
    for name in ("forecast", "same source"):
        rows = [row for row in judged() if kind_of(row) == name]
        error, held = statistics.median(abs(math.log(times_forecast(row))) for row in rows), sum(map(is_held, rows))
        share = f"{held}, {100 * held / len(rows):.0f} %"
        lines.append((name, len(rows), share, f"{100 * (math.exp(error) - 1):.0f} %"))
    return markdown(["rows", "number", "inside their range", "median error"], lines)


def source_sections() -> str:
    """Every source with its rows, and why others of its page are none."""
    return "\n\n".join(
        f"### {source.name}\n\n{fill(f'{source.page}. Left out: {source.left_out}.', 120)}\n\n{row_table(source)}"
        for source in dict.fromkeys(row.source for row in ROWS)
    )


def cost_table(machine: HardwareConfig) -> str:
    """The cost ratio of a 7B draft to a 70B target."""
    lines = []
    for num_gpus, kind, published in COST_RATIOS:
        ratio = timing(job("llama2_70B", num_gpus, draft="llama2_7B", kind=kind), machine).cost_ratio
        assert ratio, "there is a draft"
        lines.append((num_gpus, kind, published, f"{ratio:.3f}", f"{ratio / published:.2f}"))
    return markdown(["GPUs of the target", "draft", "published c", "forecast", "forecast / published"], lines)


@cache
def draft_cost(pair: Pair) -> tuple[float, str]:
    """The pair's c and where it is from."""
    if pair.machine is None:
        return (pair.draft_ms or 0.0) / pair.plain_ms, "published"
    target_s, draft_s = (timing(job(name, 1), machine_of(pair.machine)).plain_s for name in (pair.target, pair.draft))
    return draft_s / target_s, "forecast"


def pair_table() -> str:
    """The speculative table."""
    lines = []
    for pair in PAIRS:
        number, (ratio, source) = pair.num_draft_tokens, draft_cost(pair)
        implied = pair.plain_ms / pair.speculative_ms * (1 + number * ratio)
        lines.append(
            (
                pair.name,
                number,
                f"{pair.plain_ms:.4g} -> {pair.speculative_ms:.4g}",
                f"{ratio:.3f} ({source})",
                f"{implied:.2f}",
                f"{acceptance_of(implied - 1, number):.2f}",
            )
        )
    return markdown(["pair", "K", "ms/token", "c", "implied tokens per round", "implied acceptance"], lines)


def page() -> str:
    """The whole document."""
    machine = machine_of(A100)
    stored, found = (machine.kernel_s, 0.0, machine.launch_s), fitted(machine)
    names = (
        "time of a kernel in addition to its bytes",
        "what a sum takes more inside a step, for each doubling of its ranks",
        "time of an operator launched from Python",
    )
    constants = [
        (name, f"{1e6 * new:.2f} us", f"{1e6 * old:.2f} us")
        for name, new, old in zip(names, found, stored, strict=True)
    ]
    constants += [
        (
            f"time to read weights of {bits} bits, over a copy of as many bytes",
            f"{fitted_slowdown(bits, machine):.2f}",
            f"{slowdown:.2f}",
        )
        for bits, slowdown in READ_SLOWDOWN.items()
    ]
    return page_of(
        "published",
        constants=markdown(["constant", "fitted", "in the catalogue"], constants),
        shares=share_table(),
        rows=source_sections(),
        costs=cost_table(machine),
        pairs=pair_table(),
    )


if __name__ == "__main__":
    show(page(), page="published.md", is_written=True)
