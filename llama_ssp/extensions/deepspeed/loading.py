"""A target that DeepSpeed splits over all ranks with AutoTP (`kind=deepspeed`).

Every rank reads the whole model into host memory. DeepSpeed keeps this rank's slices of the decoder layers' linear
layers; embeddings and head stay whole. No compiler is needed: none of DeepSpeed's kernels are built or used.
"""

import atexit
import io
import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError, PlacementError
from llama_ssp.extensions.deepspeed.records import check_split
from llama_ssp.extensions.modules.building import load_modules
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import World
from llama_ssp.settings.layout import Layout


def check(world: World, layout: Layout, shape: ModelShape, quantization: str) -> None:
    """Check that DeepSpeed can split a model, without loading weights.

    Raises ConfigError if DeepSpeed is not installed, and PlacementError if the model's heads do not divide evenly or
    quantization was requested.
    """
    if world.device.type == "cpu":  # also if there are GPUs; it reads this when it is imported.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "placement.target.kind=deepspeed needs the package deepspeed: ./machine-install.sh --deepspeed installs "
            "it, and placement.target.kind=tensor needs none"
        )
    check_split(shape, quantization, num_ranks=len(layout.target_ranks))


def load(loading: Loading) -> ModuleRunner:
    """Load a whole model, and let DeepSpeed keep this rank's part; raises PlacementError if it cannot split the model.

    `loading.comm` has all ranks of the world, and `loading.precision` is unquantized. For other errors see
    `load_model`.
    """
    assert loading.precision.kernel is None, "`check` comes first"
    model = load_modules(replace(loading, device=torch.device("cpu"), comm=Comm.single()))
    buffers = {name: (model.get_submodule(name.rpartition(".")[0]), buffer) for name, buffer in model.named_buffers()}
    with redirect_stdout(io.StringIO()):  # it prints, but standard output is reserved for texts
        _share(model, loading.origin.shape.model_type, dtype=loading.weights_dtype, comm=loading.comm)
    for name, (module, buffer) in buffers.items():  # it rounds rotary frequencies to the dtype of the weights
        setattr(module, name.rpartition(".")[2], buffer.to(loading.device))
    atexit.register(_let_go, ref(model))
    return ModuleRunner(model, comm=loading.comm, cache_dtype=loading.precision.cache_dtype)


def _share(model: nn.Module, model_type: str, *, dtype: torch.dtype, comm: Comm) -> None:
    """Replace the model's linear layers by DeepSpeed's, and move the model to the device."""
    import deepspeed

    sharing: dict[str, object] = {"tp_size": comm.size}
    if comm.size > 1:
        # DeepSpeed's shared-memory all-reduce is compiled at first use and ignores groups and timeouts.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist.get_backend(comm.group), auto_mpi_discovery=False, verbose=False)
        # Our process group in DeepSpeed's interface; a group made by DeepSpeed would have its own timeout.
        ours = SimpleNamespace(get_model_parallel_group=lambda: comm.group)
        sharing |= {"tp_group": comm.group, "mpu": ours}
    try:
        deepspeed.init_inference(model, tensor_parallel=sharing, dtype=dtype, replace_with_kernel_inject=False)
    except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:  # an unknown architecture
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        message = f"DeepSpeed cannot share a {model_type} model ({reason}): use placement.target.kind=tensor"
        raise PlacementError(message) from error


def _let_go(shared: ref[nn.Module]) -> None:
    """Drop DeepSpeed's references to our process group: its threads end with its last reference; see `leave_groups`."""
    model = shared()
    for module in model.modules() if model else ():
        vars(module).pop("mp_group", None)
    for method in vars(sys.modules["deepspeed.comm.torch"].TorchBackend).values():
        defaults = method.__defaults__ or () if isinstance(method, FunctionType) else ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            method.__defaults__ = None
