"""Every setting that a run can have, as typed dataclasses.

The dataclasses are registered with Hydra by `config.store` and checked by `config.checks`; below `launch` nothing else
is ever passed around. They hold no logic. Members of the enums are lower case, because that is how they are written on
the command line.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llama_ssp.config.formats.format import NO_QUANTIZATION
from llama_ssp.config.rules.rule import DEFAULT
from llama_ssp.config.target_placement import TargetPlacement

DEFAULT_DRAFT, NO_DRAFT, MODEL_DRAFT = "default", "none", "model"
"""Kinds of draft: the default of the model entry, plain decoding, and a smaller model."""


class Dtype(Enum):
    """Number format of weights, activations and cache; `planning.job.number_format` says what `auto` stands for."""

    auto = "auto"
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


class WeightsKind(Enum):
    """Where the weights of target and draft come from: files, or a recipe that needs none (`models.synthetic`)."""

    checkpoint = "checkpoint"
    synthetic = "synthetic"


class DraftLayout(Enum):
    """Where the draft model sits.

    Whole on one rank; cut over several (sharded); whole on each of several that draft for their share of the rows
    (replicated); or on ranks that hold nothing of the target (own_gpu).
    """

    one_rank = "one_rank"
    sharded = "sharded"
    replicated = "replicated"
    own_gpu = "own_gpu"


class DeviceKind(Enum):
    """Where the ranks compute; `auto` takes GPUs when every rank has one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True)
class ModelShape:
    """Sizes of a causal language model, in the words of its config.json.

    `model_type` decides which parameters exist besides the matrices: biases, norms, learned positions.
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

    Exactly one of `path`, `shipped` and `hub_id` says where the weights are; `path` wins when it is given.
    `dtype` is the number format to compute in; `auto` leaves it to the device (`planning.job.number_format`).
    `stored_dtype` is the files' own number format, where it is known.
    `gpu_dtype` is what `dtype=auto` means on a GPU; `auto` takes that of the files.
    `quantization` names a storage format of linear layers (`config.formats`).
    `int8_threshold` is for `quantization=int8`: inputs of at least this size are not quantized; 0 quantizes all.
    `verify` compares every file with a manifest of hashes; null is the one beside the files.
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
    """What proposes tokens: a kind of `config.drafts`, and its model if it has one."""

    kind: str = DEFAULT_DRAFT
    model: ModelConfig | None = None


@dataclass(kw_only=True)
class DraftPlacement:
    """Ranks of the draft; null means: the target's first (one_rank), the target's (sharded, replicated), the last."""

    kind: DraftLayout = DraftLayout.one_rank
    ranks: list[int] | None = None
    tp_size: int | None = None


@dataclass(kw_only=True)
class PlacementConfig:
    """Where target and draft sit, and in how many copies.

    `num_replicas` copies share out the prompts; each has an equal block of the ranks, and its ranks count from 0. With
    `auto` the planner chooses the rest.
    """

    target: TargetPlacement = field(default_factory=TargetPlacement)
    draft: DraftPlacement = field(default_factory=DraftPlacement)
    num_replicas: int = 1
    auto: bool = False


@dataclass(kw_only=True)
class SamplingConfig:
    """How the next token is drawn from the logits, alike for target and draft.

    Null switches a processor off; temperature 0 is greedy.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(kw_only=True)
class VerificationConfig:
    """How drafted tokens are accepted: the name of a rule (`config.rules`)."""

    rule: str = DEFAULT


@dataclass(kw_only=True)
class SpeculationConfig:
    """How far the draft runs ahead (K in Chen et al. 2023), and what the forecast assumes of it.

    `acceptance` is how probable it is that a drafted token is accepted; null takes the figure of conf/pairs.yaml.
    """

    num_draft_tokens: int = 4
    acceptance: float | None = None


@dataclass(kw_only=True)
class SyntheticConfig:
    """Synthetic weights: how probable it is, at temperature 0.8, that a drafted token is accepted."""

    agreement: float = 0.8


@dataclass(kw_only=True)
class TimeoutConfig:
    """How long a rank waits for its peers before it gives up, in seconds."""

    load_s: float = 1800.0
    decode_s: float = 60.0


@dataclass(kw_only=True)
class TaskConfig:
    """What a run does; each task adds its own fields, and a default to `name` (`config.tasks`)."""

    name: str


@dataclass(kw_only=True)
class RunConfig:
    """All of one run.

    `hardware` holds the figures of an entry of conf/hardware for the forecast; empty describes the machine at hand.
    """

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
    chat: bool = False
    ignore_eos: bool = False
    stop_strings: list[str] = field(default_factory=list)
    device: DeviceKind = DeviceKind.auto
    cuda_graphs: bool = True
    one_shot_all_reduce: bool = True
    hardware: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    run_dir: str | None = None
