"""Records of the model families (`registry`), read by planner, loader, checks and models.

Which models run, and on how many ranks, follows from config.json alone: a plan says it, and a run before its ranks
start. The tables hold what transformers 5.23 has; a test compares them with it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast

from llama_ssp import architectures
from llama_ssp.architectures.matrices import Cut, Inventory, WholeParts
from llama_ssp.architectures.model_files import TEXT_PARTS
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError, PlacementError, shown
from llama_ssp.manifest import absent
from llama_ssp.registry import Registry
from llama_ssp.types import LibraryPart, Parsed


@cache
def kinds() -> Mapping[str, Mapping[str, Any]]:
    """Facts by kind: `names` of fields that its files rename, `defaults` of absent ones, and what bars it from runs.

    `without_plan`: neither the library nor a record of ours has a tensor-parallel plan. `is_encoder`: it is one unless
    its files say `is_decoder`. `fails`: why it does not run with the static cache. Of a model that also reads images
    or audio, `text` is the kind of its text part, empty if no text of it was seen equal to the library's.
    """
    found: dict[str, Any] = json.loads((files(__package__) / "kinds.json").read_text())
    return found


class Chunk(int):
    """A window that begins at the last multiple of its size, not that many positions before each token."""


_SLIDING, _FULL, _CHUNKED = "sliding_attention", "full_attention", "chunked_attention"


def windows_of_layers(config: LibraryPart) -> tuple[int | None, ...]:
    """Layers that slide or have chunks have the config's; without types of layers, all slide."""
    size = getattr(config, "attention_chunk_size", None)
    windows = {_SLIDING: getattr(config, "sliding_window", None), _CHUNKED: Chunk(size) if size else None}
    return tuple(map(windows.get, getattr(config, "layer_types", None) or [_SLIDING] * int(config.num_hidden_layers)))


