"""The record of DeepSpeed's AutoTP: the models that it can split, the bytes of a rank, and refusals."""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.matrices import Inventory
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.planning.memory import GB
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.weights import model_bytes, shares
from llama_ssp.settings.backends import Backend
from llama_ssp.settings.layout import named
from llama_ssp.storage.formats import format_of
from llama_ssp.text.messages import said

_KIND = "placement.target.kind=deepspeed"


def check_split(shape: ModelShape, quantization: str, *, num_ranks: int) -> None:
    """Raise PlacementError if DeepSpeed cannot split a model evenly, or would not split its recurrent states at all."""
    heads, problem = shape.num_key_value_heads, ""
    if num_ranks > 1 and record_of(shape.model_type).recurrent:
        problem = f"cannot split the recurrent layers of {shape.model_type} models: use "
    elif format_of(quantization).is_quantized:
        problem = (
            f"splits only unquantized layers, and those of the target are {quantization}: use "
            f"{said('model.quantization', 'none')} on unquantized files, or "
        )
    elif heads % num_ranks:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        problem = f"splits {heads} key-value heads evenly, and {num_ranks} ranks were given: use {sizes} ranks, or "
    if problem:
        raise PlacementError(f"{_KIND} {problem}placement.target.kind=tensor")


def _shares(model: PlannedModel, *, num_ranks: int) -> tuple[Inventory, ...]:
    check_split(model.shape, model.quantization, num_ranks=num_ranks)
    uncut = inventory(model.shape)
    return tuple(
        replace(share, embeddings=uncut.embeddings, head=uncut.head)
        for share in shares(model.shape, num_ranks=num_ranks)
    )


def _problems(target_ranks: tuple[int, ...], draft_ranks: tuple[int, ...]) -> Iterator[str]:
    if not {*draft_ranks} <= {*target_ranks}:
        yield (
            f"{_KIND} needs all ranks, since DeepSpeed communicates over all of them, and the draft is on "
            f"{named(draft_ranks)}, the target on {named(target_ranks)}: use a draft on the target's ranks, or "
            "placement.target.kind=tensor"
        )


def _notes(spec: PlanSpec) -> Iterator[str]:
    whole = model_bytes(inventory(spec.target.shape), spec.target, device=spec.device).total_bytes
    yield (
        f"while loading, DeepSpeed keeps the whole target in host memory on every rank, {whole / GB:.4g} GB each, "
        "whose capacity is checked on a CPU only"
    )


DEEPSPEED = Backend(
    name="deepspeed",
    purpose="deepspeed is AutoTP over all ranks (./machine-install.sh --deepspeed).",
    load="llama_ssp.extensions.deepspeed.loading:load",
    check="llama_ssp.extensions.deepspeed.loading:check",
    shares=_shares,
    reads_whole=True,
    problems=_problems,
    notes=_notes,
)
