"""The records of synthetic weights: their source, their setting with its range, and their checks. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from llama_ssp import catalogue
from llama_ssp.settings.combinations import Ability
from llama_ssp.settings.commands import Topic
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import PlanConfig, RunConfig
from llama_ssp.settings.tasks import NoEffect, task_of
from llama_ssp.settings.weights import WeightsRecord

NAME, AGREEMENT_FILE = "synthetic", "agreement.json"
"""The value of `weights`, and the file of a shipped model that says which noise gives which agreement."""
AGREEMENT, HEAD_AGREEMENT, LEAST_AGREEMENT = 0.8, 0.768, 0.3
"""The default of `synthetic.agreement`, the most that a draft head can have, its default, and the least of both."""


@dataclass(kw_only=True)
class SyntheticConfig:
    """Synthetic weights."""

    agreement: float | None = setting(
        None,
        "probability that a drafted token is accepted at temperature 0.8, from 0.3 to 1, or to 0.768 of a draft head;"
        " null takes 0.8, and of a head 0.768.",
    )


@dataclass(kw_only=True)
class SyntheticRun(RunConfig):
    """A run, whose weights may be synthetic."""

    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass(kw_only=True)
class SyntheticPlan(PlanConfig, SyntheticRun):
    """A plan of a run whose weights may be synthetic."""


SETTINGS = MoreSettings(
    name=NAME,
    config=SyntheticRun,
    after="weights",
    ranges=(("synthetic.agreement", lambda a: LEAST_AGREEMENT <= a <= 1, f"between {LEAST_AGREEMENT} and 1"),),
)
OF_PLANS = replace(SETTINGS, name="synthetic plans", config=SyntheticPlan, ranges=())
TOPIC = Topic(
    name=NAME,
    after="models",
    text="""\
SYNTHETIC: weights=synthetic (default checkpoint), without a download
  {settings weights synthetic.}
""",
)


def _is_synthetic(config: RunConfig) -> bool:
    return config.weights == NAME


def agreement_of(config: RunConfig) -> float:
    """The probability that a drafted token of synthetic weights is accepted."""
    given, draft = cast("SyntheticRun", config).synthetic.agreement, config.draft.model
    default = HEAD_AGREEMENT if draft and draft.shape and draft.shape.is_head else AGREEMENT
    return default if given is None else given


def _context() -> tuple[int, str] | None:
    shipped = catalogue.load("tiny").shape
    return (shipped.max_position_embeddings, "shipped model, which synthetic weights run,") if shipped else None


def _problems(config: RunConfig) -> Iterator[str | NoEffect]:
    if not _is_synthetic(config):
        yield NoEffect(NAME, "without weights=synthetic")
        return
    draft = config.draft.model
    for group, model in ("model", config.model), ("draft", draft):
        if model is None or isinstance(config, PlanConfig):
            continue
        if model.shape is None:
            yield f"weights=synthetic needs a shape of the catalogue, and {group}={model.name} has none: use {group}=7B"
        elif model.shape.model_type not in {"llama", "eagle3"}:
            yield (
                f"weights=synthetic supports models of the Llama kind only, and {group}={model.name} is a "
                f"{model.shape.model_type} model: use {group}=7B, or leave weights=synthetic out"
            )
        elif model.shape.is_head and agreement_of(config) > HEAD_AGREEMENT:
            yield (
                f"synthetic.agreement={agreement_of(config)} is more than the shipped head has, which synthetic heads "
                f"compute: at most {HEAD_AGREEMENT} is possible with draft={model.name}"
            )
    yield NoEffect("placement.target.experts", "with weights=synthetic, whose models have no experts")
    if draft is None and not task_of(config).needs_draft:
        yield NoEffect(NAME, "without a draft: give one with draft=NAME")


SOURCE = WeightsRecord(
    name=NAME,
    purpose="synthetic makes any Llama shape on the device, as target, draft and draft head, at its true size and "
    "cost, without a download. Each computes the shipped small model or head; the context has 2048 tokens.",
    make="llama_ssp.extensions.synthetic.source:of_run",
    acceptance=agreement_of,
    acceptance_setting="synthetic.agreement",
    context=_context,
    small_files=(AGREEMENT_FILE,),
)
ABILITY = Ability(
    name="synthetic weights",
    has=_is_synthetic,
    clashes={
        "chats": "chat=true needs a chat template, and synthetic weights use the shipped model's tokenizer, which has "
        "none",
        "MTP layers": "draft=mtp reads the files of the target, and weights=synthetic has none: give another draft",
    },
    problems=_problems,
)
