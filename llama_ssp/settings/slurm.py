"""Settings of `hydra/launcher=slurm`, which conf/hydra/launcher/slurm.yaml fills in, and their checks."""

from dataclasses import dataclass, field

from llama_ssp.errors import ConfigError, one_message

KEY = "hydra.launcher"  # Where Hydra keeps these settings.


@dataclass(kw_only=True)
class SlurmConfig:
    """Resources of every job of a sweep."""

    nodes: int = 1  # nodes of one job.
    ranks_per_node: int | None = None  # processes per node; null takes the GPUs of a node of hardware=.
    partition: str | None = None  # as sbatch takes them; null takes the cluster's default.
    account: str | None = None  # as sbatch takes them; null takes the cluster's default.
    # time limit, 30 (minutes), 4:00:00 or 1-12:00; near it a run stops and its job requeues itself.
    time: str | None = None
    memory: str | None = None  # memory per node, such as 64G.
    # generic resources, such as gpu:a100:8; null asks for gpu:RANKS_PER_NODE on GPUs and for nothing on CPUs.
    gres: str | None = None
    constraint: str | None = None  # as sbatch takes them; null takes the cluster's default.
    cpus_per_rank: int | None = None  # cores per rank.
    max_running: int | None = None  # jobs that may run at the same time; null sets no limit.
    # words in front of python, such as [apptainer,exec,--nv,image.sif].
    container: list[str] = field(default_factory=list)
    python: str | None = None  # interpreter on the nodes; null takes the submitting one, in a container `python`.
    # folder on every node's own disk, such as /scratch/me; the job copies the weights there first.
    stage_to: str | None = None
    # further arguments, each `--name=value` or `--name`, such as ["--mail-type=END"].
    sbatch: list[str] = field(default_factory=list)


def check(settings: SlurmConfig) -> None:
    """Raise ConfigError for settings that are invalid on any cluster; sbatch checks the limits of this one."""
    counts = {name: getattr(settings, name) for name in ("nodes", "ranks_per_node", "cpus_per_rank", "max_running")}
    problems = [f"{KEY}.{name}={value} must be at least 1" for name, value in counts.items() if (value or 1) < 1]
    problems += [
        f"{KEY}.sbatch has {argument!r}, and sbatch would take it for a script: write --name=value"
        for argument in settings.sbatch
        if not argument.startswith("--") or argument == "--"
    ]
    if not (settings.stage_to or "/").startswith("/"):
        problems.append(
            f"{KEY}.stage_to={settings.stage_to} must be an absolute path on the nodes, for example /scratch/weights"
        )
    if problems:
        raise ConfigError(one_message(problems))
