"""Draft heads: layers of a Llama over tokens and hidden states of the target. Reads their config.json.

A head reads the inputs of some layers of the target, its taps. One of EAGLE-3 joins them with the embedding of the
token that follows, and drafts the token after that; later tokens need its own output. Heads of one pass draft a block
at once, from mask tokens in place of tokens to come:

    kind      public layouts                                    reads                     blocks
    eagle3    of the authors; `speculators`                     pairs of tap and token    one token
    peagle    the same, with the id of a mask token             pairs, then masks         causal
    dflash    `speculators` (dflash, dspark); `dflash_config`   keys and values of taps,  each position sees all
              of its authors; DeepSpec's, of DFlash and DSpark  then anchor and masks

DSpark is a DFlash with a Markov head, which adds to the logits of a position what follows the token drafted before it.
`sources` reads the tensors.

Source: arXiv:2503.01840 (EAGLE-3), 2602.01469 (P-EAGLE), 2602.06036 (DFlash), 2607.05147 (DSpark); `speculators` 0.6,
github.com/z-lab/dflash and github.com/deepseek-ai/DeepSpec.
"""

import json
import math
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import Inventory, Matrix, decoder
from llama_ssp.catalogue import NUM_TAPS, ModelShape
from llama_ssp.errors import CheckpointError

EAGLE3, PEAGLE, DFLASH = "eagle3", "peagle", "dflash"
_SPECULATOR, _KINDS = "speculators_model_type", {EAGLE3: EAGLE3, PEAGLE: PEAGLE, DFLASH: DFLASH, "dspark": DFLASH}
_LAYERS_BEFORE = "target_layer_ids"
_MASKS = "mask_token_id", "ptd_token_id"
_DEEPSPEC = "Qwen3DSparkModel"
_ONE_PASS = re.compile(r"dflash|dspark|p-?eagle", re.IGNORECASE)
FC, MARKOV = "fc", "markov_head"
"""The product of a head that maps taps to a hidden state, and the head that joins drafted tokens."""
MASK = "mask_hidden"
"""The tensor of taps that mask tokens are read with."""
MARKOV_HEADS = "vanilla", "gated", "rnn"


_OTHER_HEADS = {
    r".*medusa.*": "Medusa heads", r"mlp|.*mlp_?speculator.*": "an MLP speculator",
    r"eagle(model)?|.*forcausallmeagle": "a head of EAGLE-1 or 2",
}  # fmt: skip
"""Heads that are not read, by what their files call them."""
_EAGLE = {"fc.weight", "layers.0.mlp.up_proj.weight"}
"""Tensors of a head of EAGLE-1 or 2, whose config.json is mostly that of a Llama of one layer."""
_MAX_HEADER_BYTES = 2**20
_HEADS_READ = (
    "of draft heads those of EAGLE-3, P-EAGLE, DFlash and DSpark are read: give one of them in safetensors, or another "
    "draft"
)


