"""Every setting of a run, as typed dataclasses without logic.

`config.compose` makes them, and `config.checks` checks them. Below `commands` a config has only this form.
Enum members are lower case because they are written that way on the command line.
"""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import yaml

from llama_ssp.config.formats import NO_QUANTIZATION
from llama_ssp.config.rules import DEFAULT

DEFAULT_DRAFT, NO_DRAFT, MODEL_DRAFT = "default", "none", "model"
"""Kinds of draft: the model entry's default, plain decoding, and a smaller model."""
ADAPTIVE = "auto"
ADAPTIVE_LENGTHS = (1, 2, 3, 4, 6, 8)
"""The value of `num_draft_tokens` that chooses K for each round, and the K that it chooses from, besides 0."""


class Dtype(Enum):
    """Number format of weights, activations and cache; `planning.spec.number_format` resolves `auto`."""

    auto = "auto"
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"

    @property
    def is_short(self) -> bool:
        """Whether a value has 16 bits."""
        return self is Dtype.bf16 or self is Dtype.fp16


class WeightsKind(Enum):
    """Source of the weights of target and draft: files, or generated ones (`weights.synthetic`)."""

    checkpoint = "checkpoint"
    synthetic = "synthetic"


class DraftLayout(Enum):
    """Placement of the draft model.

    Whole on one rank; sharded over several; replicated on several, each of which drafts for its share of the batch; or
    on ranks that hold nothing of the target (own_gpu).
    """

    one_rank = "one_rank"
    sharded = "sharded"
    replicated = "replicated"
    own_gpu = "own_gpu"


class WholeParts(Enum):
    """What every rank of a sharded draft holds whole, which saves collectives and costs memory.

    Nothing; the embedding, which saves a collective in every forward; or the attention of all layers and its cache too,
    which saves one in every layer.
    """

    none = "none"
    embedding = "embedding"
    attention = "attention"

    @property
    def keeps_embedding(self) -> bool:
        """Whether the embedding is whole."""
        return self is not WholeParts.none

    @property
    def keeps_attention(self) -> bool:
        """Whether attention is whole."""
        return self is WholeParts.attention


