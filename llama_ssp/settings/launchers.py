"""The records of launchers, which make jobs of the points of a sweep: `-m hydra/launcher=NAME`."""

from dataclasses import dataclass

from llama_ssp.registry import Registry

LAUNCHER = "hydra.launcher"
"""Key of Hydra's config with the settings of a launcher."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher.

    Attributes:
        name: the option `conf/hydra/launcher/NAME.yaml`, whose values go on top of `/schema/NAME@_here_`.
        config: its settings, a dataclass.
        run: `module:function` that gets the points of a sweep (`run.commands.points.Point`) and its settings.
        ranks_setting: the setting that says how many ranks a job has.
    """

    name: str
    config: type
    run: str
    ranks_setting: str


LAUNCHERS: Registry[Launcher] = Registry(setting="hydra/launcher", kind=Launcher)


def launcher_with(settings: object) -> Launcher | None:
    """Return the launcher whose settings these are; None for Hydra's own."""
    return next((one for one in LAUNCHERS.all().values() if isinstance(settings, one.config)), None)