def with_slots(config: LibraryPart) -> list[int]:
    """The layers that have keys and values; layers of a kind `hybrid` have a state as well."""
    kinds = getattr(config, "layer_types", None) or [""] * int(config.num_hidden_layers)
    without = {*record_of(config.model_type).recurrent} - {"hybrid"}
    return [number for number, kind in enumerate(kinds) if kind not in without]


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one `model_type`."""

    model_type: str
    parameters: Callable[[ModelShape], Inventory]  # lists the parameters of a model of given sizes.
    is_llama_kind: bool = False  # the lean decoder runs it.
    # modules of a Llama kind that have biases, by the field of its config that says so; none: as in `parameters`.
    biased_by: Mapping[str, Collection[str]] = field(default_factory=dict)
    norms_heads: bool = False  # query and key heads of a Llama kind are normed.
    is_head: bool = False  # it is no model, but a draft head that reads hidden states of its target.
    in_one_pass: bool = False  # such a head drafts all tokens of a round in one forward.
    # maps a config of the library to the window of each layer in positions, its own included, or its `Chunk`, None for
    # a layer without one; None if no layer has any.
    windows: Callable[[Any], tuple[int | None, ...]] | None = None
    # maps what gives a field of a config by name to sizes that this family alone has.
    sizes: Callable[[Callable[[str], Any]], dict[str, Any]] | None = None
    num_masks: int = 1  # masks of a forward that exist at the same time.
    attention: str = "sdpa"  # the library's `attn_implementation`.
    keeps_scores: bool = False  # no fused kernel computes its attention, so a forward keeps the scores of all heads.
    cuts_vocabulary: bool = False  # the embedding is sharded, whether or not the library's plan says so.
    cuts_own_embedding: bool = False  # also if the embedding is a class of the family itself.
    # kinds of layers without keys and values: they keep a state (`models.states`), or nothing; `hybrid` ones keep both.
    recurrent: tuple[str, ...] = ()
    gates_experts: bool = True  # as storage formats need: no kernel has others.
    gates_queries: bool = False  # the matrix of queries also makes a gate of each head, after it.
    has_stages: bool = True  # a layer reads of earlier ones only the hidden states of the one before it.
    num_layer_outputs: int = 0  # values of the tuple that the library's layers return; 0 for hidden states alone.
    keeps_attention: bool = False  # every rank computes attention: its norms need the outputs of all heads.
    # tensor-parallel plan, style by module, beside the library's.
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    # units of modules by the ends of their names, where these do not say them.
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    turned: tuple[str, ...] = ()  # ends of the names of matrices whose inputs come first in its files.
    # `module:function` that compares a checkpoint with its config before the model is built.
    check_files: str | None = None
    adapt: str | None = None  # `module:function` that adds what the library's modules lack.
    # lists the parameters of a model by the fields of its config; a shape has too few sizes of some families.
    modules: Callable[[Callable[[str], Any], ModelShape], Inventory] | None = None
    is_written: bool = True  # a record written by hand; a run checks other families against the library.

    @property
    def name(self) -> str:
        """Key in the registry."""
        return self.model_type

    def windows_of(self, config: LibraryPart) -> tuple[int | None, ...]:
        """The window of each layer, None for one without."""
        return self.windows(config) if self.windows else (None,) * int(config.num_hidden_layers)

    def attention_pair_bytes(self, *, num_heads: int, value_bytes: int) -> int:
        """Bytes per pair of position and cache slot: masks and, without a fused kernel, all scores, also in fp32."""
        scores = num_heads * (value_bytes + 4) if self.keeps_scores else 0
        return 1 + self.num_masks * value_bytes + scores


def layer_plan(
    part: str, columns: Collection[str], rows: Collection[str], *, layers: str = "model.layers"
) -> dict[str, str]:
    """The tensor-parallel plan of a part of each layer, or of a layer without parts, by the names of its modules."""
    styles = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
    return {".".join(filter(None, (f"{layers}.*", part, name))): style for name, style in styles.items()}


VOCABULARY_PLAN = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}

FAMILIES: Registry[Family] = Registry(setting="model_type", modules=(architectures.__name__,), kind=Family)
register, families = FAMILIES.register, FAMILIES.all


def record_of(model_type: str) -> Family:
    """The record of a family."""
    found = FAMILIES.records.get(model_type) or FAMILIES.find(model_type)
    return found or library_of(model_type).record(model_type)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelLibrary:
    """A library of model definitions, whose own modules run the kinds that the lean decoder does not.

    Code is named as `module:function`, and imported when a model is described, checked or loaded.
    """

    name: str
    record: Callable[[str], Family]  # of a kind that has none.
    describe: str  # reads the `ModelShape` of a folder, with its modules, from its config.json.
    with_modules: str  # makes a `weights.source.WeightSource` whose shape has the modules, of one without.
    join: str  # joins stored tensors that its modules have as one, by name, of a folder.
    match: str  # makes the `models.loading.MatchedLibrary` of a source, on `num_ranks` that hold some parts `whole`.
    load: str  # makes the `models.runner.Runner` of a `models.weights.Loading`.


LIBRARIES: Registry[ModelLibrary] = Registry(setting="model_type", kind=ModelLibrary)


def library_of(model_type: str) -> ModelLibrary:
    """The library that runs a kind; ConfigError if this installation has none."""
    found = next(iter(LIBRARIES.all().values()), None)
    if found is None:
        raise ConfigError(absent("model_type", model_type) or f"no library runs {model_type} models here")
    return found


_SAME = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "mimo": "qwen2",
    "kimi_k2": "deepseek_v3",
    "gpt-sw3": "gpt2",
}
"""Kinds that equal another: text parts whose tokens have three positions, other names, a Qwen 2 with MTP layers."""
_TIES = "tie_word_embeddings"
_OF_BOTH = (
    _TIES,
    "quantization_config",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "auto_map",
    "trust_remote_code",
)


def _holder(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that contains the text part: for a model that also speaks, its thinker."""
    holder = content.get("thinker_config", content)
    return holder if isinstance(holder, dict) else content


