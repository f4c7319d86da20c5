"""Finds the kind of draft head that a config.json describes, by `architectures`; refuses unknown kinds by name.

A class or a type of `speculators` whose name ends in a version that is unknown here is not taken for an older kind, nor
is a file with a field that no kind here has. Imports no torch.
"""

import json
import pickletools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from llama_ssp.errors import CheckpointError

EAGLE3, PEAGLE, DFLASH, DSPARK, DFLASH2 = "eagle3", "peagle", "dflash", "dspark", "dflash2"
KINDS = EAGLE3, PEAGLE, DFLASH, DSPARK, DFLASH2
SPECULATOR, MASK_OF_PAIRS, BLOCKS = "speculators_model_type", "ptd_token_id", "dflash_config"
DEEPSPEC = "Qwen3DSparkModel"
_CLASS = re.compile(r"(dflash|dspark|p-?eagle|eagle)[-_]?(\d*)", re.IGNORECASE)
_SAME_VERSION = {"dflash1": DFLASH, "p-eagle": PEAGLE}
_OF_SELECTOR = {"selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"}
_OF_SPARK = {
    "projector_type",  # of SpecForge, which says the kind once more
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
}
_OWN_FIELDS = {DFLASH2: _OF_SELECTOR, DSPARK: _OF_SPARK}
"""Fields that only one kind has, by kind."""
_OWN_WORDS = ("selector_", "conv_", "candidate_", "markov_", "enable_confidence_", "confidence_")
"""Beginnings of the names of such fields, also in files of kinds to come."""
_OF_BLOCKS = {
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "causal",
    "use_swa",
    "attention_sink_bias",
}
_OTHER_HEADS = {
    r".*medusa.*": "Medusa heads",
    r"mlp|.*mlp_?speculator.*": "an MLP speculator",
    r"eagle(model)?|.*forcausallmeagle": "a head of EAGLE-1 or 2",
    r"\w+_assistant|\w+assistantforcausallm": "an assistant, which reads the keys and values of its target's cache",
}
"""Names of heads that are not supported, by patterns of what their files call them."""
_EAGLE = {"fc.weight", "layers.0.mlp.up_proj.weight"}
"""Tensors of a head of EAGLE-1 or 2, whose config.json is mostly that of a Llama of one layer."""
_MAX_HEADER_BYTES = 2**20
HEADS_READ = (
    "of draft heads those of EAGLE-3, P-EAGLE, DFlash and DSpark are read: give one of them in safetensors, or another "
    "draft"
)


def refuse_other_heads(content: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError for the config.json of a draft head of a kind that is not read."""
    named = [str(content.get(SPECULATOR)), str(content.get("model_type")), *classes_of(content)]
    named += ["medusa"] * ("medusa_num_heads" in content)
    says = not content.keys().isdisjoint({"draft_vocab_size", SPECULATOR, BLOCKS}) or any(map(_CLASS.search, named[2:]))
    if content.get("num_hidden_layers") == 1 and not says:
        named += ["eagle"] * (_names_in(file.parent) >= _EAGLE)
    for name in named:
        for pattern, what in _OTHER_HEADS.items():
            if re.fullmatch(pattern, name.lower()):
                raise CheckpointError(f"{file} describes {what}, and {HEADS_READ}")


def _names_in(folder: Path) -> set[str]:
    """Return names of tensors and other texts in a folder's file of weights, without running it; none if unreadable."""
    try:
        if (pickled := folder / "pytorch_model.bin").is_file():
            with ZipFile(pickled) as stored:
                found = [each for each in stored.infolist() if each.filename.endswith("/data.pkl")]
                parts = [stored.read(each) for each in found if each.file_size <= _MAX_HEADER_BYTES]
            return {text for part in parts for _, text, _ in pickletools.genops(part) if isinstance(text, str)}
        with (folder / "model.safetensors").open("rb") as file:
            return set(json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))))
    except Exception:  # noqa: BLE001 - whatever a damaged file raises
        return set()


def classes_of(content: Mapping[str, Any]) -> list[str]:
    """The classes of `architectures`."""
    return [str(name) for name in content.get("architectures") or []]


def fields_of_blocks(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of `dflash_config`; none without it."""
    blocks = content.get(BLOCKS)
    return blocks if isinstance(blocks, dict) else {}


def kind_of(content: Mapping[str, Any], file: Path) -> str | None:
    """The kind of a head, one of `KINDS`; None for a model. CheckpointError for a head that is not read."""
    kind = _kind_in(content, file)
    if kind is None:
        return None
    blocks, known = fields_of_blocks(content), _OWN_FIELDS.get(kind, set())
    unknown = _unknown(blocks, known | _OF_BLOCKS) + [
        name for name in _unknown(content, known) if name.startswith(_OWN_WORDS)
    ]
    if (projector := blocks.get("projector_type", kind)) != kind:
        raise CheckpointError(f"{file} has projector_type {projector}, and {HEADS_READ}")
    if unknown:
        where = f" ({', '.join(classes_of(content))})" if classes_of(content) else ""
        raise CheckpointError(f"{file} has {', '.join(unknown)}, which no {kind} head{where} has, and {HEADS_READ}")
    return kind


def _unknown(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the unknown fields that have a value."""
    return [name for name, value in fields.items() if name not in known and value not in (None, False, 0)]


def _kind_in(content: Mapping[str, Any], file: Path) -> str | None:
    """Return the kind by class, or by the layout if the class does not tell."""
    by_class, speculator, classes = _kind_by_class(content, file), content.get(SPECULATOR), classes_of(content)
    named, problem, kind = " ".join(classes), None, by_class
    if speculator is not None:
        kind = str(speculator)
        if kind not in KINDS:
            problem = f"describes a speculator of type {speculator}, and {HEADS_READ}"
        elif by_class and {by_class, kind} not in ({kind}, {EAGLE3, PEAGLE}):
            problem = f"describes a speculator of type {speculator} in the class {named}: download it again"
    elif by_class == DSPARK:
        is_known = DEEPSPEC in classes or isinstance(content.get(BLOCKS), dict)
        problem = None if is_known else _layout_unknown(named)
    elif by_class in {DFLASH, DFLASH2} or isinstance(content.get(BLOCKS), dict):
        kind = by_class or DFLASH
        problem = f"has {BLOCKS} in the class {named}: download it again" if kind in {EAGLE3, PEAGLE} else None
    elif by_class == PEAGLE and MASK_OF_PAIRS not in content:
        problem = _layout_unknown(named)
    elif by_class or "draft_vocab_size" in content:
        has_mask = any(content.get(name) is not None for name in (MASK_OF_PAIRS, "mask_token_id"))
        kind = PEAGLE if has_mask else EAGLE3
    if problem:
        raise CheckpointError(f"{file} {problem}")
    return kind


def _layout_unknown(named: str) -> str:
    return f"describes {named}, a head of one pass in a layout that is not read, and {HEADS_READ}"


def _kind_by_class(content: Mapping[str, Any], file: Path) -> str | None:
    """The kind that the classes of `architectures` name; CheckpointError for another version of one."""
    for name in classes_of(content):
        if not (found := _CLASS.search(name)):
            continue
        kind = "".join(found.groups()).lower()
        kind = _SAME_VERSION.get(kind, kind)
        if kind in KINDS:
            return kind
        if not kind.startswith("eagle"):  # which models are called, too
            raise CheckpointError(f"{file} describes {name}, and {HEADS_READ}")
    return None
