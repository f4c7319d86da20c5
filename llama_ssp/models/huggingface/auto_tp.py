"""A target that DeepSpeed shares over all ranks by its AutoTP: `kind=deepspeed`, for sites that run on it.

Every rank reads the whole model into the host's memory, DeepSpeed keeps this rank's slices of the linear layers of the
layers, and embeddings and head stay whole. It needs no compiler: none of its own kernels are built or used.
"""

import io
import os
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

from llama_ssp.architectures.sharding import check_deepspeed
from llama_ssp.config.schema import ModelShape
from llama_ssp.distributed.comms import Comm
from llama_ssp.errors import ConfigError, PlacementError
from llama_ssp.models.build import load_modules
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.loader import Progress
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.weights.source import WeightSource


def check_auto_tp(shape: ModelShape, *, quantization: str, num_ranks: int) -> None:
    """Find what would stop DeepSpeed from sharing a model, without loading a weight.

    Raises:
        ConfigError: DeepSpeed is not installed.
        PlacementError: the model's heads do not divide evenly, or it is to be quantized.
    """
    if find_spec("deepspeed") is None:
        message = (
            "placement.target.kind=deepspeed needs the package deepspeed: ./machine-install.sh --deepspeed installs "
            "it, and placement.target.kind=tensor needs none"
        )
        raise ConfigError(message)
    check_deepspeed(shape, quantization, num_ranks=num_ranks)


def choose_accelerator(device: torch.device) -> None:
    """Have DeepSpeed compute on a CPU although there are GPUs; it decides when it is first imported."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def load_auto_tp(
    origin: WeightSource,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    comm: Comm,
    progress: Progress | None = None,
    precision: Precision = UNQUANTIZED,
) -> ModuleRunner:
    """Load a whole model, and let DeepSpeed keep this rank's part of it.

    Args:
        origin: where its numbers come from.
        dtype: number format of weights and cache; None takes the origin's own.
        device: where this rank computes.
        comm: all ranks of the world, whom DeepSpeed talks to.
        progress: see `backends.load_model`.
        precision: unquantized.

    Raises:
        CheckpointError, ConfigError: see `backends.load_model`.
        PlacementError: DeepSpeed does not know how to share the model.
    """
    assert precision == UNQUANTIZED, "check_auto_tp comes first"
    host = torch.device("cpu")
    model = load_modules(origin, dtype=dtype, device=host, comm=Comm.single(), progress=progress)
    buffers = {name: (model.get_submodule(name.rpartition(".")[0]), buffer) for name, buffer in model.named_buffers()}
    with redirect_stdout(io.StringIO()):  # it prints what it has found, and standard output is the texts'
        _share(model, origin.shape.model_type, dtype=dtype or origin.dtype, comm=comm)
    for name, (module, buffer) in buffers.items():  # it rounds rotary frequencies to the format of the weights
        setattr(module, name.rpartition(".")[2], buffer.to(device))
    return ModuleRunner(model, comm=comm)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Our group in DeepSpeed's words, so that it has our time limits; a group that DeepSpeed makes has its own."""

    group: dist.ProcessGroup | None

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the model."""
        return self.group


def _share(model: nn.Module, model_type: str, *, dtype: torch.dtype, comm: Comm) -> None:
    """Swap the model's linear layers for DeepSpeed's, and move all of it to the device."""
    import deepspeed  # noqa: PLC0415 - an optional package, and slow to import

    sharing: dict[str, object] = {"tp_size": comm.size}
    if comm.size > 1:
        # Its all-reduce in shared memory would be compiled when first used, and knows neither groups nor time limits.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist.get_backend(comm.group), auto_mpi_discovery=False, verbose=False)
        sharing |= {"tp_group": comm.group, "mpu": _Group(group=comm.group)}
    try:
        deepspeed.init_inference(model, tensor_parallel=sharing, dtype=dtype, replace_with_kernel_inject=False)
    except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:  # what its parser cannot place
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        message = f"DeepSpeed cannot share a {model_type} model ({reason}): use placement.target.kind=tensor"
        raise PlacementError(message) from error
