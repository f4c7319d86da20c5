"""Names what a run lacks for `reproducible=true` on a CPU, by settings, files and this machine. Imports no torch.

What depends on a rank's own slice, or on weights that fp16 cannot hold, is checked when the models are loaded.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from llama_ssp.architectures.engine import LANES
from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import ModelConfig
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.code.kinds import ATTENTION_NEEDS, BLOCK, IN_FP16, WIDEST_HEAD
from llama_ssp.settings.combinations import Ability, on_gpus
from llama_ssp.settings.drafters import reads_draft_probs
from llama_ssp.settings.schema import PlanConfig, RunConfig
from llama_ssp.storage.formats import FORMATS, NO_QUANTIZATION
from llama_ssp.text.messages import said


def lacking(config: RunConfig) -> str | None:
    """Name what the run lacks, after `reproducible=true needs`; None if nothing is known, or for a GPU."""
    if on_gpus(config):
        return None
    draft = config.draft.model
    found = [*_of_format("model", config.model), *_of_sizes("model", config.model)]
    of_draft = [*_of_format("draft.model", draft), *_of_sizes("draft.model", draft)] if draft else []
    if not found and of_draft and reads_draft_probs(config):
        found = of_draft
    if not found and config.reproducible and not isinstance(config, PlanConfig):  # a plan is of another machine
        found = [*_of_machine([config.model, *([draft] if draft and reads_draft_probs(config) else [])])]
    return found[0] if found else None


def _of_format(key: str, model: ModelConfig) -> Iterator[str]:
    storage = FORMATS.find(model.quantization)
    if storage and storage.is_quantized and not storage.compiled:
        yield (
            f"a format with compiled products, and {said(f'{key}.quantization', storage.name)} has none: use another "
            "one, such as int8_weight_only"
        )


def _of_sizes(key: str, model: ModelConfig) -> Iterator[str]:
    shape = model.shape
    if shape is None:
        return
    if not record_of(shape.model_type).is_llama_kind:
        yield (
            f"models of the lean decoder, and {shape.model_type} models run on the modules of transformers, whose "
            "attention adds up in another order for another number of positions: leave it out"
        )
        return
    sizes = {name: getattr(shape, name) for name in ("head_dim", "hidden_size", "intermediate_size", "vocab_size")}
    odd = [f"{name}={size}" for name, size in sizes.items() if size % BLOCK]
    odd += [f"head_dim={shape.head_dim}"] * (not shape.head_dim % LANES and shape.head_dim > WIDEST_HEAD)
    if odd:
        yield (
            f"sizes that are multiples of {BLOCK}, and heads of at most {WIDEST_HEAD} dimensions, and "
            f"{said(key, model.name)} has {', '.join(odd)}: use another model"
        )


def _of_machine(models: list[ModelConfig]) -> Iterator[str]:
    if not find_spec("llvmlite"):
        yield "llvmlite, which compiles its operators: pip install llvmlite, or the extra `cpu`, brings it"
        return
    for model in models:
        storage = FORMATS.find(model.quantization or NO_QUANTIZATION)
        needs = ((storage and storage.compiled) or IN_FP16).needs
        missing = [name for name in dict.fromkeys((*ATTENTION_NEEDS, *needs)) if not has_features((name,))]
        if missing:
            yield f"a processor with {', '.join(missing)}, which this one lacks: leave it out"


ABILITY = Ability(
    name="a CPU without equal bits",
    has=lacking,
    clashes={"equal bits": "{reproducible} needs {lacking}"},
    words=lambda config: {"lacking": lacking(config)},
)
