"""The reference of all settings, from the dataclasses and their docstrings, and of the options in `conf`."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, get_type_hints

from docs.hooks.repository import ROOT
from llama_ssp.catalogue import head_of
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.manifest import conf_of_extensions
from llama_ssp.run.commands.help import (
    DescribedSetting,
    is_schema,
    settings_of,
    settings_of_launchers,
    settings_of_plan,
    task_settings,
)
from llama_ssp.settings.drafters import drafters
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.fields import help_of
from llama_ssp.settings.launchers import LAUNCHER, LAUNCHERS
from llama_ssp.settings.schema import DERIVED, DrafterConfig, RunConfig
from llama_ssp.settings.tasks import task_specs

CONF = ROOT / "conf"
_INTRODUCTION = (
    "The build makes this page from the dataclasses in `llama_ssp/settings` and the files in `conf`. Every setting is "
    "`name=value` on the command line. `llama-ssp run --help all` prints the same settings by topic, and "
    "`--cfg job` prints the composed values of one run."
)
_NOT_LISTED = (*DERIVED, "draft.model.")
"""The words of config.json, and the fields of `model` once more."""


def table(settings: Iterable[DescribedSetting]) -> str:
    """Draw settings as a table, which the style sheet knows by its class."""
    rows = [
        (f"`{each.key}`", each.kind, f"`{each.default}`" if each.default else "", each.meaning.replace("|", "\\|"))
        for each in settings
    ]
    lines = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(['<div class="settings" markdown>', "", *lines, "", "</div>"])


def options(group: str) -> str:
    """Draw the options of a group as a table: what each file says of itself."""
    found = [file for folder in (CONF, *conf_of_extensions()) for file in (folder / group).glob("*.yaml")]
    named = [file for file in sorted(found, key=lambda file: file.name) if file.stem != "this_machine"]
    rows = [f"| `{file.stem}` | {head_of(file)} |" for file in named]
    return "\n".join([f"| `{group}=` | |", "|---|---|", *rows])


def groups() -> list[str]:
    """Return the groups of `llama-ssp run` that have a dataclass and a folder."""
    hints = get_type_hints(RunConfig)
    return [name for name, kind in hints.items() if is_schema(kind) and (CONF / name).is_dir()]


def group_settings(group: str) -> Iterator[DescribedSetting]:
    """Describe the settings of one group."""
    listed = settings_of(whole(get_type_hints(RunConfig)[group]), f"{group}.")
    return (each for each in listed if not each.key.startswith(_NOT_LISTED))


def option_settings(group: str) -> Iterator[tuple[str, list[DescribedSetting]]]:
    """List the options of a group that have settings of their own."""
    if group == "task":
        yield from ((name, own) for name in task_specs() if (own := task_settings(name)))
    shared = [each.key for each in settings_of(DrafterConfig, "draft.")]
    for name, record in drafters().items() if group == "draft" else ():
        if own := [each for each in settings_of(record.config, "draft.") if each.key not in shared]:
            yield "NAME" if record.has_model else name, own


def top_settings(schema: type[Any]) -> list[DescribedSetting]:
    """Describe the settings that belong to no group of options."""
    return [each for each in settings_of(schema) if not (CONF / each.key.split(".")[0]).is_dir()]


def hardware_settings() -> Iterator[DescribedSetting]:
    """Describe the figures of a machine."""
    for each in dataclasses.fields(HardwareConfig):
        yield DescribedSetting(key=f"hardware.{each.name}", kind="", default="", meaning=help_of(each))


def described() -> list[DescribedSetting]:
    """Return every setting that must have a meaning."""
    found = [each for group in groups() if group != "task" for each in group_settings(group)]
    found += [each for group in ("draft", "task") for _, own in option_settings(group) for each in own]
    found += [*top_settings(whole(RunConfig)), *settings_of_plan(), *settings_of_launchers()]
    return [*found, *hardware_settings()]


def page() -> str:
    """Make the page."""
    parts = [
        "# Settings",
        _INTRODUCTION,
        "## `llama-ssp run`",
    ]
    parts.append(table(top_settings(whole(RunConfig))))
    for group in groups():
        parts += [f"## `{group}=`", options(group)]
        if group != "task":
            parts.append(table(group_settings(group)))
        if group == "draft":
            parts.append("`draft.model.FIELD` has the fields of [`model`](#model).")
        parts += [text for name, own in option_settings(group) for text in (f"### `{group}={name}`", table(own))]
    for bundle in ("experiment", "debug"):
        parts += [
            f"## `{bundle}=`",
            "Several settings at once. A setting that you give yourself wins.",
            options(bundle),
        ]
    parts += ["## `hardware=`", options("hardware"), table(hardware_settings())]
    parts.append("## `llama-ssp plan`")
    parts.append("A plan has the settings of a run, and these.")
    parts.append(table(settings_of_plan()))
    for launcher in LAUNCHERS.all().values():
        parts += [f"## `-m hydra/launcher={launcher.name}`", table(settings_of(launcher.config, f"{LAUNCHER}."))]
    return "\n\n".join(parts) + "\n"
