"""The model catalogue: reads `conf/model/*.yaml` into dataclasses with PyYAML alone.

The planner, the checks and notebooks use this module; a run composes the same files with Hydra. Both give the same
result because the only Hydra feature an entry may use is the defaults list `[BASE, _self_]`, which inherits all fields
of another entry.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.config.formats.format import format_of, problem_of
from llama_ssp.config.schema import Dtype, ModelConfig, ModelShape
from llama_ssp.errors import ConfigError, unknown_name


@cache
def conf_dir() -> Path:
    """Return the folder `conf`: next to the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    in_checkout = package.parent / "conf"
    return in_checkout if in_checkout.is_dir() else package / "conf"


def names() -> list[str]:
    """Return the sorted names of all models, one per file in `conf/model`."""
    return sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml"))


def load(name: str) -> ModelConfig:
    """Read one entry into a new config, as `model=NAME` does; an unknown name or field raises ConfigError."""
    if name not in names():
        raise ConfigError(unknown_name("model", name, names()))
    fields = _fields(name)
    shape = fields.pop("shape", None)
    try:
        for key in ("dtype", "stored_dtype", "gpu_dtype"):
            fields[key] = Dtype[fields.get(key, "auto")]
        model = ModelConfig(shape=ModelShape(**shape) if shape else None, **fields)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"conf/model/{name}.yaml does not describe a model: {error}") from error
    if problem := problem_of(model.quantization):
        raise ConfigError(f"conf/model/{name}.yaml does not describe a model: {problem}")
    return model


def relatives(model: ModelConfig) -> list[ModelConfig]:
    """Read the unquantized entries of the same family and vocabulary size, itself included."""
    wanted = model.shape and (model.shape.model_type, model.shape.vocab_size)
    known = [other for other in map(load, names()) if not format_of(other.quantization).is_quantized]
    return [other for other in known if other.shape and (other.shape.model_type, other.shape.vocab_size) == wanted]


def smaller_relatives(model: ModelConfig) -> list[str]:
    """Name the possible draft models, which are smaller `relatives`; smallest first."""
    found = sorted(relatives(model), key=_relative_size)
    return [other.name for other in found if _relative_size(other) < _relative_size(model)]


def _relative_size(model: ModelConfig) -> int:
    """Sort key for models of one family; not a parameter count."""
    shape = model.shape
    assert shape, "relatives have shapes"
    return shape.num_hidden_layers * shape.hidden_size * (shape.hidden_size + shape.intermediate_size)


def _fields(name: str) -> dict[str, Any]:
    """Return the fields of a file, merged over those of its base."""
    text = (conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    fields: dict[str, Any] = yaml.safe_load(text)
    for base in fields.pop("defaults", []):
        if base != "_self_":
            fields = _fields(base) | fields
    return fields
