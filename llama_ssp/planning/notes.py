"""Notes of a plan on its models and its machine: families, states, contexts, storage, placement, overlap."""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.advisers import Adviser
from llama_ssp.planning.memory import GIB, RankMemoryPlan, fits
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.spec import PlanSpec, without_draft
from llama_ssp.planning.timing import CostModel, Timing, bubble, timing
from llama_ssp.planning.weights import model_bytes, rank_shares
from llama_ssp.settings.drafters import SAME
from llama_ssp.settings.layout import named
from llama_ssp.storage.formats import NO_QUANTIZATION
from llama_ssp.text.messages import counted, rounded


def notes_on_families(*models: PlannedModel | ModelConfig) -> Iterator[str]:
    """Say which models are planned as a Llama of their sizes or compared with transformers."""
    for model in models:
        if model.shape and not model.shape.refusal and not record_of(model.shape.model_type).is_written:
            yield f"a run compares {model.shape.model_type} models with transformers before it begins"
        if model.shape and not (model.shape.modules or record_of(model.shape.model_type).is_written):
            yield (
                f"{model.label} is planned as a Llama of its sizes, so bytes and times are estimates: others were 0.8 "
                "to 1.4 times the bytes of the model"
            )


def notes_on_states(spec: PlanSpec) -> Iterator[str]:
    """Say what recurrent layers keep."""
    for model, num_kept in zip((spec.target, spec.draft), spec.kept_states, strict=True):
        if model and (states := inventory(model.shape).states):
            yield (
                f"{sum(kept.num_layers for kept in states)} of {model.shape.num_hidden_layers} layers of {model.label} "
                f"keep states: those behind the last {num_kept[0]} tokens of a row, to which rejected drafts go back,"
                f"{' and one that later prompts go on from,' * len(num_kept[1:])} take "
                f"{model.state_bytes(*num_kept) / 2**20:.2f} MiB at any length"
            )


_MOST_WHOLE = 0.03
"""The share of a rank's weights that every rank may hold without a note."""


def notes_on_whole_parts(spec: PlanSpec) -> Iterator[str]:
    """Name the parts of the target that each rank holds whole, if they are a large share of a rank's weights."""
    num_ranks = len(spec.target_ranks) // spec.num_stages
    if spec.backend.shares or num_ranks == 1:
        return
    held = rank_shares(spec.target, num_ranks=num_ranks)[0]
    found = model_bytes(held, spec.target, device=spec.device)
    if found.repeated_bytes > _MOST_WHOLE * found.total_bytes:
        tables = (*held.layer, *held.embeddings, *filter(None, [held.head]))
        names = dict.fromkeys(table.module for table in tables if table.cut is None)
        yield (
            f"each of {num_ranks} ranks holds {found.repeated_bytes / GIB:.2f} GiB of {spec.target.label} whole, "
            f"{100 * found.repeated_bytes / found.total_bytes:.0f} % of its weights: {', '.join([*names, 'norms'])}"
        )


