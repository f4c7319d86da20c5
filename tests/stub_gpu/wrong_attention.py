"""On the stub device: builds a layer of 7B where attention by lengths is wrong; prints what it launches, as JSON."""

import json
import sys

import torch

from benchmarks.gpu_nodes import CUDA, LAYER, Case, layer_nodes, load
from llama_ssp.kernels import attention_by_length as varlen
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.ranks.comms import Comm


def main() -> None:
    """Print what runs."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # as `world.start` does
    torch.cuda.set_device(CUDA)
    varlen.fault_of = lambda *_arguments, **_options: "wrong values"
    runner = load("7B", Comm.single(), num_layers=1)
    assert isinstance(runner, LeanRunner)
    with torch.inference_mode():
        nodes = [record.name for record in layer_nodes(Case(kind=LAYER, target="7B", num_rows=5, limit=0))]
    found = {"by_length": runner.reads_by_length, "is_fused": runner.is_fused, "nodes": nodes}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
