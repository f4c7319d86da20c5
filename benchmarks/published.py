"""The planner against published speeds: writes docs/benchmarks/published.md.

    python -m benchmarks.published

Five constants are fitted here and nowhere else: the time of a kernel and the latency of an all-reduce from gpt-fast's
four Llama-2-7B bf16 rows on A100, the time to read weights of 8 and of 4 bits from its rows of these formats, and the
time of an operator launched from Python from one plain row of transformers. Everything else is of data sheets. All
other rows are forecasts.
"""

from dataclasses import dataclass, replace

from benchmarks.measured import markdown, show
from llama_ssp.architectures.family import inventory
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.acceptance import KnownPoint, expected, implied_acceptance, points, tokens_per_round
from llama_ssp.planning.spec import PlanSpec, planned_model
from llama_ssp.planning.timing import LIBRARY_SHARE, bandwidth, timing
from llama_ssp.settings import catalogue
from llama_ssp.settings.drafters import Matching
from llama_ssp.settings.formats import NO_QUANTIZATION, READ_SLOWDOWN, format_of
from llama_ssp.settings.layout import Kernels
from llama_ssp.settings.schema import DraftLayout, TargetKind

COST_RATIOS = (
    (2, "sharded", 0.126), (4, "sharded", 0.150), (8, "sharded", 0.190), (4, "one_rank", 0.36), (8, "one_rank", 0.60)
)  # fmt: skip
OTHER_ENGINES = Kernels(layer=12, frame=8, draw=17, verify=38)
A100 = "8xa100_80gb"
FORMATS = {"none": "bf16", "int8_weight_only": "int8 weight-only", "int4_weight_only": "int4 weight-only"}
TRANSFORMERS_13B_MS, TRANSFORMERS_70B_MS = 31.9, 113.3


@dataclass(frozen=True)
class PlainRow:
    """Published tokens per second of plain decoding; `by_library` in transformers, layers in a row."""

    model: str
    quantization: str
    num_gpus: int
    tokens_per_s: float
    is_fitted: bool = False
    by_library: bool = False
    machine: str = A100

    @property
    def name(self) -> str:
        """How tables name it."""
        if self.by_library:
            return f"{self.model} fp16, transformers, layers in a row"
        where = "" if self.machine == A100 else ", MI250X die"
        return f"{self.model} {FORMATS[self.quantization]}{where}"


PLAIN = (
    *(
        PlainRow("llama2_7B", "none", gpus, rate, True)
        for gpus, rate in ((1, 104.9), (2, 168.8), (4, 254.0), (8, 328.4))
    ),
    PlainRow("llama2_70B", "none", 2, 21.3),
    PlainRow("llama2_70B", "none", 4, 38.0),
    PlainRow("llama2_70B", "none", 8, 62.5),
    PlainRow("llama2_7B", "int8_weight_only", 1, 155.6, True),
    PlainRow("llama2_70B", "int8_weight_only", 1, 19.1),
    PlainRow("llama2_70B", "int8_weight_only", 8, 80.4),
    PlainRow("llama2_7B", "int4_weight_only", 1, 196.8, True),
    PlainRow("llama2_70B", "int4_weight_only", 1, 25.25),
    PlainRow("llama2_70B", "int4_weight_only", 8, 90.8),
    PlainRow("llama2_7B", "none", 1, 76.3, machine="mi250"),
    PlainRow("llama2_7B", "int8_weight_only", 1, 101.9, machine="mi250"),
    PlainRow("llama2_70B", "none", 8, 1e3 / TRANSFORMERS_70B_MS, by_library=True),
)


PROMPTS = (("llama2_7B", 1, 132.4, "fitted"), ("llama2_70B", 8, 249.2, "forecast"))
"""Model in fp16, A100 GPUs, published milliseconds of a prompt of 2048 tokens in TensorRT-LLM 0.9."""


@dataclass(frozen=True)
class Pair:
    """A published pair; `draft_ms` is the draft's published time per token, None where the planner must forecast it."""

    name: str
    target: str
    draft: str
    num_draft_tokens: int
    plain_ms: float
    speculative_ms: float
    draft_ms: float | None
    machine: str | None = None

    @property
    def row(self) -> str:
        """Its name in conf/acceptance.yaml, without the mark of a footnote."""
        return self.name.partition(" [^")[0]


