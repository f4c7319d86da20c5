"""Kernels of a round, counted without a GPU: `python -m benchmarks.gpu_nodes`; `--write` makes the page of the docs.

It starts itself on the stub device, with an interpreter that LLAMA_SSP_CUDA_PYTHON names (tests/stub_gpu/README.md).
Models have their true sizes there: weights are memory that nobody writes. For several GPUs the process is the first
rank, and its peers exist for the stub's NCCL alone. `tests/stub_gpu` holds the engine to the budgets of CASES; a change
that needs fewer nodes lowers its budget.

Shapes: B sequences, T positions, V vocabulary.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decoding import run_config
from benchmarks.measured import PAGES, markdown, show
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm, Mesh
from llama_ssp.run.decoders import Models, build_decoder
from llama_ssp.settings import catalogue
from llama_ssp.settings.formats import NO_QUANTIZATION
from llama_ssp.settings.layout import lay_out_replica
from llama_ssp.settings.schema import (
    DeviceKind,
    DraftLayout,
    DraftPlacement,
    ModelShape,
    PlacementConfig,
    SamplingConfig,
    SpeculationConfig,
    VerificationConfig,
    WholeParts,
)
from llama_ssp.speculate.engine.executors import CudaRecorder
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.uniforms import PER_DRAW
from llama_ssp.weights.source import TensorFacts, Wanted
from llama_ssp.weights.synthetic import llama_config
from tests.stub_gpu import device
from tests.stub_gpu.device import Record
from tests.stub_gpu.process import Stub, find_stub

PAGE = PAGES / "gpu_nodes.md"
CUDA = torch.device("cuda", 0)
DTYPE = torch.float16
PROMPT_TOKENS, NEW_TOKENS = 300, 16
NUM_DRAFT_TOKENS = 4
CONTEXT = 2048
"""Slots of the cache of a layer, and those that attention reads where its blocks are counted."""
NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200: attention with fewer blocks leaves some idle."""
_ATTENTION = re.compile("fmha|flash|attention|attend|splitkv")
_KINDS = {
    "attention": _ATTENTION,
    "norm": re.compile("norm", re.IGNORECASE),
    "cache write": re.compile("index_copy|index_elementwise|write"),
    "sort": re.compile("sort|topk|radix", re.IGNORECASE),
}
LAYER, BLOCKS, DRAW, ROUND = "layer", "attention of a layer", "draw of one token", "round"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A thing that is counted, and its budget.

    A layer of a forward, the thread blocks of its attention, one draw for one row, or all graphs of a round with K = 4
    or of a plain step; on each of the GPUs that share a model.

    Attributes:
        kind: LAYER, BLOCKS, DRAW or ROUND.
        limit: the most nodes, or the least blocks.
        num_rows: tokens of a sequence in a forward.
        whole: of a sharded draft; None for a draft on one rank.
    """

    kind: str
    limit: int
    target: str = ""
    draft: str | None = None
    whole: WholeParts | None = None
    num_ranks: int = 1
    batch_size: int = 1
    num_rows: int = 1
    quantization: str = NO_QUANTIZATION
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def name(self) -> str:
        """Its name in tables."""
        gpus = f"{self.num_ranks} GPU{'s' * (self.num_ranks > 1)}"
        batch = f"batch {self.batch_size}"
        drawn = "sampled" if self.sampling.temperature else "greedy"
        if self.kind == DRAW:
            return next((each for each in ("top_k", "top_p") if getattr(self.sampling, each)), drawn)
        if self.kind == ROUND:
            whole = self.whole.value + " whole" if self.whole and self.whole.keeps_embedding else ""
            shared = f" (sharded{', ' * bool(whole)}{whole})" if self.whole else ""
            models = f"{self.target} with {self.draft}{shared}" if self.draft else f"{self.target}, plain"
            return ", ".join([models, gpus, batch, drawn])
        stored = [] if self.quantization == NO_QUANTIZATION else [self.quantization]
        rows = f"{self.num_rows} row{'s' * (self.num_rows > 1)}"
        return ", ".join([self.target, gpus, *[batch] * (self.batch_size > 1), rows, *stored])

    def keeps(self, counted: Mapping[str, int]) -> bool:
        """Whether a count is within the budget."""
        number = sum(counted.values())
        return number >= self.limit if self.kind == BLOCKS else 0 < number <= self.limit


def _cases() -> Iterator[Case]:
    """All cases."""
    for model in ("tiny", "7B", "llama3_8B"):
        for rows in (1, 5):
            yield Case(kind=LAYER, target=model, num_rows=rows, limit=10)
    yield Case(kind=LAYER, target="7B", num_ranks=8, num_rows=5, limit=12)
    yield Case(kind=LAYER, target="7B", batch_size=16, num_rows=5, limit=10)
    for form, batch_size, most in (
        ("int8_weight_only", 1, 10), ("int8_weight_only", 25, 10), ("int8_weight_only", 32, 35),
        ("int4_weight_only", 25, 10), ("int4_weight_only", 32, 35),
    ):  # fmt: skip
        yield Case(kind=LAYER, target="65B", batch_size=batch_size, num_rows=5, quantization=form, limit=most)
    greedy = SamplingConfig(temperature=0.0)
    for sampling, most in (
        (greedy, 2), (SamplingConfig(), 8), (SamplingConfig(top_k=50), 40), (SamplingConfig(top_p=0.9), 40)
    ):  # fmt: skip
        yield Case(kind=DRAW, sampling=sampling, limit=most)
    yield Case(kind=ROUND, target="tiny", limit=125)
    yield Case(kind=ROUND, target="tiny", draft="tiny-draft", limit=265)
    yield Case(kind=ROUND, target="7B", limit=345)
    yield Case(kind=ROUND, target="30B", draft="7B", limit=1965)
    yield Case(kind=ROUND, target="30B", draft="7B", sampling=greedy, limit=1940)
    yield Case(kind=ROUND, target="30B", draft="7B", batch_size=4, limit=1965)
    yield Case(kind=ROUND, target="30B", draft="7B", num_ranks=8, limit=2100)
    for whole, most in ((WholeParts.none, 1910), (WholeParts.embedding, 1880), (WholeParts.attention, 1795)):
        yield Case(kind=ROUND, target="30B", draft="tinyllama_1B", whole=whole, num_ranks=8, limit=most)
    for model, num_ranks, batch_size, least in (
        ("7B", 1, 1, 128), ("30B", 1, 1, 128), ("llama3_8B", 1, 1, 128), ("tinyllama_1B", 1, 1, 128),
        ("llama3_70B", 8, 1, 128), ("30B", 8, 1, 112), ("7B", 1, 3, 128), ("llama3_70B", 8, 4, 128),
    ):  # fmt: skip
        yield Case(kind=BLOCKS, target=model, num_ranks=num_ranks, batch_size=batch_size, num_rows=5, limit=least)


CASES = (*_cases(),)


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
    num_layers: int | None = None,
    *,
    whole: WholeParts = WholeParts.none,
    quantization: str = NO_QUANTIZATION,
) -> Runner:
    """This rank's slice of an entry of the catalogue, with all of its layers or some."""
    shape = catalogue.load(name).shape
    assert shape, f"{name} has no shape"
    context = max(shape.max_position_embeddings, CONTEXT)
    num_layers = num_layers or shape.num_hidden_layers
    shape = replace(shape, max_position_embeddings=context, num_hidden_layers=num_layers)
    return load_model(
        BlankWeights(shape), device=CUDA, comm=comm, dtype=DTYPE, whole=whole,
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
    return Comm.of_world(rank=0, size=num_ranks, device=CUDA, crowded=False, device_wait=None)


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


def layer_nodes(case: Case) -> list[Record]:
    """The nodes that a second layer adds to a forward."""
    one, two = (
        forward_nodes(
            load(case.target, group_of(case.num_ranks), layers, quantization=case.quantization),
            num_rows=case.num_rows, bucket=256, batch_size=case.batch_size,
        )
        for layers in (1, 2)
    )  # fmt: skip
    left = Counter(_sort_of(record) for record in one)
    added = []
    for record in two:
        if left[_sort_of(record)]:
            left[_sort_of(record)] -= 1
        else:
            added.append(record)
    assert len(added) == len(two) - len(one)
    return added


def attention_blocks(case: Case) -> int:
    """Thread blocks of the attention of one layer; of its smallest kernel if it has several."""
    runner = load(case.target, group_of(case.num_ranks), num_layers=1)
    nodes = forward_nodes(runner, num_rows=case.num_rows, bucket=CONTEXT, batch_size=case.batch_size)
    return min([node.num_blocks for node in nodes if _sort_of(node) == "attention"], default=0)


def draw_nodes(sampling: SamplingConfig) -> list[Record]:
    """The nodes of one draw from the logits of Llama's vocabulary."""
    rule = make_rule(sampling, VerificationConfig())
    logits_BV = torch.zeros(1, 32000, device=CUDA)
    uniforms_BP = torch.full((1, PER_DRAW), 0.5, dtype=torch.float64, device=CUDA)
    return captured(lambda: rule.draw(logits_BV, uniforms_BP, None))


def round_nodes(case: Case) -> list[Record]:
    """The nodes of all graphs of a round, or of a plain step."""
    comm = group_of(case.num_ranks)
    target = load(case.target, comm)
    kind, whole = DraftLayout.sharded if case.whole else DraftLayout.one_rank, case.whole or WholeParts.embedding
    placement = PlacementConfig(draft=DraftPlacement(kind=kind))
    layout = lay_out_replica(placement, world_size=case.num_ranks, has_draft=case.draft is not None)
    holds_all = layout.splits_batch or len(layout.draft_ranks) == 1
    draft_comm = Comm.single() if holds_all else comm
    draft = load(case.draft, draft_comm, whole=whole) if case.draft else None
    mesh = Mesh(world=comm, replica=comm, number=0, layout=layout, target=comm, draft=draft_comm)
    tokenizer: Any = None
    models = Models(
        target=target, draft=draft, drafts=draft is not None, mesh=mesh, tokenizer=tokenizer, eos_ids=(),
        context=CONTEXT,
    )  # fmt: skip
    config = run_config(
        catalogue.load(case.target), catalogue.load(case.draft) if case.draft else None, placement=placement,
        sampling=case.sampling, speculation=SpeculationConfig(num_draft_tokens=NUM_DRAFT_TOKENS),
        batch_size=case.batch_size, device=DeviceKind.cuda,
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


@torch.inference_mode()
def count(case: Case) -> dict[str, int]:
    """The nodes of a case by kind, or its thread blocks; on the stub device."""
    if case.kind == BLOCKS:
        return {"blocks": attention_blocks(case)}
    if case.kind == DRAW:
        nodes = draw_nodes(case.sampling)
    else:
        nodes = layer_nodes(case) if case.kind == LAYER else round_nodes(case)
    return dict(Counter(map(_sort_of, nodes)).most_common())


def count_all(stub: Stub) -> dict[str, Any]:
    """The version of torch, and the counts of all cases by kind and name."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts.json"
        stub.run("-m", "benchmarks.gpu_nodes", "--count", out, timeout_s=600, STUB_GPU_ALONE=1)
        counts: dict[str, Any] = json.loads(out.read_text())
    return counts


def document(counts: Mapping[str, Any]) -> str:
    """docs/benchmarks/gpu_nodes.md."""
    made = "`python -m benchmarks.gpu_nodes --write` makes this page; `just gpu-stub` holds the engine to the budgets."
    parts = ["# Kernels of a round on a GPU", made, _NODES, _STUB.format(counts["torch"])]
    for kind, title in _TITLES.items():
        lines = []
        for case in (case for case in CASES if case.kind == kind):
            counted = counts[kind][case.name]
            of_which = [", ".join(f"{number} {sort}" for sort, number in counted.items())] * (kind != BLOCKS)
            lines.append([case.name, sum(counted.values()), case.limit, *of_which])
        heads = ["blocks", "at least"] if kind == BLOCKS else ["nodes", "budget", "of which"]
        parts += [title, markdown([kind, *heads], lines)]
    return "\n\n".join(parts) + "\n"


_NODES = """\
A node of a CUDA graph is a kernel, a copy or a collective. At batch 1 each costs a GPU a few microseconds that are not
spent on weights, so their number decides how near a round comes to the memory's speed."""
_STUB = """\
No GPU was needed: a stub device wrote down what a CUDA build of torch {} launched in fp16."""
_TITLES = {
    LAYER: "## A layer", DRAW: "## A draw", ROUND: f"## A round, K = {NUM_DRAFT_TOKENS}",
    BLOCKS: f"""\
## Attention over {CONTEXT} slots

A GPU has {NUM_MULTIPROCESSORS} multiprocessors; attention with fewer thread blocks leaves some idle.""",
}  # fmt: skip


def main() -> None:
    """Count, and print or write the page; exits with 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} in docs/benchmarks")
    parser.add_argument("--count", type=Path, metavar="OUT", help="count on the stub device, where this runs, as JSON")
    arguments = parser.parse_args()
    if arguments.count:
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # as `world.start` does
        torch.cuda.set_device(CUDA)
        counts: dict[str, Any] = {"torch": torch.__version__, **{kind: {} for kind in _TITLES}}
        for case in CASES:
            counts[case.kind][case.name] = count(case)
        arguments.count.write_text(json.dumps(counts))
        return
    stub = find_stub()
    if isinstance(stub, str):
        parser.error(stub)
    counts = count_all(stub)
    show(document(counts), page=PAGE.name, is_written=arguments.write)
    wrong = [case.name for case in CASES if not case.keeps(counts[case.kind][case.name])]
    sys.exit(f"over budget: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
