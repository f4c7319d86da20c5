"""Names what a run lacks for `reproducible=true` on a GPU, by settings and files. Imports no torch.

The GPU itself, the number of ranks and whether each kernel works there are seen when the models are loaded.
"""

from collections.abc import Iterator

from llama_ssp.architectures.engine import FIRST_CAPABILITY_BY_LENGTH, LARGEST_HEAD_BY_LENGTH, reads_by_length
from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import ModelConfig
from llama_ssp.planning.model import DTYPE_BYTES, number_format
from llama_ssp.settings.combinations import Ability, on_gpus
from llama_ssp.settings.drafters import reads_draft_probs, sees_window
from llama_ssp.settings.processors import filters
from llama_ssp.settings.schema import RunConfig
from llama_ssp.storage.formats import FORMATS, few_rows_bytes
from llama_ssp.text.messages import key_of, said


def lacking(config: RunConfig) -> str | None:
    """Name what the run lacks, after `reproducible=true needs`; None if nothing is known."""
    if not on_gpus(config):
        return None
    models = [("model", config.model)]
    draft = config.draft.model if reads_draft_probs(config) else None
    has_head = draft is not None and draft.shape is not None and draft.shape.is_head
    if draft and not has_head:
        models.append(("draft.model", draft))
    found = [*_of_rounds(config, has_head=has_head), *(each for model in models for each in _of_model(*model))]
    return found[0] if found else None


def _of_rounds(config: RunConfig, *, has_head: bool) -> Iterator[str]:
    if config.speculation.tree:
        yield f"chains on a GPU, since torch's kernels attend to trees there: leave {key_of('speculation.tree')} out"
    if reads_draft_probs(config) and sees_window(config.draft):
        yield (
            "a rule without the draft's probabilities on a GPU, since torch's kernels attend to windows there: leave "
            f"{key_of('draft.window')} out, or use {said('sampling', 'greedy')} or {said('verification', 'coupled')}"
        )
    if config.sampling.by_row:
        yield "one setting for all rows on a GPU, since requests are drawn by sums of torch there: leave it out"
    if config.sampling.temperature > 0 and config.sampling.truncates:
        names = ", ".join(key_of(f"sampling.{name}") for name in [one.name for one in filters()])
        yield f"draws from all tokens on a GPU, since torch sums what is left there: leave {names} out"
    if has_head:
        yield (
            "a rule without the head's probabilities on a GPU, since its own products have other orders of sums: use "
            f"{said('sampling', 'greedy')} or {said('verification', 'coupled')}"
        )


def _of_model(key: str, model: ModelConfig) -> Iterator[str]:
    storage, shape = FORMATS.find(model.quantization), model.shape
    if storage and storage.is_quantized and storage.cost.gpu_read_bytes is not few_rows_bytes:
        yield (
            "a format whose packed weights the kernel of a few rows reads, and "
            f"{said(f'{key}.quantization', storage.name)} has none: use another one, such as int8_weight_only"
        )
    if shape is None or storage is None:
        return
    if not record_of(shape.model_type).is_llama_kind:
        yield (
            f"models of the lean decoder, and {shape.model_type} models run on the modules of transformers, whose "
            "products add up in another order for another number of rows: leave it out"
        )
        return
    value_bytes = DTYPE_BYTES.get(number_format(model, device="cuda"), 2)
    if not reads_by_length(
        capability=FIRST_CAPABILITY_BY_LENGTH, value_bytes=value_bytes, head_dim=shape.head_dim, rounds_inputs=False
    ):
        yield (
            f"numbers in 16 bits and heads of at most {LARGEST_HEAD_BY_LENGTH} dimensions in steps of 8 on a GPU, and "
            f"{said(key, model.name)} has {8 * value_bytes} bits and heads of {shape.head_dim}: use "
            f"{said(f'{key}.dtype', 'bf16')}, or another model"
        )


ABILITY = Ability(
    name="a GPU without equal bits",
    has=lacking,
    clashes={"equal bits": "{reproducible} needs {lacking_gpu}"},
    words=lambda config: {"lacking_gpu": lacking(config)},
)
