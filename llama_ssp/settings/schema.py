"""Every setting of a run and of a plan, as typed dataclasses without logic.

`settings.compose` makes them, and `settings.checks` checks them. Enum members are written as on the command line.
"""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import yaml

from llama_ssp.settings.formats import NO_QUANTIZATION
from llama_ssp.settings.rules import DEFAULT

DEFAULT_DRAFT, NO_DRAFT, MODEL_DRAFT = "default", "none", "model"
"""Kinds of draft: the model entry's default, plain decoding, and a smaller model."""
DERIVED = ("task.name", "model.name", "model.shape", "draft.kind", "draft.model.name", "draft.model.shape")
"""Settings that follow from the choice of an option: task=, model= and draft= set them."""
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
    """Placement of the draft model; `DraftPlacement` says more."""

    one_rank = "one_rank"
    sharded = "sharded"
    replicated = "replicated"
    own_gpu = "own_gpu"


class WholeParts(Enum):
    """Parts that every rank of a sharded draft holds whole: a collective less in every forward, or in every layer."""

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
    """Kernels of GPUs; `fused` has larger products, which no GPU has timed yet."""

    default = "default"
    fused = "fused"


@dataclass(kw_only=True)
class ModelShape:
    """Sizes of a causal language model, named as in its config.json."""

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

    Attributes:
        name: the entry's name, the same as that of its file.
        hub_id, revision: repository on the Hugging Face hub, and its revision; null takes the newest.
        path: a folder to read instead of the hub.
        shipped: whether the weights come with the package.
        dtype: fp32, bf16, fp16 or auto. On a CPU auto is fp32 arithmetic, which is fastest there; weights of 16-bit
            files stay in 16 bits. On a GPU auto is gpu_dtype.
        stored_dtype: number format of the files where it is known, so that a plan knows how wide a CPU keeps them.
        gpu_dtype: meaning of dtype=auto on a GPU; auto takes the format of the files.
        quantization: storage of the linear layers in the decoder layers: none, int8 or nf4 (bitsandbytes),
            int8_weight_only, int4_weight_only. Each rank quantizes its own slice while it reads it. int4_weight_only
            also reads checkpoints that hold 4 bits (compressed-tensors, GPTQ).
        int8_threshold: with int8, inputs of at least this size stay unquantized (bitsandbytes uses 6); 0 quantizes
            all. Above 0, rows of a batch depend on each other.
        verify: true compares every file with the hashes that llama-ssp manifest DIR wrote to DIR/sha256.json.
        manifest: another file with those hashes; both work for model.path and for files of the hub.
        default_draft: entry that draft=default stands for.
        chat: whether the model has a chat template.
        gated: whether the hub asks for a login.
        shape: sizes in the words of config.json; null reads them from the folder.
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
    """The drafter: a kind of `settings.drafters`, and its model if it has one.

    Attributes:
        kind: follows from draft=NAME.
        model: the fields of a model's entry.
        fallback: with speculation.num_draft_tokens=auto, a draft without a model for rounds in which it gains more,
            for example ngram.
    """

    kind: str = DEFAULT_DRAFT
    model: ModelConfig | None = None
    fallback: str | None = None


class TargetKind(Enum):
    """How the target is split; `TargetPlacement` says more."""

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
    """Ranks of the target.

    Attributes:
        kind: tensor is tensor parallel over its ranks; heads may divide unevenly. accelerate is layer-wise on one rank,
            over the GPUs that no other rank has. deepspeed is AutoTP over all ranks (./machine-install.sh
            --deepspeed). The last two are also placements, and both are slower than tensor.
        ranks: ranks of the target; null takes all that an own_gpu draft leaves.
        tp_size: or how many of them.
        offload: with accelerate, cpu keeps layers that fit on no device in the host's memory, disk keeps them in the
            run folder; each forward reads them again.
        max_memory_gb: with offload, GB (1e9 bytes) of weights that each device may hold.
    """

    kind: TargetKind = TargetKind.tensor
    ranks: list[int] | None = None
    tp_size: int | None = None
    offload: Offload = Offload.none
    max_memory_gb: float | None = None


@dataclass(kw_only=True)
class DraftPlacement:
    """Ranks of the draft.

    Attributes:
        kind: one_rank is whole on one rank; sharded is tensor parallel too; replicated is whole on every rank of the
            target, each of which drafts for its share of the batch; own_gpu is on ranks without the target. Each is
            also a placement.
        ranks: ranks of the draft; null takes the target's first (one_rank), the target's (sharded, replicated), or the
            last (own_gpu).
        tp_size: or how many, for sharded and own_gpu; null takes as many as the target, or 1.
        whole: held whole by each rank of a sharded draft, for fewer collectives: none; embedding; or attention, which
            is that and all attention with its cache.
    """

    kind: DraftLayout = DraftLayout.one_rank
    ranks: list[int] | None = None
    tp_size: int | None = None
    whole: WholeParts = WholeParts.embedding


