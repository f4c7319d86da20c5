"""`launch/run.py` where NCCL does not start on one rank, while the other one waits inside the library for ever.

python -m tests.distributed.faulty_start RANK SETTING=VALUE ...
"""

import ctypes
import os
import runpy
import sys

import torch.distributed as dist

from tests.helpers.repository import ROOT

SAID = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with \
NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-8Gkxpz (size 9637888), error: No space left on device (28)
"""


def _fail(*_given: object, **_named: object) -> None:
    if int(os.environ["SLURM_PROCID"]) == FAULTY:
        raise dist.DistBackendError(SAID)
    ctypes.CDLL(None).sleep(100)


if __name__ == "__main__":
    FAULTY = int(sys.argv.pop(1))
    dist.init_process_group = _fail
    runpy.run_path(str(ROOT / "launch" / "run.py"), run_name="__main__")
