"""Counts the nodes of CUDA graphs at true sizes on the stub device; `gpu_nodes` starts it and has the budgets.

Weights are memory that nobody writes, so models of any size fit. For several GPUs this process is the first rank, and
its peers exist for the stub's NCCL alone.

Shapes: B sequences, T positions, V vocabulary.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_budgets import ATTENTION, CONTEXT, DRAWS, LAYERS, NUM_DRAFT_TOKENS, ROUNDS, Attention, Layer, Round
from llama_ssp.config import catalogue
from llama_ssp.config.drafters import ModelDraftConfig
from llama_ssp.config.formats import NO_QUANTIZATION
from llama_ssp.config.layout import lay_out_replica
from llama_ssp.config.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DeviceKind,
    DrafterConfig,
    DraftPlacement,
    ModelShape,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    VerificationConfig,
    WholeParts,
)
from llama_ssp.config.tasks import GenerateConfig
from llama_ssp.distributed.comms import Comm, Mesh
from llama_ssp.engine.executors.cuda_graph import CudaRecorder
from llama_ssp.engine.state import Request
from llama_ssp.models.build import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.rules import make_rule
from llama_ssp.sampling.uniforms import PER_DRAW
from llama_ssp.session.loading import Models, build_decoder
from llama_ssp.weights.source import TensorFacts, Wanted
from llama_ssp.weights.synthetic import llama_config
from tests.stub_gpu import device
from tests.stub_gpu.device import Record

CUDA = torch.device("cuda", 0)
DTYPE = torch.float16
PROMPT_TOKENS, NEW_TOKENS = 300, 16
_ATTENTION = re.compile("fmha|flash|attention|attend|splitkv")
_KINDS = {
    "attention": _ATTENTION,
    "norm": re.compile("norm", re.IGNORECASE),
    "cache write": re.compile("index_copy|index_elementwise|write"),
    "sort": re.compile("sort|topk|radix", re.IGNORECASE),
}


@dataclass(frozen=True)
class BlankWeights:
    """A model of a shape whose tensors have no content; a `WeightSource`."""

    shape: ModelShape
    dtype: torch.dtype = DTYPE
    context: int = CONTEXT

    @property
    def folder(self) -> Path:
        """A name for messages; no such folder exists."""
        return Path("blank")

    @cached_property
    def config(self) -> LlamaConfig:
        """See `WeightSource`."""
        return llama_config(self.shape)

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """See `WeightSource`."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        return {name: TensorFacts(dtype=DTYPE, shape=tuple(p.shape)) for name, p in model.named_parameters()}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource`."""
        sizes = list(self.tensors[name].shape)
        if (dim := wanted.get("dim")) is not None:
            sizes[dim] = sum(len(part) for part in wanted["parts"])
        return torch.empty(sizes, dtype=wanted.get("dtype") or DTYPE, device=wanted.get("device"))


def load(
    name: str,
    comm: Comm,
    *,
    num_layers: int | None = None,
    whole: WholeParts = WholeParts.none,
    fuses: bool = False,
    quantization: str = NO_QUANTIZATION,
) -> Runner:
    """This rank's slice of an entry of the catalogue, with all of its layers or some."""
    shape = catalogue.load(name).shape
    assert shape, f"{name} has no shape"
    context = max(shape.max_position_embeddings, CONTEXT)
    num_layers = num_layers or shape.num_hidden_layers
    shape = replace(shape, max_position_embeddings=context, num_hidden_layers=num_layers)
    return load_model(
        BlankWeights(shape), device=CUDA, comm=comm, dtype=DTYPE, whole=whole, fuses=fuses,
        precision=Precision(quantization=quantization),
    )  # fmt: skip


def group_of(num_ranks: int) -> Comm:
    """The group of this rank and its absent peers."""
    if num_ranks == 1:
        return Comm.single()
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.HashStore()  # type: ignore[attr-defined] # torch's types do not export it
    patience = timedelta(seconds=60)
    dist.init_process_group("nccl", store=store, rank=0, world_size=num_ranks, timeout=patience, device_id=CUDA)
    return Comm.of_world(rank=0, size=num_ranks, device=CUDA, crowded=False)


def captured(piece: Callable[[], Any]) -> list[Record]:
    """The nodes of a piece, after a first call that warms up."""
    piece()
    device.reset()
    CudaRecorder().record(piece)
    log = device.log()
    assert not device.faults(log), device.faults(log)
    [number] = [int(record.text) for record in log if record.kind == "captured"]
    return device.graph(number)


def forward_nodes(runner: Runner, *, num_rows: int, bucket: int, batch_size: int = 1) -> list[Record]:
    """The nodes of a forward of some sequences with `num_rows` tokens each."""
    runner.allocate(batch_size=batch_size, capacity=CONTEXT)
    ids_BT = torch.zeros(batch_size, num_rows, dtype=torch.int64, device=CUDA)
    positions_BT = (torch.arange(num_rows, device=CUDA) + PROMPT_TOKENS).repeat(batch_size, 1)
    return captured(lambda: runner.forward(ids_BT, positions_BT, bucket=bucket))


