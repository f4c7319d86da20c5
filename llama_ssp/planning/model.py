"""A model as plans and runs take it: sizes, number format, storage format, and the bytes of keys, values and states.

Sizes of a model that the catalogue lacks are read from its config.json, without the library that wrote it. A plan knows
more models than the engine runs.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.matrices import Inventory, Matrix
from llama_ssp.architectures.reading import read_config, read_stored_format
from llama_ssp.catalogue import CONFIG_FILE, Dtype, ModelConfig, ModelShape, read_path
from llama_ssp.errors import ConfigError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.settings.draft_heads import head_in_target
from llama_ssp.settings.schema import PlanConfig
from llama_ssp.storage.formats import CACHES, NO_QUANTIZATION, OWN_DTYPE, PackedLayout, StorageFormat, format_of
from llama_ssp.storage.stored import StoredFormat
from llama_ssp.text.messages import said

COMPILED_BLOCK = 16
DTYPE_BYTES = {Dtype.fp32: 4, Dtype.bf16: 2, Dtype.fp16: 2}


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model in its final precision; `dtype` is never `auto`, `stored` is `auto` if the files' format is unknown.

    Files that are quantized have a `stored_format`; `quantization` is then the format in which runs keep their linear
    layers. `quantized_dtype` is the number format of the quantized model, where `auto` means `dtype`. With `by_library`
    it runs in the library's modules even if the lean decoder supports its family.
    """

    name: str
    shape: ModelShape
    dtype: Dtype
    quantization: str
    stored: Dtype = Dtype.auto
    quantized_dtype: Dtype = Dtype.auto
    by_library: bool = False
    stored_format: StoredFormat | None = None
    cache_dtype: str = OWN_DTYPE
    folder: str = ""  # name of the folder of an entry that stands for any.

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.folder or self.name

    def __hash__(self) -> int:
        """Shapes have no hash; a search asks for this one thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.dtype, self.quantization, self.stored, self.by_library, self.cache_dtype))

    @cached_property
    def storage(self) -> StorageFormat:
        """The format in which runs keep its linear layers."""
        return format_of(self.quantization)

    @cached_property
    def is_lean(self) -> bool:
        """Whether the lean decoder runs the model."""
        return record_of(self.shape.model_type).is_llama_kind and not self.by_library

    @cached_property
    def num_attention_layers(self) -> int:
        """Layers with keys and values; of a hybrid only some."""
        shape = self.shape
        if not (shape.recurrent and (values := inventory(shape).cached_values)):
            return shape.num_hidden_layers
        return values // (shape.latent_width or 2 * shape.num_key_value_heads * shape.head_dim)

    def slot_bytes(self, num_kv_heads: int, held: Inventory | None = None) -> int:
        """Bytes of the keys and values of a token in the layers `held`, by default all, on a rank with `num_kv_heads`.

        Layers that share the cache of an earlier layer have no bytes of their own. Where global layers have other
        heads, every rank has all heads.
        """
        shape, kinds, held = self.shape, self.shape.layer_kinds, held or inventory(self.shape)
        of_head = partial(CACHES.of(self.cache_dtype).row_bytes, value_bytes=DTYPE_BYTES[self.dtype])
        head_bytes = of_head(shape.head_dim)
        if shape.latent_width:  # a row of each of its parts
            of_layer = of_head(shape.latent_rank) + of_head(shape.qk_rope_head_dim)
            in_all = held.cached_values
            return round((held.num_layers if in_all is None else in_all / shape.latent_width) * of_layer)
        if (values := held.cached_values) is not None:
            is_whole = values % shape.num_key_value_heads
            values = values if is_whole else values * num_kv_heads // shape.num_key_value_heads
            return values * head_bytes // shape.head_dim
        if not kinds:
            return 2 * held.num_layers * num_kv_heads * head_bytes
        of_global = num_kv_heads * shape.num_global_key_value_heads // shape.num_key_value_heads
        of_local = kinds.count("s") * num_kv_heads * head_bytes
        of_all = 2 * (of_local + kinds.count("g") * of_global * of_head(shape.global_head_dim))
        return of_all * held.num_layers // len(kinds)

    def has_latent_kernel(self, hardware: HardwareConfig) -> bool:
        """Whether an operator of the device reads latents, as they are kept; elsewhere torch's operators do."""
        if hardware.device == "cpu":
            return self.shape.latent_rank % engine.LANES == self.shape.qk_rope_head_dim % engine.LANES == 0
        return self.dtype.is_short

    def latent_read_bytes(self, hardware: HardwareConfig) -> int:
        """Bytes that attention to latents reads of a token in all layers; torch's operators read latents twice."""
        once = self.slot_bytes(self.shape.num_key_value_heads)
        sums = self.num_attention_layers * self.shape.latent_rank * DTYPE_BYTES[self.dtype]
        return once if self.has_latent_kernel(hardware) else once + sums

    def state_bytes(self, *num_kept: int, held: Inventory | None = None) -> int:
        """Bytes of the recurrent states of a row: the sum over several places, each of which keeps `num_kept` states.

        They are those of a rank that holds `held`, by default of all ranks together; 0 for a model without such layers.
        """
        value_bytes, states = DTYPE_BYTES[self.dtype], (held or inventory(self.shape)).states
        if not states:
            return 0
        return sum(kept.row_bytes(number, value_bytes=value_bytes) for kept in states for number in num_kept)

    @cached_property
    def has_own_cache(self) -> bool:
        """Whether the cache has another format than the model."""
        return self.cache_dtype not in (OWN_DTYPE, self.dtype.name)

    def unpacks_cache(self, hardware: HardwareConfig) -> bool:
        """Whether attention, of prompts at least, reads a copy of a layer's keys and values in the model's format."""
        is_compiled = hardware.device == "cpu" and self.is_lean
        return self.has_own_cache and not (is_compiled and self.shape.head_dim % engine.LANES == 0)

    def reads_by_length(self, hardware: HardwareConfig) -> bool:
        """Whether a GPU reads its cache by lengths, and prompts of several lengths without padding; else with masks."""
        return (
            hardware.device == "cuda"
            and self.is_lean
            and engine.reads_by_length(
                capability=hardware.capability,
                value_bytes=DTYPE_BYTES[self.dtype],
                head_dim=self.shape.head_dim,
                rounds_inputs=self.storage.rounds_inputs,
            )
        )

    @property
    def weights_name(self) -> str:
        """The format of its linear layers in a table: the quantization's, or the numbers'."""
        storage = self.storage
        return storage.name if storage.is_quantized else self.dtype.name

    @cached_property
    def layout(self) -> PackedLayout | None:
        """The packed layout of files that are kept as they are; None for others."""
        layout = self.stored_format.layout if self.stored_format else None
        return layout if layout and layout.storage == self.quantization else None

    @property
    def setting(self) -> str:
        """The `model.quantization` that a run needs for this model: none if the files are stored in that format."""
        return NO_QUANTIZATION if self.stored_format and self.stored_format.planned else self.quantization

    def can_be(self, quantization: str) -> bool:
        """Whether a quantization is worth trying: files that are quantized already are not quantized again."""
        if self.stored_format is None:
            return quantization == NO_QUANTIZATION or format_of(quantization).change_weight is not None
        return quantization == (self.stored_format.planned or NO_QUANTIZATION)

    def quantized(self, quantization: str) -> "PlannedModel":
        """The same model with quantized linear layers."""
        # Only on a CPU is a model in fp32 that would otherwise be quantized in 16 bits.
        stays = self.dtype is Dtype.fp32 and format_of(quantization).fp32_on_cpus
        dtype = self.dtype if stays or self.quantized_dtype is Dtype.auto else self.quantized_dtype
        return replace(self, quantization=quantization, dtype=dtype)

    def matrix_dtype(self, device: str) -> Dtype:
        """The number format of the linear layers; a CPU keeps weights of 16-bit files in 16 bits even in fp32."""
        is_kept = device == "cpu" and self.dtype is Dtype.fp32 and not self.by_library
        return Dtype.fp16 if is_kept and self.stored.is_short else self.dtype

    def packs(self, matrix: Matrix, device: str) -> bool:
        """Whether a CPU's products use a copy of this unquantized matrix in 16 bits.

        They copy matrices of whole blocks, and any matrix of an fp32 model. A tied output is then a matrix of its own.
        """
        is_block = matrix.num_rows % COMPILED_BLOCK == matrix.num_columns % COMPILED_BLOCK == 0
        is_short = device == "cpu" and self.matrix_dtype(device).is_short and not self.by_library
        return is_short and (is_block or self.dtype is Dtype.fp32)


