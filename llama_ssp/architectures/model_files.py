"""Reads the JSON files of a model folder, and checks their size, their depth and the types of known fields.

Files that a library reads itself are read here first, so that a fault gives one sentence instead of a traceback.
"""

import json
import math
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llama_ssp.catalogue import CONFIG_FILE, GGUF, GGUF_ALONE
from llama_ssp.errors import CheckpointError, shown
from llama_ssp.manifest import absent
from llama_ssp.settings.weight_changes import CHANGES
from llama_ssp.storage.stored import QUANTIZATION
from llama_ssp.types import Parsed

MODELOPT_FILE, GPTQ_FILE = "hf_quant_config.json", "quantize_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
"""Files that the library's tokenizers read; all are optional."""
_MAX_DEPTH = 64  # Nesting of objects and lists; files of published models have fewer than 10 levels.
_MAX_BYTES, _MAX_TOKENIZER_BYTES = 2**26, 2**28  # About ten times the largest published files.
TEXT_PARTS = "text_config", "llm_config", "language_config"
"""Fields that describe the language model of a checkpoint that also reads images or audio."""
INNER_CONFIGS = ("decoder", "generator", "text_config")
"""Inner configs in which transformers searches for settings that a model config itself lacks."""
MISTRAL_ALONE = (
    "holds Mistral's own layout (params.json, consolidated.safetensors), which is not read: use a repository with "
    "config.json and model.safetensors"
)


_FLOATS = [{"__float__": name} for name in ("Infinity", "-Infinity", "NaN")]
Kind = tuple[str, Callable[[Any], bool]]  # What is required of a field, for an error, and whether a value meets it.


def _whole(low: int, high: int) -> Kind:
    return f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high


def _in_layers(low: int, high: int) -> Kind:
    wanted, fits = _whole(low, high)
    return wanted, lambda value: all(map(fits, value)) if isinstance(value, list) else fits(value)


def _number(low: float, high: float) -> Kind:
    wanted = f"a number from {low:g} to {high:g}" if high < math.inf else f"a number of at least {low:g}"
    return wanted, lambda value: type(value) in {int, float} and low <= value <= high


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(isinstance(item, kind) for item in values)


def _is_token_ids(value: object) -> bool:
    return all(type(item) is int and -1 <= item < 2**31 for item in (value if isinstance(value, list) else [value]))


def _is_inner(value: object) -> bool:
    return isinstance(value, dict) and all(_is_token_ids(value.get(name, 0) or 0) for name in _SPECIAL_IDS.split())


def _is_counted_kinds(value: Parsed) -> bool:
    """Whether this is a list of pairs: kinds of attention, and the number of repetitions."""
    _, is_count = _whole(0, _MAX_LAYERS)
    return _are(list, value) and all(len(pair) == 2 and _are(str, pair[0]) and is_count(pair[1]) for pair in value)


def _is_rope(value: object) -> bool:
    """Whether a value has parameters of rotary frequencies, alone or by kind of layer."""
    if not isinstance(value, dict):
        return False
    return all(
        all(isinstance(part.get(name) or "", str) for name in ("rope_type", "type"))
        and all(part.get(name) is None or _POSITIVE[1](part[name]) for name in ("factor", "rope_theta", _ORIGINAL))
        for part in (value, *value.values())
        if isinstance(part, dict)
    )