@dataclass(kw_only=True)
class PlacementConfig:
    """Placement of target and draft, and the number of replicas of both.

    Attributes:
        target: of the target.
        draft: of the draft.
        num_replicas: copies of target and draft, each on an equal block of ranks, that share the prompts; ranks count
            from 0 in each copy.
        auto: true takes the fastest placement by the forecast for this job and machine.
    """

    target: TargetPlacement = field(default_factory=TargetPlacement)
    draft: DraftPlacement = field(default_factory=DraftPlacement)
    num_replicas: int = 1
    auto: bool = False


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling from the logits of target and draft.

    Attributes:
        temperature: 0 always takes the most probable token.
        top_k: only the k most probable tokens.
        top_p: only the most probable tokens that hold this much probability.
        min_p: only tokens with at least this share of the highest probability.
        repetition_penalty: above 1, tokens of prompt and text become less probable, as in transformers; 1 is off.
        frequency_penalty: taken off the logit of a token for each time that it stands in prompt and text.
        presence_penalty: taken off the logit of every token in prompt and text.
    """

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
    """Acceptance of drafted tokens.

    Attributes:
        rule: name of a rule; each is also an option, verification=NAME. All but greedy keep the target's distribution.
    """

    rule: str = DEFAULT


class TextKind(Enum):
    """Kinds of text, as far as the acceptance depends on them."""

    any = "any"
    prose = "prose"
    code = "code"


@dataclass(kw_only=True)
class SpeculationConfig:
    """Number of drafted tokens per round (K in Chen et al. 2023), and the acceptance that the forecast assumes.

    Attributes:
        num_draft_tokens: K, the number of drafted tokens per round, or auto, which chooses it for each round.
        acceptance: probability of acceptance that the forecast assumes; null takes the pair's figure, or forecasts it.
        text: kind of text, for that forecast: prose, code, or any where it is not known.
        overlap: true drafts while the target verifies; needs placement=own_gpu, so far on CPUs.
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
    """Synthetic weights.

    Attributes:
        agreement: probability that a drafted token is accepted at temperature 0.8, from 0.3 to 1.
    """

    agreement: float = 0.8


@dataclass(kw_only=True)
class TimeoutConfig:
    """Seconds that a rank waits for a silent rank; a rank that dies ends the run within seconds.

    Attributes:
        load_s: while models are loaded.
        decode_s: after that.
    """

    load_s: float = 1800.0
    decode_s: float = 60.0


class Resume(Enum):
    """Whether a folder with finished completions is resumed: with the models' files that it began with, or any."""

    if_unchanged = "if_unchanged"
    anyway = "anyway"


@dataclass(kw_only=True)
class TaskConfig:
    """The task of a run; each task adds its own fields and a default for `name` (`settings.tasks`)."""

    name: str


@dataclass(kw_only=True)
class RunConfig:
    r"""All settings of one run.

    Attributes:
        task, model, draft, placement, sampling, verification: options, each with settings of its own.
        speculation, synthetic, timeouts: further groups of settings.
        weights: synthetic makes any Llama shape on the device, as target and as draft, at its true size and cost,
            without a download. Each computes the shipped small model; the context has 2048 tokens.
        max_new_tokens: new tokens per completion.
        batch_size: sequences decoded together; the draws do not depend on it.
        num_samples: completions per prompt.
        seed: seed of all draws. The same seed gives the same text, also on another placement, unless sums that round
            differently change a draw: one token in some 100000 in fp32, more in 16 bits.
        prompt: one prompt, taken literally; only the shell needs quotes.
        prompts: a file. .txt has a prompt per line; .jsonl and .json have objects with a `prompt`, or `turns`, a list
            of texts of which each follows the answers to those before it (Spec-Bench), or `messages`, a list with roles
            for the chat template; .csv, .tsv and .parquet have a column `prompt`. - is standard input; on a terminal
            the run asks for one prompt after the other, until Ctrl-D; a line that ends with \ goes on in the next.
        prompts_column: another column or field of that file.
        chat: true puts each prompt into the model's chat template.
        ignore_eos: true continues after the end-of-sequence token.
        stop_strings: texts or special tokens that end a completion and stay in it, such as ["\n\n"]; \n is a line
            break, \t a tab.
        device: cpu, cuda, or auto, which takes GPUs when every rank has one.
        cuda_graphs: on GPUs, captures rounds as CUDA graphs and replays them; false launches every operator from
            Python.
        gpu_kernels: on GPUs, fused has larger products, which take in the norm and the gate, and which none has timed.
        hardware: machine of the forecast, an entry of conf/hardware; without one, the measurements of task=calibrate
            here, else a guess.
        dry_run: true prints the plan of exactly this run and loads nothing.
        run_dir: the run folder, outputs/ID by default; a folder with finished prompts is resumed.
        resume: anyway resumes also a folder whose models have other files now, or of an earlier version.
    """

    task: TaskConfig
    model: ModelConfig
    draft: DrafterConfig
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    verification: VerificationConfig = field(default_factory=VerificationConfig)
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


class PlanFormat(Enum):
    """What `llama-ssp plan` prints."""

    table = "table"
    json = "json"


class Objective(Enum):
    """What a comparison of machines is sorted by."""

    latency = "latency"
    throughput = "throughput"
    price = "price"


@dataclass(kw_only=True)
class PlanConfig(RunConfig):
    """A run that is not started, on a machine that is only described.

    Attributes:
        prompt_tokens: length of the longest prompt.
        format: json prints the document that docs/reference/plan-document.md describes.
        figure: a file (.png, .svg, .pdf): memory by rank, ms/token by K; of a search ms/token by GPUs.
        search: true ranks precisions, drafts, layouts and K of the model here, then of smaller ones.
        objective: order of a comparison of machines: latency (null), throughput, or price per million tokens.
        max_ms_per_token: machines that need more time per token are left out.
        max_price: machines that cost more US dollars per hour are left out.
        prices: US dollars per hour that replace those of the hardware files, such as {8xh100:20,1xl4:0.5}.
    """

    task: TaskConfig = field(default_factory=lambda: TaskConfig(name="generate"))
    prompt_tokens: int = 128
    format: PlanFormat = PlanFormat.table
    figure: str | None = None
    search: bool = False
    objective: Objective | None = None
    max_ms_per_token: float | None = None
    max_price: float | None = None
    prices: dict[str, float] = field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether a setting asks for a comparison of machines, or of the numbers of GPUs of one."""
        return bool(self.objective or self.max_ms_per_token is not None or self.max_price is not None or self.prices)


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
