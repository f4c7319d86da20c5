"""Settings of `hydra/launcher=slurm`, which conf/hydra/launcher/slurm.yaml fills in, and their checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.errors import ConfigError, one_message

KEY = "hydra.launcher"
"""Where Hydra keeps these settings."""


@dataclass(kw_only=True)
class SlurmConfig:
    """Resources of every job of a sweep.

    Attributes:
        ranks_per_node: processes per node; null uses the number of GPUs per node of the hardware entry.
        partition, account, time, memory, gres, constraint: passed to sbatch; null uses the cluster's default, and for
            `gres` the number of ranks.
        max_running: number of jobs of the sweep that may run at the same time.
        container: words in front of python, such as a container command.
        python: the interpreter on the nodes; null uses the submitting one, or `python` in a container.
        stage_to: a folder on each node's local disk; weights are copied there before the run.
        sbatch: further arguments, each `--name=value` or `--name`.
    """

    nodes: int = 1
    ranks_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    memory: str | None = None
    gres: str | None = None
    constraint: str | None = None
    cpus_per_rank: int | None = None
    max_running: int | None = None
    container: list[str] = field(default_factory=list)
    python: str | None = None
    stage_to: str | None = None
    sbatch: list[str] = field(default_factory=list)


def check(settings: SlurmConfig) -> None:
    """Raise ConfigError for settings that are invalid on any cluster; sbatch checks the limits of this one."""
    if problems := list(_problems(settings)):
        raise ConfigError(one_message(problems))


def _problems(settings: SlurmConfig) -> Iterator[str]:
    for name in ("nodes", "ranks_per_node", "cpus_per_rank", "max_running"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            yield f"{KEY}.{name}={value} must be at least 1"
    for argument in settings.sbatch:
        if not argument.startswith("--") or argument == "--":
            yield f"{KEY}.sbatch has {argument!r}, and sbatch would take it for a script: write --name=value"
    if settings.stage_to is not None and not settings.stage_to.startswith("/"):
        yield f"{KEY}.stage_to={settings.stage_to} must be an absolute path on the nodes, for example /scratch/weights"
