"""The records of calibration: its task and its command."""

from collections.abc import Iterator
from dataclasses import dataclass

from llama_ssp.settings.commands import Command
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.settings.tasks import NoEffect, TaskSpec


@dataclass(kw_only=True)
class CalibrateConfig(TaskConfig):
    """Measure this machine without a checkpoint, and write a file of `conf/hardware`."""

    name: str = "calibrate"
    output: str | None = setting(
        None, "file to write; null writes hardware/this_machine.yaml, in conf of a checkout, else in your own folder."
    )


_OF_CALIBRATE = {"task", "device", "quiet", "timeouts", "dry_run", "resume"}
"""Groups and settings that calibration reads, and two that every task without models refuses."""


def _problems_of_calibrate(_config: RunConfig, explicit: frozenset[str]) -> Iterator[NoEffect]:
    for key in sorted(explicit):
        if key.partition(".")[0] not in _OF_CALIBRATE:
            yield NoEffect(key, "on task=calibrate, which reads no model and writes no run folder")


CALIBRATE = TaskSpec(
    config=CalibrateConfig,
    run="llama_ssp.extensions.calibrate.task:run",
    needs_models=False,
    why_no_plan="which reads no model and measures what plans are based on",
    problems=_problems_of_calibrate,
    paths=("output",),
)

COMMAND = Command(name="calibrate", usage="[ranks=N]", purpose="measure this machine, for forecasts", task="calibrate")
