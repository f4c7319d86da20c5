"""The catalogue of models: reads `conf/model/*.yaml` into dataclasses with PyYAML alone.

The planner, the checks and a notebook know models through this module; a run composes the same files with Hydra. The
two readings agree because an entry may use just one device of Hydra's, the defaults list `[BASE, _self_]`, which
inherits every field of another entry.
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
    """Return the folder `conf`: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "conf"
    return beside if beside.is_dir() else package / "conf"


def names() -> list[str]:
    """Return the name of every model, sorted: one per file in `conf/model`."""
    return sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml"))


def load(name: str) -> ModelConfig:
    """Read one entry.

    Args:
        name: a name from `names()`.

    Returns:
        A fresh config, equal to what `model=NAME` gives a run.

    Raises:
        ConfigError: there is no such model, or its file has a field that a model does not have.
    """
    if name not in names():
        raise ConfigError(unknown_name("model", name, names()))
    fields = _fields(name)
    shape = fields.pop("shape", None)
    try:
        model = ModelConfig(
            dtype=Dtype[fields.pop("dtype", "auto")],
            stored_dtype=Dtype[fields.pop("stored_dtype", "auto")],
            gpu_dtype=Dtype[fields.pop("gpu_dtype", "auto")],
            shape=ModelShape(**shape) if shape else None,
            **fields,
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"conf/model/{name}.yaml does not describe a model: {error}") from error
    if problem := problem_of(model.quantization):
        raise ConfigError(f"conf/model/{name}.yaml does not describe a model: {problem}")
    return model


def smaller_relatives(model: ModelConfig) -> list[str]:
    """Name the models that could draft for `model`: same family and vocabulary size, unquantized, smaller.

    Args:
        model: the target; without a shape it has no known relatives.

    Returns:
        Names from the catalogue, the smallest first.
    """
    shape = model.shape
    if shape is None:
        return []
    sizes = {}
    for other in map(load, names()):
        if other.shape is None or format_of(other.quantization).is_quantized:
            continue
        if (other.shape.model_type, other.shape.vocab_size) == (shape.model_type, shape.vocab_size):
            sizes[other.name] = _relative_size(other.shape)
    return sorted((name for name in sizes if sizes[name] < _relative_size(shape)), key=sizes.__getitem__)


def _relative_size(shape: ModelShape) -> int:
    """Order models of one family by size; not a count of parameters."""
    return shape.num_hidden_layers * shape.hidden_size * (shape.hidden_size + shape.intermediate_size)


def _fields(name: str) -> dict[str, Any]:
    """Return the fields of a file on top of those of its base."""
    text = (conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    fields: dict[str, Any] = yaml.safe_load(text)
    bases = [base for base in fields.pop("defaults", []) if base != "_self_"]
    for base in bases:
        fields = _fields(base) | fields
    return fields
