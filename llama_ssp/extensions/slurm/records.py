"""The records of sweeps on SLURM: the launcher with its settings, and its topic of `--help`."""

from dataclasses import dataclass

from llama_ssp.settings.commands import Topic
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.launchers import Launcher


@dataclass(kw_only=True)
class SlurmConfig:
    """Resources of every job of a sweep with `hydra/launcher=slurm`, in the option's file."""

    nodes: int = setting(1, "nodes of one job.")
    ranks_per_node: int | None = setting(None, "processes per node; null takes the GPUs of a node of hardware=.")
    partition: str | None = setting(None, "as sbatch takes it; null takes the cluster's default.")
    account: str | None = setting(None, "as sbatch takes it; null takes the cluster's default.")
    time: str | None = setting(
        None, "time limit, 30 (minutes), 4:00:00 or 1-12:00; near it a run stops and its job requeues itself."
    )
    memory: str | None = setting(None, "memory per node, such as 64G.")
    gres: str | None = setting(
        None, "generic resources, such as gpu:a100:8; null asks for gpu:RANKS_PER_NODE on GPUs and for nothing on CPUs."
    )
    constraint: str | None = setting(None, "features of the nodes, as sbatch takes them; null takes any.")
    cpus_per_rank: int | None = setting(None, "cores per rank.")
    max_running: int | None = setting(None, "jobs that may run at the same time; null sets no limit.")
    container: list[str] = made(list, "words in front of python, such as [apptainer,exec,--nv,image.sif].")
    python: str | None = setting(
        None, "interpreter on the nodes; null takes the submitting one, in a container `python`."
    )
    stage_to: str | None = setting(
        None, "folder on every node's own disk, such as /scratch/me; the job copies the weights there first."
    )
    sbatch: list[str] = made(list, 'further arguments, each `--name=value` or `--name`, such as ["--mail-type=END"].')


LAUNCHER = Launcher(
    name="slurm",
    config=SlurmConfig,
    run="llama_ssp.extensions.slurm.sweep:submit_sweep",
    ranks_setting="ranks_per_node",
)
TOPIC = Topic(
    name="slurm",
    after="forecast",
    text="""\
SLURM: -m hydra/launcher=slurm hardware=NAME, sweeps on a cluster
  It makes a batch job of every combination of values. All are checked and planned before the first is queued;
  dry_run=true shows their plans and queues nothing.
  {settings hydra.launcher.}
""",
)
