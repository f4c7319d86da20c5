"""Notes of a plan of long texts: the gain from fewer bits of the cache, a window, or fewer layers. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llama_ssp.extensions.self_drafts.records import KIND, SelfConfig
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import fits, largest_batch, largest_context
from llama_ssp.planning.printed import accepted
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel, Timing, timing
from llama_ssp.storage.formats import OWN_DTYPE
from llama_ssp.text.messages import listed, rounded, said

LEAST_SHARE = 0.5
"""The least share of keys and values, in the bytes that a step reads, for a note; below it, weights matter more."""
_WINDOW, _NUM_DRAFTED, _STEPS = 512, 4, 6
_MOST_ASKED = 0.95
"""The highest acceptance that a note asks for, since no draft reaches more."""


def cache_share(spec: PlanSpec, hardware: HardwareConfig) -> float:
    """The share of keys and values in the bytes that a plain step reads in the middle of a completion."""
    weights = CostModel(replace(spec, prompt_tokens=1, max_new_tokens=1), hardware).least_bytes
    return 1 - weights / CostModel(spec, hardware).least_bytes


def gains_from(spec: PlanSpec, hardware: HardwareConfig, plain_s: float, **settings: Any) -> float | None:
    """The acceptance from which the target gains by drafting for itself; None if it would have to be 0.95."""
    drafts = replace(
        spec, free_draft=KIND, free_settings=SelfConfig(kind=KIND, **settings), num_draft_tokens=_NUM_DRAFTED
    )
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fastest_s = min(timing(replace(drafts, acceptance=middle), hardware).by_num_draft_tokens)
        low, high = (low, middle) if fastest_s < plain_s else (middle, high)
    return high if high < _MOST_ASKED and fits(drafts, hardware) else None


def notes(spec: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Say what gains where keys and values are most of what a step reads."""
    share = 0.0 if spec.backend.by_library else cache_share(spec, hardware)
    if share < LEAST_SHARE:
        return
    ways, target, length = list[str](), spec.target, spec.prompt_tokens + spec.max_new_tokens
    narrow_setting = said("model.cache_dtype", "int8")
    if target.cache_dtype == OWN_DTYPE and accepted(narrow_setting):
        narrow = replace(spec, target=replace(target, cache_dtype="int8"))
        rows, tokens = (most(narrow, hardware) for most in (largest_batch, largest_context))
        ways.append(
            f"{narrow_setting} {rounded(1e3 * timing(narrow, hardware).plain_s)} ms/token in place of "
            f"{rounded(1e3 * timed.plain_s)} plain, and room for {rows} rows, or rows of {tokens} tokens"
        )
    can_draft = not spec.drafts and spec.num_stages == 1  # with all layers on its ranks
    for settings in ({"window": _WINDOW}, {"layers": spec.num_target_layers // 2}) if can_draft else ():
        ((name, value),) = settings.items()
        words = said("draft", KIND), said(f"draft.{name}", value)
        if value < length and accepted(*words) and (least := gains_from(spec, hardware, timed.plain_s, **settings)):
            ways.append(f"{' '.join(words)} a gain from an acceptance of {least:.2f} on")
    if ways:
        yield f"{100 * share:.0f} % of what a step reads are keys and values: {listed(ways, 'and')}"
