"""Every setting of a run and of a plan, as typed dataclasses without logic.

`settings.compose` makes them, and `settings.checks` checks them. Enum members are written as on the command line.
"""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import yaml

from llama_ssp.settings.formats import NO_QUANTIZATION, OWN_DTYPE
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.stored import StoredFormat
from llama_ssp.settings.trees import TreeShape, tree_shape

DEFAULT_DRAFT, NO_DRAFT, MODEL_DRAFT = "default", "none", "model"
"""Kinds of draft: the model entry's default, plain decoding, and a smaller model."""
DERIVED = ("task.name", "model.name", "model.shape", "draft.kind", "draft.model.name", "draft.model.shape")
"""Settings that follow from the choice of an option: task=, model= and draft= set them."""
AGREEMENT, HEAD_AGREEMENT = 0.8, 0.768
"""The default of `synthetic.agreement`, and the most that a draft head can have, its default."""
LAUNCHER = "hydra.launcher"
"""Where Hydra keeps a `SlurmConfig`."""
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
    # of layers with experts; other layers and models have one MLP of `intermediate_size` units.
    num_experts: int = 0
    num_experts_per_tok: int = 0  # experts that read a token.
    moe_intermediate_size: int = 0  # units of an expert.
    shared_intermediate_size: int = 0  # units of the MLP beside the experts that reads every token.
    num_dense_layers: int = 0  # layers without experts.
    # of a Gemma 4, a letter for each layer: s for one with a window and g for a global one, upper case for one that
    # reads the keys and values of an earlier one.
    layer_kinds: str = ""
    global_head_dim: int = 0  # width of the heads of global layers.
    num_global_key_value_heads: int = 0
    attention_k_eq_v: bool = False  # the keys of global layers are their values too.
    use_double_wide_mlp: bool = False  # where layers read the keys and values of earlier ones.
    hidden_size_per_layer_input: int = 0  # of an embedding that each layer has for itself.
    vocab_size_per_layer_input: int = 0
    latent_width: int = 0  # numbers that every rank caches of a token in a layer, in place of keys and values.
    spreads_experts: bool = False  # of several ranks, each holds whole ones: placement.target.experts=spread.
    # of a draft head: the vocabulary and the width of its target; `vocab_size` counts the tokens that it can draft.
    target_vocab_size: int | None = None
    target_hidden_size: int | None = None
    refusal: str = ""  # why runs refuse the model, if they do.
    # the modules of a family without a record (`architectures.matrices.Inventory`); no setting.
    modules: Any = field(default=None, metadata={"omegaconf_ignore": True})
    shares_embedding: bool = False  # of a draft head without an embedding of its own, which reads its target's.

    @property
    def is_head(self) -> bool:
        """Whether it is a draft head, which reads hidden states of its target and is no model of its own."""
        return self.target_vocab_size is not None

    @property
    def num_token_ids(self) -> int:
        """Size of the vocabulary that the model reads."""
        return self.target_vocab_size or self.vocab_size


@dataclass(kw_only=True)
class ModelConfig:
    """One entry of the catalogue `conf/model`: a checkpoint, its precision and its shape.

    The weights come from exactly one of `path`, `shipped` and `hub_id`; `path` has precedence.
    """

    name: str  # the entry's name, the same as that of its file.
    hub_id: str | None = None  # repository on the Hugging Face hub.
    revision: str | None = None  # its branch, tag or commit; null takes the newest.
    path: str | None = None  # a folder to read instead of the hub.
    # a folder with a LoRA adapter as PEFT writes it, which is merged into the weights while they are loaded.
    adapter: str | None = None
    shipped: bool = False  # whether the weights come with the package.
    # fp32, bf16, fp16 or auto. On a CPU auto is fp32 arithmetic, which is fastest there; weights of 16-bit files stay
    # in 16 bits. On a GPU auto is gpu_dtype.
    dtype: Dtype = Dtype.auto
    # number format of the files where it is known, so that a plan knows how wide a CPU keeps them.
    stored_dtype: Dtype = Dtype.auto
    gpu_dtype: Dtype = Dtype.auto  # meaning of dtype=auto on a GPU; auto takes the format of the files.
    # storage of the linear layers in the decoder layers: none, int8, nf4 or fp4 (bitsandbytes), int8_weight_only,
    # int4_weight_only, fp8_weight_only, mxfp4 and nvfp4. Each rank quantizes its own slice while it reads it. none
    # keeps a quantized checkpoint as it is stored (compressed-tensors, GPTQ, AWQ, FP8, MXFP4, NVFP4, bitsandbytes).
    quantization: str = NO_QUANTIZATION
    # format of keys and values in the cache: auto, which is dtype; bf16 or fp16; int8 or fp8 (E4M3), with a scale for
    # each head and token. Fewer bits than dtype's change the last digits of logits, and with them texts.
    cache_dtype: str = OWN_DTYPE
    # with int8, inputs of at least this size stay unquantized (bitsandbytes uses 6); 0 quantizes all. Above 0, rows of
    # a batch depend on each other.
    int8_threshold: float = 0.0
    # true compares every file with the hashes that llama-ssp manifest DIR wrote to DIR/sha256.json.
    verify: bool = False
    manifest: str | None = None  # another file with those hashes; both work for model.path and for files of the hub.
    default_draft: str | None = None  # entry that draft=default stands for.
    target: str | None = None  # of a draft head: entry of the model that it was trained for.
    chat: bool = False  # whether the model has a chat template.
    gated: bool = False  # whether the hub asks for a login.
    shape: ModelShape | None = None  # sizes in the words of config.json; null reads them from the folder.
    # the format of linear layers that its files quantize, once somebody has read their config.json; no setting.
    stored_format: StoredFormat | None = field(default=None, metadata={"omegaconf_ignore": True})


