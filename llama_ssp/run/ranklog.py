"""Log files: one per rank, and `run.log` for rank 0, whose warnings also go to standard error."""

import logging
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch

from llama_ssp.ranks.comms import Mesh
from llama_ssp.ranks.world import World
from llama_ssp.reports.provenance import processor
from llama_ssp.visible import visible

_OURS = __name__.partition(".")[0]
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _VisibleFormatter(logging.Formatter):
    """Makes control characters visible, so that a log can be shown on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Warnings(logging.StreamHandler[TextIO]):
    """Shows what goes on otherwise than intended; a progress display may have replaced `sys.stderr` since."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def open_logs(run_dir: Path, *, rank: int) -> None:
    """Log to `ranks/NNN.log`, and on rank 0 also to `run.log`, in an existing run folder; it shows our warnings too."""
    paths = [run_dir / "ranks" / f"{rank:03d}.log"]
    if rank == 0:
        paths.append(run_dir / "run.log")
    logging.raiseExceptions = False  # on a full disk, the run fails when it writes records, not logs
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
        handler.setFormatter(_VisibleFormatter(_FORMAT))
        root.addHandler(handler)
    if rank == 0:
        shown = _Warnings()
        shown.setLevel(logging.WARNING)
        shown.setFormatter(_VisibleFormatter("%(message)s"))
        shown.addFilter(logging.Filter(_OURS))
        root.addHandler(shown)


def describe_rank(world: World) -> str:
    """Describe this rank: host, device and process."""
    device = world.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        on = f"{device} ({properties.name}, {properties.total_memory / 2**30:.1f} GiB)"
    else:
        on = f"cpu ({processor()}, {torch.get_num_threads()} threads)"
    return f"rank {world.comm.rank} of {world.comm.size} on {platform.node()}, {on}, process {os.getpid()}"


def describe_part(mesh: Mesh) -> str:
    """Describe this rank's parts of target and draft."""
    parts = [
        f"the {part}" if comm.size == 1 else f"slice {comm.rank + 1} of {comm.size} of the {part}"
        for part, comm in (("target", mesh.target), ("draft", mesh.draft))
        if comm
    ]
    return f"holds {' and '.join(parts) or 'nothing'}, in replica {mesh.number}"


def close_logs() -> None:
    """Close what `open_logs` opened."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler | _Warnings):
            root.removeHandler(handler)
            with suppress(OSError):
                handler.close()
