"""Hydra's plugin for a sweep on this machine: checks every point before the first one starts.

Hydra imports launchers from the namespace package `hydra_plugins` on sys.path at each start. What only a sweep needs is
imported by `launch`.
"""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn


class LocalLauncher(BasicLauncher):
    """Runs the points of a sweep one after the other, as Hydra's own launcher, once all of them have been checked."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check all points, then run them; raises as `points.for_all` does before anything starts."""
        from llama_ssp.commands.points import check_here, compose_point, for_all, launching_ranks  # noqa: PLC0415 - see above

        context, config, ranks = self.hydra_context, self.config, launching_ranks()
        assert context is not None
        assert config is not None
        numbered = enumerate(job_overrides, start=initial_job_idx)
        points = [compose_point(context, config, number=number, overrides=each) for number, each in numbered]
        for_all(points, lambda point: check_here(point, ranks))
        return super().launch(job_overrides, initial_job_idx)