_MAX_LAYERS = 1024
POSITIONS, _WINDOW = _whole(1, 2**30), _whole(0, 2**30)
_SHARE, LARGE = _number(0, 1), _number(0, 1e12)
_POSITIVE: Kind = ("a number above 0", lambda value: type(value) in {int, float} and 0 < value < math.inf)
_ORIGINAL = "original_max_position_embeddings"
_ROPE: Kind = (
    f"an object with rope_type as a text, {_ORIGINAL} above 0, and factor and rope_theta above 0,",
    _is_rope,
)
FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
TEXT: Kind = ("a text", lambda value: isinstance(value, str))
_TEXTS: Kind = ("a list of texts", partial(_are, str))
OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
_TOKEN_IDS: Kind = ("a token id or a list of them", _is_token_ids)
_SPECIAL_IDS = "bos_token_id eos_token_id pad_token_id decoder_start_token_id"
_OF_EVERY_PART: Mapping[str, Kind] = {
    "model_type": TEXT,
    "rope_theta rotary_emb_base rope_local_base_freq": _POSITIVE,
    "rope_parameters rope_scaling": _ROPE,
}
"""Fields of a config.json, and of the configs in it."""
_FIELDS: Mapping[str, Mapping[str, Kind]] = {
    CONFIG_FILE: {
        "num_hidden_layers num_layers n_layer": _whole(1, _MAX_LAYERS),
        "num_attention_heads num_heads n_head num_key_value_heads num_global_key_value_heads": _whole(1, 2**16),
        "hidden_size n_embd head_dim": _whole(1, 2**20),
        "intermediate_size moe_intermediate_size": _in_layers(1, 2**20),
        "vocab_size": _whole(1, 2**24),
        f"max_position_embeddings {_ORIGINAL}": POSITIONS,
        "sliding_window window_size max_window_layers num_kv_shared_layers": _WINDOW,
        "hidden_size_per_layer_input vocab_size_per_layer_input global_head_dim": _WINDOW,
        "tie_word_embeddings use_cache use_sliding_window attention_bias mlp_bias": FLAG,
        "is_causal use_parallel_residual qk_layernorm attention_k_eq_v use_double_wide_mlp enable_moe_block": FLAG,
        "use_bidirectional_attention": ("true, false, all or vision", {True, False, "all", "vision"}.__contains__),
        "rms_norm_eps layer_norm_eps layer_norm_epsilon rotary_pct partial_rotary_factor": _SHARE,
        "query_pre_attn_scalar": LARGE,
        "attn_logit_softcapping final_logit_softcapping": LARGE,
        "hidden_act hidden_activation activation_function dtype torch_dtype": TEXT,
        "layer_types attention_layers architectures": _TEXTS,
        **_OF_EVERY_PART,
        "per_layer_config": OBJECT,
        " ".join(INNER_CONFIGS): ("an object, with token ids as special tokens,", _is_inner),
        "attention_types": ("a list of pairs of kinds and a count", _is_counted_kinds),
        _SPECIAL_IDS: _TOKEN_IDS,
    },
    GENERATION_CONFIG_FILE: {
        "temperature repetition_penalty encoder_repetition_penalty guidance_scale": LARGE,
        "top_p min_p typical_p epsilon_cutoff eta_cutoff": _SHARE,
        "top_k no_repeat_ngram_size min_length min_new_tokens": _WINDOW,
        "max_length max_new_tokens num_beams num_return_sequences": POSITIONS,
        "do_sample use_cache renormalize_logits remove_invalid_values": FLAG,
        "cache_implementation": TEXT,
        _SPECIAL_IDS: _TOKEN_IDS,
    },
    TOKENIZER_FILE: {"model": OBJECT, "added_tokens": ("a list of objects", partial(_are, dict))},
    TOKENIZER_CONFIG_FILE: {
        "model_max_length": _number(1, math.inf),  # libraries write 10^30 for "no limit", some as a float
        "padding_side truncation_side tokenizer_class": TEXT,
        "model_input_names": _TEXTS,
        "added_tokens_decoder": OBJECT,
        "clean_up_tokenization_spaces": FLAG,
    },
}
"""Fields with a known type, by file; a field may be missing or null."""


def require_folder(folder: Path) -> None:
    """Raise CheckpointError if a model's folder does not exist, or as `refuse_other_kinds` does."""
    if folder.suffix == GGUF and folder.is_file():
        raise CheckpointError(f"{folder} {GGUF_ALONE}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: a folder with config.json and safetensors weights is required")
    refuse_other_kinds(folder)


def refuse_other_kinds(folder: Path) -> None:
    """Raise CheckpointError if a folder without config.json holds a change of weights, or other layouts alone."""
    if not (folder / CONFIG_FILE).exists() and (said := other_kind(str(folder), folder)):
        raise CheckpointError(said)


