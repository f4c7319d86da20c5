"""Records of the model families (`settings.registry`), read by planner, loader, checks and models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from llama_ssp import architectures
from llama_ssp.architectures.matrices import Inventory, decoder
from llama_ssp.settings.registry import Registry
from llama_ssp.settings.schema import ModelShape, WholeParts


def windows_of_layers(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
    """Layers of type `sliding_attention` have the config's window; without types of layers, all have it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one `model_type`."""

    model_type: str
    parameters: Callable[[ModelShape], Inventory]  # lists the parameters of a model of given sizes.
    is_llama_kind: bool = False  # the lean decoder runs it.
    is_head: bool = False  # it is no model, but a draft head that reads hidden states of its target.
    # maps a config of the library to the window of each layer in positions, its own included, None for a layer without
    # one; None if no layer has a sliding window.
    windows: Callable[[Any], tuple[int | None, ...]] | None = None
    # maps what gives a field of a config by name to sizes that this family alone has.
    sizes: Callable[[Callable[[str], Any]], dict[str, Any]] | None = None
    num_masks: int = 1  # masks of a forward that exist at the same time.
    attention: str = "sdpa"  # the library's `attn_implementation`.
    keeps_scores: bool = False  # no fused kernel computes its attention, so a forward keeps the scores of all heads.
    ties_unless_said: bool = False  # default of `tie_word_embeddings` in config.json.
    cuts_vocabulary: bool = False  # the embedding is sharded, whether or not the library's plan says so.
    cuts_own_embedding: bool = False  # also if the embedding is a class of the family itself.
    keeps_attention: bool = False  # every rank computes attention: its norms need the outputs of all heads.
    # tensor-parallel plan, style by module, beside the library's.
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    # `module:function` that compares a checkpoint with its config before the model is built.
    check_files: str | None = None
    adapt: str | None = None  # `module:function` that adds what the library's modules lack.
    is_written: bool = True  # somebody wrote this record; a run checks other families against the library.

    @property
    def name(self) -> str:
        """Key in the registry."""
        return self.model_type

    def windows_of(self, config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
        """The window of each layer, None for one without."""
        return self.windows(config) if self.windows else (None,) * int(config.num_hidden_layers)

    def attention_pair_bytes(self, *, num_heads: int, value_bytes: int) -> int:
        """Bytes that a forward keeps per pair of position and cache slot.

        The masks and, without a fused kernel, the scores of all heads, also in fp32.
        """
        scores = num_heads * (value_bytes + 4) if self.keeps_scores else 0
        return 1 + self.num_masks * value_bytes + scores


FAMILIES: Registry[Family] = Registry(setting="model_type", package=architectures.__name__, kind=Family)
register, families = FAMILIES.register, FAMILIES.all


def record_of(model_type: str) -> Family:
    """The record of a family; one without a record has the parameters of a Llama of its sizes in plans."""
    found = FAMILIES.find(model_type)
    return found or Family(model_type=model_type, parameters=decoder, windows=windows_of_layers, is_written=False)


_SAME_TEXT = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_LIKE_TEXT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""Text models of families with images, and such families whose files have the fields of the text model on top."""
_OF_BOTH = (
    "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
    "pad_token_id", "auto_map", "trust_remote_code",
)  # fmt: skip


def text_part(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder of text; that of a text model is all of it."""
    text = content.get("text_config")
    model_type = content.get("model_type")
    if isinstance(text, dict) and isinstance(text.get("model_type"), str):
        shared = {name: content[name] for name in _OF_BOTH if name in content}
        return shared | text | {"model_type": _SAME_TEXT.get(text["model_type"], text["model_type"])}
    return {**content, "model_type": _LIKE_TEXT[model_type]} if model_type in _LIKE_TEXT else content


def num_positions(field: Callable[[str], Any]) -> Any:  # noqa: ANN401 - a field of a config
    """The positions that a model is read at, from the fields of a config: those with one set of rotary frequencies.

    LongRoPE has a second set for longer texts, which would turn all positions anew (arXiv:2402.13753).
    """
    rope = field("rope_parameters") or field("rope_scaling") or {}
    if isinstance(rope, dict) and LONGROPE in {rope.get("rope_type"), rope.get("type")}:
        return field("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return field("max_position_embeddings")


LONGROPE = "longrope"


def kept_whole(shape: ModelShape, whole: WholeParts) -> WholeParts:
    """What every rank of a model holds whole: what was asked for, and what its family cannot cut."""
    has_others = shape.num_global_key_value_heads not in {0, shape.num_key_value_heads}  # which split elsewhere
    return WholeParts.attention if has_others or record_of(shape.model_type).keeps_attention else whole


def inventory(shape: ModelShape) -> Inventory:
    """List the parameters of a model."""
    return _inventory(record_of(shape.model_type).parameters, tuple(vars(shape).items()))


@lru_cache(maxsize=512)  # a search asks for the same models thousands of times
def _inventory(parameters: Callable[[ModelShape], Inventory], sizes: tuple[tuple[str, Any], ...]) -> Inventory:
    return parameters(ModelShape(**dict(sizes)))
