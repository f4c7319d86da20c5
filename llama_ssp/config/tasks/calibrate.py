"""Settings and record of `task=calibrate`."""

from dataclasses import dataclass

from llama_ssp.config.schema import TaskConfig
from llama_ssp.config.tasks.spec import TaskSpec


@dataclass(kw_only=True)
class CalibrateConfig(TaskConfig):
    """Measure this machine without a checkpoint, and write a file of `conf/hardware`."""

    name: str = "calibrate"
    output: str | None = None
    refresh: bool = False


TASK = TaskSpec(
    config=CalibrateConfig,
    run="llama_ssp.tasks.calibrate:run",
    needs_models=False,
    why_no_plan="which reads no model and measures what plans are based on",
    paths=("output",),
)
