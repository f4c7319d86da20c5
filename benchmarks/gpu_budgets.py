"""Budgets of CUDA graphs: how many nodes a layer, a draw and a round may have, and how many blocks attention must have.

`gpu_nodes` counts them, and `tests/stub_gpu` holds the engine to them. A change that needs fewer lowers its budget.
"""

from dataclasses import dataclass, field

from llama_ssp.config.formats import NO_QUANTIZATION
from llama_ssp.config.schema import DraftLayout, SamplingConfig, WholeParts

NUM_DRAFT_TOKENS = 4
CONTEXT = 2048
"""Slots that attention reads where its blocks are counted."""
_FUSED = ", gpu_kernels=fused"
NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200: attention with fewer blocks leaves some idle."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a forward of some rows a sequence, on each of the GPUs that share it: at most `most` nodes.

    `fuses` is `gpu_kernels=fused`.
    """

    model: str
    num_ranks: int = 1
    batch_size: int = 1
    num_rows: int
    most: int
    fuses: bool = False
    quantization: str = NO_QUANTIZATION

    @property
    def name(self) -> str:
        """What it is called in tables."""
        stored = "" if self.quantization == NO_QUANTIZATION else f", {self.quantization}"
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return f"{self.model}, {gpus(self.num_ranks)}{batch}, {rows(self.num_rows)}{stored}{_FUSED * self.fuses}"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a layer over `CONTEXT` slots: at least `least` thread blocks."""

    model: str
    num_ranks: int = 1
    batch_size: int = 1
    num_rows: int
    least: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return f"{self.model}, {gpus(self.num_ranks)}{batch}, {rows(self.num_rows)}"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One draw of a token for one row: at most `most` nodes."""

    name: str
    sampling: SamplingConfig
    most: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round with K = 4, or a plain step, on each GPU: at most `most` nodes in all of its graphs."""

    target: str
    draft: str | None = None
    draft_layout: DraftLayout = DraftLayout.one_rank
    draft_whole: WholeParts = WholeParts.embedding
    num_ranks: int = 1
    batch_size: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    most: int
    fuses: bool = False

    @property
    def name(self) -> str:
        """What it is called in tables."""
        is_sharded = self.draft_layout is DraftLayout.sharded
        whole = f", {self.draft_whole.value} whole" if is_sharded and self.draft_whole.keeps_embedding else ""
        shared = "" if self.draft_layout is DraftLayout.one_rank else f" ({self.draft_layout.value}{whole})"
        models = f"{self.target} with {self.draft}{shared}" if self.draft else f"{self.target}, plain"
        drawn = "sampled" if self.sampling.temperature else "greedy"
        return f"{models}, {gpus(self.num_ranks)}, batch {self.batch_size}, {drawn}{_FUSED * self.fuses}"


def gpus(number: int) -> str:
    """In words."""
    return "1 GPU" if number == 1 else f"{number} GPUs"


def rows(number: int) -> str:
    """In words."""
    return "1 row" if number == 1 else f"{number} rows"


GREEDY, SHARDED = SamplingConfig(temperature=0.0), DraftLayout.sharded


def _with_sharded_draft(whole: WholeParts, most: int) -> Round:
    return Round(target="30B", draft="tinyllama_1B", draft_layout=SHARDED, draft_whole=whole, num_ranks=8, most=most)


LAYERS: tuple[Layer, ...] = (
    *(Layer(model=model, num_rows=rows, most=10) for model in ("tiny", "7B", "llama3_8B") for rows in (1, 5)),
    Layer(model="7B", batch_size=3, num_rows=5, most=10),
    Layer(model="7B", batch_size=16, num_rows=5, most=9),
    Layer(model="65B", num_rows=5, quantization="int8_weight_only", most=10),
    *(
        Layer(model="65B", batch_size=batch_size, num_rows=5, quantization=quantization, most=most)
        for quantization, batch_size, most in (
            ("int8_weight_only", 25, 9),
            ("int8_weight_only", 32, 34),
            ("int4_weight_only", 25, 9),
            ("int4_weight_only", 32, 140),
        )
    ),
    *(Layer(model="7B", num_ranks=8, num_rows=rows, most=12) for rows in (1, 5)),
    *(
        Layer(model=model, num_rows=rows, most=8, fuses=True)
        for model in ("tiny", "7B", "llama3_8B")
        for rows in (1, 5)
    ),
    *(Layer(model="7B", num_ranks=8, num_rows=rows, most=10, fuses=True) for rows in (1, 5)),
)
DRAWS = (
    Draw(name="greedy", sampling=GREEDY, most=2),
    Draw(name="sampled", sampling=SamplingConfig(), most=8),
    Draw(name="top_k", sampling=SamplingConfig(top_k=50), most=40),
    Draw(name="top_p", sampling=SamplingConfig(top_p=0.9), most=40),
)
ROUNDS = (
    Round(target="tiny", most=115),
    Round(target="tiny", draft="tiny-draft", most=245),
    Round(target="7B", most=345),
    Round(target="30B", draft="7B", most=1965),
    Round(target="30B", draft="7B", sampling=GREEDY, most=1940),
    Round(target="30B", draft="7B", batch_size=4, most=1780),
    Round(target="30B", draft="7B", num_ranks=8, most=2100),
    Round(target="7B", fuses=True, most=244),
    Round(target="30B", draft="7B", fuses=True, most=1400),
    _with_sharded_draft(WholeParts.none, most=1820),
    _with_sharded_draft(WholeParts.embedding, most=1795),
    _with_sharded_draft(WholeParts.attention, most=1705),
)
ATTENTION = (
    Attention(model="7B", num_rows=1, least=128),
    Attention(model="7B", num_rows=5, least=128),
    Attention(model="30B", num_rows=1, least=128),
    Attention(model="30B", num_rows=5, least=128),
    Attention(model="llama3_8B", num_rows=1, least=128),
    Attention(model="llama3_8B", num_rows=5, least=128),
    Attention(model="tinyllama_1B", num_rows=1, least=128),
    Attention(model="tinyllama_1B", num_rows=5, least=128),
    Attention(model="llama3_70B", num_ranks=8, num_rows=1, least=128),
    Attention(model="llama3_70B", num_ranks=8, num_rows=5, least=128),
    Attention(model="7B", batch_size=3, num_rows=5, least=128),
    Attention(model="30B", batch_size=2, num_rows=5, least=128),
    Attention(model="llama3_70B", num_ranks=8, batch_size=4, num_rows=5, least=128),
    Attention(model="30B", num_ranks=8, batch_size=4, num_rows=5, least=128),
    Attention(model="30B", num_ranks=8, num_rows=1, least=112),
    Attention(model="30B", num_ranks=8, num_rows=5, least=112),
)
