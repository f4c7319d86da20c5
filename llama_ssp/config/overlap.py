"""Checks of `speculation.overlap`: drafting while the target verifies, on ranks that hold nothing of the target."""

from collections.abc import Iterator

from llama_ssp.config.drafts.model import matching_of
from llama_ssp.config.schema import ADAPTIVE, DeviceKind, DrafterConfig, DraftLayout, PlacementConfig, SpeculationConfig

NO_GPUS = (
    "speculation.overlap=true runs on CPUs alone so far, since its rounds are not captured as CUDA graphs: "
    "leave it out, or use device=cpu"
)
"""The error of a run on GPUs."""


def problems_of_overlap(
    speculation: SpeculationConfig, draft: DrafterConfig, placement: PlacementConfig, device: DeviceKind
) -> Iterator[str]:
    """Yield what keeps drafting from overlapping verification, the same for runs and plans."""
    if not speculation.overlap or (draft.model is None and draft.fallback is None and draft.kind == "none"):
        return
    if draft.model is None:
        yield f"speculation.overlap=true needs a draft model, and draft={draft.kind} has none: give one with draft=NAME"
        return
    if placement.auto or placement.draft.kind is not DraftLayout.own_gpu:
        chosen = "placement=auto" if placement.auto else f"placement.draft.kind={placement.draft.kind.name}"
        yield (
            f"speculation.overlap=true needs a draft on ranks of its own, and {chosen} was given: "
            "use placement=own_gpu on at least 2 ranks"
        )
    if speculation.adapts:
        yield (
            f"speculation.overlap=true needs one K for all rounds, and speculation.num_draft_tokens={ADAPTIVE} was "
            "given: use a number, about as many as draft steps fit into a forward of the target"
        )
    if draft.fallback is not None:
        yield f"speculation.overlap=true drafts with the model alone: leave draft.fallback={draft.fallback} out"
    if matching_of(draft):
        yield "speculation.overlap=true needs a draft with the target's tokenizer: leave draft.tokenizer=own out"
    if device is DeviceKind.cuda:
        yield NO_GPUS