PAIRS = (
    Pair("llama-ssp, 8xA100-40GB: 13B with 7B", "13B", "7B", 4, 125, 114, 70),
    Pair("llama-ssp, 8xA100-40GB: 30B with 7B", "30B", "7B", 4, 330, 180, 70),
    Pair("llama-ssp, 8xA100-40GB: 65B with 7B", "65B", "7B", 4, 610, 270, 70),
    Pair("llama-ssp, 4xA10G, 8-bit: 13B with 7B", "13B", "7B", 4, 270, 330, 210),
    Pair("llama-ssp, 4xA10G, 8-bit: 30B with 7B", "30B", "7B", 4, 405, 370, 210),
    Pair("transformers, A100, fp16: 13B with 7B [^k]", "llama2_13B", "llama2_7B", 4, 31.9, 27.8, None, A100),
    Pair("transformers, 8xA100, fp16: 70B with 7B [^k]", "llama2_70B", "llama2_7B", 4, 113.3, 40.1, None, "eager"),
    Pair("transformers, 8xA100, fp16: 70B with 13B [^k]", "llama2_70B", "llama2_13B", 4, 113.3, 46.3, 31.9),
    Pair(
        "gpt-fast, A100-80GB, int4: 70B with 7B [^k]", "llama2_70B", "llama2_7B", 4, 1e3 / 25.3, 1e3 / 48.4, 1e3 / 196.8
    ),
    Pair("Chinchilla 70B with 4B, nucleus [^c]", "chinchilla", "4B", 4, 14.1, 7.52, 1.8),
    Pair("Chinchilla 70B with 4B, greedy [^c]", "chinchilla", "4B", 4, 14.1, 7.00, 1.8),
    Pair("Chinchilla 70B with 4B, code [^c]", "chinchilla", "4B", 4, 14.1, 5.73, 1.8),
    Pair("SmolLM2 1.7B with 135M", "smollm2_1.7B", "smollm2_135M", 10, 35.8, 28.4, 10.7),
    Pair("GPT-NeoX 20B with GPT-Neo 1.3B, AMD", "gpt_neox_20B", "gpt_neo_1.3B", 4, 77.2, 57.0, None, "mi250"),
)


def points_by_row() -> dict[str, KnownPoint]:
    """The points of conf/acceptance.yaml that have a row in the page."""
    return {point.row: point for point in points() if point.row}


def job(
    target: str, num_gpus: int, *, draft: str | None = None, kind: str = "one_rank", eager: bool = False
) -> PlanSpec:
    """A job at batch 1 with a prompt of five tokens, as gpt-fast measures."""
    ranks = tuple(range(num_gpus))
    drafting = planned_model(catalogue.load(draft), device="cuda") if draft else None
    return PlanSpec(
        target=planned_model(catalogue.load(target), device="cuda"),
        draft=drafting,
        matching=Matching.text if draft == "gpt_neo_1.3B" else None,
        target_kind=TargetKind.tensor,
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
        kernels=OTHER_ENGINES,
    )


def fitted(machine: HardwareConfig) -> HardwareConfig:
    """Fit kernel_s and link.latency_s to the 7B rows: least squares of the relative errors, linear in both."""
    without = replace(machine, kernel_s=0.0, link=replace(machine.link, latency_s=0.0))
    rows = []
    for row in PLAIN:
        if not row.is_fitted or row.quantization != NO_QUANTIZATION:
            continue
        planned, tokens_per_s = job(row.model, row.num_gpus), row.tokens_per_s
        base = timing(planned, without).plain_s
        kernel = timing(planned, replace(without, kernel_s=1.0)).plain_s - base
        latency = timing(planned, replace(without, link=replace(without.link, latency_s=1.0))).plain_s - base
        rows.append((kernel * tokens_per_s, latency * tokens_per_s, 1 - base * tokens_per_s))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    kernel_s, latency_s = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    plain = job("llama2_13B", 1, eager=True)
    base = timing(plain, replace(machine, launch_s=0.0)).plain_s
    for_one = timing(plain, as_library(replace(machine, launch_s=1.0))).plain_s - base
    launch_s = (TRANSFORMERS_13B_MS / 1e3 - base) / for_one
    return replace(machine, kernel_s=kernel_s, launch_s=launch_s, link=replace(machine.link, latency_s=latency_s))


def fitted_slowdown(bits: int, machine: HardwareConfig) -> float:
    """Fit the time to read packed weights, relative to a copy, to the 7B row of these bits."""
    (row,) = (row for row in PLAIN if row.is_fitted and row.quantization == f"int{bits}_weight_only")
    planned, storage = planned_model(catalogue.load(row.model), device="cuda"), format_of(row.quantization)
    held = inventory(planned.shape)
    copy_s = held.num_layers * sum(storage.matrix_bytes(size, 2) for size in held.products) / bandwidth(machine)
    return READ_SLOWDOWN[bits] + (1 / row.tokens_per_s - 1 / plain_tokens_per_s(row, machine)) / copy_s