def _refuse_other_heads(content: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError for the config.json of a draft head of a kind that is not read."""
    named = [content.get("speculators_model_type"), content.get("model_type"), *(content.get("architectures") or [])]
    named += ["medusa"] * ("medusa_num_heads" in content)
    if content.get("num_hidden_layers") == 1 and content.keys().isdisjoint({"draft_vocab_size", _SPECULATOR}):
        named += ["eagle"] * (_names_in(file.parent) >= _EAGLE)
    for name in named:
        for pattern, what in _OTHER_HEADS.items():
            if re.fullmatch(pattern, str(name).lower()):
                raise CheckpointError(f"{file} describes {what}, and {_HEADS_READ}")


def _names_in(folder: Path) -> set[str]:
    """The names of tensors, and other texts, in a folder's file of weights, of which none runs; none if unreadable."""
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


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The fields of a head's config.json."""

    sizes: Mapping[str, Any]  # fields of a config.json of its kind of layers, a Llama's or Qwen 3's, with all tokens.
    draft_vocab_size: int  # tokens that it can draft.
    target_hidden_size: int  # the width of a tap.
    # layers of the target whose inputs are tapped; None for the layout's default. `eagle_config`, which trainers for
    # SGLang write, `dflash_config` and DeepSpec name the layers whose outputs they are.
    layers: tuple[int, ...] | None
    kind: str  # see the module.
    norm_before_residual: bool  # the first layer adds to its normed hidden state, not to the hidden state itself.
    norm_output: bool  # the next step reads the normed output.
    norms_taps: str | None  # `fc_norm`, an RMS norm of each tap, or `input_norm`, one of all taps together.
    mask_token_id: int | None  # the token that stands for tokens to come.
    most_drafted: int  # tokens of a block; 0 for any number.
    drafts_at_anchor: bool  # the position of the newest token drafts the first token, else the first mask's does.
    markov_rank: int  # width of the Markov head; 0 without.
    markov_head: str  # one of `MARKOV_HEADS`.
    source = "llama_ssp.rooms.heads.sources:source_of"

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The tapped layers of a target of `num_layers`, counted from 0."""
        return self.layers or (2, num_layers // 2, num_layers - 3)

    def shape_over(self, layers: ModelShape) -> ModelShape:
        """The sizes of the head, from the sizes `layers` of a model whose layers are as its own."""
        return replace(
            layers, model_type=self.kind, vocab_size=self.draft_vocab_size, tie_word_embeddings=False,
            target_vocab_size=layers.vocab_size, target_hidden_size=self.target_hidden_size,
            num_taps=len(self.layers) if self.layers else NUM_TAPS, most_drafted=self.most_drafted,
            markov_size=sum(map(math.prod, self.markov_sizes(layers.hidden_size, layers.vocab_size).values())),
        )  # fmt: skip

    def markov_sizes(self, width: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the Markov head's tensors, over `vocab_size` tokens of the target."""
        rank = self.markov_rank
        inner = {"gated": ("gate", rank, rank + width), "rnn": ("joint", 3 * rank, 2 * rank + width)}
        sizes: dict[str, tuple[int, ...]] = {
            "markov_w1.weight": (vocab_size, rank), "markov_w2.weight": (self.draft_vocab_size, rank),
        }  # fmt: skip
        if self.markov_head in inner:
            name, rows, columns = inner[self.markov_head]
            sizes |= {f"{name}_proj.weight": (rows, columns), f"{name}_proj.bias": (rows,)}
        return sizes if rank else {}


def read_head_config(content: Mapping[str, Any], file: Path) -> HeadConfig | None:
    """Read the config.json of a head; None if it is a model's. CheckpointError for a faulty one."""
    _refuse_other_heads(content, file)
    found = _kind_of(content, file)
    if found is None:
        return None
    kind, blocks = found
    sizes = dict(content.get("transformer_layer_config") or {} if _SPECULATOR in content else content)
    if kind == DFLASH:
        sizes["model_type"] = "qwen3"  # whatever it says: all implementations build its layers
    sizes.setdefault("model_type", "llama")
    needed = {name: sizes.get(name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    sizes.setdefault("num_hidden_layers", 1)
    mask: Any = next((content[name] for name in _MASKS if content.get(name) is not None), blocks.get(_MASKS[0]))
    block_size: Any = blocks.get("block_size") or content.get("block_size")
    is_spark = content.get(_SPECULATOR) == "dspark" or _DEEPSPEC in _classes(content)
    rank: Any = content.get("markov_rank", 256) if is_spark else 0
    needed |= {_MASKS[0]: mask} if kind != EAGLE3 else {}
    needed |= {"block_size": block_size, "markov_rank": rank} if kind == DFLASH else {}
    if missing := [name for name, size in needed.items() if type(size) is not int or size < 0]:
        raise CheckpointError(f"{file} lacks {', '.join(missing)} of the head: copy or download it again")
    if kind != EAGLE3 and mask >= sizes["vocab_size"]:
        raise CheckpointError(f"{file} has mask_token_id {mask} of {sizes['vocab_size']} tokens: download it again")
    markov_head = str(content.get("markov_head_type", MARKOV_HEADS[0])).lower()
    if rank and markov_head not in MARKOV_HEADS:
        raise CheckpointError(f"{file} has markov_head_type {markov_head}, and {' or '.join(MARKOV_HEADS)} is read")
    at_anchor = bool(content.get("sample_from_anchor", is_spark))
    norms = [name for name, key in (("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc")) if content.get(key)]
    return HeadConfig(
        sizes=sizes, kind=kind,
        draft_vocab_size=int(content.get("draft_vocab_size") or sizes["vocab_size"]),
        target_hidden_size=int(content.get("target_hidden_size") or sizes["hidden_size"]),
        layers=_tapped_layers(content, blocks, kind, file),
        norm_before_residual=bool(content.get("norm_before_residual", False)),
        norm_output=bool(content.get("norm_output", False)),
        norms_taps=norms[0] if norms else None,
        mask_token_id=mask,
        most_drafted=max(block_size - (not at_anchor), 1) if kind == DFLASH else 0,
        drafts_at_anchor=at_anchor, markov_rank=rank, markov_head=markov_head,
    )  # fmt: skip


def _classes(content: Mapping[str, Any]) -> list[str]:
    return content.get("architectures") or []


def _kind_of(content: Mapping[str, Any], file: Path) -> tuple[str, Mapping[str, Any]] | None:
    """The kind of a head and its fields of blocks; None for a model. CheckpointError for a head that is not read."""
    speculator, classes, blocks = content.get(_SPECULATOR), _classes(content), content.get("dflash_config")
    problem, kind = None, _KINDS.get(str(speculator))
    if speculator is not None:
        problem = None if kind else f"describes a speculator of type {speculator}, and {_HEADS_READ}"
    elif isinstance(blocks, dict):
        kind = DFLASH
        found = [name for name in ("causal", "use_swa", "attention_sink_bias") if blocks.get(name)]
        problem = f"has {', '.join(found)} in dflash_config, which engines read differently" if found else None
    elif _DEEPSPEC in classes:
        kind = DFLASH
    elif any(map(_ONE_PASS.search, classes)) and _MASKS[1] not in content:
        problem = f"describes {' '.join(classes)}, a head of one pass in a layout that is not read, and {_HEADS_READ}"
    elif "draft_vocab_size" in content or any("eagle3" in name.lower() for name in classes):
        kind = PEAGLE if any(content.get(name) is not None for name in _MASKS) else EAGLE3
    sizes = content.get("transformer_layer_config") or content
    if kind == DFLASH and "sliding_attention" in (sizes.get("layer_types") or []):
        problem = problem or "has layers with a sliding window, which engines read differently in a block"
    if problem:
        raise CheckpointError(f"{file} {problem}")
    return (kind, blocks if isinstance(blocks, dict) else {}) if kind else None


def _tapped_layers(
    content: Mapping[str, Any], blocks: Mapping[str, Any], kind: str, file: Path
) -> tuple[int, ...] | None:
    """The layers whose inputs are tapped; CheckpointError if they are no numbers, or a layout has no default."""
    if kind == DFLASH:
        name, before = "aux_hidden_state_layer_ids", blocks.get(_LAYERS_BEFORE) or content.get(_LAYERS_BEFORE)
    else:
        name = "eagle_aux_hidden_state_layer_ids"
        before = (content.get("eagle_config") or {}).get(name)
    given, distance = content.get(name), 0
    if given is None and before:
        given, distance = before, 1
    if given is None and kind == DFLASH and _SPECULATOR not in content:
        raise CheckpointError(f"{file} lacks {_LAYERS_BEFORE}, the layers that the head taps: download it again")
    is_list = isinstance(given, list) and all(type(number) is int and number >= -distance for number in given)
    if given is not None and not is_list:
        raise CheckpointError(f"{file} has {name} {given}, and a list of layer numbers is required")
    return tuple(number + distance for number in given) if given else None


def _of_pairs(shape: ModelShape) -> Inventory:
    """The parameters of a head whose first layer reads pairs: its products have twice the columns."""
    whole, width, share = decoder(shape), shape.hidden_size, 1 / shape.num_hidden_layers
    layer = []
    for matrix in whole.layer:
        if matrix.module in {"q_proj", "k_proj", "v_proj"}:
            layer.append(replace(matrix, num_columns=2 * width, copies=share))
            layer += [replace(matrix, copies=1 - share)] * (share < 1)
        else:
            layer.append(matrix)
    return _with_taps(replace(whole, layer=tuple(layer)), shape)


def _with_taps(held: Inventory, shape: ModelShape) -> Inventory:
    """A head's parameters: with the product and the norm of its taps, its embedding, and its Markov head."""
    width = shape.hidden_size
    columns = shape.num_taps * (shape.target_hidden_size or width)
    fc = Matrix(module=FC, num_rows=width, num_columns=columns, copies=1 / shape.num_hidden_layers)
    embedding = Matrix(module="embed_tokens", num_rows=shape.num_token_ids, num_columns=width)
    vectors = held.final_vectors + width + shape.markov_size + width * (shape.model_type == PEAGLE)
    return replace(held, layer=(*held.layer, fc), embeddings=(embedding,), final_vectors=vectors)


HEAD = Family(model_type=EAGLE3, parameters=_of_pairs, is_llama_kind=True, is_head=True)
PARALLEL_HEAD = replace(HEAD, model_type=PEAGLE, in_one_pass=True)
BLOCK_HEAD = replace(
    PARALLEL_HEAD, model_type=DFLASH, parameters=lambda shape: _with_taps(decoder(shape, head_norms=2), shape)
)
