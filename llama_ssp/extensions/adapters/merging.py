"""A LoRA adapter in a folder as PEFT writes it, merged into the weights of a checkpoint while slices are read.

    adapter_config.json          r, lora_alpha, use_rslora, rank_pattern, alpha_pattern
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight (R, I) and .lora_B.weight (O, R); of an output
                                 head .base_layer.weight (O, I) too, which takes the place of the checkpoint's

A weight becomes W + scale B A, where scale is lora_alpha / r, or lora_alpha / sqrt(r) with rslora. Modules whose names
match a pattern have an r or a lora_alpha of their own. For a slice of a weight, only its rows of B or its columns of A
are read. The sum is computed in fp32, and rounded once, to the number format that the weight is loaded in, before any
quantization.

Shapes: O outputs, I inputs, R rank.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.model_files import read_json
from llama_ssp.errors import CheckpointError, shown
from llama_ssp.extensions.adapters.records import CONFIG, FIELDS, WEIGHTS
from llama_ssp.storage.patterns import Pattern
from llama_ssp.weights.checkpoint import Checkpoint, of_text, summary
from llama_ssp.weights.source import ListedTensor, StoredTensor, read_header
from llama_ssp.weights.turned import TurnedTensor

_PICKLE, _BASE = "adapter_model.bin", "base_layer"
_KEY = re.compile(r"base_model\.model\.(.+)\.(lora_A|lora_B|base_layer)\.weight")
_TURNED = "fan_in_fan_out"
_OTHER_METHODS = (
    "use_dora",
    "modules_to_save",
    _TURNED,
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
    "megatron_config",
)
"""Fields that change the merged weights; all are refused."""
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the weights of the base as they are; others, such as pissa, change them."""


@dataclass(frozen=True, kw_only=True)
class MergedTensor(StoredTensor):
    """A stored weight (O, I), to which `scale` times the product of `up` (O, R) and `down` (R, I) is added.

    For a weight that is stored as (I, O), like those of GPT-2, the product `is_turned` (transposed).
    """

    up: StoredTensor
    down: StoredTensor
    scale: float
    is_turned: bool

    def mapped(self, *parts: range) -> Tensor:
        """Return the sum, or `parts` of its first dimensions, in fp32, or in the tensor's dtype if that is wider."""
        weight_OI = super().mapped(*parts)
        dtype = torch.promote_types(weight_OI.dtype, torch.float32)
        rows, *columns = parts or (range(self.shape[0]),)
        if self.is_turned:
            outputs = columns[0] if columns else range(self.up.shape[0])
            right, left = (part.t() for part in (self.up.mapped(outputs), self.down.mapped(_whole(self.down), rows)))
        else:
            left, right = self.up.mapped(rows), self.down.mapped(_whole(self.down), *columns)
        return torch.addmm(weight_OI.to(dtype), left.to(dtype), right.to(dtype), alpha=self.scale)


def _whole(down_RI: StoredTensor) -> range:
    return range(down_RI.shape[0])