def as_library(machine: HardwareConfig) -> HardwareConfig:
    """The machine as the library's modules use it, which launch more operators than the lean decoder."""
    return replace(machine, launch_s=LIBRARY_SHARE * machine.launch_s)


def plain_tokens_per_s(row: PlainRow, machine: HardwareConfig) -> float:
    """The forecast of a plain row."""
    planned = job(row.model, row.num_gpus, eager=row.by_library)
    planned = replace(planned, target=replace(planned.target, quantization=row.quantization, by_library=row.by_library))
    if row.by_library:
        ranks = planned.target_ranks
        planned = replace(
            planned, target_kind=TargetKind.accelerate, target_ranks=ranks[:1], spare_devices=ranks[1:]
        )  # fmt: skip
    return 1 / timing(planned, machine).plain_s


def plain_table(machine: HardwareConfig) -> str:
    """The plain table."""
    lines = []
    for row in PLAIN:
        at = machine if row.machine == A100 else hardware.load(row.machine)
        forecast, rate = plain_tokens_per_s(row, at), row.tokens_per_s
        how = "fitted" if row.is_fitted else "forecast"
        lines.append((row.name, row.num_gpus, f"{rate:.4g}", f"{forecast:.4g}", f"{forecast / rate:.2f}", how))
    return markdown(["model", "GPUs", "published tokens/s", "forecast", "forecast / published", ""], lines)


def prompt_table(machine: HardwareConfig) -> str:
    """The table of first tokens."""
    lines = []
    for model, num_gpus, published_ms, how in PROMPTS:
        forecast_ms = 1e3 * timing(replace(job(model, num_gpus), prompt_tokens=2048), machine).plain_prefill_s
        ratio = f"{forecast_ms / published_ms:.2f}"
        lines.append((f"{model} fp16", num_gpus, f"{published_ms:.1f}", f"{forecast_ms:.1f}", ratio, how))
    return markdown(["model", "GPUs", "published ms", "forecast", "forecast / published", ""], lines)


def cost_table(machine: HardwareConfig) -> str:
    """The cost ratio of a 7B draft to a 70B target."""
    lines = []
    for num_gpus, kind, published in COST_RATIOS:
        ratio = timing(job("llama2_70B", num_gpus, draft="llama2_7B", kind=kind), machine).cost_ratio
        assert ratio, "there is a draft"
        lines.append((num_gpus, kind, published, f"{ratio:.3f}", f"{ratio / published:.2f}"))
    return markdown(["GPUs of the target", "draft", "published c", "forecast", "forecast / published"], lines)


def draft_cost(pair: Pair, machine: HardwareConfig) -> tuple[float, str]:
    """The pair's c and where it is from."""
    if pair.draft_ms is not None:
        return pair.draft_ms / pair.plain_ms, "published"
    if pair.machine == "eager":
        return 1e3 * timing(
            job(pair.draft, 1, eager=True), as_library(machine)
        ).plain_s / pair.plain_ms, "forecast of the draft"
    at = hardware.load(pair.machine) if pair.machine and pair.machine != A100 else machine
    target_s, draft_s = (timing(job(name, 1), at).plain_s for name in (pair.target, pair.draft))
    return draft_s / target_s, "forecast"


def speculative_ms(pair: Pair, cost_ratio: float, acceptance: float) -> float:
    """Milliseconds per token of a pair: those of a round over its tokens."""
    number = pair.num_draft_tokens
    return pair.plain_ms * (1 + number * cost_ratio) / tokens_per_round(acceptance, number)


def pair_table(machine: HardwareConfig) -> str:
    """The speculative table."""
    lines = []
    for pair in PAIRS:
        number = pair.num_draft_tokens
        ratio, source = draft_cost(pair, machine)
        implied = pair.plain_ms / pair.speculative_ms * (1 + number * ratio)
        adds_up = implied <= number + 1
        acceptance = expected(points_by_row()[pair.row].pair)
        forecast = speculative_ms(pair, ratio, acceptance.probability)
        lines.append((
            pair.name, number, f"{pair.plain_ms:.4g} -> {pair.speculative_ms:.4g}", f"{ratio:.3f} ({source})",
            f"{implied:.2f}", number + 1 if adds_up else f"**{number + 1}: does not add up**",
            f"{implied_acceptance(implied, number):.2f}" if adds_up else "none", f"{forecast:.1f}",
            f"{forecast / pair.speculative_ms:.2f}", "forecast" if acceptance.is_forecast else "fitted",
        ))  # fmt: skip
    heads = ["pair", "K", "ms/token", "c", "implied tokens per round", "of at most K + 1", "implied acceptance"]
    return markdown([*heads, "forecast ms/token", "forecast / published", ""], lines)


