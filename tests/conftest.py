"""What all tests share: no network, one thread for each process, and which markers run on which machine."""

import os
import time

import pytest

from tests.helpers import slurm

# Read when the libraries are first imported, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine lacks, and slow tests unless they were asked for."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --slow runs it"))
        if item.get_closest_marker("slurm") and (reason := slurm.why_not()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if marker := item.get_closest_marker("gpu"):
            _skip_without_gpus(item, needed=marker.args[0])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long `.ci/run` took, all of its steps together."""
    if started_s := os.environ.get("CI_STARTED_S"):
        terminalreporter.write_line(f"all steps of .ci/run took {time.time() - float(started_s):.0f} s")


def _skip_without_gpus(item: pytest.Item, *, needed: int) -> None:
    import torch

    if torch.cuda.device_count() < needed:
        wanted = "1 GPU" if needed == 1 else f"{needed} GPUs"
        item.add_marker(pytest.mark.skip(reason=f"needs {wanted}, {torch.cuda.device_count()} found"))
