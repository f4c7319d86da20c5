"""Hydra's plugin for `hydra/launcher=slurm`: composes every point of a sweep and passes all of them to `slurm`.

Hydra imports launchers from the namespace package `hydra_plugins` on sys.path at each start. What only a sweep needs is
imported by `launch`.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig

from llama_ssp.config.slurm import SlurmConfig
from llama_ssp.errors import ConfigError


class SlurmLauncher(Launcher):
    """Submits every point of a sweep as a batch job; `settings` are the fields of `SlurmConfig`."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - Hydra checks them against the dataclass
        lists = {name: list(value) for name, value in settings.items() if isinstance(value, ListConfig)}
        self._settings = SlurmConfig(**{**settings, **lists})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra passes; `task_function` is not needed, since jobs run elsewhere."""
        del task_function
        self._context = hydra_context
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose all points and submit them together, or none; raises as `slurm.submit_sweep` does."""
        from llama_ssp.commands import slurm  # noqa: PLC0415 - see above
        from llama_ssp.commands.points import compose_point, launching_ranks  # noqa: PLC0415 - see above

        if launching_ranks().size > 1:
            raise ConfigError("hydra/launcher=slurm submits each job once: start it with plain python, on one rank")
        if initial_job_idx or self._config.hydra.sweeper.max_batch_size is not None:
            raise ConfigError("hydra.sweeper.max_batch_size has no effect here: use hydra.launcher.max_running")
        numbered = enumerate(job_overrides)
        points = [
            compose_point(self._context, self._config, number=number, overrides=each) for number, each in numbered
        ]
        slurm.submit_sweep(points, self._settings)
        return [JobReturn(overrides=overrides, status=JobStatus.COMPLETED) for overrides in job_overrides]