def text_part(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder of text; all of a text model's.

    A part without a kind, and fields of a text part on top, are of the kind that transformers gives the part.
    """
    holder = _holder(content)
    unsaid = kinds().get(str(holder.get("model_type")), {}).get("text")
    text = next((holder[name] for name in TEXT_PARTS if isinstance(holder.get(name), dict)), None)
    part = content
    if text is not None and isinstance(kind := text.get("model_type") or unsaid, str):
        both = {name: content[name] for name in _OF_BOTH if name in content}
        ties = {name: holder[name] for name in (_TIES,) if holder.get(name) is not None}
        part = {**both, **text, **ties, "model_type": kind}
    elif text is None and unsaid:
        part = {**content, "model_type": unsaid}
    model_type = part.get("model_type")
    same = _SAME.get(str(model_type))
    if part is content and same is None:
        return content
    ropes = {name: part[name] for name in ("rope_scaling", "rope_parameters") if isinstance(part.get(name), dict)}
    # Tokens of text have one position in place of three, which turn all parts of a head alike.
    one = {
        name: {key: "default" if each == "mrope" else each for key, each in rope.items()}
        for name, rope in ropes.items()
    }
    return {**part, "model_type": same or model_type, **one}


_LACKED: Mapping[str, Collection[str]] = {
    "routed_expert_hidden_size": (),
    "attn_res_block_size": (),
    "mla_use_output_gate": (),
    "moe_latent_size": ("nemotron_h",),
}
"""Fields that add parts to a model, and the kinds that transformers has these parts of."""
_DECODERS = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the library's classes that continue a text."""
_OTHER_PARTS = "vision_config", "audio_config"


def check_kind(content: Mapping[str, Any], where: object) -> None:
    """Raise PlacementError for a model that transformers continues no text with, by its config.json alone.

    Kinds that are unknown here are left to the installed transformers.
    """
    part, classes, whole = text_part(content), content.get("architectures") or [], _holder(content).get("model_type")
    if isinstance(whole, str) and not kinds().get(whole, {}).get("text", whole):
        raise PlacementError(
            f"{where} has a {whole} model, whose text part is not compared with transformers': a text model is "
            "required, or a model that reads images or audio of docs/guides/models.md"
        )
    model_type = part.get("model_type")
    set_fields = {name: kinds_of for name, kinds_of in _LACKED.items() if part.get(name)}
    if lacked := [name for name, kinds_of in set_fields.items() if model_type not in kinds_of]:
        said = ", ".join(f"{name} {shown(part[name])}" for name in lacked)
        raise PlacementError(f"{where} has {said}, which transformers' {model_type} models lack: {OTHER}")
    if not isinstance(model_type, str) or model_type in kinds() or record_of(model_type).is_written:
        return
    if part is not content or any(name in content for name in _OTHER_PARTS):
        raise PlacementError(
            f"{where} has a text model of kind {shown(model_type)} inside a {content.get('model_type')} model, and "
            "transformers has no causal language model for this part alone: a text model is required, or one that "
            "reads images too with a text part of docs/guides/models.md"
        )
    if content.get("is_encoder_decoder") or (classes and not any(name.endswith(_DECODERS) for name in classes)):
        named = f" ({', '.join(classes)})" if classes else ""
        raise PlacementError(f"{model_type} models{named} do not continue a text token by token: a decoder is required")


def num_positions(field: Callable[[str], Any]) -> Parsed:
    """The number of positions that a model is read at, from a config's fields: with one set of rotary frequencies.

    LongRoPE has a second set for longer texts, which would turn all positions again (arXiv:2402.13753).
    """
    rope = field("rope_parameters") or field("rope_scaling") or {}
    if isinstance(rope, dict) and "longrope" in {rope.get("rope_type"), rope.get("type")}:
        return field("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return field("max_position_embeddings") or field("max_seq_len") or 2**17  # without a limit


def kept_whole(shape: ModelShape, whole: WholeParts) -> WholeParts:
    """Parts that every rank of a model holds whole: the ones asked for, and the ones its family cannot cut."""
    record = record_of(shape.model_type)
    has_others = shape.num_global_key_value_heads not in {0, shape.num_key_value_heads}  # which split elsewhere
    if has_others or record.keeps_attention:
        return WholeParts.attention
    # A head embeds more tokens than it drafts.
    return WholeParts.embedding if record.is_head and whole is WholeParts.none else whole


def inventory(shape: ModelShape) -> Inventory:
    """List the parameters of a model."""
    if shape.modules is not None:
        return cast("Inventory", shape.modules)
    return _inventory(record_of(shape.model_type).parameters, tuple(vars(shape).items()))


@lru_cache(maxsize=512)  # a search asks for the same models thousands of times
def _inventory(parameters: Callable[[ModelShape], Inventory], sizes: tuple[tuple[str, Any], ...]) -> Inventory:
    return parameters(ModelShape(**dict(sizes)))


_STATES = "whose states do not roll back here"
_COMPRESSED = "whose tokens read blocks of slots in compressed form"
_OTHER_LAYERS = {
    "linear_attention": (
        _STATES,
        (
            "bailing_hybrid",
            "falcon_mamba",
            "jamba",
            "mamba",
            "mamba2",
            "minimax",
            "qwen4_exp_text",
            "recurrent_gemma",
            "zamba",
            "zamba2",
        ),
    ),
    "indexed_attention": (
        "whose tokens read slots that an index of the layer's own chooses",
        ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    ),
    "hybrid": (_STATES, ("inkling2_text", "inkling_text", "zamba", "zamba2", "zaya")),
    "conv": (_STATES, ("lfm3",)),
    _CHUNKED: ("whose tokens see no position before their own chunk", ()),
    "compressed_sparse_attention": (_COMPRESSED, ("deepseek_v4",)),
    "heavily_compressed_attention": (_COMPRESSED, ("deepseek_v4",)),
    "wkv": (_STATES, ("rwkv",)),
    "mlstm": (_STATES, ("xlstm",)),
}
"""Layers that the static cache has no place for: why they do not run, and the families whose files need not list them.

Families whose record names such layers run.
"""
_STATES_OF = {
    **dict.fromkeys(("falcon_mamba", "jamba", "zamba"), "Mamba 1"),
    "zamba2": "Mamba 2 with shared attention blocks",
    "minimax": "lightning attention",
    "recurrent_gemma": "RG-LRU",
}
"""Recurrences that are not known here, in families whose files call them otherwise."""
_SAME_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers by their names in older files."""
_ROPE_TYPES = (
    "default",
    "dynamic",
    "linear",
    "llama3",
    "longrope",
    "proportional",
    "yarn",
    "ntk_alpha",
    "su",
    "xdrope",
)
"""Rotary frequencies that transformers knows; the last three are names of single families."""
_ACTIVATIONS = (
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "prelu",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "sqrtsoftplus",
    "swish",
    "tanh",
    "xielu",
)
"""Activations of MLPs that transformers knows."""
OTHER = "one of the families of docs/guides/models.md is required"


def check_servable(field: Callable[[str], Any]) -> None:
    """Reject models whose attention is not causal over the latest positions of a row, or over all of them.

    `field` gives a field of a config by name, None if there is none. ConfigError if the family's sliding windows are
    not supported, or it has layers without keys and values or bidirectional attention.
    """
    model_type, context, window = field("model_type"), field("max_position_embeddings"), field("sliding_window")
    model = f"{model_type} model"
    unsaid = [kind for kind, (_, names) in _OTHER_LAYERS.items() if model_type in names] or [_SLIDING]
    record = record_of(model_type)
    layers = {_SAME_LAYERS.get(kind, kind) for kind in field("layer_types") or unsaid}
    if not record.windows and _SLIDING in layers and window and context and window < context:
        windowed = [name for name, family in families().items() if family.windows]
        raise ConfigError(
            f"this {model} has sliding windows of {window} tokens in a context of {context}, which are supported for "
            f"{', '.join(sorted(windowed))} (max_position_embeddings={window} in its config.json would do)"
        )
    other = sorted(layers - {_SLIDING, _FULL, *(() if record.is_written else (_CHUNKED,)), *record.recurrent})
    if other:
        reason, _ = _OTHER_LAYERS.get(other[0], ("which the cache has no place for", ()))
        if model_type in _STATES_OF:
            other[-1] += f" ({_STATES_OF[model_type]})"
        raise ConfigError(
            f"this {model} has layers of kind {', '.join(other)}, {reason}: sliding_attention, full_attention or a "
            "recurrent family of docs/guides/models.md is required"
        )
    # Of "vision", only images are read in both directions.
    facts = kinds().get(model_type, {})
    is_encoder = "is_encoder" in facts and not field("is_decoder")
    if is_encoder or field("use_bidirectional_attention") not in {None, False, "vision"} or field("is_causal") is False:
        wanted = "is_decoder=true" if is_encoder else "use_bidirectional_attention=false and is_causal=true"
        raise ConfigError(f"this {model} attends in both directions, and {wanted} is required")
    if field("alibi"):
        raise ConfigError(
            f"this {model} has alibi=true, a bias of scores by distance, which the static cache's masks lack: {OTHER}"
        )
    rope = field("rope_parameters") or field("rope_scaling") or {}
    _check_names(model, field, (rope, *(values for values in rope.values() if isinstance(values, dict))))
    if record.is_llama_kind and rope and all(isinstance(values, dict) for values in rope.values()):
        raise ConfigError(
            f"this {model} has rope_parameters for {', '.join(rope)}, and its layers have one set: write the fields of "
            "one of them, such as rope_type, in rope_parameters itself"
        )
    if failure := facts.get("fails"):
        raise ConfigError(f"{model_type} models do not run with the static cache ({failure}): {OTHER}")


def _check_names(model: str, field: Callable[[str], Any], ropes: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError for functions that transformers lacks."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if isinstance(act := field(name), str) and act not in _ACTIVATIONS:
            raise ConfigError(f"this {model} has {name} {act!r:.60}: {', '.join(_ACTIVATIONS)} is required")
    for rope in ropes:
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in _ROPE_TYPES:
            raise ConfigError(f"this {model} has rope_type {rope_type!r:.60}: {', '.join(_ROPE_TYPES[:7])} is required")


def check_ranks(model_type: str, num_ranks: int) -> None:
    """Raise PlacementError for a family that runs on fewer ranks: no tensor-parallel plan can be followed."""
    if num_ranks > 1 and kinds().get(model_type, {}).get("without_plan"):
        raise PlacementError(no_plan(model_type, num_ranks))


def no_plan(model_type: str, num_ranks: int) -> str:
    """The sentence for a family without a tensor-parallel plan."""
    return f"{model_type} has no tensor-parallel plan: run it on one rank, not on {num_ranks}"
