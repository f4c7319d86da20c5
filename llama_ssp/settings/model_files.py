"""Reads the JSON files of a model folder, and checks their size, their depth and the types of known fields.

Files that a library reads itself are read here first, so that a fault gives one sentence instead of a traceback.
Required fields and their meaning are checked where they are used. Does not import torch.
"""

import json
import math
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llama_ssp.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
AGREEMENT_FILE = "agreement.json"
"""Of the shipped pair: which noise gives which agreement of synthetic weights."""
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
MAX_DEPTH = 64
"""Nesting of objects and lists; files of published models have fewer than 10 levels."""
MAX_BYTES, MAX_TOKENIZER_BYTES = 2**26, 2**28
"""About ten times the largest published files."""
INNER_CONFIGS = ("decoder", "generator", "text_config")
"""Where transformers searches for settings that a model config itself lacks."""
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Type and range of a field; errors quote `wanted`."""

    wanted: str
    fits: Callable[[Any], bool]


def _whole(low: int, high: int) -> _Kind:
    return _Kind(wanted=f"a whole number from {low} to {high}", fits=lambda value: _is_whole(value, low, high))


def _is_whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _number(low: float, high: float) -> _Kind:
    wanted = f"a number from {low:g} to {high:g}" if high < math.inf else f"a number of at least {low:g}"
    return _Kind(wanted=wanted, fits=lambda value: type(value) in {int, float} and low <= value <= high)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_token_ids(value: object) -> bool:
    return all(_is_whole(item, -1, 2**31 - 1) for item in (value if isinstance(value, list) else [value]))


def _is_counted_kinds(value: object) -> bool:
    """Whether this is a list of pairs: kinds of attention, and the number of repetitions."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and _is_list_of(str, pair[0]) and _is_whole(pair[1], 0, _MAX_LAYERS)  # noqa: PLR2004 - a pair
        for pair in value
    )


_MAX_LAYERS = 1024
_LAYERS, _HEADS = _whole(1, _MAX_LAYERS), _whole(1, 2**16)
_WIDTH, _TOKENS, _POSITIONS = _whole(1, 2**20), _whole(1, 2**24), _whole(1, 2**30)
_WINDOW = _whole(0, 2**30)
_FLAG = _Kind(wanted="true or false", fits=lambda value: isinstance(value, bool))
_TEXT = _Kind(wanted="a text", fits=lambda value: isinstance(value, str))
_TEXTS = _Kind(wanted="a list of texts", fits=partial(_is_list_of, str))
_OBJECT = _Kind(wanted="an object", fits=lambda value: isinstance(value, dict))
_TOKEN_IDS = _Kind(wanted="a token id or a list of them", fits=_is_token_ids)
_SMALL, _SHARE, _LARGE = _number(0, 1), _number(0, 1), _number(0, 1e12)
_SPECIAL_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), _TOKEN_IDS)

_INNER = _Kind(
    wanted="an object, with token ids as special tokens,",
    fits=lambda value: isinstance(value, dict) and all(_is_token_ids(value.get(name, 0) or 0) for name in _SPECIAL_IDS),
)

_CONFIG = (
    dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), _LAYERS)
    | dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "num_key_value_heads"), _HEADS)
    | dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "head_dim"), _WIDTH)
    | {"vocab_size": _TOKENS, "max_position_embeddings": _POSITIONS}
    | dict.fromkeys(("sliding_window", "window_size", "max_window_layers"), _WINDOW)
    | dict.fromkeys(("tie_word_embeddings", "use_cache", "use_sliding_window", "attention_bias", "mlp_bias"), _FLAG)
    | dict.fromkeys(("is_causal", "use_bidirectional_attention", "use_parallel_residual", "qk_layernorm"), _FLAG)
    | dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _SMALL)
    | dict.fromkeys(("rotary_pct", "partial_rotary_factor"), _SHARE)
    | dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "query_pre_attn_scalar"), _LARGE)
    | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _LARGE)
    | dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _TEXT)
    | dict.fromkeys(("dtype", "torch_dtype"), _TEXT)
    | dict.fromkeys(("layer_types", "attention_layers", "architectures"), _TEXTS)
    | dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT)
    | dict.fromkeys(INNER_CONFIGS, _INNER)
    | {"attention_types": _Kind(wanted="a list of pairs of kinds and a count", fits=_is_counted_kinds)}
    | _SPECIAL_IDS
)
_GENERATION = (
    dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), _LARGE)
    | dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _SHARE)
    | dict.fromkeys(("top_k", "no_repeat_ngram_size", "min_length", "min_new_tokens"), _WINDOW)
    | dict.fromkeys(("max_length", "max_new_tokens", "num_beams", "num_return_sequences"), _POSITIONS)
    | dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"), _FLAG)
    | {"cache_implementation": _TEXT}
    | _SPECIAL_IDS
)
_TOKENIZER = {"model": _OBJECT, "added_tokens": _Kind(wanted="a list of objects", fits=partial(_is_list_of, dict))}
_TOKENIZER_CONFIG = {
    "model_max_length": _number(1, math.inf),  # libraries write 10^30 for "no limit", some as a float
    **dict.fromkeys(("padding_side", "truncation_side", "tokenizer_class"), _TEXT),
    "model_input_names": _TEXTS,
    "added_tokens_decoder": _OBJECT,
    "clean_up_tokenization_spaces": _FLAG,
}
_FIELDS: Mapping[str, Mapping[str, _Kind]] = {
    CONFIG_FILE: _CONFIG,
    GENERATION_CONFIG_FILE: _GENERATION,
    TOKENIZER_FILE: _TOKENIZER,
    TOKENIZER_CONFIG_FILE: _TOKENIZER_CONFIG,
}


def require_folder(folder: Path) -> None:
    """Raise CheckpointError if a model's folder does not exist."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: a folder with config.json and safetensors weights is required")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder. Fields with a known type may be missing or null.

    A file that is unreadable, too large or too deep, no object, or has a field of another type raises CheckpointError.
    """
    try:
        content = json.loads(_read_bytes(file).decode("utf-8"))
    except OSError as error:
        message = f"{file} cannot be read ({error.strerror}): a folder as save_pretrained writes it is required"
        raise CheckpointError(message) from error
    except RecursionError as error:
        raise _too_deep(file) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}): copy or download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object: copy or download it again")
    if _is_deep(content):
        raise _too_deep(file)
    problems = [
        f"{name} {shown(content[name])}, and {kind.wanted} is required"
        for name, kind in _FIELDS.get(file.name, {}).items()
        if content.get(name) is not None and not kind.fits(content[name])
    ]
    if problems:
        raise CheckpointError(f"{file} has {'; '.join(problems)}: copy or download it again")
    return content


def shown(value: object) -> str:
    """A value of a file for an error message: as ASCII JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _read_bytes(file: Path) -> bytes:
    found = file.stat()
    limit = MAX_TOKENIZER_BYTES if file.name == TOKENIZER_FILE else MAX_BYTES
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is not a regular file: a folder as save_pretrained writes it is required")
    if found.st_size > limit:
        message = f"{file} has {found.st_size} bytes, and at most {limit} are read: copy or download it again"
        raise CheckpointError(message)
    return file.read_bytes()


def _is_deep(content: object) -> bool:
    level = [content]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _too_deep(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} is nested more than {MAX_DEPTH} deep: copy or download it again")
