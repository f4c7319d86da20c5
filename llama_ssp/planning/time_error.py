"""How far times may be from their forecasts: those by data sheets, and those of a machine whose speed varies."""

import math
from dataclasses import dataclass
from functools import cache

from llama_ssp.config import folders
from llama_ssp.config.machines.hardware import HardwareConfig

CALIBRATED = "measured by task=calibrate"
"""How the source of figures begins that were measured on the machine itself."""
TURNS_QUANTILE = 1.4
"""Ends of an 80 % range in standard deviations that are known from nine turns (Student's t, 8 degrees of freedom)."""


@dataclass(frozen=True, kw_only=True)
class TimeError:
    """The logarithm of measured over forecast time; an 80 % range ends `quantile` spreads from the mean."""

    mean: float
    spread: float
    quantile: float

    def ends(self, seconds: float) -> tuple[float, float]:
        """The range of a forecast time."""
        half = self.quantile * self.spread
        return seconds * math.exp(self.mean - half), seconds * math.exp(self.mean + half)


def time_error(hardware: HardwareConfig, num_active: int) -> TimeError | None:
    """The error of times with `num_active` ranks of a node; None where it is not known.

    A calibrated CPU has the spread that calibration saw. A GPU that is known by its data sheet alone has the error of
    published times, which `python -m benchmarks.ranges` writes to conf/ranges.yaml.
    """
    if profile := hardware.profile_of(num_active):
        spread = profile.spread
        return TimeError(mean=0.0, spread=spread, quantile=TURNS_QUANTILE) if spread else None
    is_measured = any(source.startswith(CALIBRATED) for source in hardware.sources.values())
    return None if is_measured or hardware.device != "cuda" else _of_data_sheets()


@cache
def _of_data_sheets() -> TimeError:
    return TimeError(**folders.read(folders.conf_dir() / "ranges.yaml")["times"])
