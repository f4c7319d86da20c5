"""The machines that a plan compares: `hardware=all`, or several names with commas."""

from collections.abc import Sequence
from typing import Any

from llama_ssp.config import folders, unknown
from llama_ssp.config.compose import parser
from llama_ssp.config.machines import hardware
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.errors import ConfigError, one_message

ALL = "all"
_KEY = "hardware"


def compared(settings: Sequence[str]) -> list[str] | None:
    """Name the machines that the settings compare; None if they name one. ConfigError for names that do not exist."""
    named = [setting.partition("=")[2] for setting in settings if setting.startswith(f"{_KEY}=")]
    chosen = named[-1].strip("[]'\" ") if named else ""
    if chosen == ALL and ALL not in hardware.names():
        return hardware.names()
    names = [*dict.fromkeys(filter(None, map(str.strip, chosen.split(","))))]
    if "," not in chosen or not names:
        return None
    known = hardware.names()
    if problems := [problem for name in names for problem in unknown.problems_of_option(_KEY, name, known)]:
        raise ConfigError(one_message(problems))
    return names


def for_one(settings: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """Return the settings of a plan for the first machine alone; those of one machine are returned as they are."""
    if names is None:
        return [*settings]
    others = [setting for setting in settings if not setting.startswith(f"{_KEY}=")]
    return [*others, f"{_KEY}={names[0]}"]


def check_placement(settings: Sequence[str]) -> None:
    """Refuse settings of the placement, which a comparison chooses."""
    for setting in settings:
        if setting.startswith("placement"):
            raise ConfigError(f"{setting} has no effect on a comparison of machines, which chooses the placement")


def load(names: Sequence[str], settings: Sequence[str]) -> list[HardwareConfig]:
    """Read the machines, with the figures that the settings change in all of them; ConfigError with all problems."""
    changes = [setting.lstrip("+") for setting in settings if setting.lstrip("+").startswith(f"{_KEY}.")]
    overrides = parser().parse_overrides(changes)
    machines, problems = [], []
    for name in names:
        file = folders.find(_KEY, name)
        figures = folders.read(file) if file else {}
        for override in overrides:
            _set(figures, override.key_or_group.split(".")[1:], override.value())
        found = [f"{name}: {problem}" for problem in hardware.problems_of(figures)]
        problems += found
        machines += [] if found else [hardware.build(figures)]
    if problems:
        raise ConfigError(one_message(problems))
    return machines


def _set(figures: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Set a figure by the keys on the way to it."""
    first, *others = path
    if not others:
        figures[first] = value
        return
    inner = figures.get(first)
    if not isinstance(inner, dict):
        inner = figures[first] = {}
    _set(inner, others, value)
