"""A stand-in for sbatch that writes down its arguments, and what a sweep asked of it."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama_ssp.settings import checks
from llama_ssp.settings.schema import RunConfig
from tests.helpers.composed import compose_run
from tests.helpers.in_process import Ended, launch

SBATCH = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], sorted(os.environ)]) + "\\n")
if {refusal!r} in sys.argv[-2:]:
    sys.exit("sbatch: error: Batch job submission failed: Invalid\\n  partition")
print(100 + len(open({log!r}).readlines()))
"""


@dataclass(frozen=True, kw_only=True)
class Submitted(Ended):
    """How a sweep was submitted."""

    calls: list[list[str]]
    environments: list[list[str]]

    @property
    def jobs(self) -> list[list[str]]:
        """A command for each job: of an array, what each of its tasks makes of it."""
        return [job for call in self.calls for job in tasks(call)]


Sweep = Callable[..., Submitted]


def sweeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sweep:
    """A function that submits a sweep with a stand-in for sbatch, in an empty folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def submit(*arguments: str, installed: bool = True, refusal: str = "never", multirun: bool = True) -> Submitted:
        log, program = tmp_path / "log", tmp_path / "bin" / "sbatch"
        if installed:
            program.write_text(SBATCH.format(python=sys.executable, log=str(log), refusal=refusal))
            program.chmod(0o755)
        ended = launch(*(["-m"] if multirun else []), "hydra/launcher=slurm", *arguments)
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return Submitted(**vars(ended), calls=[job for job, _ in calls], environments=[env for _, env in calls])

    return submit


def tasks(call: list[str]) -> list[list[str]]:
    """The call of each task of an array, as launch/slurm.sbatch reads its arguments; or the call itself."""
    if "--arguments-in" not in call:
        return [call]
    folder = Path(call[-1])
    indices = options(call)["array"].partition("%")[0].split(",")
    words = [(folder / index / "job.args").read_bytes().decode().split("\0") for index in indices]
    assert all(each.pop() == "" for each in words)
    own = call[: call.index("--arguments-in")]
    return [
        [word.replace("%a", index).replace("%%", "%") for word in own] + each
        for index, each in zip(indices, words, strict=True)
    ]


def composed(job: list[str]) -> RunConfig:
    """What run.py makes of the settings in a job's command, checked."""
    config, explicit = compose_run(*job[job.index("--") + 1 :])
    checks.check(config, explicit, world_size=1)
    return config


def options(job: list[str]) -> dict[str, str]:
    """The options that sbatch got for itself."""
    return dict(word[2:].split("=", 1) for word in job[: script(job)] if "=" in word)


def script(job: list[str]) -> int:
    return next(place for place, word in enumerate(job) if word.endswith("launch/slurm.sbatch"))
