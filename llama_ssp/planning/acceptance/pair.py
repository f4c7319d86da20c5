"""A pair of models as a forecast of its acceptance sees it, and what such a forecast says."""

from dataclasses import dataclass

from llama_ssp.architectures.family import inventory
from llama_ssp.config.drafters import draft_name, matching_of
from llama_ssp.config.rules import DEFAULT
from llama_ssp.config.schema import ModelShape, RunConfig, TextKind
from llama_ssp.planning.spec import PlanSpec

CONFIDENCE = 0.8
"""Share of pairs that a range is to hold."""


@dataclass(frozen=True, kw_only=True)
class DraftedPair:
    """A target and its draft, and all that its acceptance depends on.

    Attributes:
        target, draft: names; a draft without a model has the name of its kind.
        has_model: whether the draft is a model.
        size_ratio: parameters of the target over those of the draft; None if they are not known.
        family: `model_type` of the target; None if it is not known.
        temperature: 0 is greedy; None if it is not known.
        text: what is written.
        rule: the verification rule.
        own_tokenizer: the draft has a tokenizer of its own.
        trained_together: the target was trained to be predictable for this draft.
    """

    target: str
    draft: str
    has_model: bool = True
    size_ratio: float | None = None
    family: str | None = None
    temperature: float | None = None
    text: TextKind = TextKind.any
    rule: str = DEFAULT
    own_tokenizer: bool = False
    trained_together: bool = False


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted.

    Attributes:
        probability: the figure, or the median of a forecast.
        source: where it is from.
        low, high: the ends of its 80 % range; None for a figure that the user gave.
        is_forecast: nobody has measured the pair.
    """

    probability: float
    source: str
    low: float | None = None
    high: float | None = None
    is_forecast: bool = False

    @property
    def has_range(self) -> bool:
        """Whether it has both ends."""
        return self.low is not None and self.high is not None

    @property
    def ends(self) -> tuple[float, float]:
        """The range, which a figure without one begins and ends."""
        return (
            self.probability if self.low is None else self.low,
            self.probability if self.high is None else self.high,
        )


def pair_of_job(job: PlanSpec) -> DraftedPair:
    """The pair of a job with a draft."""
    return DraftedPair(
        target=job.target.name,
        draft=job.draft.name if job.draft else str(job.free_draft),
        has_model=job.draft is not None,
        size_ratio=_size_ratio(job.target.shape, job.draft.shape) if job.draft else None,
        family=job.target.shape.model_type,
        temperature=job.temperature,
        text=job.text,
        rule=job.rule,
        own_tokenizer=job.matching is not None,
    )


def pair_of_run(config: RunConfig) -> DraftedPair:
    """The pair of a run with a draft."""
    target, draft = config.model.shape, config.draft.model and config.draft.model.shape
    return DraftedPair(
        target=config.model.name,
        draft=str(draft_name(config.draft)),
        has_model=config.draft.model is not None,
        size_ratio=_size_ratio(target, draft) if target and draft else None,
        family=target.model_type if target else None,
        temperature=config.sampling.temperature,
        text=config.speculation.text,
        rule=config.verification.rule,
        own_tokenizer=matching_of(config.draft) is not None,
    )


def _size_ratio(target: ModelShape, draft: ModelShape) -> float:
    return inventory(target).num_parameters / inventory(draft).num_parameters
