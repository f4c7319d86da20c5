"""The executor of a device: traced on CPUs, CUDA graphs on GPUs, else the round itself, from Python."""

from llama_ssp.engine.executors.cuda_graph import CudaGraphExecutor, CudaRecorder
from llama_ssp.engine.executors.cuda_overlap import CudaOverlap
from llama_ssp.engine.executors.traced_cpu import TracedExecutor
from llama_ssp.engine.executors.traced_overlap import TracedOverlap
from llama_ssp.engine.overlap import OverlappedExecutor, OverlappedRound
from llama_ssp.engine.round import Executor, Round


def make_executor(round_: Round, *, cuda_graphs: bool) -> Executor | OverlappedExecutor:
    """Choose by the kind of round and the device of the target.

    Args:
        round_: what it executes.
        cuda_graphs: whether a GPU's rounds are captured.
    """
    device, finish = round_.target.device, round_.verifier.comm.finish
    if device.type == "cpu":
        return TracedOverlap(round_) if isinstance(round_, OverlappedRound) else TracedExecutor(round_)
    if not cuda_graphs:
        return round_
    recorder = CudaRecorder(finish=finish)
    if isinstance(round_, OverlappedRound):
        return CudaOverlap(round_, recorder=recorder)
    return CudaGraphExecutor(round_, recorder=recorder)