def resolved(config: PlanConfig) -> PlanConfig:
    """Fill in the shape and the stored number format of models that have only a folder, of any family.

    Raises as `planned_model`.
    """

    def filled(model: ModelConfig) -> ModelConfig:
        found = planned_model(model, device="cpu")
        return replace(model, shape=found.shape, stored_dtype=found.stored)

    draft = replace(config.draft, model=config.draft.model and filled(config.draft.model))
    return replace(config, model=filled(config.model), draft=draft)


def expands_latents(shape: ModelShape, num_positions: int) -> bool:
    """See `engine.expands_latents`."""
    made = shape.qk_nope_head_dim + shape.v_head_dim
    return engine.expands_latents(num_positions, rank=shape.latent_rank, made=made)


def number_format(model: ModelConfig, *, device: str) -> Dtype:
    """The compute number format of a model; `auto` if only its files define it.

    Most CPUs have no fast 16-bit arithmetic. Their default is fp32, which represents all values of a checkpoint, while
    linear layers of 16-bit files stay in 16 bits (`PlannedModel.matrix_dtype`). Some quantized layers are an
    exception, because their kernels are faster with 16-bit inputs.
    """
    if model.dtype is not Dtype.auto:
        return model.dtype
    storage = format_of(model.quantization)
    if device == "cpu" and (storage.fp32_on_cpus or not storage.is_quantized):
        return Dtype.fp32
    return model.stored_dtype if model.gpu_dtype is Dtype.auto else model.gpu_dtype


