"""Settings of `hydra/launcher=slurm`, as a typed dataclass, and what they must satisfy.

The values stand in conf/hydra/launcher/slurm.yaml, what is done with them in `launch/slurm.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.errors import ConfigError, one_message

KEY = "hydra.launcher"
"""Where Hydra keeps these settings."""


@dataclass(kw_only=True)
class SlurmConfig:
    """What every job of a sweep asks of the cluster.

    Attributes:
        nodes: of one job.
        ranks_per_node: processes on each node; null takes the GPUs of a node of the hardware entry.
        partition, account, time, memory, gres, constraint: as sbatch takes them; null leaves them to the cluster, and
            `gres` to the number of ranks.
        cpus_per_rank: cores of each rank.
        max_running: how many jobs of the sweep may run at a time.
        container: words in front of python, such as a container's command.
        python: the interpreter on the nodes; null takes the one that submits, in a container `python`.
        stage_to: a folder on every node's own disk, to which weights are copied before the run.
        sbatch: further arguments, each `--name=value` or `--name`.
    """

    _target_: str = "hydra_plugins.slurm_launcher.SlurmLauncher"  # Hydra's own key, which no command line can set
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
    """Refuse settings that no cluster could follow; what this cluster allows, sbatch knows.

    Raises:
        ConfigError: names every problem.
    """
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
