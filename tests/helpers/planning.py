"""Jobs to be planned, as the command line would make them."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from llama_ssp import catalogue
from llama_ssp.catalogue import Dtype, ModelShape
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.model import PlannedModel, planned_model
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import timing
from llama_ssp.settings.backends import backend_of
from llama_ssp.settings.schema import DraftLayout


def make_spec(
    target: str | PlannedModel,
    draft: str | None = None,
    *,
    num_ranks: int = 1,
    draft_kind: DraftLayout = DraftLayout.one_rank,
    target_kind: str = "tensor",
    device: str = "cuda",
    of_target: Mapping[str, Any] = MappingProxyType({}),
    of_draft: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> PlanSpec:
    """A spec whose target is on the first `num_ranks` ranks, and its draft on the first or on all of them.

    A layer-wise target has the first rank, and the GPUs of the others. `of_target` and `of_draft` are fields of the
    models to be changed.
    """
    ranks, backend = tuple(range(num_ranks)), backend_of(target_kind)
    model = planned_model(catalogue.load(target), device=device) if isinstance(target, str) else target
    chosen: dict[str, Any] = {
        "target_ranks": ranks[:1] if backend.is_layer_wise else ranks,
        "spare_devices": ranks[1:] if backend.is_layer_wise else (),
        "draft_ranks": (ranks[:1] if draft_kind is DraftLayout.one_rank else ranks) if draft else (),
        "num_draft_tokens": 4,
        "acceptance": 0.8,
        "batch_size": 1,
        "prompt_tokens": 128,
        "max_new_tokens": 64,
        "cuda_graphs": True,
    }
    return PlanSpec(
        target=replace(model, by_library=backend.by_library, **of_target),
        draft=replace(planned_model(catalogue.load(draft), device=device), **of_draft) if draft else None,
        backend=backend,
        draft_kind=draft_kind,
        device=device,
        **chosen | fields,
    )


def times_of(spec: PlanSpec, machine: HardwareConfig) -> Any:
    return timing(spec, machine)


def small_model(*, quantization: str = "none", **sizes: int) -> PlannedModel:
    """A Llama of a few layers; `sizes` override its shape."""
    known: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 192,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
    }
    shape = ModelShape(model_type="llama", **(known | sizes))
    return PlannedModel(name="small", shape=shape, dtype=Dtype.fp16, quantization=quantization)
