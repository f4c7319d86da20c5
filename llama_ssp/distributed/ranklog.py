"""Log files: one per rank, and `run.log` for rank 0. The terminal is the business of `tasks.terminal`."""

import logging
from contextlib import suppress
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def open_logs(run_dir: Path, *, rank: int) -> None:
    """Send this process's log records to `ranks/NNN.log`, and on rank 0 also to `run.log`.

    Args:
        run_dir: the run folder, which exists.
        rank: world rank.
    """
    paths = [run_dir / "ranks" / f"{rank:03d}.log"]
    if rank == 0:
        paths.append(run_dir / "run.log")
    logging.raiseExceptions = False  # a full disk ends a run by the records that cannot be written, not by its logs
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)


def close_logs() -> None:
    """Close what `open_logs` opened."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
            with suppress(OSError):
                handler.close()
