"""A config as the text of `config.yaml`, which a run folder keeps and a resumed run is compared with."""

from dataclasses import asdict
from enum import Enum

import yaml

from llama_ssp.config.schema import RunConfig


class _Dumper(yaml.SafeDumper):
    """Writes enum members too."""


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_str(member.name))


def to_yaml(config: RunConfig) -> str:
    """Write all settings of a run as YAML, with enum members by their command-line names."""
    return yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
