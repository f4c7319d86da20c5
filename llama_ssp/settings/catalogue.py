"""The model catalogue: reads the files `model/*.yaml` of `settings.folders` into dataclasses with PyYAML alone.

A run composes the same files with Hydra. Both give the same result because the only Hydra feature that an entry may use
is the defaults list `[BASE, _self_]`, which inherits all fields of another entry.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.settings import folders
from llama_ssp.settings.folders import is_hub_id
from llama_ssp.settings.formats import format_of, problem_of
from llama_ssp.settings.schema import Dtype, ModelConfig, ModelShape


def names() -> list[str]:
    """Return the sorted names of all models, one per file of the group `model`."""
    return folders.names("model")


def load(name: str) -> ModelConfig:
    """Read one entry as `model=NAME` does; an id of the hub is an entry with that id alone.

    An unknown name, or a file that describes no model, raises ConfigError.
    """
    file = _file(name)
    return _entry(name, file) if file else ModelConfig(name=name, hub_id=name)


def entries() -> list[ModelConfig]:
    """Read all entries, in the order of `names`; raises as `load`."""
    files = {name: folders.find("model", name) for name in names()}
    return [_entry(name, file) for name, file in files.items() if file]


def _entry(name: str, file: Path) -> ModelConfig:
    fields = _fields(file, names_below=())
    if fields.get("name") != name:
        raise ConfigError(f"{folders.shown(file)} must have the line name: {name}, the name of the file")
    shape = fields.pop("shape", None)
    try:
        for key in ("dtype", "stored_dtype", "gpu_dtype"):
            fields[key] = Dtype[fields.get(key, "auto")]
        model = ModelConfig(shape=ModelShape(**shape) if shape else None, **fields)
        problem = problem_of(model.quantization)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folders.shown(file)} does not describe a model: {error}") from error
    if problem:
        raise ConfigError(f"{folders.shown(file)} does not describe a model: {problem}")
    return model


def may_share_vocabulary(target: ModelShape, draft: ModelShape) -> bool:
    """Allow 1 % within a family, whose models pad the vocabulary differently; tokenizers are compared later."""
    difference = abs(target.vocab_size - draft.vocab_size)
    return difference == 0 or (target.model_type == draft.model_type and difference <= 0.01 * target.vocab_size)


def relatives(model: ModelConfig, *, known: Sequence[ModelConfig] | None = None) -> list[ModelConfig]:
    """The unquantized entries of the same family and vocabulary, itself included, of all or of the `known` ones."""
    shape = model.shape
    whole = [other for other in known or entries() if not format_of(other.quantization).is_quantized]
    family = [other for other in whole if shape and other.shape and other.shape.model_type == shape.model_type]
    return [other for other in family if shape and other.shape and may_share_vocabulary(shape, other.shape)]


def smaller_relatives(model: ModelConfig, *, known: Sequence[ModelConfig] | None = None) -> list[str]:
    """Name the possible draft models, which are smaller `relatives`; smallest first."""
    found = sorted(relatives(model, known=known), key=_relative_size)
    return [other.name for other in found if _relative_size(other) < _relative_size(model)]


def _relative_size(model: ModelConfig) -> int:
    shape = model.shape
    assert shape, "relatives have shapes"
    return shape.num_hidden_layers * shape.hidden_size * (shape.hidden_size + shape.intermediate_size)


def _file(name: str) -> Path | None:
    """The file of an entry; None for an id of the hub without one. ConfigError for any other name."""
    if is_hub_id(name) or name in names():
        return folders.find("model", name)
    raise ConfigError(unknown_name("model", name, names()))


def _fields(file: Path, *, names_below: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a file, merged over those of its base; `names_below` are the entries that inherit them."""
    fields = folders.read(file)
    for base in fields.pop("defaults", []):
        if base == "_self_":
            continue
        base_file = _file(base) if isinstance(base, str) else None
        if base_file is None or base in (*names_below, file.stem):
            raise ConfigError(f"{folders.shown(file)}: defaults must name another entry, as in defaults: [7B, _self_]")
        inherited = _fields(base_file, names_below=(*names_below, file.stem))
        shape = (inherited.get("shape") or {}) | (fields.get("shape") or {})
        fields = inherited | fields | ({"shape": shape} if shape else {})
    return fields
