"""Jobs to be planned, as the command line would make them."""

from dataclasses import replace
from typing import Any

from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.profile import LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.planning.spec import PlannedModel, PlanSpec, planned_model
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import DraftLayout, Dtype, ModelShape, TargetKind


def make_job(  # noqa: PLR0913 - every choice that tests make
    target: str | PlannedModel,
    draft: str | None = None,
    *,
    num_ranks: int = 1,
    draft_kind: DraftLayout = DraftLayout.one_rank,
    target_kind: TargetKind = TargetKind.tensor,
    num_draft_tokens: int = 4,
    acceptance: float | None = 0.8,
    batch_size: int = 1,
    prompt_tokens: int = 128,
    max_new_tokens: int = 64,
    cuda_graphs: bool = True,
    device: str = "cuda",
) -> PlanSpec:
    """A job whose target is on the first `num_ranks` ranks, and its draft on the first or on all of them.

    A layer-wise target has the first rank, and the GPUs of the others.
    """
    ranks = tuple(range(num_ranks))
    alone = draft_kind is DraftLayout.one_rank
    is_layer_wise = target_kind is TargetKind.accelerate
    model = planned_model(catalogue.load(target), device=device) if isinstance(target, str) else target
    return PlanSpec(
        target=replace(model, by_library=target_kind is not TargetKind.tensor),
        draft=planned_model(catalogue.load(draft), device=device) if draft else None,
        target_kind=target_kind,
        target_ranks=ranks[:1] if is_layer_wise else ranks,
        spare_devices=ranks[1:] if is_layer_wise else (),
        draft_kind=draft_kind,
        draft_ranks=(ranks[:1] if alone else ranks) if draft else (),
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        cuda_graphs=cuda_graphs,
        device=device,
    )


def small_model(*, quantization: str = "none", **sizes: int) -> PlannedModel:
    """A Llama of a few layers; `sizes` override its shape."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 192,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
    }
    return PlannedModel(
        name="small",
        shape=ModelShape(model_type="llama", **(shape | sizes)),
        dtype=Dtype.fp16,
        quantization=quantization,
    )


def measured_machine(machine: HardwareConfig) -> HardwareConfig:
    """A machine whose linear layers take a second for each row and a million elements; the rest are round figures."""
    linear = [
        LinearPoint(
            dtype="fp16",
            arithmetic="fp16",
            rows=rows,
            elements=elements,
            working_set_bytes=size,
            s=rows * elements / 1e6,
        )
        for rows in (1, 5)
        for elements in (1000, 100_000)
        for size in (1, 10**9)
    ]
    flat = [SizePoint(size=1, s=0.5), SizePoint(size=1000, s=0.5)]
    profile = Profile(
        num_ranks=1,
        linear=linear,
        tied_head=[replace(point, s=2 * point.s) for point in linear],
        layer=[RowsPoint(rows=1, width=64, s=10.0), RowsPoint(rows=5, width=64, s=14.0)],
        frame=[RowsPoint(rows=1, width=64, s=3.0)],
        attention=[SizePoint(size=1, s=1e-15)],
        draw=flat,
        verify=flat,
        round_s=0.25,
    )
    return replace(machine, device="cpu", profiles=[profile])
