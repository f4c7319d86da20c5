"""How far a forecast may be from what a GPU takes: 80 % ranges, and what nobody has published a speed of.

No GPU has run this engine, so the ranges are the errors of forecasts for other engines. `python -m
benchmarks.published` fits them to published speeds: published time over forecast, every source of equal weight, as the
range of a source that was not among them. A calibrated machine and a CPU have none.
"""

import math
from collections.abc import Iterator
from typing import TypeAlias

from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.formats import NO_QUANTIZATION

Ends: TypeAlias = tuple[float, float]
"""The smaller and the larger end, of seconds or of factors of them."""

NEAR, FAR = (0.86, 1.23), (0.66, 2.24)
"""Factors of forecasts near what most sources measured, and of all others: prompts, many rows, 8 and 4 bits, short
steps, in which an engine's host shows, and other GPUs."""
PAIR = (0.67, 1.54)
"""Factors of the speculative time of a pair that nobody has measured, of what follows from its acceptance."""
NEAR_ROWS, NEAR_STEP_S = 16, 0.005
"""The most rows, and the least time of a plain step, that are near."""
PUBLISHED_GPUS = ("A100", "H100", "H200", "MI250")
PUBLISHED_FORMATS = (NO_QUANTIZATION, "int8_weight_only", "int4_weight_only")
MOST_PUBLISHED_ROWS = 1280
"""Of unquantized weights; quantized ones were measured with one row."""


def decoding_error(job: PlanSpec, hardware: HardwareConfig, step_s: float) -> Ends | None:
    """Factors of the time of a token whose plain step takes `step_s`; None where no published speed says anything."""
    if hardware.profiles or hardware.device != "cuda":
        return None
    is_near = (
        not _is_quantized(job) and job.batch_size <= NEAR_ROWS and step_s >= NEAR_STEP_S
        and hardware.gpu.startswith(PUBLISHED_GPUS)
    )  # fmt: skip
    return NEAR if is_near else FAR


def unmeasured(job: PlanSpec, hardware: HardwareConfig) -> Iterator[str]:
    """What of a job nobody has published a speed of, in words."""
    if hardware.profiles or hardware.device != "cuda":
        return
    target = job.target
    if not hardware.gpu.startswith(PUBLISHED_GPUS):
        yield hardware.gpu
    if target.quantization not in PUBLISHED_FORMATS:
        yield target.weights_name
    most = 1 if _is_quantized(job) else MOST_PUBLISHED_ROWS
    if job.batch_size > most:
        yield f"{job.batch_size} rows of {target.weights_name}"


def _is_quantized(job: PlanSpec) -> bool:
    return job.target.quantization != NO_QUANTIZATION


def spread(value: float, *ranges: Ends) -> Ends:
    """The range of a product of independent factors, each with its range around `value`."""
    down, up = (math.hypot(*(math.log(ends[side] / value) for ends in ranges)) for side in (0, 1))
    return value * math.exp(-down), value * math.exp(up)


def times(value: float, factors: Ends) -> Ends:
    """The range of a value with an error."""
    return value * factors[0], value * factors[1]
