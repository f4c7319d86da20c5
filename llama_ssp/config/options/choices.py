"""Checks an option that a user has chosen, before Hydra composes it."""

import os
from collections.abc import Collection, Iterator

from llama_ssp.config import catalogue, folders
from llama_ssp.config.folders import GROUPS, is_hub_id
from llama_ssp.config.machines import hardware
from llama_ssp.errors import ConfigError, similar_name, unknown_name


def problems_of(group: str, name: str, known: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with an option: its name, or a file of the user's.

    Args:
        group: such as `model`.
        name: as given on the command line.
        known: the group's options; ids of the hub need not be among them.
    """
    if name not in known:
        problem = _of_name(group, name, known)
        if problem:
            yield problem
        return
    try:
        if file := folders.find(group, name):
            folders.read(file)
        if group == "hardware":
            hardware.load(name)
        elif group in GROUPS and name in catalogue.names():
            catalogue.load(name)
    except ConfigError as error:
        yield str(error)


def _of_name(group: str, name: str, known: Collection[str]) -> str | None:
    if group not in GROUPS:
        return unknown_name(group, name, known)
    key = "model" if group == "model" else f"{group}.model"
    if os.path.isfile(f"{name}/config.json"):  # noqa: PTH113 - a name can be no path at all
        of_hub = f", or {group}=local {key}.hub_id={name} for the model of the hub" if is_hub_id(name) else ""
        return f"{group}={name} is a folder here: give {group}=local {key}.path={name}{of_hub}"
    if is_hub_id(name):
        return None
    if "/" in name:
        return (
            f"{group}={name} is neither a name of the catalogue nor an id of the hub, owner/name: for a folder give "
            f"{group}=local {key}.path=DIR"
        )
    sentence = unknown_name(group, name, known)
    return sentence if similar_name(name, known) else f"{sentence}; {group}=owner/name takes a model of the hub"
