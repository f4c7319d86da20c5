"""Finds settings that were given explicitly and have no effect in combination with the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llama_ssp.config import layout
from llama_ssp.config.drafts.drafter import drafts
from llama_ssp.config.formats.format import takes
from llama_ssp.config.rules.rule import rules
from llama_ssp.config.schema import DeviceKind, RunConfig, WeightsKind
from llama_ssp.config.tasks.spec import task_of


def is_synthetic(config: RunConfig) -> bool:
    """Whether weights are generated instead of read from files."""
    return config.weights is WeightsKind.synthetic


@dataclass(frozen=True)
class _Pointless:
    """Settings that have no effect while `holds`. A key includes all keys below it; `{task}` is the task's record."""

    keys: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    reason: str


def _draws_by_position(config: RunConfig) -> bool:
    known = rules()
    return config.verification.rule in known and known[config.verification.rule].draws_by_position


_POINTLESS = (
    _Pointless(
        ("speculation",),
        lambda c: not drafts(c.draft) and not task_of(c).needs_draft,
        "without a draft: give one with draft=NAME",
    ),
    _Pointless(
        ("verification",),
        lambda c: not (drafts(c.draft) or task_of(c).needs_draft or _draws_by_position(c)),
        "without a draft: give one with draft=NAME",
    ),
    _Pointless(
        ("placement.draft", "draft.model"),
        lambda c: c.draft.model is None and not task_of(c).needs_draft,
        "without a draft model: give one with draft=NAME",
    ),
    _Pointless(
        ("placement.target", "placement.draft"), lambda c: c.placement.auto, "with placement=auto, which chooses it"
    ),
    _Pointless(
        ("sampling.top_k", "sampling.top_p", "sampling.min_p"),
        lambda c: c.sampling.temperature == 0,
        "at temperature 0, which always takes the most probable token",
    ),
    _Pointless(
        ("num_samples",),
        lambda c: c.sampling.temperature == 0 and c.num_samples > 1,
        "at temperature 0, where all samples of a prompt are equal",
    ),
    _Pointless(
        ("task.default_prompts",), lambda c: c.prompt is not None or c.prompts is not None, "with prompt= or prompts="
    ),
    _Pointless(
        ("model.int8_threshold",),
        lambda c: not takes(c.model.quantization, "int8_threshold"),
        "without model.quantization=int8",
    ),
    _Pointless(
        ("draft.model.int8_threshold",),
        lambda c: c.draft.model is not None and not takes(c.draft.model.quantization, "int8_threshold"),
        "without draft.model.quantization=int8",
    ),
    _Pointless(("model.manifest",), lambda c: not c.model.verify, "without model.verify=true"),
    _Pointless(
        ("draft.model.manifest",),
        lambda c: c.draft.model is not None and not c.draft.model.verify,
        "without draft.model.verify=true",
    ),
    _Pointless(("cuda_graphs", "one_shot_all_reduce"), lambda c: c.device is DeviceKind.cpu, "with device=cpu"),
    _Pointless(
        ("cuda_graphs",),
        lambda c: not layout.may_capture(c.placement.target),
        "with a target that accelerate or deepspeed places: its operators are launched from Python",
    ),
    _Pointless(
        ("dry_run",), lambda c: c.dry_run and not task_of(c).needs_models, "on task={task.name}, {task.why_no_plan}"
    ),
    _Pointless(("synthetic",), lambda c: not is_synthetic(c), "without weights=synthetic"),
    _Pointless(
        ("synthetic",),
        lambda c: is_synthetic(c) and c.draft.model is None and not task_of(c).needs_draft,
        "without a draft: give one with draft=NAME",
    ),
    _Pointless(
        ("model.path", "model.hub_id", "model.revision", "model.verify"),
        lambda c: is_synthetic(c) and c.model.shape is not None,
        "with weights=synthetic, which reads no files",
    ),
    _Pointless(
        ("draft.model.path", "draft.model.hub_id", "draft.model.revision", "draft.model.verify"),
        lambda c: is_synthetic(c) and c.draft.model is not None and bool(c.draft.model.shape),
        "with weights=synthetic, which reads no files",
    ),
    _Pointless(("model.hub_id", "model.revision"), lambda c: c.model.path is not None, "with model.path"),
    _Pointless(
        ("draft.model.hub_id", "draft.model.revision"),
        lambda c: c.draft.model is not None and c.draft.model.path is not None,
        "with draft.model.path",
    ),
)


def without_effect(config: RunConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Yield a sentence for each key in `explicit` that has no effect."""
    for entry in _POINTLESS:
        for key in sorted(explicit) if entry.holds(config) else ():
            if any(key == top or key.startswith(f"{top}.") for top in entry.keys):
                yield f"{key} has no effect {entry.reason.format(task=task_of(config))}"
