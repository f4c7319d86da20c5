"""Plans as a task: for a described machine, or for the spec that a run is about to start. Never imports torch.

`planning` computes plans; `reports.plan_tables` shows them, and extensions draw them (`MoreSettings.draw`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from llama_ssp.architectures.reading import check_readable, read_config, read_stored_format
from llama_ssp.catalogue import ModelConfig, read_path
from llama_ssp.errors import CapacityError, ConfigError, refuse
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import detect_hardware, machine_of_run
from llama_ssp.planning.layouts import choose_placement
from llama_ssp.planning.model import resolved
from llama_ssp.planning.plan import PLAN_VERSION, Plan, document, make_plan, require_room, shortage
from llama_ssp.planning.spec import PlanSpec, make_spec, spec_of_plan
from llama_ssp.planning.timing import CostModel, Timing
from llama_ssp.registry import imported
from llama_ssp.reports.records import Forecast
from llama_ssp.run.lengths import CHARACTERS_PER_TOKEN, check_lengths, count_tokens
from llama_ssp.run.prompts import STANDARD_INPUT, Prompt, read_prompts
from llama_ssp.settings.backends import backend_of
from llama_ssp.settings.checks import check_plan, check_values
from llama_ssp.settings.draft_heads import head_in_target
from llama_ssp.settings.extensions import MORE
from llama_ssp.settings.layout import lay_out
from llama_ssp.settings.schema import DeviceKind, DraftLayout, PlanConfig, PlanFormat, RunConfig
from llama_ssp.settings.tasks import task_of
from llama_ssp.text.messages import lasting

_Config = TypeVar("_Config", bound=RunConfig)

TYPED_TOKENS = 128

Figures = Mapping[str, tuple[Path, str]]
"""Files of figures, and `module:function` that draws each, by the words that ask for them, such as figure=plan.png."""
NO_FIGURES: Figures = {}


def show_plan(
    plan: Plan, form: PlanFormat, *, figures: Figures = NO_FIGURES, words: Mapping[str, str] | None = None
) -> None:
    """Print a plan, and draw its figures.

    Raises ConfigError if a figure cannot be drawn. After printing, raises CapacityError if the plan does not fit, and
    ConfigError if runs refuse its models.
    """
    show(plan, partial(document, plan), form, figures)
    require_room(plan, words=words)


def show_machines(configs: Sequence[PlanConfig]) -> None:
    """Print the plans of a spec on several machines in one table, in the order given.

    Raises ConfigError with the problems of all machines, and CapacityError at the end if it fits none.
    """
    described = [(config.hardware.get("name"), hardware.problems_of(config.hardware)) for config in configs]
    refuse([f"{name}: {problem}" for name, problems in described for problem in problems])
    plans = [plan_on(config, hardware.build(config.hardware)) for config in map(resolve, configs)]
    show(plans, lambda: {"plan_version": PLAN_VERSION, "plans": [*map(document, plans)]}, configs[0].format)
    refuse(plans[0].refusals)
    if not any(plan.fits for plan in plans):
        nearest = min(plans, key=lambda plan: plan.fullest.needed_bytes / plan.fullest.capacity_bytes)
        raise CapacityError(
            f"none of the {len(plans)} machines has room; on {nearest.hardware.name}, {shortage(nearest)}"
        )


def figures_of(config: PlanConfig) -> Figures:
    """Return the figures that settings of extensions ask for.

    Raises ConfigError for a figure in a folder that does not exist, before a long search begins.
    """
    chosen = [(more, name) for more in MORE.all().values() for name in more.paths if more.draw]
    found = {f"{name}={file}": (Path(file), more.draw) for more, name in chosen if (file := getattr(config, name))}
    for asked, (file, _) in found.items():
        if not file.parent.is_dir():
            raise ConfigError(f"{asked}: create the folder {file.parent} first, or name another file")
    return found


def show(
    content: object,
    as_json: Callable[[], dict[str, Any]],
    form: PlanFormat,
    figures: Figures = NO_FIGURES,
    *,
    tables: str = "llama_ssp.reports.plan_tables:show",
) -> None:
    """Draw figures, and print plans as JSON or as text; the reader of the output may close it early.

    `tables` is `module:function` that prints the content with rich.
    """
    needs_rich = [*figures] if form is PlanFormat.json else [f"format={form.value}"]
    try:
        if needs_rich:
            import rich  # noqa: F401 - JSON needs none
    except ImportError as error:
        raise ConfigError(f"{needs_rich[0]} needs rich: pip install rich, or use format=json alone") from error
    for asked, (file, draw) in figures.items():
        imported(draw, setting=asked)(content, file)
    if form is PlanFormat.json:
        print(json.dumps(as_json(), indent=2))  # noqa: T201 - the requested output
    else:
        imported(tables, setting=f"format={form.value}")(content, is_full=form is PlanFormat.full)


def settings_of_run(config: RunConfig) -> dict[str, str]:
    """Return phrases that name, in messages of `shortage`, settings of a plan that a run does not have."""
    words = {
        "hardware": "a machine like {}",
        "hardware.num_gpus": "{} GPUs",
        "hardware.num_nodes": "{} nodes",
        "placement.target.tp_size": "{} ranks",
        "prompt_tokens": "prompts of at most {} tokens",
    }
    setting = task_of(config).batch_size_setting
    return words | ({"batch_size": setting} if setting else {})


def dry_run(config: RunConfig, *, world_size: int) -> None:
    """Print the plan of exactly this run; loads no weights.

    Raises CapacityError if it does not fit, PlacementError for a model that cannot be placed as requested, and
    ConfigError for prompts that the run refuses, and if the machine has no description, or a faulty one.
    """
    plan = plan_with_prompts(config, world_size=world_size)
    plan = replace(plan, whole_run=_whole_run(config, plan, num_ranks=world_size))
    show_plan(plan, PlanFormat.full, words=settings_of_run(config))


_DISK_BYTES_PER_S = 2e9
"""An NVMe disk, or a file system of a cluster that one node reads from: a stated speed, not a measured one."""


def _whole_run(config: RunConfig, plan: Plan, *, num_ranks: int) -> str | None:
    """The time of all prompts, and of loading; None where the prompts are not known yet."""
    hours = expected_hours(config, plan)
    load_bytes = sum(rank.target_weights_bytes + rank.draft_weights_bytes for rank in plan.ranks)
    if hours is None:
        return None
    gpu_hours = f" ({hours * num_ranks:.2g} GPU-hours)" if plan.hardware.device == "cuda" else ""
    read_s, speed = load_bytes / plan.hardware.num_nodes / _DISK_BYTES_PER_S, f"{_DISK_BYTES_PER_S / 1e9:g} GB/s"
    modes = "both modes" if task_of(config).has_both_modes and plan.timing.speculative_run_s else "decoding"
    return (
        f"the whole run: {lasting(max(3600 * hours, 1))} of {modes}{gpu_hours} if every completion has its full "
        f"length; {lasting(max(read_s, 1))} to read {load_bytes / 1e9:.3g} GB at {speed} a node"
    )


def plan_with_prompts(config: RunConfig, *, world_size: int, machine: HardwareConfig | None = None) -> Plan:
    """Plan a run as `plan_ahead` does, but count the tokens of its prompts if the target's tokenizer is here.

    Raises ConfigError for prompts that are too long. With `placement=auto` tokens are not counted: ranks that choose a
    placement must choose alike, so they count none.
    """
    config = with_sizes(config)
    warning = check_lengths(config)
    plan = plan_ahead(config, world_size=world_size, machine=machine, counts=not config.placement.auto)
    return replace(plan, warnings=(*plan.warnings, *filter(None, [warning])))


def plan_ahead(
    config: RunConfig, *, world_size: int, machine: HardwareConfig | None = None, counts: bool = False
) -> Plan:
    """Plan a run before anything is loaded, on its own machine or on this one; raises ConfigError as `dry_run`."""
    on_cpu = config.device is DeviceKind.cpu
    spec, own = _spec_ahead(config, world_size=world_size, on_cpu=on_cpu, counts=counts)
    return _plan(config, spec, machine or own, num_ranks=world_size)


def resolve(config: PlanConfig) -> PlanConfig:
    """Fill in the sizes of a plan's models, and check the config; raises ConfigError, or as `with_sizes`."""
    config = resolved(with_sizes(config, is_plan=True))
    check_plan(config)
    return config


