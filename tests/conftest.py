"""What all tests share: no network, one thread per process, how many workers, and which markers run on which machine.

Four lanes, by cost: unmarked tests run always, those of `seconds` with --seconds, as in .ci/run, and wherever a file or
a folder is named, `heavy` ones with --heavy, `slow` ones with --slow. A fifth, with --gpu-stub, needs a CUDA build of
torch.
"""

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from llama_ssp import catalogue
from llama_ssp.ranks.process import signals_kept
from tests.helpers import extensions
from tests.helpers.own_conf import OwnConf, writer

# Read when the libraries are first imported, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):  # no test is a rank of what starts the tests
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the sources anew
sys.dont_write_bytecode = False
gc.disable()  # until all tests are collected: it would look again and again through what is imported
# Models, machines and the history of whoever runs the tests stay out of them.
for name in ("CONFIG", "STATE"):
    os.environ[f"XDG_{name}_HOME"] = str(Path(tempfile.gettempdir()) / f"llama-ssp-tests-{os.getuid()}")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MOST_WORKERS = 8
"""Each of them imports torch, which takes about 0.6 GB."""
JOBS, OF_EXTENSIONS = ("tests/distributed/", "tests/stub_gpu/"), "/test_distributed.py"
"""Tests that start several ranks: one worker runs them one after the other, so that their time limits hold."""
UNTIMED = (
    "tests/distributed/test_placement.py",
    *(f"tests/extensions/{name}/test_distributed.py" for name in ("accelerate", "deepspeed")),
)
"""Those that share groups of ranks and have no time limits: another worker may run them at the same time."""
_OF_UNIT = ("api", "models", "repository", "run", "settings", "weights")
FILES = ("tests/extensions/", *(f"tests/unit/{folder}/" for folder in _OF_UNIT))
"""Tests of one file share what they have parsed or made; all others, one by one, fill up the workers in the end."""
COMPILED = "tests/extensions/gpu/test_kernels.py"
"""Its tests take almost all of the time of .ci/run's step of Triton, and share hardly a kernel."""