def page() -> str:
    """The whole document."""
    machine = hardware.load(A100)
    fit = fitted(machine)
    stored = (machine.kernel_s, machine.link.latency_s, machine.launch_s)
    found = (fit.kernel_s, fit.link.latency_s, fit.launch_s)
    names = (
        "time of a kernel in addition to its bytes",
        "latency of an all-reduce over NVLink",
        "time of an operator launched from Python",
    )
    constants = [
        (name, f"{1e6 * new:.2f} us", f"{1e6 * old:.2f} us")
        for name, new, old in zip(names, found, stored, strict=True)
    ]
    constants += [
        (f"time to read weights of {bits} bits, over a copy of as many bytes", f"{fitted_slowdown(bits, machine):.2f}",
         f"{slowdown:.2f}")
        for bits, slowdown in READ_SLOWDOWN.items()
    ]  # fmt: skip
    return TEXT.format(
        constants=markdown(["constant", "fitted", "in the catalogue"], constants),
        plain=plain_table(machine),
        prompts=prompt_table(machine),
        costs=cost_table(machine),
        pairs=pair_table(machine),
    )


TEXT = """# The planner against published speeds

`python -m benchmarks.published` makes this page. It compares forecasts with published figures; this project measured
none of them.

## Constants

The machine is `conf/hardware/8xa100_80gb.yaml`: figures of the data sheet, and the 1.7 TB/s that gpt-fast measured with
a plain copy. Five constants are on no data sheet. The first two are fitted to gpt-fast's four Llama-2-7B bf16 rows,
the third to the plain 13B row of transformers, the last two to the Llama-2-7B rows of their formats. A layer counts as
12 kernels, as 25 operators when they are launched one by one, and as 50 operators in transformers. The kernels of 8
and 4 bits are gpt-fast's; ours have run on no GPU.

{constants}

## Plain decoding, batch 1

All rows are gpt-fast's (README.md of pytorch-labs/gpt-fast), except for the one of transformers.

{plain}

## Prompts of 2048 tokens, batch 1

The rows are TensorRT-LLM 0.9's on A100 (its performance page): the first token of a prompt of 2048 tokens. The share of
the data sheet's matrix rate that prompts reach, `flops_share: 0.65`, is taken from the first, which reaches 67 %.

{prompts}

## Cost of a 7B draft with a 70B target

{costs}

## Speculative pairs

A round costs K draft steps and one target step. Published times therefore imply
`tokens per round = plain / speculative x (1 + K c)`.
c is the draft's published time per token over the target's where both are published, otherwise the planner's forecast.
The forecast uses the acceptance that a plan uses, not the implied one: the pair's own figure in `conf/pairs.yaml`, else
that of the nearest other pair of `conf/acceptance.yaml`. `fitted` rows are those that a pair's own figure comes from,
so they are no forecasts. In all rows the plain time is the published one.

{pairs}

[^k]: K is not published with these figures; this page takes 4.
[^c]: 1.8 ms per draft step on 16 TPUv4 (Chen et al., arXiv:2302.01318).

**70B with 13B does not add up.** Both plain times are published. At K = 4 a round costs 4 x 31.9 + 113.3 = 240.9 ms, so
46.3 ms/token need 5.2 tokens from rounds that yield at most 5. Either K was larger, or the three figures come from
different set-ups. 70B with 7B of the same table stays just below its bound, with an acceptance of nearly 1.

**13B with 7B**: the forecast is the planner's default for one A100-80GB, with forward passes in CUDA graphs, so c is
close to the ratio of the weights. transformers launches operator by operator. The draft has 32 layers, the target 40,
and c rises to 0.67. A forecast with that c and an acceptance of 0.80 is 25 % above the published figure; with the
acceptance that 70B with 7B implies it is 15 % below.

T5-XXL (1.4x-3.4x at an acceptance of 0.53-0.82) is published as ranges over tasks and drafts. No pair follows from
them.
"""

if __name__ == "__main__":
    show(page(), page="published.md", is_written=True)
