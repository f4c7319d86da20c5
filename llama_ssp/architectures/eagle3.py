"""EAGLE-3 draft heads: one layer of a Llama over a token and hidden states of the target. Reads their config.json.

A head takes the inputs of some layers of the target, its taps, and the embedding of the token that follows, and drafts
the token after that. It has two public layouts, which `weights.head` reads:

    original       sizes in config.json as of a Llama, with `draft_vocab_size`; tensors `midlayer.*`
    speculators    sizes in `transformer_layer_config`, with `speculators_model_type`; tensors `layers.0.*`

Source: arXiv:2503.01840, and the `speculators` format of version 0.5 (EAGLE 3.1: `norm_output`, `fc_norm`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import Inventory, Matrix, decoder
from llama_ssp.architectures.model_files import refuse_other_heads
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import CheckpointError

MODEL_TYPE = "eagle3"
NUM_TAPS = 3
_SPECULATOR = "speculators_model_type"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The fields of a head's config.json.

    Attributes:
        sizes: the fields of a config.json of its kind of layer, a Llama's or Qwen 3's; `vocab_size` is the target's.
        draft_vocab_size: the number of tokens that it can draft.
        target_hidden_size: the width of a tap.
        layers: layers of the target whose inputs are tapped; None for the layout's default. `eagle_config`, which
            trainers for SGLang write, names the layers whose outputs they are.
        norm_before_residual: the layer adds to its normed hidden state, not to the hidden state itself.
        norm_output: the next step reads the normed output.
        norms_taps: `fc_norm`, an RMS norm of each tap, or `input_norm`, one of all taps together; None without.
    """

    sizes: Mapping[str, Any]
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool = False
    norm_output: bool = False
    norms_taps: str | None = None

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The tapped layers of a target of so many layers, counted from 0."""
        return self.layers or (2, num_layers // 2, num_layers - 3)

    def shape_over(self, layer: ModelShape) -> ModelShape:
        """The sizes of the head, from those of a model whose layers are as its one layer."""
        return replace(
            layer, model_type=MODEL_TYPE, vocab_size=self.draft_vocab_size, tie_word_embeddings=False,
            target_vocab_size=layer.vocab_size, target_hidden_size=self.target_hidden_size,
        )  # fmt: skip


def read_head_config(content: Mapping[str, Any], file: Path) -> HeadConfig | None:
    """Read the config.json of a head; None if it is that of a model. CheckpointError for a faulty one."""
    refuse_other_heads(content, file)
    kind = content.get(_SPECULATOR)
    classes = content.get("architectures") or []
    if kind is None and "draft_vocab_size" not in content and not any("eagle3" in name.lower() for name in classes):
        return None
    if kind not in {None, MODEL_TYPE}:
        raise CheckpointError(f"{file} describes a speculator of type {kind}: of those, eagle3 is read")
    sizes = dict(content if kind is None else content.get("transformer_layer_config") or {})
    sizes.setdefault("model_type", "llama")
    missing = [
        name for name in ("vocab_size", "hidden_size", "num_attention_heads") if type(sizes.get(name)) is not int
    ]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)} of the head's layer: copy or download it again")
    if sizes.setdefault("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{file} describes a head of {sizes['num_hidden_layers']} layers, and one is required")
    given = content.get(_LAYERS)
    if given is None and (outputs := (content.get("eagle_config") or {}).get(_LAYERS)):  # of the layers before
        given = [layer + 1 if type(layer) is int else layer for layer in outputs]
    if given is not None and not (
        isinstance(given, list) and all(type(number) is int and number >= 0 for number in given)
    ):
        raise CheckpointError(f"{file} has {_LAYERS} {given}, and a list of layer numbers is required")
    norms = [name for name, key in (("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc")) if content.get(key)]
    return HeadConfig(
        sizes=sizes,
        draft_vocab_size=int(content.get("draft_vocab_size") or sizes["vocab_size"]),
        target_hidden_size=int(content.get("target_hidden_size") or sizes["hidden_size"]),
        layers=tuple(given[:NUM_TAPS]) if given else None,
        norm_before_residual=bool(content.get("norm_before_residual", False)),
        norm_output=bool(content.get("norm_output", False)),
        norms_taps=norms[0] if norms else None,
    )


def _parameters(shape: ModelShape) -> Inventory:
    width, whole = shape.hidden_size, decoder(shape, norms=3)
    layer = (
        *(replace(matrix, num_columns=2 * width) if matrix.module in {"q_proj", "k_proj", "v_proj"} else matrix
          for matrix in whole.layer),
        Matrix(module="fc", num_rows=width, num_columns=NUM_TAPS * (shape.target_hidden_size or width)),
    )  # fmt: skip
    embedding = Matrix(module="embed_tokens", num_rows=shape.num_token_ids, num_columns=width)
    return replace(whole, layer=layer, embeddings=(embedding,))


HEAD = Family(model_type=MODEL_TYPE, parameters=_parameters, is_llama_kind=True, is_head=True)
