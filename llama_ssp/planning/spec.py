"""What is to be planned, with every choice made: models, ranks, sizes.

Made from a plan's config, or from a run's (`tasks.plan`). Nothing is worked out here but which rank does what.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.architectures.family import family_of
from llama_ssp.architectures.inventory import Inventory
from llama_ssp.config.formats.format import format_of
from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.layout import Layout, lay_out, max_device_bytes, may_capture
from llama_ssp.config.model_files import CONFIG_FILE, read_json
from llama_ssp.config.plan import PlanConfig
from llama_ssp.config.rules.rule import DEFAULT
from llama_ssp.config.schema import DraftLayout, Dtype, ModelConfig, ModelShape
from llama_ssp.config.target_placement import Offload, TargetKind, TargetPlacement
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.planning.weights import DTYPE_BYTES, WeightBytes, weight_bytes

SLOT_STEP = 8
"""See `models.prefill`."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model in the precision it will have; `dtype` is never `auto`, and `stored` is where the files' is unknown.

    `quantized_dtype` is the number format it would have if it were quantized; `auto` stands for the same one.
    `by_library` says that it runs in the library's modules although the lean decoder knows its family.
    """

    name: str
    shape: ModelShape
    dtype: Dtype
    quantization: str
    stored: Dtype = Dtype.auto
    quantized_dtype: Dtype = Dtype.auto
    by_library: bool = False

    @property
    def is_lean(self) -> bool:
        """Whether the lean decoder runs it."""
        return family_of(self.shape.model_type).is_llama_kind and not self.by_library

    def quantized(self, quantization: str) -> "PlannedModel":
        """The same model with its linear layers in another form than their number format."""
        dtype = self.dtype if self.quantized_dtype is Dtype.auto else self.quantized_dtype
        return replace(self, quantization=quantization, dtype=dtype)

    def matrix_dtype(self, device: str) -> Dtype:
        """The number format of the linear layers: a CPU keeps those of 16-bit files in 16 bits, also in fp32."""
        is_kept = device == "cpu" and self.dtype is Dtype.fp32
        is_short = self.stored in {Dtype.bf16, Dtype.fp16}
        return Dtype.fp16 if is_kept and is_short and self.is_lean else self.dtype


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Everything that memory and time follow from.

    Attributes:
        target, draft: the models; no draft means plain decoding.
        target_kind, draft_kind: how each is laid out.
        target_ranks, draft_ranks: on which ranks of each copy, increasing.
        spare_devices: GPUs that have no rank, and hold layers of a target in a row beside its rank's own.
        offload: where layers wait that no device has room for.
        max_device_bytes: of the target's weights on each device; None where nothing waits elsewhere.
        num_draft_tokens: K.
        acceptance: probability that a drafted token is accepted; None takes the catalogue's.
        batch_size: rows decoded together.
        prompt_tokens, max_new_tokens: of the longest row.
        cuda_graphs: whether forwards are captured; without, every operator is launched from Python.
        device: cpu or cuda.
        num_replicas: copies of target and draft, each on as many ranks of its own.
        rule: what judges drafts; `greedy` at temperature 0, where it needs no probabilities.
    """

    target: PlannedModel
    draft: PlannedModel | None
    target_kind: TargetKind
    target_ranks: tuple[int, ...]
    draft_kind: DraftLayout
    draft_ranks: tuple[int, ...]
    num_draft_tokens: int
    acceptance: float | None
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    cuda_graphs: bool
    device: str
    num_replicas: int = 1
    rule: str = DEFAULT
    spare_devices: tuple[int, ...] = ()
    offload: Offload = Offload.none
    max_device_bytes: int | None = None

    @property
    def target_devices(self) -> tuple[int, ...]:
        """What holds weights of the target: its ranks' own devices, and for layers in a row those without a rank."""
        return (*self.target_ranks, *self.spare_devices)

    @property
    def layout(self) -> Layout:
        """Who holds what in each copy."""
        return Layout(target_ranks=self.target_ranks, draft_ranks=self.draft_ranks, draft_kind=self.draft_kind)

    @property
    def num_slots(self) -> int:
        """Cache slots of a row: its tokens and K + 1 that a round may write beyond them, in whole steps."""
        return -(-(self.prompt_tokens + self.max_new_tokens + self.round_rows) // SLOT_STEP) * SLOT_STEP

    @property
    def round_rows(self) -> int:
        """Positions per row that the target's forward of a round has: K + 1, or 1 without a draft."""
        return self.num_draft_tokens + 1 if self.draft else 1


def model_bytes(held: Inventory, model: PlannedModel, *, device: str) -> WeightBytes:
    """Bytes of what a rank holds of a model, as that device keeps it."""
    return weight_bytes(
        held, dtype=model.dtype, quantization=model.quantization, matrix_dtype=model.matrix_dtype(device)
    )


def step_bytes(held: Inventory, model: PlannedModel, *, device: str) -> int:
    """Bytes of weights that one forward reads of what a rank holds.

    Of an embedding a forward takes some rows: the table counts only where it is the head as well.
    """
    is_head = held.head is None and model.matrix_dtype(device) is model.dtype
    tables = 0 if is_head else sum(table.num_elements for table in held.embeddings)
    return model_bytes(held, model, device=device).total_bytes - DTYPE_BYTES[model.dtype] * tables


def settle_models(config: PlanConfig) -> None:
    """Fill in the shape and the files' number format of models that are known by their folder alone.

    Raises:
        ConfigError: there is neither a shape nor a folder.
        CheckpointError: a folder's config.json does not describe a model.
    """
    for model in (config.model, config.draft.model):
        if model is not None:
            settled = planned_model(model, device="cpu")
            model.shape, model.stored_dtype = settled.shape, settled.stored


def make_job(config: PlanConfig, hardware: HardwareConfig) -> PlanSpec:
    """Decide what a checked config leaves open.

    Raises:
        ConfigError: a model has neither a shape nor a folder to read it from.
        CheckpointError: a folder's config.json does not describe a model.
    """
    draft = planned_model(config.draft.model, device=hardware.device) if config.draft.model else None
    placement = config.placement
    num_ranks = hardware.num_ranks // placement.num_replicas
    layout = lay_out(placement.target, placement.draft, num_ranks=num_ranks, has_draft=draft is not None)
    return PlanSpec(
        **target_fields(config.model, placement.target, layout, num_gpus=hardware.num_gpus, device=hardware.device),
        draft=draft,
        draft_kind=layout.draft_kind,
        draft_ranks=layout.draft_ranks,
        num_replicas=placement.num_replicas,
        num_draft_tokens=config.speculation.num_draft_tokens,
        acceptance=config.speculation.acceptance,
        batch_size=config.batch_size,
        prompt_tokens=config.prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        cuda_graphs=config.cuda_graphs and hardware.device == "cuda" and may_capture(placement.target),
        device=hardware.device,
    )


def target_fields(
    model: ModelConfig, target: TargetPlacement, layout: Layout, *, num_gpus: int, device: str
) -> dict[str, Any]:
    """The fields of a `PlanSpec` that say what the target is and where.

    Args:
        model: its entry.
        target: its placement.
        layout: which ranks of a copy hold what.
        num_gpus: of each node; layers in a row are spread over those of the target's node that no rank has.
        device: cpu or cuda.

    Raises:
        ConfigError, CheckpointError: see `planned_model`.
    """
    in_a_row = target.kind is TargetKind.accelerate
    first = layout.target_ranks[0] // num_gpus * num_gpus
    spare = [gpu for gpu in range(first, first + num_gpus) if in_a_row and gpu not in layout.ranks]
    return {
        "target": replace(planned_model(model, device=device), by_library=target.kind is not TargetKind.tensor),
        "target_kind": target.kind,
        "target_ranks": layout.target_ranks,
        "spare_devices": tuple(spare),
        "offload": target.offload,
        "max_device_bytes": max_device_bytes(target),
    }


def number_format(model: ModelConfig, *, device: str) -> Dtype:
    """The number format that a model computes in; `auto` where only its files say.

    CPUs have no fast 16-bit arithmetic as a rule. There fp32 is the default, which holds the values of every
    checkpoint, while linear layers of 16-bit files stay in 16 bits (`PlannedModel.matrix_dtype`). Quantized layers are
    the exception: their kernels are faster with 16-bit inputs.

    Args:
        model: its entry; a number format that the user gives is taken as it is.
        device: cpu or cuda.
    """
    if model.dtype is not Dtype.auto:
        return model.dtype
    if device == "cpu" and not format_of(model.quantization).is_quantized:
        return Dtype.fp32
    return _quantized_number_format(model)


def _quantized_number_format(model: ModelConfig) -> Dtype:
    """The number format of a quantized model, on any device; `auto` where only its files say."""
    if model.dtype is not Dtype.auto:
        return model.dtype
    return model.stored_dtype if model.gpu_dtype is Dtype.auto else model.gpu_dtype


def planned_model(model: ModelConfig, *, device: str) -> PlannedModel:
    """Settle a model's shape and number format; a folder's config.json is their only source where the entry has none.

    Args:
        model: its entry.
        device: cpu or cuda.

    Raises:
        ConfigError: there is neither a shape nor a folder.
        CheckpointError: the folder's config.json does not describe a model.
    """
    shape = model.shape
    if shape is None:
        if model.path is None:
            raise ConfigError(f"model={model.name} needs model.path=DIR, a folder with config.json")
        shape, stored = read_config(Path(model.path))
        model = replace(model, stored_dtype=stored)
    dtype = number_format(model, device=device)
    return PlannedModel(
        name=model.name,
        shape=shape,
        dtype=Dtype.fp32 if dtype is Dtype.auto else dtype,
        quantization=model.quantization,
        stored=model.stored_dtype,
        quantized_dtype=_quantized_number_format(model),
    )


_ALIASES = {
    "num_hidden_layers": ("num_layers", "n_layer"),
    "num_attention_heads": ("num_heads", "n_head"),
    "hidden_size": ("n_embd",),
}


def read_config(folder: Path) -> tuple[ModelShape, Dtype]:
    """Read the sizes and the number format of a checkpoint from its config.json.

    Raises:
        CheckpointError: the file is missing, is not JSON, or lacks a size.
        PlacementError: the family is not known.
    """
    file = folder / CONFIG_FILE
    content = read_json(file)
    if isinstance(model_type := content.get("model_type"), str):
        family = family_of(model_type)
    sizes: dict[str, Any] = {}
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings"):
        found = [content[name] for name in (key, *_ALIASES.get(key, ())) if isinstance(content.get(name), int)]
        sizes[key] = found[0] if found else None
    missing = [key for key, value in sizes.items() if value is None or value < 1]
    if missing or not isinstance(model_type, str):
        wanting = ", ".join(missing) or "model_type"
        raise CheckpointError(f"{file} lacks {wanting}: a config.json as save_pretrained writes it is required")
    num_heads = sizes["num_attention_heads"]
    shape = ModelShape(
        model_type=model_type,
        num_key_value_heads=content.get("num_key_value_heads") or num_heads,
        head_dim=content.get("head_dim") or sizes["hidden_size"] // num_heads,
        intermediate_size=content.get("intermediate_size") or 4 * sizes["hidden_size"],
        tie_word_embeddings=bool(content.get("tie_word_embeddings", family.ties_unless_said)),
        **sizes,
    )
    if shape.head_dim < 1:
        wanted = f"at least the {num_heads} of num_attention_heads is required"
        raise CheckpointError(f"{file} has hidden_size {shape.hidden_size}, and {wanted}: copy or download it again")
    stored = str(content.get("dtype") or content.get("torch_dtype") or Dtype.fp32.value)
    return shape, next((dtype for dtype in Dtype if dtype.value == stored), Dtype.fp32)
