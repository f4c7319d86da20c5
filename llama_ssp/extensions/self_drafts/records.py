"""The record of a target that drafts for itself: its settings with checks, and the costs in a plan. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import ModelConfig
from llama_ssp.planning.advisers import Adviser
from llama_ssp.settings.backends import backend_of
from llama_ssp.settings.drafters import DrafterRecord, DraftTerms, RoundSizes
from llama_ssp.settings.extensions import Range
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from llama_ssp.settings.tasks import NoEffect
from llama_ssp.storage.formats import FORMATS
from llama_ssp.text.messages import key_of, said

KIND = "self"
"""The value of `draft.kind`."""


@dataclass(kw_only=True)
class SelfConfig(DrafterConfig):
    """The target as its own draft."""

    layers: Any = setting(
        None,
        "layers that draft, before the model's norm and output: a number of them, the first ones, or a list, counted "
        "from 0; null for all.",
    )
    window: int | None = setting(
        None, "newest tokens that drafting sees, from a small cache of its own; null for all, in the target's cache."
    )
    sinks: int = setting(4, "first tokens of a text that drafting with a window also sees.")
    quantization: str | None = setting(
        None,
        "storage format of a second copy of the layers, which drafts over the target's cache; null for no copy.",
    )
    restores: bool = setting(
        False, "true leaves the target's cache as it was, for tools that draft along finished texts without verifying."
    )


def chosen_layers(draft: SelfConfig, num_layers: int) -> Sequence[int]:
    """The numbers of the layers that draft, of a target of `num_layers`."""
    given = draft.layers
    return range(num_layers if given is None else given) if given is None or isinstance(given, int) else list(given)


def small_cache_slots(draft: SelfConfig) -> int | None:
    """Slots of the small cache that the target's are copied to; None without one."""
    return None if draft.window is None else draft.window + draft.sinks


def _copies(draft: SelfConfig, num_layers: int) -> tuple[str, int] | None:
    """The format of the second copy, and its layers: all up to the last that drafts."""
    return None if draft.quantization is None else (draft.quantization, max(chosen_layers(draft, num_layers)) + 1)


_RANGES: tuple[Range, ...] = (
    ("draft.window", lambda n: n is None or n >= 1, "at least 1 token, or null for all"),
    ("draft.sinks", lambda n: n >= 0, "at least 0"),
)


def _problems(config: RunConfig) -> Iterator[str | NoEffect]:
    draft, target = config.draft, config.model
    assert isinstance(draft, SelfConfig)
    if draft.layers is None and draft.window is None and draft.quantization in {None, target.quantization}:
        given = f", also with {said('draft.quantization', draft.quantization)}" if draft.quantization else ""
        yield (
            f"draft=self drafts with the whole target{given}, which gains nothing: give {key_of('draft.layers')}=, "
            f"{key_of('draft.window')}= or {key_of('draft.quantization')}= of fewer bits"
        )
    if backend_of(config.placement.target.kind).by_library:
        kind = said("placement.target.kind", config.placement.target.kind)
        yield f"draft=self needs placement.target.kind=tensor, and {kind} was given"
    if config.placement.target.stages > 1:
        stages = said("placement.target.stages", config.placement.target.stages)
        yield f"draft=self drafts with layers of one stage, and {stages} was given: leave it out, or give another draft"
    steps = config.most_draft_tokens
    if draft.window is not None and 1 <= draft.window <= steps:
        yield f"{said('draft.window', draft.window)} is less than K + 1, here {steps + 1}: give a wider window"
    if draft.window is None:
        yield NoEffect("draft.sinks", f"without {key_of('draft.window')}")
    if target.shape is None:
        return
    if target.shape.recurrent and draft.window is not None:
        yield (
            f"{said('draft.window', draft.window)} needs a target that keeps all of a text, and {target.name} has "
            f"layers of kind {target.shape.recurrent}, which keep one state: leave it out, and give "
            f"{key_of('draft.layers')}="
        )
    yield from _problems_of_copy(draft, target)
    yield from _problems_of_layers(draft, target.shape.num_hidden_layers)


def _problems_of_copy(draft: SelfConfig, target: ModelConfig) -> Iterator[str]:
    if draft.quantization is None:
        return
    if problem := FORMATS.problem_of(draft.quantization, key="draft.quantization"):
        yield problem
    elif target.shape and (target.shape.recurrent or not record_of(target.shape.model_type).has_stages):
        of_layers = "keep states" if target.shape.recurrent else "read more of earlier layers than their output"
        yield (
            f"{said('draft.quantization', draft.quantization)} copies layers that stand alone, and those of "
            f"{target.name}, a {target.shape.model_type} model, {of_layers}: give {key_of('draft.layers')}= alone, or "
            "a draft model"
        )
    elif target.stored_format and target.stored_format.storage:
        yield (
            f"{said('draft.quantization', draft.quantization)} needs files that are not quantized, and those of "
            f"{target.name} are in {target.stored_format.storage}: give {key_of('draft.layers')}= or "
            f"{key_of('draft.window')}="
        )


def _problems_of_layers(draft: SelfConfig, num_layers: int) -> Iterator[str]:
    given = draft.layers
    if given is None:
        return
    if isinstance(given, int) and not isinstance(given, bool):
        if not 1 <= given <= num_layers:
            yield f"{said('draft.layers', given)} is out of range: the target has {num_layers} layers"
        return
    numbers = [*given] if isinstance(given, Sequence) and not isinstance(given, str) else []
    is_list = numbers and all(type(number) is int for number in numbers)
    if not is_list or numbers != sorted({*numbers}) or not 0 <= numbers[0] <= numbers[-1] < num_layers:
        yield (
            f"{said('draft.layers', given)} is neither a number of layers nor a rising list of numbers from 0 to "
            f"{num_layers - 1}, as {said('draft.layers', '[0,1,2]')}"
        )


def _terms(draft: SelfConfig, round_: RoundSizes) -> DraftTerms:
    """Count the steps of the layers, and the slots of the small cache."""
    layers, slots = chosen_layers(draft, round_.num_target_layers), small_cache_slots(draft)
    copied, num_copied = _copies(draft, round_.num_target_layers) or (None, 0)
    return DraftTerms(
        layers=len(layers), seen_slots=slots, copied_slots=slots or 0, copied_format=copied, copied_layers=num_copied
    )


# Source: arXiv:2404.16710 (first layers), arXiv:2410.06916 (skipped layers), arXiv:2408.11049 (window and sinks).
SELF = DrafterRecord(
    name=KIND,
    make="llama_ssp.extensions.self_drafts.drafter:SelfDrafter",
    config=SelfConfig,
    draws=True,
    reads_target=True,
    alone=lambda draft: replace(draft, restores=True),
    has_trees=True,
    ranges=_RANGES,
    problems=_problems,
    terms=_terms,
    copies=_copies,
    step_name="draft by the target's own layers",
    sees_window=lambda draft: draft.window is not None,
)
# After advice on choices: it names other ways.
LENGTHS = Adviser(name="lengths", order=3, notes="llama_ssp.extensions.self_drafts.lengths:notes")
