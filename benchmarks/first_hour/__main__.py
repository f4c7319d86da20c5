"""The first hour on GPUs: `python -m benchmarks.first_hour [--gpus N]` proves the GPU path, or says where it is wrong.

Every step is a process of its own with a time limit; none stops the others. The cheapest and most decisive come first:
facts, kernels against fp64, the engine with the path that it took, speed of what fits; then several GPUs, or ranks that
share one, and lost ranks last. Everything is in outputs/first_hour.tar.gz. Without a GPU, tiny shapes run on the CPU.
"""

import argparse
import math
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.first_hour import engine, facts, kernels, runs, shared_gpu
from benchmarks.first_hour.runner import FAIL, HANG, ROOT, SHARES, Step, run

LARGE = [f"speed-{target}" for target in list(runs.SIZES)[1:]]
_COUNT = "import torch; print(torch.cuda.device_count())"


def all_steps(*, is_small: bool, num_gpus: int, most_s: float = math.inf) -> list[Step]:
    """Every step, in the order in which they run; with tiny shapes one size is enough."""

    def step(module: str, words: str, limit_s: float, *, num_gpus: int = 0, modules: tuple[str, ...] = ()) -> Step:
        command = [sys.executable, "-m", f"benchmarks.first_hour.{module}", *words.split(), *["--small"] * is_small]
        name = f"{module}-{words.replace(' --', '-')}"
        return Step(name=name, command=command, limit_s=min(limit_s, most_s), num_gpus=num_gpus, modules=modules)

    sums = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    program = [*(shared_gpu.program() or ["-m"]), "benchmarks.first_hour.messages"]
    return [
        *(step("facts", name, 120) for name in facts.CHECKS),
        *(step("kernels", name, 180) for name in kernels.CHECKS),
        *(step("engine", name, 120) for name in engine.CHECKS),
        Step(name="messages", command=[sys.executable, "-m", *sums, *program], num_gpus=2),
        *(
            step("runs", name, 400, num_gpus=least, modules=("hydra", "omegaconf"))
            for name, (least, _) in runs.CHECKS.items()
            if not (is_small and name in LARGE)
        ),
    ]


def count_gpus() -> int:
    """The GPUs of this machine, asked in a process of its own, since a driver may hang."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
        )
        return int(asked.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"torch cannot count the GPUs: {error}")
        return 0


def main() -> None:
    """Run the steps, or list them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="how many to use; default: all")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, metavar="N", help="runs of several GPUs share one")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="steps, also by patterns: 'kernels-*'")
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    parser.add_argument("--minutes", type=float, default=50.0, help="stop after so many (default 50; 9 for a glance)")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="S", help="seconds that a step may take at most"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes; always so without a GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "first_hour", help="default: %(default)s")
    arguments = parser.parse_args()
    num_gpus = count_gpus()
    if arguments.gpus is not None and arguments.gpus < num_gpus:
        num_gpus, seen = arguments.gpus, os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[:num_gpus])
    num_gpus *= arguments.ranks_per_gpu
    os.environ[SHARES] = str(arguments.ranks_per_gpu)
    steps = all_steps(is_small=arguments.small or not num_gpus, num_gpus=num_gpus, most_s=arguments.limit)
    steps = [step for step in steps if any(fnmatch(step.name, each) for each in arguments.only)]
    if arguments.list or not steps:
        print(*(step.name for step in steps), sep="\n")
        return
    rows = run(steps, arguments.folder, num_gpus=num_gpus, minutes=arguments.minutes)
    print(f"everything is in {arguments.folder}.tar.gz")
    sys.exit(any(row["result"] in {FAIL, HANG} for row in rows))


if __name__ == "__main__":
    main()
