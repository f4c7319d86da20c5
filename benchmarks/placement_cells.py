"""The table that `placements` measures: its lines are placements, its columns precisions, both of them data."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from llama_ssp.config import catalogue
from llama_ssp.config.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DeviceKind,
    DrafterConfig,
    DraftLayout,
    DraftPlacement,
    Dtype,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    TargetKind,
    TargetPlacement,
    VerificationConfig,
)
from llama_ssp.config.tasks import GenerateConfig

TARGET, DRAFT = "tiny", "tiny-draft"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who holds what: a line of the table.

    Attributes:
        name: what the line says.
        num_ranks: that are started for it.
        placement: as a config has it.
        drafts: whether rounds are measured, or plain steps of the target alone.
        plain: the line in which the same target decodes alone.
        batch_size: rows decoded together.
    """

    name: str
    num_ranks: int
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    drafts: bool = True
    plain: str | None = None
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Form:
    """Number format of both models, and how the linear layers of each are stored: a column of the table."""

    name: str
    dtype: Dtype = Dtype.fp32
    target: str = "none"
    draft: str = "none"

    def entry(self, name: str) -> ModelConfig:
        """The catalogue's entry in this form."""
        quantization = self.target if name == TARGET else self.draft
        return replace(catalogue.load(name), dtype=self.dtype, quantization=quantization)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A line and a column."""

    place: Place
    form: Form

    def config(self, num_draft_tokens: int) -> RunConfig:
        """The run that it stands for; nothing is written into its folder."""
        draft = DrafterConfig(kind=NO_DRAFT)
        if self.place.drafts:
            draft = DrafterConfig(kind=MODEL_DRAFT, model=self.form.entry(DRAFT))
        return RunConfig(
            task=GenerateConfig(),
            model=self.form.entry(TARGET),
            draft=draft,
            placement=self.place.placement,
            sampling=SamplingConfig(temperature=0.8),
            verification=VerificationConfig(),
            speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
            batch_size=self.place.batch_size,
            device=DeviceKind.cpu,
            ignore_eos=True,
            run_dir="outputs",
        )


def _draft(kind: DraftLayout) -> PlacementConfig:
    return PlacementConfig(draft=DraftPlacement(kind=kind))


ALONE, ONE_RANK = "1 rank, target alone", "1 rank, both models"
LAYERWISE = "1 rank, the target's layers in a row"
DEEPSPEED, DEEPSPEED_ALONE = "1 rank, target by DeepSpeed", "1 rank, target by DeepSpeed, alone"
SPLIT, SPLIT_ALONE = "target on 2 ranks", "target on 2 ranks, alone"
CUT, CUT_ALONE = "target on 2 ranks by DeepSpeed", "target on 2 ranks by DeepSpeed, alone"
_OVER_BOTH = PlacementConfig(
    target=TargetPlacement(ranks=[0]), draft=DraftPlacement(kind=DraftLayout.sharded, ranks=[0, 1])
)
_IN_A_ROW = PlacementConfig(target=TargetPlacement(kind=TargetKind.accelerate))
_BY_DEEPSPEED = PlacementConfig(target=TargetPlacement(kind=TargetKind.deepspeed))
_REPLICATED = _draft(DraftLayout.replicated)
PLACES = (
    Place(name=ALONE, num_ranks=1, drafts=False),
    Place(name=ONE_RANK, num_ranks=1, plain=ALONE),
    Place(name=f"{ONE_RANK}, batch 8", num_ranks=1, batch_size=8),
    Place(name=LAYERWISE, num_ranks=1, plain=ALONE, placement=_IN_A_ROW),
    Place(name=DEEPSPEED_ALONE, num_ranks=1, drafts=False, placement=_BY_DEEPSPEED),
    Place(name=DEEPSPEED, num_ranks=1, plain=DEEPSPEED_ALONE, placement=_BY_DEEPSPEED),
    Place(name=SPLIT_ALONE, num_ranks=2, drafts=False),
    Place(name=f"{SPLIT}, draft one_rank", num_ranks=2, plain=SPLIT_ALONE),
    Place(name=f"{SPLIT}, draft sharded", num_ranks=2, plain=SPLIT_ALONE, placement=_draft(DraftLayout.sharded)),
    Place(name=f"{SPLIT}, draft replicated", num_ranks=2, plain=SPLIT_ALONE, placement=_REPLICATED),
    Place(name=f"{SPLIT}, draft one_rank, batch 8", num_ranks=2, batch_size=8),
    Place(name=f"{SPLIT}, draft replicated, batch 8", num_ranks=2, batch_size=8, placement=_REPLICATED),
    Place(name="target on rank 0, draft sharded over both", num_ranks=2, placement=_OVER_BOTH),
    Place(name="target on rank 0, draft own_gpu", num_ranks=2, placement=_draft(DraftLayout.own_gpu)),
    Place(name=CUT_ALONE, num_ranks=2, drafts=False, placement=_BY_DEEPSPEED),
    Place(name=f"{CUT}, draft one_rank", num_ranks=2, plain=CUT_ALONE, placement=_BY_DEEPSPEED),
    Place(name="2 replicas, a rank each", num_ranks=2, placement=PlacementConfig(num_replicas=2)),
)
FP32 = "fp32"
FORMS = (
    Form(name=FP32),
    Form(name="bf16", dtype=Dtype.bf16),
    Form(name="fp16", dtype=Dtype.fp16),
    Form(name="int8", target="int8"),
    Form(name="nf4", target="nf4"),
    Form(name="int8_weight_only", target="int8_weight_only"),
    Form(name="int8_weight_only, bf16", dtype=Dtype.bf16, target="int8_weight_only"),
    Form(name="draft int8", draft="int8"),
    Form(name="draft int8_weight_only", draft="int8_weight_only"),
)
"""All but bf16 and fp16 keep fp32 where nothing else is said."""


def cells(num_ranks: int, names: Collection[str]) -> list[Cell]:
    """The cells of one group of ranks in some forms."""
    return [
        Cell(place=place, form=form)
        for place in PLACES
        for form in FORMS
        if form.name in names and place.num_ranks == num_ranks and _is_taken(place, form)
    ]


def _is_taken(place: Place, form: Form) -> bool:
    """DeepSpeed's places are there to be compared in fp32; a target alone does not know the precisions of a draft."""
    if place.placement.target.kind is TargetKind.deepspeed:
        return form.name == FP32
    return place.drafts or form.draft == "none"