@dataclass(kw_only=True)
class DrafterConfig:
    """The drafter: a kind of `settings.drafters`, and its model if it has one."""

    kind: str = DEFAULT_DRAFT  # follows from draft=NAME.
    model: ModelConfig | None = None  # the fields of a model's entry.
    # with speculation.num_draft_tokens=auto, a draft without a model for rounds in which it gains more, for example
    # ngram.
    fallback: str | None = None


class TargetKind(Enum):
    """How the target is split; `TargetPlacement` says more."""

    tensor = "tensor"
    accelerate = "accelerate"
    deepspeed = "deepspeed"


class ExpertParts(Enum):
    """What each of several ranks holds of a layer's experts: some units of each, or some experts whole."""

    cut = "cut"
    spread = "spread"


class Offload(Enum):
    """Where layer-wise placement keeps layers that fit on no device: in host memory, or in the run folder."""

    none = "none"
    cpu = "cpu"
    disk = "disk"


@dataclass(kw_only=True)
class TargetPlacement:
    """Ranks of the target."""

    # tensor is tensor parallel over its ranks; heads may divide unevenly. accelerate is layer-wise on one rank, over
    # the GPUs that no other rank has. deepspeed is AutoTP over all ranks (./machine-install.sh --deepspeed). The last
    # two are also placements, and both are slower than tensor.
    kind: TargetKind = TargetKind.tensor
    ranks: list[int] | None = None  # ranks of the target; null takes all that an own_gpu draft leaves.
    tp_size: int | None = None  # or how many of them.
    # with tensor, each rank holds some units of every expert (cut), or whole experts (spread), as many as the others.
    experts: ExpertParts = ExpertParts.cut
    # with accelerate, cpu keeps layers that fit on no device in the host's memory, disk keeps them in the run folder;
    # each forward reads them again.
    offload: Offload = Offload.none
    max_memory_gb: float | None = None  # with offload, GB (1e9 bytes) of weights that each device may hold.


@dataclass(kw_only=True)
class DraftPlacement:
    """Ranks of the draft."""

    # one_rank is whole on one rank; sharded is tensor parallel too; replicated is whole on every rank of the target,
    # each of which drafts for its share of the batch; own_gpu is on ranks without the target. Each is also a placement.
    kind: DraftLayout = DraftLayout.one_rank
    # ranks of the draft; null takes the target's first (one_rank), the target's (sharded, replicated), or the last
    # (own_gpu).
    ranks: list[int] | None = None
    tp_size: int | None = None  # or how many, for sharded and own_gpu; null takes as many as the target, or 1.
    # held whole by each rank of a sharded draft, for fewer collectives: none; embedding; or attention, which is that
    # and all attention with its cache.
    whole: WholeParts = WholeParts.embedding