def other_kind(where: str, folder: Path, names: Iterable[str] = ()) -> str | None:
    """Say what `where` is instead of a model: a folder, or a repository of more `names`; None for nothing known."""
    files = {*names, *(file.name for file in folder.glob("*"))}
    if said := change_alone(where, folder, files):
        return said
    endings = {Path(name).suffix for name in files}
    if GGUF in endings and ".safetensors" not in endings:
        return f"{where} {GGUF_ALONE}"
    return f"{where} {MISTRAL_ALONE}" if "params.json" in files else None


def change_alone(where: str, folder: Path, names: Iterable[str]) -> str | None:
    """Say which change of weights a folder or a repository of these files holds; None for none."""
    for change in CHANGES.all().values():
        if (file := folder / change.config).is_file():
            return change.alone(where, file)
    missing = next(filter(None, (absent("file", name) for name in names)), None)
    return missing and f"{where} is no model, and {missing}"


def read_json(file: Path, kinds: Mapping[str, Kind] = MappingProxyType({})) -> dict[str, Any]:
    """Read a JSON object; CheckpointError if it is unreadable, too large or deep, or has a field of another type.

    `kinds` are the types of the fields of a file that this module does not know.
    """
    try:
        content = json.loads(_read_bytes(file).decode("utf-8"), object_hook=_decoded)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}): a folder as save_pretrained writes it is required"
        ) from error
    except RecursionError as error:
        raise _too_deep(file) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}): copy or download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object: copy or download it again")
    if is_deep(content, _MAX_DEPTH):
        raise _too_deep(file)
    parts = [(content, _FIELDS.get(file.name, kinds))]
    if file.name == CONFIG_FILE:
        parts += [(content[name], _OF_EVERY_PART) for name in INNER_CONFIGS if isinstance(content.get(name), dict)]
    if problems := [
        f"{name} {shown(part[name])}, and {wanted} is required"
        for part, kinds in parts
        for names, (wanted, fits) in kinds.items()
        for name in names.split()
        if part.get(name) is not None and not fits(part[name])
    ]:
        raise CheckpointError(f"{file} has {'; '.join(problems)}: copy or download it again")
    return content


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model, with the quantization that tools write elsewhere; as `read_json`.

    An empty quantization is none.
    """
    content = read_json(folder / CONFIG_FILE)
    others = {name: read_json(file) if (file := folder / name).is_file() else {} for name in (MODELOPT_FILE, GPTQ_FILE)}
    for part in (content, *map(content.get, TEXT_PARTS)):
        if isinstance(part, dict) and QUANTIZATION in part and part[QUANTIZATION] in ({}, None):
            del part[QUANTIZATION]
    elsewhere = {
        "compressed-tensors": content.get("compression_config"),
        "modelopt": others[MODELOPT_FILE].get("quantization"),
        "mlx": content.get("quantization"),
        "gptq": others[GPTQ_FILE],
    }
    for method, found in elsewhere.items():
        if isinstance(found, dict) and found:
            content.setdefault(QUANTIZATION, {**found, "quant_method": method})
    return content


def _decoded(content: dict[str, Any]) -> Parsed:
    """The number that transformers writes as an object, because JSON has none for it; else the object."""
    return float(content["__float__"]) if content in _FLOATS else content


def _read_bytes(file: Path) -> bytes:
    found = file.stat()
    limit = _MAX_TOKENIZER_BYTES if file.name == TOKENIZER_FILE else _MAX_BYTES
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is not a regular file: a folder as save_pretrained writes it is required")
    if found.st_size > limit:
        raise CheckpointError(
            f"{file} has {found.st_size} bytes, and at most {limit} are read: copy or download it again"
        )
    return file.read_bytes()


def is_deep(content: object, most: int) -> bool:
    """Whether more than `most` objects and lists stand inside each other."""
    level = [content]
    for _ in range(most):
        outer = [item for item in level if isinstance(item, dict | list)]
        level = [value for item in outer for value in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, dict | list) for item in level)


def _too_deep(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} is nested more than {_MAX_DEPTH} deep: copy or download it again")


LAYERS_AHEAD = "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"


def num_layers_ahead(field: Callable[[str], Any]) -> int:
    """The layers stored with a model that predict further tokens; `field` gives a field of its config by name."""
    return max((size for name in LAYERS_AHEAD if type(size := field(name)) is int), default=0)