def planned_model(model: ModelConfig, *, device: str) -> PlannedModel:
    """Resolve a model's shape and number format; an entry without a shape is read from the folder's config.json.

    The config.json of a folder also says how its linear layers are stored. Without a shape and a folder, ConfigError is
    raised; `read_config` says what else is.
    """
    shape = model.shape
    if shape is None:
        if model.path is None:
            raise ConfigError(
                f"{said('model', model.name)} needs {said('model.path', 'DIR')}, a folder with config.json"
            )
        shape, stored = read_config(read_path(model.path), of=head_in_target(model.name))
        model = replace(model, stored_dtype=stored)
    packed = model.stored_format
    if model.path is not None and (read_path(model.path) / CONFIG_FILE).is_file():
        packed = read_stored_format(read_path(model.path), shape)
    if packed and packed.kept:
        shape = replace(shape, modules=inventory(shape).leaving(packed.kept))
    if packed and packed.planned and model.quantization == NO_QUANTIZATION:
        model = replace(model, quantization=packed.planned)
    dtype = number_format(model, device=device)
    return PlannedModel(
        name=model.name,
        shape=shape,
        dtype=Dtype.fp32 if dtype is Dtype.auto else dtype,
        quantization=model.quantization,
        stored=model.stored_dtype,
        quantized_dtype=number_format(model, device="cuda"),
        stored_format=packed,
        cache_dtype=model.cache_dtype,
        folder=model.label,
    )