def with_adapter(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Merge the adapter of a folder into a checkpoint; raises CheckpointError if that cannot be done exactly."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: a folder with {CONFIG} is required")
    config = read_json(folder / CONFIG, FIELDS)
    if problems := [*_unsupported(config, turns=bool(record_of(checkpoint.shape.model_type).turned))]:
        raise CheckpointError(
            f"{folder} cannot be merged ({', '.join(problems)}): merge it with PEFT, or use plain LoRA"
        )
    pairs = _pairs(checkpoint, folder)
    rank_of = _by_pattern(config, "rank_pattern", config["r"], folder)
    alpha_of = _by_pattern(config, "alpha_pattern", config["lora_alpha"], folder)
    targets = {module: target for module in pairs if (target := _target(checkpoint.tensors, module))}
    if len(targets) < len(pairs) or not pairs:
        absent = [module for module in pairs if module not in targets]
        lacks = f"{summary(absent)}, which {checkpoint.folder} lacks" if absent else "nothing"
        raise CheckpointError(f"{folder} changes {lacks}: give the adapter of this model")
    if unfit := [
        name for module, name in targets.items() if not _fits(checkpoint.tensors[name], pairs[module], rank_of(module))
    ]:
        raise CheckpointError(
            f"{folder} does not fit {checkpoint.folder}, as in {summary(unfit)}: lora_A and lora_B of rank "
            f"{config['r']}, or that of rank_pattern, and of the sizes of a weight in 16 or 32 bits are required"
        )
    merged = dict(checkpoint.tensors)
    for module, name in targets.items():
        rank = rank_of(module)
        scale = alpha_of(module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight, pair = merged[name], pairs[module]
        merge = partial(MergedTensor, up=pair["B"], down=pair["A"], scale=scale)
        if isinstance(weight, TurnedTensor):
            merged[name] = TurnedTensor.of(merge(**vars(weight.stored), is_turned=True))
        else:
            merged[name] = merge(**vars(pair.get(_BASE, weight)), is_turned=False)  # PEFT saves a head's base too
    return replace(checkpoint, tensors=merged)


def _pairs(checkpoint: Checkpoint, folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Return the matrices A and B of each module that the adapter changes; for a head also the base that PEFT saves."""
    if not (folder / WEIGHTS).is_file():
        pickled = f" but pickle weights, {_PICKLE}, which are not read" if (folder / _PICKLE).is_file() else ""
        raise CheckpointError(f"{folder} holds no {WEIGHTS}{pickled}: save it in safetensors")
    stored = read_header(folder / WEIGHTS)
    if strays := [name for name in stored if not _KEY.fullmatch(name)]:
        raise CheckpointError(
            f"{folder} holds {summary(strays)}, and only lora_A and lora_B of linear layers are merged"
        )
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if found := _KEY.fullmatch(name):
            pairs.setdefault(found[1], {})[found[2].removeprefix("lora_")] = tensor
    heads = [module for module in pairs if module.rpartition(".")[2] == "lm_head"]
    if heads and checkpoint.shape.tie_word_embeddings:  # which would be left as it is, or change the embedding too
        raise CheckpointError(
            f"{folder} changes {heads[0]}, whose weights {checkpoint.folder} shares with its embedding: merge it with "
            "PEFT and save the model with tie_word_embeddings false"
        )
    return pairs


def _unsupported(config: Mapping[str, Any], *, turns: bool) -> Iterator[str]:
    """Yield the fields of a config whose effect no sum W + scale B A can have.

    PEFT sets `fan_in_fan_out` for models that store weights as (I, O); `turns` says whether the checkpoint has such.
    """
    kind, init = config.get("peft_type"), config.get("init_lora_weights")
    if kind != "LORA":
        yield f"peft_type {shown(kind)}"
    yield from (
        f"{name} {shown(config[name])}"
        for name in _OTHER_METHODS
        if config.get(name) and not (turns and name == _TURNED)
    )
    if config.get("bias", "none") != "none":
        yield f"bias {shown(config['bias'])}"
    if init not in _KEEPS_BASE:
        yield f"init_lora_weights {shown(init)}"
    yield from (f"no {name}" for name in ("r", "lora_alpha") if config.get(name) is None)


def _target(tensors: Mapping[str, object], module: str) -> str | None:
    """Return the stored name of a module's weight; it may lack the base model's prefix, or have that of a text part."""
    parts = of_text(f"{module}.weight").split(".")
    return next((name for begin in range(2) if (name := ".".join(parts[begin:])) in tensors), None)


def _by_pattern(config: Mapping[str, Any], field: str, default: float, folder: Path) -> Callable[[str], float]:
    """Return a function that returns a module's value: that of the first pattern that matches the end of its name.

    This is how PEFT reads patterns.
    """
    values, where = config.get(field) or {}, f"{folder}: {field} has"
    if odd := [value for value in values.values() if type(value) not in {int, float} or not value > 0]:
        raise CheckpointError(f"{where} {shown(odd[0])}, and a number above 0 is required: copy or download it again")
    patterns = [(Pattern(f"(.*\\.)?({text})$", where=where), value) for text, value in values.items()]
    return lambda module: next((value for pattern, value in patterns if pattern.match(module)), default)


def _fits(weight: ListedTensor, pair: Mapping[str, StoredTensor], rank: float) -> bool:
    stored = weight.stored if isinstance(weight, TurnedTensor) else weight
    if not isinstance(stored, StoredTensor) or pair.keys() - {_BASE} != {"A", "B"} or len(weight.shape) != 2:
        return False
    down, up = pair["A"], pair["B"]
    if (up.shape, down.shape) != ((weight.shape[0], rank), (rank, weight.shape[1])):
        return False
    base = pair.get(_BASE, weight)
    return base.shape == weight.shape and None not in {weight.dtype, base.dtype, down.dtype, up.dtype}