def layer_nodes(case: Layer) -> list[Record]:
    """What a second layer adds to a forward."""
    one, two = (
        forward_nodes(
            load(
                case.model,
                group_of(case.num_ranks),
                num_layers=number,
                fuses=case.fuses,
                quantization=case.quantization,
            ),
            num_rows=case.num_rows,
            bucket=256,
            batch_size=case.batch_size,
        )
        for number in (1, 2)
    )
    left = Counter(_sort_of(record) for record in one)
    added = []
    for record in two:
        if left[_sort_of(record)]:
            left[_sort_of(record)] -= 1
        else:
            added.append(record)
    assert len(added) == len(two) - len(one)
    return added


def attention_blocks(case: Attention) -> int:
    """Thread blocks of the attention of one layer; of its largest kernel if it has several."""
    runner = load(case.model, group_of(case.num_ranks), num_layers=1)
    nodes = forward_nodes(runner, num_rows=case.num_rows, bucket=CONTEXT, batch_size=case.batch_size)
    return max([node.num_blocks for node in nodes if _sort_of(node) == "attention"], default=0)


def draw_nodes(sampling: SamplingConfig) -> list[Record]:
    """The nodes of one draw from the logits of Llama's vocabulary."""
    rule = make_rule(sampling, VerificationConfig())
    logits_BV = torch.zeros(1, 32000, device=CUDA)
    uniforms_BP = torch.full((1, PER_DRAW), 0.5, dtype=torch.float64, device=CUDA)
    return captured(lambda: rule.draw(logits_BV, uniforms_BP, None))


def round_nodes(case: Round) -> list[Record]:
    """The nodes of all graphs of a round, or of a plain step."""
    comm = group_of(case.num_ranks)
    target = load(case.target, comm, fuses=case.fuses)
    placement = PlacementConfig(draft=DraftPlacement(kind=case.draft_layout, whole=case.draft_whole))
    layout = lay_out_replica(placement, world_size=case.num_ranks, has_draft=case.draft is not None)
    holds_all = layout.splits_batch or len(layout.draft_ranks) == 1
    draft_comm = Comm.single() if holds_all else comm
    draft = load(case.draft, draft_comm, whole=case.draft_whole, fuses=case.fuses) if case.draft else None
    mesh = Mesh(world=comm, replica=comm, number=0, layout=layout, target=comm, draft=draft_comm)
    tokenizer: Any = None
    models = Models(
        target=target, draft=draft, drafts=draft is not None, mesh=mesh, tokenizer=tokenizer, eos_ids=(),
        context=CONTEXT,
    )  # fmt: skip
    entry = catalogue.load(case.target)
    drafter = DrafterConfig(kind=NO_DRAFT)
    if case.draft:
        drafter = ModelDraftConfig(kind=MODEL_DRAFT, model=catalogue.load(case.draft))
    config = RunConfig(
        task=GenerateConfig(), model=entry, draft=drafter, placement=placement, sampling=case.sampling,
        verification=VerificationConfig(), speculation=SpeculationConfig(num_draft_tokens=NUM_DRAFT_TOKENS),
        batch_size=case.batch_size, device=DeviceKind.cuda, ignore_eos=True,
    )  # fmt: skip
    decoder = build_decoder(models, config, speculative=draft is not None)
    prompt_ids = tuple(range(5, 5 + PROMPT_TOKENS))
    requests = [
        Request(index=row, prompt_ids=prompt_ids, max_new_tokens=NEW_TOKENS, num_equal_before=row)
        for row in range(case.batch_size)
    ]
    device.reset()
    with torch.inference_mode():
        for _ in decoder.run(requests):
            pass
    log = device.log()
    assert not device.faults(log), device.faults(log)
    numbers = dict.fromkeys(int(record.text) for record in log if record.kind == "replay")
    return [node for number in numbers for node in device.graph(number)]


def _sort_of(record: Record) -> str:
    if record.kind in {"gemm", "nccl", "copy", "memset"}:
        return {"gemm": "matrix product", "nccl": "collective"}.get(record.kind, record.kind)
    return next((sort for sort, names in _KINDS.items() if names.search(record.name)), "other")


def _sorts(records: Sequence[Record]) -> dict[str, int]:
    return dict(Counter(map(_sort_of, records)).most_common())


def main() -> None:
    """Write the counts of all cases to a file, as JSON."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # as `world.start` does
    torch.cuda.set_device(CUDA)
    counts: dict[str, Any] = {"torch": torch.__version__}
    with torch.inference_mode():
        counts["layers"] = {case.name: _sorts(layer_nodes(case)) for case in LAYERS}
        counts["draws"] = {case.name: _sorts(draw_nodes(case.sampling)) for case in DRAWS}
        counts["attention"] = {case.name: attention_blocks(case) for case in ATTENTION}
    counts["rounds"] = {case.name: _sorts(round_nodes(case)) for case in ROUNDS}
    Path(sys.argv[1]).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