def plan_on(config: PlanConfig, machine: HardwareConfig) -> Plan:
    """Plan a resolved config on a machine, with `placement=auto` on all its ranks."""
    return _plan(config, spec_of_plan(config, machine), machine, num_ranks=machine.num_ranks, divides=True)


def _plan(config: RunConfig, spec: PlanSpec, machine: HardwareConfig, *, num_ranks: int, divides: bool = False) -> Plan:
    """Plan a spec; with `placement=auto` over `num_ranks`, in the fastest way, which the plan then notes."""
    if not config.placement.auto:
        return make_plan(spec, machine)
    chosen, sentence = choose_placement(spec, machine, num_ranks=num_ranks, divides=divides)
    return make_plan(chosen, machine, remark=sentence)


def with_sizes(config: _Config, *, is_plan: bool = False) -> _Config:
    """Fill in the shapes and number formats of models that only the hub knows, from their config.json alone.

    Raises CheckpointError if one cannot be downloaded and is not in the hub's cache; otherwise as `read_config`.
    """

    def filled(model: ModelConfig) -> ModelConfig:
        if model.shape or model.path is not None or model.hub_id is None:
            return model
        from llama_ssp.weights import hub

        folder = hub.find_config(model, is_enough=is_plan)
        shape, stored = read_config(folder, of=head_in_target(model.name))
        return replace(model, shape=shape, stored_dtype=stored, stored_format=read_stored_format(folder, shape))

    draft = replace(config.draft, model=config.draft.model and filled(config.draft.model))
    return replace(config, model=filled(config.model), draft=draft)


