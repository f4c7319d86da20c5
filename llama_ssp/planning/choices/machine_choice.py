"""One way to use a machine: its speed and price, the limits that rule it out, its rank, and the document of all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.config.machines.hardware import PER_GPU, PER_NODE, HardwareConfig, Price
from llama_ssp.config.plan import Objective, PlanConfig
from llama_ssp.planning.choices.lengths import notes_on_guesses
from llama_ssp.planning.config_file import notes_on_families

_SECONDS_PER_HOUR, _MILLION = 3600, 10**6


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """One way to use a machine.

    Attributes:
        num_gpus: GPUs of a replica, over `num_nodes` nodes.
        num_replicas: replicas on all that is rented.
        num_draft_tokens: K; 0 for plain decoding, where a draft gains nothing.
        adapts: K is chosen for each round, up to this one.
        ms_per_token: of each completion while it is decoded.
        tokens_per_s: of all rows of all replicas.
        usd_per_hour: of what is rented; None without a known price.
        is_tight: it fits with less than 3 % of a rank's memory left.
        reason: why the choice is ruled out; None if it is not.
        settings: those of the plan of this choice.
    """

    machine: str
    gpu: str
    num_gpus: int
    num_nodes: int
    num_replicas: int
    quantization: str
    draft: str | None = None
    draft_kind: str | None = None
    num_draft_tokens: int = 0
    adapts: bool = False
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    needed_bytes: int | None = None
    capacity_bytes: int
    is_tight: bool = False
    reason: str | None = None
    settings: tuple[str, ...] = ()


def with_speed(choice: MachineChoice, token_s: float, *, batch_size: int, machine: HardwareConfig) -> MachineChoice:
    """The choice with the time of a token of each row, and what follows from it."""
    tokens_per_s = choice.num_replicas * batch_size / token_s
    hourly = usd_per_hour(machine)
    million = hourly and hourly * _MILLION / (tokens_per_s * _SECONDS_PER_HOUR)
    return replace(
        choice, ms_per_token=1e3 * token_s, tokens_per_s=tokens_per_s, usd_per_hour=hourly,
        usd_per_million_tokens=million,
    )  # fmt: skip


def usd_per_hour(machine: HardwareConfig) -> float | None:
    """What all GPUs of a machine cost per hour; None without a known price."""
    if machine.price is None:
        return None
    rented = machine.num_ranks if machine.price.per == PER_GPU else machine.num_nodes
    return rented * machine.price.usd_per_hour


def with_prices(machine: HardwareConfig, prices: Mapping[str, float]) -> HardwareConfig:
    """The machine with the price that a setting gives it, per node unless its file says otherwise."""
    if machine.name not in prices:
        return machine
    price = Price(usd_per_hour=prices[machine.name], per=machine.price.per if machine.price else PER_NODE)
    return replace(machine, price=price)


def within(choice: MachineChoice, config: PlanConfig) -> MachineChoice:
    """The choice, ruled out if it exceeds the limits."""
    ms, usd = choice.ms_per_token, choice.usd_per_hour
    reason = choice.reason
    if reason or ms is None:
        return choice
    if config.max_ms_per_token is not None and ms > config.max_ms_per_token:
        reason = f"{ms:.2f} ms/token are more than max_ms_per_token={config.max_ms_per_token:g}"
    elif config.max_price is not None and usd is None:
        reason = f"no price is known: prices={{{choice.machine}:USD_PER_HOUR}} gives one"
    elif config.max_price is not None and usd is not None and usd > config.max_price:
        reason = f"{usd:.2f} USD an hour are more than max_price={config.max_price:g}"
    return replace(choice, reason=reason)


def rank(choice: MachineChoice, objective: Objective) -> tuple[Any, ...]:
    """Sort key; the price decides between equals, then the number of GPUs."""
    ms, rate = choice.ms_per_token or math.inf, choice.tokens_per_s or 0.0
    costs = choice.usd_per_million_tokens, choice.usd_per_hour
    price, hourly = (math.inf if cost is None else cost for cost in costs)
    by = {Objective.latency: ms, Objective.throughput: -rate, Objective.price: price}[objective]
    return choice.reason is not None, by, hourly, ms, choice.num_gpus, choice.machine


def nothing_left(choices: Sequence[MachineChoice]) -> str | None:
    """An error sentence if every choice is ruled out, with the one that comes closest; else None."""
    if any(choice.reason is None for choice in choices):
        return None
    num_machines = len({choice.machine for choice in choices})
    nearest = min(choices, key=lambda choice: (choice.ms_per_token is None, _lacking(choice)))
    which = f"{num_machines} machines" if num_machines > 1 else nearest.machine
    return f"nothing is left of {which}; the closest is {nearest.num_gpus} x {nearest.gpu}: {nearest.reason}"


def _lacking(choice: MachineChoice) -> float:
    """How far a choice is from what is required."""
    return choice.ms_per_token or (choice.needed_bytes or math.inf) / choice.capacity_bytes


def comparison_document(
    choices: Sequence[MachineChoice], config: PlanConfig, machines: Sequence[HardwareConfig]
) -> dict[str, Any]:
    """The comparison for JSON: the choices numbered by rank, the prices with their dates, and notes."""
    priced = [with_prices(machine, config.prices) for machine in machines]
    models = [config.model, *([config.draft.model] if config.draft.model else [])]
    return {
        "objective": (config.objective or Objective.latency).name,
        "model": config.model.name,
        "batch_size": config.batch_size,
        "prices": {
            machine.name: asdict(machine.price) | {"source": machine.sources.get("price.usd_per_hour")}
            for machine in priced
            if machine.price
        },
        "notes": [
            *notes_on_families(*models),
            *notes_on_guesses(config.search and choice.adapts and choice.reason is None for choice in choices),
        ],
        "machines": [{"rank": rank} | asdict(choice) for rank, choice in enumerate(choices, start=1)],
    }
