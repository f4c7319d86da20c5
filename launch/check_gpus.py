"""Computes something small on each GPU: `machine-install.sh` calls it, since a driver's count says nothing of torch.

    python launch/check_gpus.py      # the GPUs that torch sees
    python launch/check_gpus.py 8    # where the driver has 8

Exit code: 0, or 2 if a GPU does not compute, or torch sees none.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from llama_ssp.errors import ConfigError, one_message
from llama_ssp.run.commands.options import Options, act_on

SIZE = 64
MOST_LETTERS = 200


def main(arguments: list[str]) -> int:
    """Check the GPUs; returns the exit code."""
    parser = Options("python launch/check_gpus.py [NUMBER]", __doc__)
    parser.add_argument("number", metavar="NUMBER", nargs="?", type=int, default=0, help="GPUs of the driver")
    return act_on(parser, arguments, _check)


def _check(given: argparse.Namespace) -> str:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    build = f"torch {torch.__version__}"
    problems = [f"{build} on {device}: {fault}" for device in devices if (fault := fault_of(device))]
    if given.number and not devices:
        problems = [f"{build} sees none of the {given.number} GPUs: it may have been built without CUDA and ROCm"]
    if problems:
        raise ConfigError(one_message(problems))
    return f"{build} computes on {len(devices)} of {max(given.number, len(devices))} GPUs"


def fault_of(device: torch.device) -> str | None:
    """Multiply matrices; returns what went wrong."""
    try:
        for dtype in (torch.float32, torch.float16):
            halves = torch.full((SIZE, SIZE), 0.5, dtype=dtype, device=device)
            found, wanted = float((halves @ halves).float().sum()), SIZE**3 / 4
            if found != wanted:
                return f"a product in {dtype} sums to {found:g} instead of {wanted:g}"
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        return " ".join(str(error).split())[:MOST_LETTERS]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