def choose_for_run(config: RunConfig, *, world_size: int, on_cpu: bool) -> tuple[PlanSpec, str]:
    """Choose the placement of a run with `placement=auto`; raises ConfigError or PlacementError as `dry_run`."""
    spec, machine = _spec_ahead(config, world_size=world_size, on_cpu=on_cpu)
    return choose_placement(spec, machine, num_ranks=world_size)


def _spec_ahead(
    config: RunConfig, *, world_size: int, on_cpu: bool, counts: bool = False
) -> tuple[PlanSpec, HardwareConfig]:
    """Return the spec of a run before its start, and its machine.

    Prompts are counted in tokens with `counts`, if a tokenizer is here; else CHARACTERS_PER_TOKEN characters are a
    token. A later turn of a conversation counts with the longest answers that the earlier ones can get. A prompt that
    is not known yet counts TYPED_TOKENS, and such prompts fill all rows; others fill at most one row each.
    """
    machine = machine_of_run(hardware_of(config, on_cpu=on_cpu), world_size)
    config, lengths, counted = with_sizes(config), [TYPED_TOKENS], None
    if prompts := known_prompts(config):
        counted = count_tokens(config, prompts) if counts else None
        numbers = counted or [prompt.num_characters // CHARACTERS_PER_TOKEN + 1 for prompt in prompts]
        lengths = [
            number + len(prompt.earlier) * config.max_new_tokens
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        config = with_filled_rows(config, num_completions=len(prompts) * config.num_samples)
    spec = _spec_on(machine, config, world_size=world_size, lengths=lengths)
    return replace(spec, guesses_tokens=counted is None and spec.mean_prompt_tokens is not None), machine


def _spec_on(machine: HardwareConfig, config: RunConfig, *, world_size: int, lengths: Sequence[int]) -> PlanSpec:
    spec = make_spec(
        config, world_size=world_size, prompt_tokens=max(lengths), device=machine.device, num_gpus=machine.num_gpus
    )
    on_device = replace(config, device=DeviceKind(machine.device))
    check_values(on_device, spec.target.shape, spec.draft.shape if spec.draft else None)
    for planned in (spec.target, spec.draft):
        if planned and planned.stored_format:
            planned.stored_format.kept_format(planned.quantization, where=planned.label)
    has_own = task_of(config).largest_cell is not None
    return spec if has_own else replace(spec, mean_prompt_tokens=fmean(lengths))


def known_prompts(config: RunConfig) -> list[Prompt]:
    """The prompts of a run; none if they will be typed. Raises as `read_prompts`."""
    has_prompts = config.prompt is not None or config.prompts or task_of(config).prompts(config)
    is_read_later = config.prompt is None and config.prompts == STANDARD_INPUT
    return read_prompts(config) if has_prompts and not is_read_later else []


def check_models(config: RunConfig, *, world_size: int = 1) -> None:
    """Check that the models can be read: their families, and how their weights are stored.

    Models that the catalogue does not describe are checked by their config.json. Raises as `check_readable`.
    """
    placement, sizes = config.placement, (1, 1)
    if world_size > 1 and not placement.auto and not backend_of(placement.target.kind).by_library:
        layout = lay_out(placement, world_size=world_size, has_draft=config.draft.model is not None)
        is_whole = layout.draft_kind is DraftLayout.replicated
        sizes = len(layout.scoring_ranks), 1 if is_whole else len(layout.draft_ranks)
    shapes = []
    for model, num_ranks in zip((config.model, config.draft.model), sizes, strict=True):
        if model is None:
            continue
        folder = read_path(model.path) if model.path is not None and config.reads_files else None
        if folder is None and model.shape is None and model.hub_id is not None:
            from llama_ssp.weights import hub

            folder = hub.find_config(model)
        shape = model.shape
        if folder:
            shape = check_readable(folder, model.quantization, num_ranks=num_ranks, of=head_in_target(model.name))
        shapes.append(shape)
    check_values(config, *shapes)


def with_filled_rows(config: RunConfig, *, num_completions: int) -> RunConfig:
    """Limit the batch size to the completions of each replica."""
    return replace(config, batch_size=min(config.batch_size, -(-num_completions // config.placement.num_replicas)))


def plan_of_run(config: RunConfig, *, world_size: int, machine: HardwareConfig, lengths: Sequence[int]) -> Plan:
    """Plan the spec that a run is about to start; `lengths` are the tokens of its prompts."""
    machine = machine_of_run(machine, world_size)
    return make_plan(_spec_on(machine, config, world_size=world_size, lengths=lengths), machine)


def expected_hours(config: RunConfig, plan: Plan) -> float | None:
    """Hours of a run's decoding if every completion has its full length; None for prompts or sizes not known yet."""
    task, timed = task_of(config), plan.timing
    prompts = [] if task.largest_cell else known_prompts(config)
    if not prompts:
        return None
    num_completions = len(prompts) * config.num_samples
    num_batches = -(-num_completions // plan.spec.num_rows)
    mode_s = timed.speculative_run_s or timed.plain_run_s
    if timed.speculative_run_s and task.has_both_modes:
        mode_s += timed.plain_run_s
    scoring_s = CostModel(plan.spec, plan.hardware).scoring_s() * (2 if task.has_both_modes else 1)
    return num_batches * (config.max_new_tokens * mode_s + scoring_s) / 3600


def forecast(timed: Timing) -> Forecast:
    """The forecasts in `summary.json`: per token of whole completions, including prompts."""
    speculative_s, is_of_texts = timed.speculative_run_s, bool(timed.acceptance and timed.acceptance.is_of_texts)
    return Forecast(
        plain_ms_per_token=1e3 * timed.plain_run_s,
        speculative_ms_per_token=None if speculative_s is None else 1e3 * speculative_s,
        speedup=None if speculative_s is None else timed.plain_run_s / speculative_s,
        tokens_per_round=timed.tokens_per_round if is_of_texts else None,
        tokens_per_round_range=[*(timed.tokens_per_round_range or ())] if is_of_texts else [],
    )


def hardware_of(config: RunConfig, *, on_cpu: bool) -> HardwareConfig:
    """Return the machine that the config names, else this one; raises ConfigError without a correct description."""
    return hardware.build(config.hardware) if config.hardware else detect_hardware(on_cpu=on_cpu)