class DeviceKind(Enum):
    """Device of the ranks; `auto` uses GPUs if every rank has one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class GpuKernels(Enum):
    """What runs on GPUs; `fused` has larger products, which no GPU has timed yet."""

    default = "default"
    fused = "fused"


@dataclass(kw_only=True)
class ModelShape:
    """Sizes of a causal language model, named as in its config.json.

    `model_type` decides which further parameters exist: biases, norms, learned positions.
    """

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False


@dataclass(kw_only=True)
class ModelConfig:
    """One entry of the catalogue `conf/model`: a checkpoint, its precision and its shape.

    The weights come from exactly one of `path`, `shipped` and `hub_id`; `path` has precedence.
    `dtype` is the compute number format; `auto` depends on the device (`planning.spec.number_format`).
    `stored_dtype` is the number format of the files, if known.
    `gpu_dtype` is the meaning of `dtype=auto` on a GPU; `auto` uses the files' format.
    `quantization` names a storage format of linear layers (`config.formats`).
    `int8_threshold` applies to `quantization=int8`: inputs of at least this size are not quantized; 0 quantizes all.
    `verify` compares every file with a manifest of hashes; `manifest=null` uses the one next to the files.
    """

    name: str
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    shipped: bool = False
    dtype: Dtype = Dtype.auto
    stored_dtype: Dtype = Dtype.auto
    gpu_dtype: Dtype = Dtype.auto
    quantization: str = NO_QUANTIZATION
    int8_threshold: float = 0.0
    verify: bool = False
    manifest: str | None = None
    default_draft: str | None = None
    chat: bool = False
    gated: bool = False
    shape: ModelShape | None = None


@dataclass(kw_only=True)
class DrafterConfig:
    """The drafter: a kind of `config.drafters`, and its model if it has one.

    `fallback` is a kind without a model, which drafts in the rounds of an adaptive run where it gains more.
    """

    kind: str = DEFAULT_DRAFT
    model: ModelConfig | None = None
    fallback: str | None = None


class TargetKind(Enum):
    """How the target is split.

    Tensor parallelism over its ranks, our own or DeepSpeed's; or layer-wise over the devices of one rank, with
    accelerate's hooks.
    """

    tensor = "tensor"
    accelerate = "accelerate"
    deepspeed = "deepspeed"


class Offload(Enum):
    """Where layer-wise placement keeps layers that fit on no device: in host memory, or in the run folder."""

    none = "none"
    cpu = "cpu"
    disk = "disk"


@dataclass(kw_only=True)
class TargetPlacement:
    """Ranks of the target; null means all that an `own_gpu` draft leaves, or the first `tp_size` of them.

    Layer-wise placement (`kind=accelerate`) has one rank. `offload` is for layers beyond `max_memory_gb` (1e9 bytes) of
    weights on each device.
    """

    kind: TargetKind = TargetKind.tensor
    ranks: list[int] | None = None
    tp_size: int | None = None
    offload: Offload = Offload.none
    max_memory_gb: float | None = None


@dataclass(kw_only=True)
class DraftPlacement:
    """Ranks of the draft; null: the target's first (one_rank), the target's (sharded, replicated), or the last.

    `whole` is what each of several ranks that share a draft holds whole.
    """

    kind: DraftLayout = DraftLayout.one_rank
    ranks: list[int] | None = None
    tp_size: int | None = None
    whole: WholeParts = WholeParts.embedding


@dataclass(kw_only=True)
class PlacementConfig:
    """Placement of target and draft, and the number of replicas of both.

    Replicas share the prompts. Each has an equal block of ranks, numbered from 0. With `auto` the planner chooses
    everything else.
    """

    target: TargetPlacement = field(default_factory=TargetPlacement)
    draft: DraftPlacement = field(default_factory=DraftPlacement)
    num_replicas: int = 1
    auto: bool = False


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling from the logits of target and draft. Null disables a processor; temperature 0 is greedy."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether most tokens get probability 0."""
        return (self.top_k, self.top_p or 1.0, self.min_p) != (None, 1.0, None)

    @property
    def penalizes(self) -> bool:
        """Whether tokens of prompt and text are penalized."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(kw_only=True)
class VerificationConfig:
    """Acceptance of drafted tokens: the name of a rule (`config.rules`)."""

    rule: str = DEFAULT


class TextKind(Enum):
    """What is written, as far as the acceptance depends on it."""

    any = "any"
    prose = "prose"
    code = "code"


@dataclass(kw_only=True)
class SpeculationConfig:
    """Number of drafted tokens per round (K in Chen et al. 2023), and what the forecast assumes of the acceptance.

    `num_draft_tokens=auto` chooses K for each round from what earlier rounds accepted.
    `acceptance` is the probability that a drafted token is accepted; null takes the pair's figure, or forecasts it.
    `text` is what that forecast assumes to be written.
    With `overlap` the draft goes on while the target verifies.
    """

    num_draft_tokens: int | str = 4
    acceptance: float | None = None
    text: TextKind = TextKind.any
    overlap: bool = False

    @property
    def adapts(self) -> bool:
        """Whether K is chosen for each round."""
        return self.num_draft_tokens == ADAPTIVE

    @property
    def most_draft_tokens(self) -> int:
        """K, or the largest one of an adaptive run."""
        return max(ADAPTIVE_LENGTHS) if self.adapts else int(self.num_draft_tokens)


@dataclass(kw_only=True)
class SyntheticConfig:
    """Synthetic weights: the probability, at temperature 0.8, that a drafted token is accepted."""

    agreement: float = 0.8


@dataclass(kw_only=True)
class TimeoutConfig:
    """Seconds that a rank waits for its peers before it gives up."""

    load_s: float = 1800.0
    decode_s: float = 60.0


class Resume(Enum):
    """Whether a folder with finished completions is resumed: with the models' files that it began with, or any."""

    if_unchanged = "if_unchanged"
    anyway = "anyway"


@dataclass(kw_only=True)
class TaskConfig:
    """The task of a run; each task adds its own fields and a default for `name` (`config.tasks`)."""

    name: str


@dataclass(kw_only=True)
class RunConfig:
    """All settings of one run; `hardware` is an entry of conf/hardware for the forecast, or this machine if empty."""

    task: TaskConfig
    model: ModelConfig
    draft: DrafterConfig
    placement: PlacementConfig
    sampling: SamplingConfig
    verification: VerificationConfig
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    weights: WeightsKind = WeightsKind.checkpoint
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    max_new_tokens: int = 64
    batch_size: int = 1
    num_samples: int = 1
    seed: int = 0
    prompt: str | None = None
    prompts: str | None = None
    prompts_column: str | None = None
    chat: bool = False
    ignore_eos: bool = False
    stop_strings: list[str] = field(default_factory=list)
    device: DeviceKind = DeviceKind.auto
    cuda_graphs: bool = True
    gpu_kernels: GpuKernels = GpuKernels.default
    hardware: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    run_dir: str | None = None
    resume: Resume = Resume.if_unchanged


def to_yaml(config: RunConfig) -> str:
    """Write all settings of a run as YAML, with enum members by their command-line names."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
