"""On the stub device: the kernels of rounds at true sizes, of one layer, and the thread blocks of attention.

`python -m tests.stub_gpu.counts` prints what the graphs of each case hold, as JSON. Weights are memory that nobody
touches, so that 30B fits.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from llama_ssp.config import catalogue
from llama_ssp.config.schema import ModelShape, SamplingConfig
from llama_ssp.distributed.comms import Comm
from llama_ssp.engine.executors.cuda_graph import CudaRecorder
from llama_ssp.engine.state import Request
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.tensor_parallel import shard
from llama_ssp.weights.synthetic import llama_config
from tests.helpers.decoders import complete, make_decoder
from tests.stub_gpu import device

CUDA = torch.device("cuda", 0)
NUM_SLOTS, NUM_DRAFT_TOKENS = 2048, 4
FEW_LAYERS, MORE_LAYERS = 2, 4
DRAWS = {
    "greedy": SamplingConfig(temperature=0.0),
    "sampled": SamplingConfig(temperature=0.8),
    "top_k": SamplingConfig(temperature=0.8, top_k=50),
    "top_p": SamplingConfig(temperature=0.8, top_p=0.9),
}


@dataclass(frozen=True, kw_only=True)
class OneOfSeveral(Comm):
    """A rank whose collectives are one kernel each and reach nobody."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Stand for a sum."""
        return values.mul_(1)

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Stand for a gather."""
        return values.new_zeros(*values.shape[:-1], sum(sizes))


def shape_of(name: str, *, num_layers: int | None = None) -> ModelShape:
    """The shape of a catalogue entry."""
    shape = catalogue.load(name).shape
    assert shape
    return replace(shape, num_hidden_layers=num_layers or shape.num_hidden_layers)


def runner(shape: ModelShape, *, num_ranks: int = 1, dtype: torch.dtype = torch.float16) -> LeanRunner:
    """A model, or the first rank's slice of it, with weights that are only allocated."""
    comm = Comm.single() if num_ranks == 1 else OneOfSeveral(rank=0, size=num_ranks, group=None, device=CUDA)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape)).to(dtype)
    model.eval().requires_grad_(requires_grad=False)
    shard(model, shape, comm)
    model.to_empty(device=CUDA)
    return LeanRunner(model, comm=comm)


def graphs(target: LeanRunner, draft: LeanRunner | None, sampling: SamplingConfig) -> list[list[device.Record]]:
    """The nodes of the graphs of rounds over NUM_SLOTS slots, in the order of their capture."""
    decoder = make_decoder(target, draft, sampling=sampling, num_draft_tokens=NUM_DRAFT_TOKENS, replay=CudaRecorder())
    decoder.make_room([Request(index=0, prompt_ids=(1, 2, 3), max_new_tokens=NUM_SLOTS - 16)])
    device.reset()
    complete(decoder, [Request(index=0, prompt_ids=tuple(range(5, 45)), max_new_tokens=24)])
    records = device.log()
    assert not device.faults(records), device.faults(records)
    return [device.graph(int(record.text)) for record in records if record.kind == "captured"]


def of_a_layer(name: str, *, num_ranks: int = 1) -> dict[str, int]:
    """The nodes of one layer, by name: the difference between models of more and of fewer layers."""
    few, more = (
        Counter(
            record.name.partition("<")[0].rpartition(" ")[2]
            for record in graphs(
                runner(shape_of(name, num_layers=number), num_ranks=num_ranks), None, DRAWS["sampled"]
            )[0]
        )
        for number in (FEW_LAYERS, MORE_LAYERS)
    )
    return {node: number // (MORE_LAYERS - FEW_LAYERS) for node, number in (more - few).items()}


def attention_blocks(name: str, *, num_ranks: int = 1) -> int:
    """The fewest thread blocks that attention launches for all keys, drafting and verifying."""
    target, draft = (runner(shape_of(name, num_layers=FEW_LAYERS), num_ranks=num_ranks) for _ in range(2))
    return min(
        record.num_blocks
        for graph in graphs(target, draft, DRAWS["greedy"])
        for record in graph
        if ("fmha" in record.name or "flash_fwd" in record.name) and "combine" not in record.name
    )


def of_a_draw(sampling: SamplingConfig) -> int:
    """The nodes of drawing a token: what a round without a draft has more than the greedy one, whose draw has two."""
    target = runner(shape_of("7B", num_layers=FEW_LAYERS))
    one, other = (len(graphs(target, None, each)[0]) for each in (sampling, DRAWS["greedy"]))
    return one - other + 2


def main() -> None:
    """Print all counts."""
    pair = runner(shape_of("30B")), runner(shape_of("7B"))
    found = {
        "round": sum(map(len, graphs(*pair, DRAWS["sampled"]))),
        "layer": of_a_layer("7B"),
        "layer of a rank": of_a_layer("7B", num_ranks=2),
        "blocks": {
            "30B": attention_blocks("30B"),
            "7B": attention_blocks("7B"),
            "llama3_8B": attention_blocks("llama3_8B"),
            "tinyllama_1B": attention_blocks("tinyllama_1B"),
            "llama3_70B on 8 ranks": attention_blocks("llama3_70B", num_ranks=8),
        },
        "draws": {name: of_a_draw(sampling) for name, sampling in DRAWS.items()},
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
