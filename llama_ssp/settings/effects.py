"""Finds settings that were given explicitly and have no effect in combination with the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llama_ssp.settings import layout
from llama_ssp.settings.drafters import drafts, matching_of
from llama_ssp.settings.folders import ENDINGS_WITH_FIELDS, ending_of
from llama_ssp.settings.formats import takes
from llama_ssp.settings.rules import rules
from llama_ssp.settings.schema import DeviceKind, DraftLayout, ModelConfig, RunConfig, WeightsKind
from llama_ssp.settings.tasks import NoEffect, task_of


def is_synthetic(config: RunConfig) -> bool:
    """Whether weights are generated instead of read from files."""
    return config.weights is WeightsKind.synthetic


@dataclass(frozen=True)
class _Row:
    """Settings that have no effect while `holds`. A key includes all keys below it; `{task}` is the task's record."""

    keys: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    reason: str


def _of_both(names: tuple[str, ...], holds: Callable[[RunConfig, ModelConfig], bool], reason: str) -> tuple[_Row, _Row]:
    """The rows for settings of the target's and of the draft's entry; `{entry}` is `model` or `draft.model`.

    `{group}` is the setting that chooses the entry: `model` or `draft`.
    """

    def row(entry: str, applies: Callable[[RunConfig], bool]) -> _Row:
        said = reason.replace("{entry}", entry).replace("{group}", entry.removesuffix(".model"))
        return _Row(tuple(f"{entry}.{name}" for name in names), applies, said)

    of_draft = row("draft.model", lambda c: c.draft.model is not None and holds(c, c.draft.model))
    return row("model", lambda c: holds(c, c.model)), of_draft


def _never_drafts(config: RunConfig) -> bool:
    return not drafts(config.draft) and not task_of(config).needs_draft


def _has_no_draft_model(config: RunConfig) -> bool:
    return config.draft.model is None and not task_of(config).needs_draft


def _cuts_no_draft(config: RunConfig) -> bool:
    """Whether each rank with the draft holds all of it, as far as the settings say."""
    draft = config.placement.draft
    has_one_rank = draft.kind is DraftLayout.own_gpu and (draft.tp_size or len(draft.ranks or [0])) == 1
    return draft.kind in {DraftLayout.one_rank, DraftLayout.replicated} or has_one_rank


def _draws_by_position(config: RunConfig) -> bool:
    known = rules()
    return config.verification.rule in known and known[config.verification.rule].draws_by_position


_NO_DRAFT = "without a draft: give one with draft=NAME"
_ROWS = (
    _Row(("speculation",), _never_drafts, _NO_DRAFT),
    _Row(("verification",), lambda c: _never_drafts(c) and not _draws_by_position(c), _NO_DRAFT),
    _Row(("draft.fallback",), lambda c: not c.speculation.adapts, "without speculation.num_draft_tokens=auto"),
    _Row(("placement.draft", "draft.model"), _has_no_draft_model, "without a draft model: give one with draft=NAME"),
    _Row(
        ("draft.tokenizer", "draft.matching"),
        lambda c: is_synthetic(c) and c.draft.model is not None,
        "with weights=synthetic, which gives both models one tokenizer",
    ),
    _Row(("draft.tokenizer", "draft.matching"), _has_no_draft_model, "without a draft model: give one with draft=NAME"),
    _Row(
        ("draft.matching",),
        lambda c: c.draft.model is not None and matching_of(c.draft) is None,
        "without draft.tokenizer=own",
    ),
    _Row(("placement.target", "placement.draft"), lambda c: c.placement.auto, "with placement=auto, which chooses it"),
    _Row(
        ("placement.draft.whole",),
        lambda c: not c.placement.auto and _cuts_no_draft(c),
        "with a draft that is whole on its ranks anyway: use it with placement=sharded",
    ),
    _Row(
        ("sampling.top_k", "sampling.top_p", "sampling.min_p"),
        lambda c: c.sampling.temperature == 0,
        "at temperature 0, which always takes the most probable token",
    ),
    _Row(
        ("num_samples",),
        lambda c: c.sampling.temperature == 0 and c.num_samples > 1,
        "at temperature 0, where all samples of a prompt are equal",
    ),
    _Row(
        ("prompts_column",),
        lambda c: ending_of(c.prompts or "") not in ENDINGS_WITH_FIELDS,
        f"without prompts=FILE that ends in {', '.join(ENDINGS_WITH_FIELDS)}",
    ),
    _Row(("task.default_prompts",), lambda c: (c.prompt, c.prompts) != (None, None), "with prompt= or prompts="),
    *_of_both(
        ("int8_threshold",),
        lambda _, m: not takes(m.quantization, "int8_threshold"),
        "without {entry}.quantization=int8",
    ),
    *_of_both(("manifest",), lambda _, m: not m.verify, "without {entry}.verify=true"),
    _Row(("cuda_graphs", "gpu_kernels"), lambda c: c.device is DeviceKind.cpu, "with device=cpu"),
    _Row(
        ("cuda_graphs",),
        lambda c: not layout.may_capture(c.placement.target),
        "with a target that accelerate or deepspeed places: its operators are launched from Python",
    ),
    _Row(("dry_run",), lambda c: c.dry_run and not task_of(c).needs_models, "on task={task.name}, {task.why_no_plan}"),
    _Row(("resume",), lambda c: not task_of(c).needs_models, "on task={task.name}, which has no run folder"),
    _Row(("synthetic",), lambda c: not is_synthetic(c), "without weights=synthetic"),
    _Row(("synthetic",), lambda c: is_synthetic(c) and _has_no_draft_model(c), _NO_DRAFT),
    *_of_both(
        ("path", "hub_id", "revision", "verify"),
        lambda c, m: is_synthetic(c) and m.shape is not None,
        "with weights=synthetic, which reads no files",
    ),
    *_of_both(("hub_id", "revision"), lambda _, m: m.path is not None, "with {entry}.path"),
    *_of_both(
        ("hub_id", "revision"),
        lambda c, m: m.shipped and m.path is None and not is_synthetic(c),
        "on an entry that comes with the package: use {group}=OWNER/NAME",
    ),
)


def without_effect(config: RunConfig, explicit: frozenset[str]) -> Iterator[NoEffect]:
    """Yield the settings that have no effect: of `explicit`, and those that the task names."""
    yield from task_of(config).without_effect(config, explicit)
    for entry in _ROWS:
        for key in sorted(explicit) if entry.holds(config) else ():
            if any(key == top or key.startswith(f"{top}.") for top in entry.keys):
                yield NoEffect(key, entry.reason.format(task=task_of(config)))
