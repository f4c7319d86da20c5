"""Every setting of `llama-ssp plan` as typed dataclasses, and their checks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from llama_ssp.config import layout
from llama_ssp.config.drafters import problems_of_overlap, problems_of_pair
from llama_ssp.config.formats import problem_of
from llama_ssp.config.machines.hardware import names, problems_of
from llama_ssp.config.schema import DrafterConfig, ModelConfig, PlacementConfig, SpeculationConfig
from llama_ssp.errors import ConfigError, one_message, unknown_name


class PlanFormat(Enum):
    """What `llama-ssp plan` prints."""

    table = "table"
    json = "json"


class Objective(Enum):
    """What a comparison of machines is sorted by."""

    latency = "latency"
    throughput = "throughput"
    price = "price"


@dataclass(kw_only=True)
class PlannedSampling:
    """How tokens are drawn, as far as a plan depends on it."""

    temperature: float = 0.8


@dataclass(kw_only=True)
class PlanConfig:
    """All settings of one plan. `config.hardware` checks `hardware`.

    Attributes:
        batch_size: sequences decoded together.
        prompt_tokens: length of the longest prompt.
        max_new_tokens: new tokens per completion.
        cuda_graphs: false launches every operator from Python.
        format: json prints the document that docs/reference/plan-document.md describes.
        figure: a file (.png, .svg, .pdf): memory by rank, ms/token by K; of a search ms/token by GPUs.
        search: true ranks precisions, drafts, layouts and K of the model here, then of smaller ones.
        objective: order of a comparison of machines: latency (null), throughput, or price per million tokens.
        max_ms_per_token: machines that need more time per token are left out.
        max_price: machines that cost more US dollars per hour are left out.
        prices: US dollars per hour that replace those of the hardware files, such as {8xh100:20,1xl4:0.5}.
    """

    model: ModelConfig
    draft: DrafterConfig
    hardware: dict[str, Any]
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    sampling: PlannedSampling = field(default_factory=PlannedSampling)
    batch_size: int = 1
    prompt_tokens: int = 128
    max_new_tokens: int = 64
    cuda_graphs: bool = True
    format: PlanFormat = PlanFormat.table
    figure: str | None = None
    search: bool = False
    objective: Objective | None = None
    max_ms_per_token: float | None = None
    max_price: float | None = None
    prices: dict[str, float] = field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether a setting asks for a comparison of machines, or of the numbers of GPUs of one."""
        return bool(self.objective or self.max_ms_per_token is not None or self.max_price is not None or self.prices)


def check(config: PlanConfig) -> None:
    """Raise ConfigError with all problems, including those of the hardware; the models must be resolved."""
    hardware = problems_of(config.hardware)
    problems = [*hardware, *_ranges(config), *_models(config)]
    if not hardware:
        problems += problems_of_overlap(config.speculation, config.draft, config.placement)
        num_ranks = int(config.hardware["num_gpus"]) * int(config.hardware.get("num_nodes", 1))
        has_draft = config.draft.model is not None
        problems += layout.problems_of(
            config.placement, world_size=num_ranks, has_draft=has_draft, searched=config.search
        )
    if problems:
        raise ConfigError(one_message(problems))


def _ranges(config: PlanConfig) -> Iterator[str]:
    speculation = config.speculation
    if isinstance(speculation.num_draft_tokens, str) and not speculation.adapts:
        yield f"speculation.num_draft_tokens={speculation.num_draft_tokens} must be a number, for example 4, or auto"
        return
    counts = {key: attrgetter(key)(config) for key in ("batch_size", "prompt_tokens", "max_new_tokens")}
    counts["speculation.num_draft_tokens"] = speculation.most_draft_tokens
    for key, value in counts.items():
        if value < 1:
            yield f"{key}={value} must be at least 1"
    acceptance = config.speculation.acceptance
    if acceptance is not None and not (0 <= acceptance <= 1 and math.isfinite(acceptance)):
        yield f"speculation.acceptance={acceptance} must be between 0 and 1, for example 0.8"
    if not 0 <= config.sampling.temperature < math.inf:
        yield f"sampling.temperature={config.sampling.temperature} must be 0 (greedy) or positive, for example 0.8"
    limits = {"max_ms_per_token": config.max_ms_per_token, "max_price": config.max_price}
    for key, most in (limits | {f"prices.{name}": price for name, price in config.prices.items()}).items():
        if most is not None and not (most > 0 and math.isfinite(most)):
            yield f"{key}={most} must be above 0, for example 20"
    yield from (unknown_name("machine in prices", name, names()) for name in config.prices if name not in names())


def _models(config: PlanConfig) -> Iterator[str]:
    target, draft = config.model, config.draft.model
    for group, key, model in (("model", "model", target), ("draft", "draft.model", draft)):
        if model and (problem := problem_of(model.quantization, key=f"{key}.quantization")):
            yield problem
        if model is None or model.shape is None:
            continue
        for name, value in vars(model.shape).items():
            if isinstance(value, int) and value < 1 and not isinstance(value, bool):
                yield f"{group}={model.name}: shape.{name}={value} must be at least 1"
        context = config.prompt_tokens + config.max_new_tokens
        if context > model.shape.max_position_embeddings:
            yield (
                f"prompt_tokens={config.prompt_tokens} and max_new_tokens={config.max_new_tokens} make {context}, "
                f"and the context of {group}={model.name} has {model.shape.max_position_embeddings} tokens"
            )
    yield from problems_of_pair(target, config.draft)
