"""Draft heads: layers of a Llama over tokens and hidden states of the target. Reads their config.json.

A head reads the inputs of some layers of the target, its taps. One of EAGLE-3 joins them with the embedding of the
token that follows, and drafts the token after that; later tokens need its own output. Heads of one pass draft a block
at once, from mask tokens in place of tokens to come:

    kind      public layouts                                    reads                     blocks
    eagle3    of the authors; `speculators`                     pairs of tap and token    one token
    peagle    the same, with the id of a mask token             pairs, then masks         causal
    dflash    `speculators` (dflash, dspark, dflash2); the      keys and values of taps,  see `reaches`
              flat one of its authors, 1 and 2, and with        then anchor and masks
              DSpark SpecForge's; DeepSpec's

DSpark is a DFlash with a Markov head, which adds to the logits of a position what follows the token drafted before it.
DFlash 2 scores the most probable tokens of a position by the token drafted before it, and convolves what its layers
read and add over the block. `kinds` says which kind a file is of; `sources` reads the tensors.

Source: arXiv:2503.01840 (EAGLE-3), 2602.01469 (P-EAGLE), 2602.06036 (DFlash), 2607.05147 (DSpark); `speculators` 0.6,
github.com/z-lab/dflash and github.com/deepseek-ai/DeepSpec.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import Inventory, Matrix, decoder
from llama_ssp.catalogue import NUM_TAPS, ModelShape
from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.heads.kinds import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    PEAGLE,
    SPECULATOR,
    fields_of_blocks,
    kind_of,
    refuse_other_heads,
)
from llama_ssp.extensions.heads.reaches import ALL, OF_REACHES, SLIDING, Reach, beside, reaches_of
from llama_ssp.types import Parsed

_LAYERS_BEFORE = "target_layer_ids"
_MASKS = "mask_token_id", "ptd_token_id"
FC, MARKOV, SELECTOR = "fc", "markov_head", "candidate_selector"
"""Names of the product that maps taps to a hidden state, and of the parts that relate drafted tokens to each other."""
CONFIDENCE = "confidence_head.proj"
"""The product of DSpark that estimates whether a token will be accepted."""
MASK = "mask_hidden"
"""The tensor that mask tokens are read with in place of taps."""
MARKOV_HEADS = "vanilla", "gated", "rnn"
CONVOLUTIONS = "attention_conv", "mlp_conv"
"""The convolutions of a layer of DFlash 2, around attention and MLP."""


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
    confidence_size: int = 0  # numbers that the estimate of an acceptance reads; 0 without one.
    reaches: tuple[Reach, ...] = ()  # of the layers of a block.
    selector: tuple[int, int] | None = None  # of DFlash 2: width of its selector, and tokens that it scores.
    convolution: tuple[int, int] = (0, 0)  # of DFlash 2: positions that a convolution reads, and features of a group.
    norms_last: bool = False  # a tap of the last layer's output is one of the final norm's.
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    softcap: float = 0.0  # logits are bent to less than that; 0 without.
    source = "llama_ssp.extensions.heads.sources:source_of"

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The tapped layers of a target of `num_layers`, counted from 0; see `TapSource.layers`.

        Trainers that read the last layer's output from transformers get it normed, and other trainers as it is.
        """
        layers = self.layers or (2, num_layers // 2, num_layers - 3)
        return tuple(layer + (layer == num_layers and not self.norms_last) for layer in layers)

    def shape_over(self, layers: ModelShape) -> ModelShape:
        """Return the sizes of the head, given the sizes `layers` of a model whose layers are like the head's."""
        return replace(
            layers,
            model_type=self.kind,
            vocab_size=self.draft_vocab_size,
            tie_word_embeddings=False,
            target_vocab_size=layers.vocab_size,
            target_hidden_size=self.target_hidden_size,
            num_taps=len(self.layers) if self.layers else NUM_TAPS,
            most_drafted=self.most_drafted,
            tapped_layers=self.layers or (),
            sees_by_itself=not self.sees_all or self._has_windows,
            has_confidence=self.confidence_size > 0,
            markov_size=sum(map(math.prod, self.joining_sizes(layers.hidden_size, layers.vocab_size).values())),
        )

    @property
    def _has_windows(self) -> bool:
        """Whether layers that read pairs have windows."""
        types = self.sizes.get("layer_types")
        is_switched_on = bool(self.sizes.get("sliding_window") and self.sizes.get("use_sliding_window"))
        return is_switched_on if types is None else SLIDING in types

    @property
    def sees_all(self) -> bool:
        """Whether, in every layer, each position of a block attends to the entire block and all text before it."""
        return all(reach == ALL for reach in self.reaches)

    def joining_sizes(self, width: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Return shapes of the tensors that relate tokens of a block, over `vocab_size` tokens of the target."""
        sizes = {f"{MARKOV}.{name}": size for name, size in self.markov_sizes(width, vocab_size).items()}
        if size := self.confidence_size:
            sizes |= {f"{CONFIDENCE}.weight": (1, size), f"{CONFIDENCE}.bias": (1,)}
        if self.selector:
            rank, _ = self.selector
            books = f"{SELECTOR}.predecessor_codebook.weight", f"{SELECTOR}.successor_codebook.weight"
            sizes |= dict.fromkeys(books, (vocab_size, rank)) | {f"{SELECTOR}.hidden_projection.weight": (rank, width)}
        kernel, group = self.convolution
        for layer in range(len(self.reaches) if kernel else 0):
            for name in CONVOLUTIONS:
                place = f"layers.{layer}.{name}"
                sizes[f"{place}.base_kernel"] = (2, kernel, width)
                sizes[f"{place}.kernel_projection.weight"] = (2 * kernel * (width // group), width)
        return sizes

    def markov_sizes(self, width: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the Markov head's tensors, over `vocab_size` tokens of the target."""
        rank = self.markov_rank
        inner = {"gated": ("gate", rank, rank + width), "rnn": ("joint", 3 * rank, 2 * rank + width)}
        sizes: dict[str, tuple[int, ...]] = {
            "markov_w1.weight": (vocab_size, rank),
            "markov_w2.weight": (self.draft_vocab_size, rank),
        }
        if self.markov_head in inner:
            name, rows, columns = inner[self.markov_head]
            sizes |= {f"{name}_proj.weight": (rows, columns), f"{name}_proj.bias": (rows,)}
        return sizes if rank else {}


def is_padded_alike(size: int, other: int) -> bool:
    """Whether two sizes may be of one vocabulary with different padding: they differ by less than a hundredth."""
    return 100 * abs(size - other) < max(size, other)


def read_head_config(content: Mapping[str, Any], file: Path) -> HeadConfig | None:
    """Read the config.json of a head; None if it is a model's. CheckpointError for a faulty one."""
    refuse_other_heads(content, file)
    found = kind_of(content, file)
    if found is None:
        return None
    sizes = dict(content.get("transformer_layer_config") or {} if SPECULATOR in content else content)
    sizes.setdefault("num_hidden_layers", 1)
    reaches: tuple[Reach, ...] = ()
    kind = found
    if kind not in {EAGLE3, PEAGLE}:
        kind, reaches = DFLASH, reaches_of(content, sizes, found, file)
        sizes = {name: value for name, value in sizes.items() if name not in OF_REACHES}
        sizes["model_type"] = "qwen3"  # whatever it says: all implementations build its layers
    elif SPECULATOR in content:
        sizes |= beside(content, sizes, file)
    sizes.setdefault("model_type", "llama")
    if not reaches and sizes["model_type"] == "llama" and SLIDING in (sizes.get("layer_types") or ()):
        sizes["model_type"] = "mistral"  # a Llama whose layers may have windows
    blocks = fields_of_blocks(content)
    mask: Any = next((content[name] for name in _MASKS if content.get(name) is not None), blocks.get(_MASKS[0]))
    block_size: Any = blocks.get("block_size") or content.get("block_size")
    is_spark = found == DSPARK
    of_spark: Mapping[str, Any] = {**content, **blocks} if is_spark else {}  # SpecForge has both in one
    rank: Any = of_spark.get("markov_rank", 256 if is_spark else 0)
    needed = {name: sizes.get(name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    needed |= {_MASKS[0]: mask} if kind != EAGLE3 else {}
    needed |= {"block_size": block_size, "markov_rank": rank} if kind == DFLASH else {}
    _check_numbers(needed, file)
    if kind != EAGLE3 and mask >= sizes["vocab_size"]:
        raise CheckpointError(f"{file} has mask_token_id {mask} of {sizes['vocab_size']} tokens: download it again")
    markov_head = str(of_spark.get("markov_head_type", MARKOV_HEADS[0])).lower()
    if rank and markov_head not in MARKOV_HEADS:
        raise CheckpointError(f"{file} has markov_head_type {markov_head}, and {' or '.join(MARKOV_HEADS)} is read")
    at_anchor = bool(content.get("sample_from_anchor", is_spark))
    norms = [name for name, key in (("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc")) if content.get(key)]
    return HeadConfig(
        sizes=sizes,
        kind=kind,
        draft_vocab_size=int(content.get("draft_vocab_size") or sizes["vocab_size"]),
        target_hidden_size=int(content.get("target_hidden_size") or sizes["hidden_size"]),
        layers=_tapped_layers(content, blocks, kind, file),
        norm_before_residual=bool(content.get("norm_before_residual", False)),
        norm_output=bool(content.get("norm_output", False)),
        norms_taps=norms[0] if norms else None,
        mask_token_id=mask,
        most_drafted=max(block_size - (not at_anchor), 1) if kind == DFLASH else 0,
        drafts_at_anchor=at_anchor,
        markov_rank=rank,
        markov_head=markov_head,
        confidence_size=_confidence_size(of_spark, rank, sizes["hidden_size"], file) if is_spark else 0,
        reaches=reaches,
        norms_last=kind == DFLASH and SPECULATOR not in content,
        **_of_dflash(content, file) if kind == DFLASH else {},
        **_of_selector(content, sizes, block_size, file) if found == DFLASH2 else {},
    )


def _confidence_size(of_spark: Mapping[str, Any], rank: int, width: int, file: Path) -> int:
    """Return `HeadConfig.confidence_size` as the file describes the confidence head.

    Where the file does not say whether there is one, heads of `speculators` have one, and others have none.
    """
    if not of_spark.get("enable_confidence_head", SPECULATOR in of_spark):
        return 0
    joins = bool(of_spark.get("confidence_head_with_markov", True))
    if joins and not rank:
        raise CheckpointError(f"{file} has confidence_head_with_markov without a Markov head: download it again")
    return width + rank * joins


def _check_numbers(needed: Mapping[str, Any], file: Path) -> None:
    if missing := [name for name, size in needed.items() if type(size) is not int or size < 0]:
        raise CheckpointError(f"{file} lacks {', '.join(missing)} of the head: copy or download it again")


def _value(content: Mapping[str, Any], name: str) -> Parsed:
    """Return a field of `dflash_config`, or of the config.json itself."""
    return fields_of_blocks(content).get(name, content.get(name))


def _of_selector(content: Mapping[str, Any], sizes: Mapping[str, Any], block_size: int, file: Path) -> dict[str, Any]:
    """Return the fields that only DFlash 2 has; raises CheckpointError if they do not fit together."""
    defaults = {"selector_rank": 256, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
    found = {name: _value(content, name) for name in defaults}
    if SPECULATOR in content:
        found = {name: found[name] if name in content else default for name, default in defaults.items()}
    _check_numbers(found, file)
    rank, top_k, kernel, group = found.values()
    drafted, least = content.get("draft_vocab_size") or sizes["vocab_size"], min(found.values())
    fits = least > 0 and top_k <= drafted == sizes["vocab_size"] and kernel <= block_size
    if not fits or sizes["hidden_size"] % group:
        said = ", ".join(f"{name} {value}" for name, value in found.items())
        raise CheckpointError(
            f"{file} has {said} for a width of {sizes['hidden_size']}, blocks of {block_size} and drafts of {drafted} "
            f"of {sizes['vocab_size']} tokens, which do not fit together: download it again"
        )
    return {"selector": (rank, top_k), "convolution": (kernel, group)}


def _of_dflash(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the factors of inputs and logits of the flat layout's heads; CheckpointError if one is no number."""
    names = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
    found = [
        default if (value := _value(content, name)) is None else value
        for name, default in zip(names, (1.0, 1.0, 0.0), strict=True)
    ]
    if faulty := [name for name, value in zip(names, found, strict=True) if type(value) not in {int, float}]:
        raise CheckpointError(f"{file} has {', '.join(faulty)}, which is no number: download it again")
    return dict(zip(("embedding_scale", "logits_scale", "softcap"), map(float, found), strict=True))


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
    if given is None and kind == DFLASH and SPECULATOR not in content:
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
