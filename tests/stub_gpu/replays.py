"""On the stub device: decodes with a pair in all of its ways, and says what was wrong with its graphs.

`python -m tests.stub_gpu.replays OUT KIND [WAY...]` writes the sentences about each way to OUT, as JSON, and rank 0 of
several ranks does. Without arguments it imports everything once and forks for each kind that it is asked for, by a line
on the socket that is its standard input (`Imported`).
"""

import gc
import json
import logging
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import triton_key

from llama_ssp import Pair, load
from llama_ssp.architectures import engine
from llama_ssp.extensions.gpu import draw as draws_of_gpus
from llama_ssp.extensions.gpu.kernels import draw as draw_kernels
from llama_ssp.extensions.modules.experts import OwnExperts
from llama_ssp.ranks.gpu import selected
from llama_ssp.run import decoders
from llama_ssp.run.tuning import make_ready
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import Executor, Round
from llama_ssp.speculate.engine.state import Request
from tests.stub_gpu import device
from tests.stub_gpu.reads import ComparedGraphs
from tests.stub_gpu.replay_settings import KINDS, Way

PROMPTS = ["import os", "def f(x): return", "class A"]
_LEAST_COMPARED = 8
_IMPORTED_LATE = "torch._dynamo", "transformers.generation.utils", "triton.compiler.code_generator"
"""Modules that torch, transformers and Triton import at their first use."""


def runs_of(way: Way) -> Iterator[list[Request]]:
    """As many texts as rows, fewer, more and longer ones, which take rows over, and other prompts."""
    num = way.batch_size
    yield way.requests(num, 16)
    yield way.requests(max(num - 1, 1), 16)
    yield way.requests(num + 2, 40)
    for _ in range(2 if "spare_rows" in way.config else 1):  # whose texts later ones begin with
        yield way.requests(num, 12, num_prompt=50)
        if way.long:
            yield way.requests(num + 1, 20, num_prompt=600)


@contextmanager
def _heard(problems: set[str]) -> Iterator[None]:
    """Add each warning to the problems."""
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("llama_ssp")
    handler.emit = lambda record: problems.add(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
        problems |= {str(warning.message) for warning in found}


def decode(pair: Pair, way: Way, *, asks_host: bool) -> list[str]:
    """Decode in one way; returns sentences about what was wrong."""
    problems, made = set[str](), list[ComparedGraphs]()

    def compared(round_: Round, *, cuda_graphs: bool) -> Executor:
        assert cuda_graphs
        made.append(ComparedGraphs(round_, problems))
        return made[-1]

    vars(decoders)["make_executor"] = compared
    device.reset()
    with _heard(problems), selected(pair.models.target.device), torch.inference_mode():
        (_call if way.calls is not None else _run)(pair, way, problems)
    problems |= _faults()
    recorders = [executor.recorder for executor in made]
    if sum(recorder.num_compared for recorder in recorders) < _LEAST_COMPARED:
        problems.add(f"replays: {[(recorder.num_replayed, recorder.num_compared) for recorder in recorders]}")
    if not asks_host and way.calls is None and (num := sum(record == ("wait", "stream") for record in device.log())):
        problems.add(f"{num} waits for a stream")
    return sorted(problems)


def _faults() -> set[str]:
    return {f"fault: {record.text}" for record in device.log() if record.kind == "fault"}


def _run(pair: Pair, way: Way, problems: set[str]) -> None:
    config = way.config_of(pair.config)
    decoder = decoders.build_decoder(pair.models, config, speculative=pair.models.drafts)
    runs = [*runs_of(way)]
    longest = max((each for run in runs for each in run), key=lambda each: len(each.prompt_ids) + each.max_new_tokens)
    make_ready(decoder, [longest], config, comm=pair.models.mesh.world)
    problems |= _faults()
    device.reset()  # what precedes the runs may wait
    _finish(decoder, runs, problems)
    if way.updates:
        problems |= _faults()
        executor, models = decoder.executor, pair.models
        assert isinstance(executor, ComparedGraphs)
        num_forgotten = executor.recorder.num_forgotten
        pair.update("tiny", "tiny-draft")
        device.reset()
        _finish(decoder, runs[:2], problems)
        if executor.recorder.num_forgotten > num_forgotten:
            problems.add("an update drops graphs")
        if (pair.models.target, pair.models.draft) != (models.target, models.draft):
            problems.add("an update makes other models")


def _finish(decoder: Decoder, runs: Sequence[list[Request]], problems: set[str]) -> None:
    for requests in runs:
        found = {update.completion.request.index for updates in decoder.run(requests) for update in updates}
        if len(found) < len(requests):
            problems.add(f"{len(found)} of {len(requests)} texts are there")


def _call(pair: Pair, way: Way, problems: set[str]) -> None:
    for num in (1, 3, 3):
        found = pair.generate(PROMPTS[:num], max_new_tokens=24, num_draft_tokens=3, **way.calls or {})
        if len(found) < num:
            problems.add(f"{len(found)} of {num} texts are there")


def take_what_is_right_on_gpus() -> None:
    """Take the kernels whose values are checked, and counts that follow from values: the stub computes none."""
    draws_of_gpus.tried_kernels = lambda: draw_kernels  # type: ignore[assignment]
    vars(torch)["equal"] = lambda *_tensors: True  # by which kernels of equal bits are checked
    engine.LEAST_SHARED_BYTES = 0
    many = OwnExperts._one_by_one

    def one_by_one(experts: OwnExperts, x_ME: Tensor, chosen_MK: Tensor) -> Tensor:
        counts = chosen_MK.flatten().bincount(minlength=experts.num_experts + 1).tolist()
        if sum(counts) == chosen_MK.numel():
            return many(experts, x_ME, chosen_MK)
        return x_ME.new_zeros(chosen_MK.numel(), x_ME.shape[1])

    OwnExperts._one_by_one = one_by_one  # type: ignore[assignment, method-assign]


def decode_kind(out: Path, name: str, *ways: str) -> None:
    """Decode with a kind in all of its ways, or in these."""
    (kind,) = [kind for kind in KINDS if kind.name == name]
    take_what_is_right_on_gpus()
    left: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        pair: Pair = load(**kind.arguments(Path()), device="cuda")  # ranks have folders of one name
        for way in kind.ways:
            if way.name in (ways or [way.name]):
                left[way.name] = decode(pair, way, asks_host=kind.asks_host)
            if pair.rank == 0:
                out.write_text(json.dumps(left))


def serve() -> None:
    """Answer each line, a list of jobs that run at once, with their exit codes; a job ends as a program does."""
    for module in _IMPORTED_LATE:
        import_module(module)
    triton_key()  # a hash of all of Triton's files, which a process keeps
    gc.freeze()  # else each fork walks through all modules when it ends
    with socket.socket(fileno=os.dup(0)) as asked, asked.makefile("rw") as lines:
        while line := lines.readline():
            pids = []
            for job in json.loads(line):
                if not (pid := os.fork()):
                    with Path(job["output"]).open("w") as sink:
                        os.dup2(sink.fileno(), 1)
                        os.dup2(sink.fileno(), 2)
                    os.environ.update(job["settings"])
                    return decode_kind(Path(job["out"]), job["kind"])
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            lines.write(f"{json.dumps(codes)}\n")
            lines.flush()
    return None


if __name__ == "__main__":
    if arguments := sys.argv[1:]:
        decode_kind(Path(arguments[0]).absolute(), *arguments[1:])
    else:
        serve()
