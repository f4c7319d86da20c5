"""A config as the text of `config.yaml`, which a run folder keeps and a resumed run is compared with."""

from dataclasses import asdict
from enum import Enum

import yaml

from llama_ssp.config.schema import RunConfig


def to_yaml(config: RunConfig) -> str:
    """Write all settings of a run as YAML, with enum members by their command-line names."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
