"""Reads the sizes of a model from its config.json, by the names and the defaults of its family.

`kinds.json` has both of all kinds that transformers 5.23 continues a text with; a test compares it with the library's
configuration classes. `weights.checkpoint` reads the library's own configurations with the same functions.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_ssp.architectures.experts import expert_sizes, first_size
from llama_ssp.architectures.family import (
    check_kind,
    check_ranks,
    check_servable,
    inventory,
    kinds,
    library_of,
    num_positions,
    record_of,
    text_part,
)
from llama_ssp.architectures.model_files import read_json, read_model_config, refuse_other_kinds, require_folder
from llama_ssp.catalogue import CONFIG_FILE, Dtype, ModelShape
from llama_ssp.errors import CheckpointError, ConfigError, PlacementError, SspError
from llama_ssp.registry import imported
from llama_ssp.settings.draft_heads import DraftHead, Field, head_file
from llama_ssp.storage.formats import PackedLayout
from llama_ssp.storage.stored import QUANTIZATION, StoredFormat, layout_of, stored_format
from llama_ssp.types import Parsed

_NAMES = {
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "num_heads", "attention_heads", "n_head", "n_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": (
        "intermediate_size_mlp",
        "block_ff_dim",
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
    ),
    "vocab_size": ("vocab_size",),
}
"""Names of a size in the files of different families."""


def fields_of(content: Mapping[str, Any]) -> Field:
    """The fields of a config.json as the library reads them."""
    kind = kinds().get(str(content.get("model_type")), {})
    names, defaults = kind.get("names", {}), kind.get("defaults", {})

    def field(name: str) -> Parsed:
        stored = names.get(name) if names.get(name) in content else name
        return content[stored] if stored in content else defaults.get(name)

    return field


def shape_from(field: Field, *, ties: bool, derives_units: bool = True) -> ModelShape:
    """The sizes of a model; sizes that a config does not have are derived from its other fields.

    The head is the embedding if it `ties` them. With `derives_units` a config without `intermediate_size` has four
    times the model's width. Raises KeyError with the names of the sizes that it lacks.
    """
    sizes: dict[str, Any] = {key: first_size(field, *names) for key, names in _NAMES.items()}
    sizes["num_hidden_layers"] = sizes["num_hidden_layers"] or len(field("layers_block_type") or ())
    if missing := [key for key, size in sizes.items() if not (size or (derives_units and key == "intermediate_size"))]:
        raise KeyError(", ".join(missing))
    num_heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    shares_keys = field("multi_query") and not field("new_decoder_architecture")
    model_type, of_keys = field("model_type"), field("num_key_value_heads") or field("num_kv_heads")
    record = record_of(model_type)
    return ModelShape(
        model_type=model_type,
        tie_word_embeddings=ties,
        num_key_value_heads=1 if shares_keys else of_keys or num_heads,
        max_position_embeddings=num_positions(field),
        **{"head_dim": field("head_dim") or width // num_heads} | _latent_sizes(field, width // num_heads),
        **sizes | {"intermediate_size": sizes["intermediate_size"] or 4 * width},
        **expert_sizes(field, num_layers=sizes["num_hidden_layers"]),
        **(record.sizes(field) if record.sizes else {}),
        recurrent=next(iter(record.recurrent), ""),
    )


def _latent_sizes(field: Field, head_dim: int) -> dict[str, int]:
    """The sizes of attention to latents, whose heads the library gives the width of what has positions; else none."""
    if not (rank := field("kv_lora_rank")):
        return {}
    rope, nope, value_dim = (field(name) or 0 for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    return {
        "latent_width": rank + rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value_dim or head_dim,
        **({"head_dim": rope} if rope else {}),
    }


def read_config(folder: Path, *, describes: bool = True, of: DraftHead | None = None) -> tuple[ModelShape, Dtype]:
    """Read the sizes and the number format of a checkpoint from its config.json.

    A file that is missing, not JSON, or without a size raises CheckpointError, a family that is not read
    PlacementError. The sentence of a run that refuses the model is in `refusal`. If a plan `describes` it, a family
    without a record has the modules of the library, where that is installed. With `of` the sizes are of a head of this
    kind in the files of its target, which needs the library.
    """
    file = folder / CONFIG_FILE
    refuse_other_kinds(folder)
    content: Mapping[str, Any] = read_model_config(folder)
    head = head_file(content, file)
    whole, content = content, text_part(content) if head is None else head.sizes
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise _incomplete(file, "model_type")
    if head is None:
        check_kind(whole, file)
    family, is_known = record_of(model_type), model_type in kinds()
    if not is_known and isinstance(text := content.get("text_config"), dict):  # which has no model_type of its own
        content = {**content, **text}
    field = fields_of(content)
    by_library = not family.is_written and (describes or not is_known)
    shape, refusal = _by_modules(folder, model_type) if by_library else (None, "")
    shape = _servable(field, file, shape, refusal, is_known=is_known)
    if family.modules and shape.modules is None and head is None:
        shape = replace(shape, modules=family.modules(field, shape))
    if shape.head_dim < 1:
        wanted = f"at least the {shape.num_attention_heads} of num_attention_heads is required"
        raise CheckpointError(f"{file} has hidden_size {shape.hidden_size}, and {wanted}: copy or download it again")
    shape = shape if head is None else head.shape_over(shape)
    if of:
        shape = imported(of.describe, setting=f"draft={of.name}")(folder)
    layout = layout_of(content.get(QUANTIZATION))
    unsaid_dtype = Dtype.bf16 if isinstance(layout, PackedLayout) else Dtype.fp32
    stored = str(content.get("dtype") or content.get("torch_dtype") or unsaid_dtype.value)
    return shape, next((dtype for dtype in Dtype if dtype.value == stored), Dtype.fp32)


def _servable(field: Field, file: Path, shape: ModelShape | None, refusal: str, *, is_known: bool) -> ModelShape:
    """The sizes of a config, by its fields where the library gave none, with the sentence of a run that refuses it."""
    model_type, said = field("model_type"), ""
    try:
        check_servable(field)
    except ConfigError as error:
        refusal = said = str(error)
    try:
        shape = shape or shape_from(field, ties=bool(field("tie_word_embeddings")), derives_units=is_known)
    except KeyError as error:
        if record_of(model_type).is_written:
            raise _incomplete(file, error.args[0]) from None
        raise PlacementError(
            said or f"no plan for {model_type} models: {file} does not give {error.args[0]}, as a Llama's would"
        ) from None
    return replace(shape, refusal=refusal)


def _by_modules(folder: Path, model_type: str) -> tuple[ModelShape | None, str]:
    """The sizes and modules of a checkpoint by the library, or why it has none; nothing without the library."""
    try:
        describe = imported(library_of(model_type).describe, setting="a plan")
    except ConfigError:
        return None, ""
    try:
        return describe(folder), ""
    except SspError as error:
        return None, str(error)


def read_stored_format(folder: Path, shape: ModelShape) -> StoredFormat | None:
    """The storage of linear layers by config.json, None if it says nothing; CheckpointError for a faulty file."""
    held = inventory(shape)
    layers = [
        [one.named(number) for one in held.by_layer(number).layer if one.name] for number in range(held.num_layers)
    ]
    return stored_format(
        text_part(read_model_config(folder)),
        layers=layers,
        head="" if shape.tie_word_embeddings else "lm_head",
        has_odd_experts=shape.num_experts > 0 and not record_of(shape.model_type).gates_experts,
    )


def check_readable(
    folder: Path, quantization: str, *, num_ranks: int = 1, of: DraftHead | None = None
) -> ModelShape | None:
    """Check by config.json alone that runs read a checkpoint, with this quantization, on `num_ranks`.

    Returns the sizes of a model or a head; with `of` such a head in its files alone is checked. Raises what
    `read_config` does, CheckpointError for weights that cannot be read, and ConfigError for another quantization than
    the stored one. A file without a family is left to the run.
    """
    require_folder(folder)
    content = read_json(folder / CONFIG_FILE)
    if of:
        of.check(fields_of(text_part(content)), folder)
    elif head_file(content, folder / CONFIG_FILE):
        return read_config(folder)[0]
    elif isinstance(content.get("model_type"), str):
        shape, _ = read_config(folder, describes=False)
        if shape.refusal:
            raise ConfigError(shape.refusal)
        check_ranks(shape.model_type, num_ranks)
        if stored := read_stored_format(folder, shape):
            stored.kept_format(quantization, where=folder)
        return shape
    return None


def _incomplete(file: Path, missing: str) -> CheckpointError:
    return CheckpointError(f"{file} lacks {missing}: a config.json as save_pretrained writes it is required")
