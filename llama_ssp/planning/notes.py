"""Notes of a plan on its models: families, states, contexts, storage."""

from collections.abc import Iterator

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.spec import PlanSpec


def notes_on_families(*models: PlannedModel | ModelConfig) -> Iterator[str]:
    """Say which models runs refuse, and which are planned as a Llama of their sizes or compared with transformers."""
    for model in models:
        if model.shape and model.shape.refusal:
            yield f"runs refuse {model.name}: {model.shape.refusal}"
        elif model.shape and not record_of(model.shape.model_type).is_written:
            yield f"a run compares {model.shape.model_type} models with transformers before it begins"
        if model.shape and not (model.shape.modules or record_of(model.shape.model_type).is_written):
            yield (
                f"{model.name} is planned as a Llama of its sizes, so bytes and times are estimates: others were 0.8 "
                "to 1.4 times the bytes of the model"
            )


def notes_on_states(spec: PlanSpec) -> Iterator[str]:
    """Say what recurrent layers keep."""
    for model, num_kept in zip((spec.target, spec.draft), spec.kept_states, strict=True):
        if model and (states := inventory(model.shape).states):
            yield (
                f"{sum(kept.num_layers for kept in states)} of {model.shape.num_hidden_layers} layers of {model.name} "
                f"keep states: those behind the last {num_kept[0]} tokens of a row, to which rejected drafts go back,"
                f"{' and one that later prompts go on from,' * len(num_kept[1:])} take "
                f"{model.state_bytes(*num_kept) / 2**20:.2f} MiB at any length"
            )


def outgrown(draft: str, context: int, num_steps: int, *, longest: int) -> str | None:
    """Say from where on the longest texts go on without a draft of this context; None if it serves them all."""
    most = engine.most_drafted_for(context, num_steps)
    if longest <= most:
        return None
    return f"rows go on without the draft behind token {most}: the context of draft={draft} has {context} tokens"


def notes_on_contexts(spec: PlanSpec) -> Iterator[str]:
    """Say at which length rows outgrow the draft's context and go on without it."""
    if spec.draft and not (spec.has_head or spec.own_tokenizer):
        longest = spec.prompt_tokens + spec.max_new_tokens
        context = spec.draft.shape.max_position_embeddings
        if note := outgrown(spec.draft.name, context, spec.draft_depth, longest=longest):
            yield note


def notes_on_storage(spec: PlanSpec) -> Iterator[str]:
    """Say how runs deal with models whose files are quantized, so that a plan does not promise what a run refuses."""
    for model in (spec.target, spec.draft):
        if model is None or (stored := model.stored_format) is None:
            continue
        try:
            stored.kept_format(model.quantization, where=model.name)
        except CheckpointError as error:
            yield f"runs refuse this model, whose matrices are counted as {model.weights_name}: {error}"
        except ConfigError as error:
            yield f"runs refuse this model: {error}"
