"""A SLURM cluster on this one machine: a controller and two nodes with made-up GPUs on the loopback, no systemd.

Touches nothing outside its folder and one folder in /run: munge has a key and a socket of its own, the daemons run in
the foreground as children of this process, and the names of the nodes are known only inside the mount namespaces of
their daemons (without that, torch waits for names that nobody can resolve).
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

NODES = ("n1", "n2")
GPUS = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "mount")
ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}

# Short waits for what a test does on purpose: a requeued job would otherwise start after two minutes (cred_expire), and
# a process that will not end would be killed after half a minute (KillWait). A long one for busy machines: within 10 s
# (MessageTimeout) a node must confirm the launch of a job, or the controller requeues it by itself.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MessageTimeout=60
MinJobAge=300
FirstJobId={first_id}
JobRequeue=1
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 SocketsPerBoard=1 CoresPerSocket=4 "
    "ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN"
)


# Ends the jobs and the daemons, whose ids it reads, when nobody holds its standard input any more: at the end of the
# cluster, and when the tests were ended by any signal.
REAPER = """\
pids=
while read -r pid; do pids="$pid $pids"; done
scancel --full --signal=KILL --user=root
for _ in $(seq 150); do [ -n "$(squeue --noheader)" ] || break; sleep 0.1; done
kill $pids
for pid in $pids; do
    for _ in $(seq 100); do kill -0 "$pid" || break; sleep 0.1; done
    kill -KILL "$pid"
done
rm -rf "$1"
"""


def why_not() -> str | None:
    """Say what keeps a cluster from being started here; None when nothing does."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"needs SLURM: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "needs root, as which SLURM's daemons run"


class Cluster:
    """A running cluster; a context manager that ends every daemon.

    Args:
        folder: for all of its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._reaper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        for name in ("state", "munge", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self._run = Path(tempfile.mkdtemp(prefix="slurm-tests-", dir="/run"))  # munge wants a short and strict path
        self._run.chmod(0o755)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        } | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._reaper = subprocess.Popen(
            ["sh", "-c", REAPER, "reaper", self._run],
            env=self.environment,
            stdin=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._start_munge()
            self._write_config()
            self._start_daemons()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reaper
        assert self._reaper.stdin
        self._reaper.stdin.close()
        for daemon in self._daemons:
            daemon.wait(40)
        self._reaper.wait(40)

    def run(
        self, *command: str | Path, check: bool = True, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command of this cluster's user; returns what it wrote to standard output."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**self.environment, **(env or {})},
            cwd=cwd,
            text=True,
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *, at_most_s: float = 120.0) -> dict[str, str]:
        """Wait until a job has ended for good; returns its last state."""
        self.until(lambda: self.job(number)["JobState"] in ENDED, f"end of job {number}", at_most_s=at_most_s)
        return self.job(number)

    def until(self, holds: Callable[[], bool], what: str, *, at_most_s: float) -> None:
        deadline = time.monotonic() + at_most_s
        while not holds():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not dead, f"{dead} ended while waiting for {what}; logs in {self.folder}"
            assert time.monotonic() < deadline, f"waited in vain for {what}; logs in {self.folder}"
            time.sleep(0.1)

    def _start(self, name: str, *command: str | Path) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            daemon = subprocess.Popen(
                [str(word) for word in command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        assert self._reaper
        assert self._reaper.stdin
        print(daemon.pid, file=self._reaper.stdin, flush=True)

    def _start_munge(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        key.parent.chmod(0o700)
        self._socket = self._run / "munge.sock"
        files = {
            "socket": self._socket,
            "key-file": key,
            "pid-file": key.with_name("pid"),
            "seed-file": key.parent / "s",
        }
        self._start("munged", "munged", "-F", "--force", *(f"--{name}={file}" for name, file in files.items()))
        self.until(self._socket.exists, "munge", at_most_s=20)

    def _write_config(self) -> None:
        host, port = socket.gethostname().split(".")[0], _free_ports(1 + len(NODES))
        # Job ids go on where an earlier cluster's ended, since they name run folders and ports.
        text = CONFIG.format(
            host=host, port=port, socket=self._socket, folder=self.folder, first_id=int(time.time()) % 60_000_000 + 1
        )
        nodes = [
            NODE.format(name=name, host=host, port=port + place, gpus=GPUS) for place, name in enumerate(NODES, start=1)
        ]
        # Nodes come before the partition that holds them.
        head, _, partition = text.rpartition("PartitionName")
        (self.folder / "slurm.conf").write_text(head + "\n".join(nodes) + f"\nPartitionName{partition}")
        (self.folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")
        names = "".join(f"127.0.0.1 {name}\n" for name in NODES)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)

    def _start_daemons(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-c")
        self.until(lambda: "is UP" in self.run("scontrol", "ping", check=False), "the controller", at_most_s=30)
        for name in NODES:
            inside = 'mount --bind "$1" /etc/hosts && exec slurmd -D -c -N "$2"'
            self._start(
                name,
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                inside,
                "node",
                self.folder / "hosts",
                name,
            )
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        self.until(lambda: len(self.run(*idle, check=False).split()) == len(NODES), "idle nodes", at_most_s=30)


def _free_ports(number: int) -> int:
    """The first of so many neighbouring ports that nobody listens at."""
    for first in range(16817, 19900, 50):
        sockets = [socket.socket() for _ in range(number)]
        try:
            for place, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + place))
        except OSError:
            continue
        else:
            return first
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports between 16817 and 19900")