@dataclass(kw_only=True)
class PlacementConfig:
    """Placement of target and draft, and the number of replicas of both."""

    target: TargetPlacement = field(default_factory=TargetPlacement)
    draft: DraftPlacement = field(default_factory=DraftPlacement)
    # copies of target and draft, each on an equal block of ranks, that share the prompts; ranks count from 0 in each
    # copy.
    num_replicas: int = 1
    auto: bool = False  # true takes the fastest placement by the forecast for this job and machine.


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling from the logits of target and draft."""

    temperature: float = 0.8  # 0 always takes the most probable token.
    top_k: int | None = None  # only the k most probable tokens.
    top_p: float | None = None  # only the most probable tokens that hold this much probability.
    min_p: float | None = None  # only tokens with at least this share of the highest probability.
    # above 1, tokens of prompt and text become less probable, as in transformers; 1 is off.
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # taken off the logit of a token for each time that it stands in prompt and text.
    presence_penalty: float = 0.0  # taken off the logit of every token in prompt and text.

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
    """Acceptance of drafted tokens."""

    # name of a rule; each is also an option, verification=NAME. All but greedy keep the target's distribution.
    rule: str = DEFAULT


class TextKind(Enum):
    """Kinds of text, as far as the acceptance depends on them."""

    any = "any"
    prose = "prose"
    code = "code"
    copy = "copy"


@dataclass(kw_only=True)
class SpeculationConfig:
    """Number of drafted tokens per round (K in Chen et al. 2023), and the acceptance that the forecast assumes."""

    # K, the number of drafted tokens per round, or auto, which chooses it for each round.
    num_draft_tokens: int | str = 4
    # probability of acceptance that the forecast assumes; null takes the pair's figure, or forecasts it.
    acceptance: float | None = None
    text: TextKind = TextKind.any  # for that forecast: prose, code, copy (summaries, edits), any.
    # a tree of drafted tokens instead of a chain, by the children of every node, level by level, such as 2x2x1: it has
    # 2, 4 and 4 nodes; dynamic lets the draft's probabilities decide. Needs verification=speculative or temperature 0.
    tree: str | None = None
    overlap: bool = False  # true drafts while the target verifies; needs placement=own_gpu, so far on CPUs.

    @property
    def adapts(self) -> bool:
        """Whether K is chosen for each round."""
        return self.num_draft_tokens == ADAPTIVE and not self.tree

    @property
    def tree_shape(self) -> TreeShape | None:
        """The shape of a tree, if rounds draft trees; raises ValueError as `trees.tree_shape`."""
        return tree_shape(self.tree) if self.tree else None

    @property
    def most_draft_tokens(self) -> int:
        """K, the largest one of an adaptive run, or the nodes of a tree."""
        if shape := self.tree_shape:
            return shape.num_nodes
        return max(ADAPTIVE_LENGTHS) if self.adapts else int(self.num_draft_tokens)


@dataclass(kw_only=True)
class SyntheticConfig:
    """Synthetic weights."""

    # probability that a drafted token is accepted at temperature 0.8, from 0.3 to 1, or to 0.768 of a draft head; null
    # takes 0.8, and of a head 0.768.
    agreement: float | None = None


@dataclass(kw_only=True)
class TimeoutConfig:
    """Seconds that a rank waits for a silent rank; a rank that dies ends the run within seconds."""

    load_s: float = 1800.0  # while models are loaded.
    decode_s: float = 60.0  # after that.


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
    """All settings of one run."""

    task: TaskConfig
    model: ModelConfig
    draft: DrafterConfig
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    # synthetic makes any Llama shape on the device, as target, draft and draft head, at its true size and cost, without
    # a download. Each computes the shipped small model or head; the context has 2048 tokens.
    weights: WeightsKind = WeightsKind.checkpoint
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    max_new_tokens: int = 64  # new tokens per completion.
    batch_size: int = 1  # sequences decoded together; the draws do not depend on it.
    num_samples: int = 1  # completions per prompt.
    # seed of all draws. The same seed gives the same text, also on another placement, unless sums that round
    # differently change a draw: one token in some 100000 in fp32, more in 16 bits.
    seed: int = 0
    prompt: str | None = None  # one prompt, taken literally; only the shell needs quotes.
    # a file. .txt has a prompt per line; .jsonl and .json have objects with a `prompt`, or `turns`, a list of texts of
    # which each follows the answers to those before it (Spec-Bench), or `messages`, a list with roles for the chat
    # template; .csv, .tsv and .parquet have a column `prompt`. - is standard input; on a terminal the run asks for one
    # prompt after the other, until Ctrl-D; a line that ends with \ goes on in the next.
    prompts: str | None = None
    prompts_column: str | None = None  # another column or field of that file.
    chat: bool = False  # true puts each prompt into the model's chat template.
    ignore_eos: bool = False  # true continues after the end-of-sequence token.
    # texts or special tokens that end a completion and stay in it, such as ["\n\n"]; \n is a line break, \t a tab.
    stop_strings: list[str] = field(default_factory=list)
    device: DeviceKind = DeviceKind.auto  # cpu, cuda, or auto, which takes GPUs when every rank has one.
    # on GPUs, captures rounds as CUDA graphs and replays them; false launches every operator from Python.
    cuda_graphs: bool = True
    # machine of the forecast, an entry of conf/hardware; without one, the measurements of task=calibrate here, else a
    # guess.
    hardware: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False  # true prints the plan of exactly this run and loads nothing.
    run_dir: str | None = None  # the run folder, outputs/ID by default; a folder with finished prompts is resumed.
    # anyway resumes also a folder whose models have other files now, or of an earlier version.
    resume: Resume = Resume.if_unchanged

    @property
    def agreement(self) -> float:
        """The probability that a drafted token of synthetic weights is accepted."""
        if self.synthetic.agreement is not None:
            return self.synthetic.agreement
        draft = self.draft.model
        return HEAD_AGREEMENT if draft and draft.shape and draft.shape.is_head else AGREEMENT


class PlanFormat(Enum):
    """Output of `llama-ssp plan`."""

    table = "table"
    json = "json"


class Objective(Enum):
    """Order of a comparison of machines."""

    latency = "latency"
    throughput = "throughput"
    price = "price"
    hourly = "hourly"


@dataclass(kw_only=True)
class PlanConfig(RunConfig):
    """A run that is not started, on a machine that is only described."""

    task: TaskConfig = field(default_factory=lambda: TaskConfig(name="generate"))
    prompt_tokens: int = 128  # length of the longest prompt.
    format: PlanFormat = PlanFormat.table  # json prints the document that docs/reference/plan-document.md describes.
    figure: str | None = None  # a file (.png, .svg, .pdf): memory by rank, ms/token by K; of a search ms/token by GPUs.
    search: bool = False  # true ranks precisions, drafts, layouts and K of the model here, then of smaller ones.
    # order of a comparison of machines: latency, throughput, price per million tokens, or hourly price; null stands for
    # hourly with a limit of time, and for latency without.
    objective: Objective | None = None
    # rows to serve at once, shared by the replicas of a machine; null takes batch_size on each. search=true tries
    # smaller batches too.
    concurrency: int | None = None
    max_ms_per_token: float | None = None  # machines that need more time per token are left out.
    max_first_token_ms: float | None = None  # machines that need more time for the prompts of a batch are left out.
    max_price: float | None = None  # machines that cost more US dollars per hour are left out.
    # US dollars per hour of whole machines, in place of the hardware files' prices, such as {8xh100:20,1xl4:0.5}.
    prices: dict[str, float] = field(default_factory=dict)

    @property
    def order(self) -> Objective:
        """The objective, also where none is given: what is fast enough is asked for its price."""
        is_limited = self.max_ms_per_token is not None or self.max_first_token_ms is not None
        return self.objective or (Objective.hourly if is_limited else Objective.latency)

    @property
    def compares(self) -> bool:
        """Whether a setting asks for a comparison of machines, or of the numbers of GPUs of one."""
        limits = self.max_ms_per_token, self.max_first_token_ms, self.max_price, self.concurrency
        return bool(self.objective or self.prices) or any(limit is not None for limit in limits)


@dataclass(kw_only=True)
class SlurmConfig:
    """Resources of every job of a sweep with `hydra/launcher=slurm`, in conf/hydra/launcher/slurm.yaml."""

    nodes: int = 1  # nodes of one job.
    ranks_per_node: int | None = None  # processes per node; null takes the GPUs of a node of hardware=.
    partition: str | None = None  # as sbatch takes it; null takes the cluster's default.
    account: str | None = None  # as sbatch takes it; null takes the cluster's default.
    # time limit, 30 (minutes), 4:00:00 or 1-12:00; near it a run stops and its job requeues itself.
    time: str | None = None
    memory: str | None = None  # memory per node, such as 64G.
    # generic resources, such as gpu:a100:8; null asks for gpu:RANKS_PER_NODE on GPUs and for nothing on CPUs.
    gres: str | None = None
    constraint: str | None = None  # features of the nodes, as sbatch takes them; null takes any.
    cpus_per_rank: int | None = None  # cores per rank.
    max_running: int | None = None  # jobs that may run at the same time; null sets no limit.
    # words in front of python, such as [apptainer,exec,--nv,image.sif].
    container: list[str] = field(default_factory=list)
    python: str | None = None  # interpreter on the nodes; null takes the submitting one, in a container `python`.
    # folder on every node's own disk, such as /scratch/me; the job copies the weights there first.
    stage_to: str | None = None
    # further arguments, each `--name=value` or `--name`, such as ["--mail-type=END"].
    sbatch: list[str] = field(default_factory=list)


class _Dumper(yaml.SafeDumper):
    """Writes members of enums by their command-line names."""

    def ignore_aliases(self, _value: object) -> bool:
        """Write everything where it stands; `reports.reading` refuses aliases."""
        return True


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_str(member.name))


_OF_FILES = ("stored_format", "modules")


def to_yaml(config: RunConfig) -> str:
    """Write all settings of a run as YAML, without what only the files of its models say."""
    settings = asdict(config, dict_factory=lambda entries: {k: each for k, each in entries if k not in _OF_FILES})
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