def notes_on_stages(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[str]:
    """Say which layers each stage has and how long it takes, what goes from stage to stage, and how long ranks wait."""
    if spec.num_stages == 1:
        return
    costs = CostModel(spec, hardware)
    stages_s, hops_s = costs.stages_s(1), costs.hops_s(spec.batch_size)
    parts = [
        f"layers {layers[0]}-{layers[-1]} on {named(ranks)} {rounded(1e3 * seconds)} ms"
        for layers, ranks, seconds in zip(spec.stages, spec.layout.stages, stages_s, strict=True)
    ]
    in_groups = f"{counted(spec.batch_size, 'row')} in {counted(costs.num_groups, 'group')}"
    yield (
        f"stages of a plain step: {', '.join(parts)}, and {rounded(1e3 * hops_s)} ms between them for "
        f"{rounded(spec.batch_size * sum(spec.hop_bytes) / 1024)} KiB; a rank waits for other stages "
        f"{100 * bubble(costs, 1):.0f} % of the time, with {in_groups}"
    )


def outgrown(draft: str, context: int, num_steps: int, *, longest: int) -> str | None:
    """Say from where on the longest texts go on without a draft of this context; None if it serves them all."""
    most = engine.most_drafted_for(context, num_steps)
    if longest <= most:
        return None
    return f"rows go on without the draft behind token {most}: the context of draft={draft} has {context} tokens"


def notes_on_contexts(spec: PlanSpec) -> Iterator[str]:
    """Say at which length rows outgrow the draft's context and go on without it."""
    if spec.draft and not spec.has_head and spec.vocabulary is SAME:
        longest = spec.prompt_tokens + spec.max_new_tokens
        context = spec.draft.shape.max_position_embeddings
        if note := outgrown(spec.draft.name, context, spec.draft_depth, longest=longest):
            yield note


def refusals(spec: PlanSpec) -> Iterator[str]:
    """Say which models runs refuse, by their family or as their files are quantized."""
    for model in filter(None, (spec.target, spec.draft)):
        if model.shape.refusal:
            yield f"runs refuse {model.label}: {model.shape.refusal}"
        if (stored := model.stored_format) is None:
            continue
        try:
            stored.kept_format(model.quantization, where=model.label)
        except CheckpointError as error:
            yield f"runs refuse this model, whose matrices are counted as {model.weights_name}: {error}"
        except ConfigError as error:
            yield f"runs refuse this model: {error}"


def notes_on_formats(spec: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Say where a GPU decodes slower with quantized weights than with the numbers that they stand for."""
    target = spec.target
    if hardware.device != "cuda" or not target.storage.is_quantized or target.storage.target_advice:
        return
    whole = replace(spec, target=replace(target, quantization=NO_QUANTIZATION, stored_format=None))
    if fits(whole, hardware) and timed.plain_s > (whole_s := CostModel(whole, hardware).plain_s()):
        yield (
            f"{target.quantization} saves memory and no time at {counted(spec.batch_size, 'row')}: "
            f"{rounded(1e3 * timed.plain_s)} ms/token plain, {rounded(1e3 * whole_s)} in {target.dtype.name}"
        )


def notes_on_heads(spec: PlanSpec, heads: tuple[int, ...], fullest: RankMemoryPlan) -> Iterator[str]:
    """Say how heads are shared if not evenly."""
    if len(set(heads)) > 1:
        num_heads, shares = spec.target.shape.num_attention_heads, " ".join(map(str, heads))
        yield f"{num_heads} heads over {len(heads)} ranks: {shares}; rank {fullest.rank} needs most"


def notes_on_machine(spec: PlanSpec, hardware: HardwareConfig, fullest: RankMemoryPlan) -> Iterator[str]:
    """Say whether memory is tight, and what is unusual about the machine or the rounds."""
    if fullest.is_tight:
        share = 100 * fullest.free_bytes / fullest.capacity_bytes
        yield f"a tight fit: {share:.1f} % of the memory of rank {fullest.rank} is left, and some items are estimates"
    if hardware.device == "cpu" and hardware.system_bytes:
        yield (
            f"{hardware.system_bytes / GIB:.3g} of {hardware.memory_bytes / GIB:.3g} GiB are left to the operating "
            "system and other programs (hardware.system_bytes)"
        )
    yield from spec.backend.notes(spec) if spec.backend.notes else ()
    has_experts = bool(inventory(spec.target.shape).experts) and not spec.target.storage.is_quantized
    if has_experts and spec.cuda_graphs:
        launched_s = timing(without_draft(replace(spec, cuda_graphs=False)), hardware).plain_s
        yield (
            f"rounds with unquantized experts may not be captured as CUDA graphs: launched from Python, a token takes "
            f"{rounded(1e3 * launched_s)} ms"
        )


def slower_overlapped(spec: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Warn if drafting while the target verifies takes longer than one after the other."""
    if not spec.overlaps or timed.speculative_s is None:
        return
    in_turn_s = timing(replace(spec, overlap=False), hardware).speculative_s
    if in_turn_s and timed.speculative_s > in_turn_s:
        with_overlap, in_turn = (rounded(1e3 * seconds) for seconds in (timed.speculative_s, in_turn_s))
        yield (
            f"overlapping drafting and verification does not gain: forecast {with_overlap} ms/token with "
            f"speculation.overlap=true, {in_turn} with speculation.overlap=false"
        )


OVERLAP = Adviser(name="overlap", order=1, warnings="llama_ssp.planning.notes:slower_overlapped")