class JobsOnOneWorker(LoadScopeScheduling):  # type: ignore[misc] # xdist is untyped
    """Hands out tests one by one; those of JOBS all to one worker, and those of a file of FILES."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(UNTIMED):
            return UNTIMED[0]
        if nodeid.startswith(JOBS) or OF_EXTENSIONS in nodeid:
            return JOBS[0]
        is_of_file = nodeid.startswith(FILES) and not nodeid.startswith(COMPILED)
        return nodeid.partition("::")[0] if is_of_file else nodeid


@pytest.fixture
def _signal_handlers() -> Iterator[None]:
    """Restore the handlers of signals, which a run sets and its end sets aside."""
    with signals_kept():
        yield


@pytest.fixture(scope="session", autouse=True)
def _programs_heed_signals() -> Iterator[None]:
    """In the background or under `nohup` tests go on ignoring these signals; programs that they start heed them."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:  # programs inherit no function
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def _options_are_composed_once() -> Iterator[None]:
    """Hydra takes a tenth of a second to compose options, and hundreds of tests choose the same ones."""
    from hydra import compose

    from llama_ssp.settings.compose import register
    from llama_ssp.settings.drafters import drafters
    from llama_ssp.settings.launchers import LAUNCHERS
    from llama_ssp.settings.tasks import task_specs

    known: dict[object, Any] = {}
    registered: dict[str, object] = {}

    def kinds() -> list[object]:
        records: list[Any] = [*task_specs().values(), *drafters().values(), *LAUNCHERS.all().values()]
        return [record.config for record in records]

    def register_once(root: str = "config") -> None:
        if registered.get("kinds") != kinds():
            registered.clear()
        if root not in registered:
            register(root)
            registered.update({"kinds": kinds(), root: True})

    def remembered(root: str, chosen: list[str], **named: bool) -> Any:
        own = [file for folder in catalogue.own_folders() for file in folder.rglob("*.yaml")]
        key = root, *chosen, *named.values(), *kinds(), *((file, file.stat().st_mtime_ns) for file in own)
        if key not in known:
            known[key] = compose(root, chosen, **named)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_ssp.settings.compose.compose_options", remembered)
        patch.setattr("llama_ssp.settings.compose.register", register_once)
        yield


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnConf]:
    """Give this test's user an empty folder of options; the folder of a `--config-dir` is forgotten afterwards."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    yield writer(tmp_path / "home" / "llama-ssp")
    monkeypatch.undo()
    catalogue.use(None)


@pytest.fixture(scope="module")
def pair() -> Any:
    """The shipped pair, loaded for each file."""
    from llama_ssp import load

    return load("tiny", "tiny-draft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", action="store_true", help="also run the tests that take seconds, as .ci/run does")
    parser.addoption("--heavy", action="store_true", help="also run the tests in which values meet, and many starts")
    parser.addoption("--gpu-stub", action="store_true", help="run the tests on the stub device: `just gpu-stub`")
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes, and the heavy ones")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Share folders out over the cores, and one more; run files that were named one by one in this process.

    The worker of JOBS, and whichever starts processes, waits for much of its time.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    named = [Path(argument.partition("::")[0]) for argument in config.option.file_or_dir]
    if named and all(path.is_file() for path in named):
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> JobsOnOneWorker:
    """How tests are shared out; `--dist loadgroup` has no effect with pytest 9.2, where node ids cannot be changed."""
    return JobsOnOneWorker(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out lanes that were not asked for, and skip what this machine lacks."""
    others = _lanes_left_out(config)
    left_out = {item for item in items if any(map(item.get_closest_marker, others))}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("triton") and not find_spec("triton"):
            item.add_marker(pytest.mark.skip(reason="torch for CPUs comes without Triton; .ci/run has it"))
        if marker := item.get_closest_marker("gpu"):
            _skip_without_gpus(item, needed=marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that asked for an extension which this installation lacks, and was told so."""
    report = yield
    if report.failed and (extension := extensions.missing_in(report.longreprtext)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"needs {extension}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports an extension which this installation lacks."""
    report = yield
    if report.failed and (extension := extensions.missing_in(report.longreprtext)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"needs {extension}")
    return report


def pytest_collection_finish() -> None:
    """Begin to collect garbage, but not whatever was imported: it takes half a second to look through that."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def _lanes_left_out(config: pytest.Config) -> dict[str, str]:
    """Return the markers of lanes that were not asked for, with what runs them."""
    asked = {"slow"} if config.getoption("--slow") else set()
    asked |= {"heavy"} if config.getoption("--heavy") or "slow" in asked else set()
    asked |= {"seconds"} if config.getoption("--seconds") or config.option.file_or_dir or "heavy" in asked else set()
    asked |= {"gpu_stub"} if config.getoption("--gpu-stub") else set()
    lanes = {"seconds": "--seconds", "heavy": "--heavy", "slow": "--slow", "gpu_stub": "`just gpu-stub`"}
    return {marker: how for marker, how in lanes.items() if marker not in asked}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the lanes that were left out, and say how long `.ci/run` took, all of its steps together."""
    if others := _lanes_left_out(config):
        words = ", ".join(f"{marker} ({how})" for marker, how in others.items())
        terminalreporter.write_line(f"left out, if there were any, are tests marked {words}")
    if started_s := os.environ.get("CI_STARTED_S"):
        terminalreporter.write_line(f"all steps of .ci/run took {time.time() - float(started_s):.0f} s")


def _skip_without_gpus(item: pytest.Item, *, needed: int) -> None:
    import torch

    if torch.cuda.device_count() < needed:
        wanted = "1 GPU" if needed == 1 else f"{needed} GPUs"
        item.add_marker(pytest.mark.skip(reason=f"needs {wanted}, {torch.cuda.device_count()} found"))
