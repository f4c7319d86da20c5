"""Draft heads as a `WeightSource`, with their target's embedding and output where their files have none.

All public layouts (`layouts`) are read as they are: their tensors get the names of the modules that `models.llama`
builds. So do tensors of the MTP layers of a checkpoint (`mtp`), which are the draft head of its own model. `d2t`
and `t2d` map the vocabulary of a head to the target's:

    d2t    (D,)  the target's id of token i is i + d2t[i]
    t2d    (V,)  whether the head can draft a token of the target

Shapes: D tokens that the head drafts, V vocabulary of the target.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.extensions.heads.kinds import DFLASH, EAGLE3, PEAGLE
from llama_ssp.extensions.heads.layouts import FC, MARKOV, MASK, SELECTOR, HeadConfig, is_padded_alike
from llama_ssp.extensions.heads.mtp import (
    HIDDEN_FIRST,
    JOIN,
    JOINED_NORMS,
    check_mtp,
    num_modules,
    of_modules,
    our_names,
    reads_before_norm,
    shares_norm,
    with_join,
)
from llama_ssp.models.loading import vocabulary_of, with_modules
from llama_ssp.types import Parsed
from llama_ssp.weights.checkpoint import Checkpoint, inspect, shape_of
from llama_ssp.weights.in_memory import kept
from llama_ssp.weights.source import TensorFacts, Wanted, WeightSource

_EXTENSION = "llama_ssp.extensions.heads"
_RUNNERS = {
    EAGLE3: f"{_EXTENSION}.runner:HeadRunner",
    PEAGLE: f"{_EXTENSION}.one_pass:ParallelRunner",
    DFLASH: f"{_EXTENSION}.one_pass:BlockRunner",
}
EMBEDDING, OUTPUT, NORM, TOKEN_MAP = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "d2t"
_OF_DRAFTED = {OUTPUT, f"model.{MARKOV}.markov_w2.weight"}
_OF_TOKENS = (
    _OF_DRAFTED
    | {EMBEDDING, f"model.{MARKOV}.markov_w1.weight"}
    | {f"model.{SELECTOR}.{name}_codebook.weight" for name in ("predecessor", "successor")}
)
"""Tensors with a row for each token that a head drafts, or reads."""
_JOIN = f"model.layers.0.{JOIN}.weight"


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """The files of a head, or its recipe, for the target that it drafts for; a `WeightSource`."""

    files: WeightSource
    head: HeadConfig
    target: WeightSource
    folder = property(attrgetter("files.folder"))
    context = property(attrgetter("target.context"))  # The head's rotary positions go as far.
    dtype = property(attrgetter("files.dtype"))
    ties, places = False, MappingProxyType({FC: f"model.{FC}"})
    library_runner = ""  # its layers are the lean decoder's.

    @property
    def lean_runner(self) -> str:
        """See `TapSource`."""
        return _RUNNERS[self.head.kind]

    @cached_property
    def shape(self) -> ModelShape:
        """See `WeightSource`."""
        own, num_token_ids = self.files.shape, self.target.shape.vocab_size
        drafted = own.vocab_size
        if self._drafts_all:
            drafted = num_token_ids if self.shares_output else min(drafted, num_token_ids)
        return replace(
            own, shares_embedding=EMBEDDING not in self._stored, target_vocab_size=num_token_ids, vocab_size=drafted
        )

    @property
    def _drafts_all(self) -> bool:
        """Whether it drafts all tokens that its own files count, in whatever way they are padded."""
        return self.files.shape.vocab_size == self.files.shape.num_token_ids

    @cached_property
    def config(self) -> PretrainedConfig:
        """The config of a model whose one layer the head has; `vocab_size` is D."""
        config = copy(self.files.config)
        config.update({"vocab_size": self.shape.vocab_size})
        return config

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """The stored names by ours."""
        return {_named(name): name for name in self.files.tensors}

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """All tensors by the names of our modules."""
        own = {ours: self.files.tensors[name] for ours, name in self._stored.items()}
        if mask := own.get(MASK):
            own[MASK] = TensorFacts(dtype=mask.dtype, shape=(math.prod(mask.shape),))
        counted = self.files.shape.num_token_ids, self.files.shape.vocab_size
        for name in _OF_TOKENS & own.keys():
            num_rows = self.shape.vocab_size if name in _OF_DRAFTED else self.shape.num_token_ids
            if own[name].shape[0] == counted[name in _OF_DRAFTED]:  # else it is faulty, and said to be
                own[name] = replace(own[name], shape=(num_rows, *own[name].shape[1:]))
        shared = (name for name in (EMBEDDING, OUTPUT) if self.files.tensors and name not in own)
        return own | {name: self.target.tensors[self._of_target[name]] for name in shared}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`."""
        if name not in self._stored:
            return self.target.read(self._of_target[name], **wanted)
        if name in _OF_TOKENS:
            return self._padded(name, wanted)
        found = self.files.read(self._stored[name], **wanted)
        return found.flatten() if name == MASK else found

    def _padded(self, name: str, wanted: Wanted) -> Tensor:
        """Return a tensor with a row for each token; rows that the files lack are zeros."""
        stored, num_rows = self._stored[name], self.tensors[name].shape[0]
        num_stored = self.files.tensors[stored].shape[0]
        if num_rows == num_stored:
            return self.files.read(stored, **wanted)
        parts = wanted.get("parts", ()) if wanted.get("dim") == 0 else [range(num_rows)]
        known = [range(part.start, min(part.stop, num_stored)) for part in parts]
        cut: Wanted = {**wanted, "dim": 0, "parts": known}
        found = self.files.read(stored, **cut)
        return functional.pad(found, (0, 0, 0, sum(map(len, parts)) - len(found)))

    @cached_property
    def _of_target(self) -> Mapping[str, str]:
        """The names under which the target stores the embedding and the output."""
        return dict(zip((EMBEDDING, OUTPUT), vocabulary_of(self.target), strict=True))

    @property
    def shares_output(self) -> bool:
        """Whether the head's files have no output, so that it has its target's."""
        return OUTPUT not in self.files.tensors

    @property
    def shares_tables(self) -> bool:
        """Whether the head has its target's embedding, its target's output, or both."""
        return not self._stored.keys() >= {EMBEDDING, OUTPUT}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs the head reads."""
        return self.head.layers_of(self.target.shape.num_hidden_layers)

    @property
    def first_norms(self) -> Sequence[str]:
        """See `TapSource`."""
        return () if self.head.kind == DFLASH else ("hidden_norm",)

    def more_parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Norms of taps, the tap of a mask token, and what joins the tokens of a block; see `TapSource`."""
        head, shape = self.head, self.shape
        tap, width = head.target_hidden_size, shape.hidden_size
        sizes: dict[str, tuple[int, ...]] = {}
        if head.norms_taps == "fc_norm":
            sizes |= {f"fc_norm.{number}.weight": (tap,) for number in range(shape.num_taps)}
        elif head.norms_taps:
            sizes["input_norm.weight"] = (shape.num_taps * tap,)
        if head.kind == DFLASH:
            sizes["hidden_norm.weight"] = (width,)
        if head.kind == PEAGLE:
            sizes[MASK] = (shape.num_taps * tap,)
        drafting = replace(head, draft_vocab_size=shape.vocab_size)
        sizes |= drafting.joining_sizes(width, shape.num_token_ids)
        return {f"model.{name}": size for name, size in sizes.items()}

    def extend(self, model: PreTrainedModel) -> None:
        """See `TapSource`; never called, since heads with files of their own run as our decoder alone."""
        raise AssertionError(f"{type(model).__name__} stands for no head with files of its own")

    def updated(self, target: WeightSource | None, files: WeightSource | None) -> WeightSource | None:
        """See `TapSource`."""
        if files is None and (target is None or not self.shares_tables):
            return None
        files = files or self.files
        return of_target(files, getattr(files, "head", None) or self.head, target or self.target)

    def token_ids(self) -> Tensor:
        """The target's id of each token that the head drafts, (D,).

        CheckpointError if the map is missing, leads out of the target's vocabulary or twice to one token, or
        contradicts `t2d`.
        """
        size, vocab_size = self.shape.vocab_size, self.shape.num_token_ids
        counted = self.files.shape
        steps_D, known_V = self._map(TOKEN_MAP, counted.vocab_size), self._map("t2d", counted.num_token_ids)
        if self._drafts_all:
            if steps_D is not None and steps_D.any():
                raise CheckpointError(f"{self.folder}: d2t maps tokens of a head that drafts all: download it again")
            return torch.arange(size)
        if steps_D is None:
            raise CheckpointError(
                f"{self.folder} drafts {size} of {vocab_size} tokens and lacks d2t, which says which: copy it again"
            )
        ids_D = torch.arange(size) + steps_D.long()
        problem = None
        if int(ids_D.min()) < 0 or int(ids_D.max()) >= vocab_size:
            problem = f"leads to token {int(ids_D.max())} of {vocab_size}"
        elif len(ids_D.unique()) < size:
            problem = "leads twice to one token"
        elif known_V is not None and not torch.equal(known_V.bool().nonzero()[:, 0], ids_D.sort().values):
            problem = "contradicts t2d"
        if problem:
            raise CheckpointError(f"{self.folder}: d2t {problem}: copy or download the head again")
        return ids_D

    def _map(self, name: str, size: int) -> Tensor | None:
        tensor = self.files.tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape != (size,):
            raise CheckpointError(f"{self.folder}: {name} is {list(tensor.shape)}, not [{size}]: copy it again")
        return self.files.read(name)


def of_target(files: WeightSource, head: HeadConfig, target: WeightSource) -> HeadSource:
    """Return the head of a target; CheckpointError if it belongs to another target, or its map of tokens is faulty."""
    sizes = target.shape.hidden_size, target.shape.vocab_size
    own = files.shape.target_hidden_size, files.shape.num_token_ids
    if sizes[0] != own[0] or not is_padded_alike(sizes[1], own[1]):
        raise CheckpointError(
            f"{files.folder} is the head of a target of width {own[0]} with {own[1]} tokens, and this target has width "
            f"{sizes[0]} and {sizes[1]} tokens: choose a head of this target"
        )
    if own[0] != files.shape.hidden_size:
        raise CheckpointError(
            f"{files.folder} is {files.shape.hidden_size} wide and its target {own[0]}: a head of the target's width "
            "is required"
        )
    if head.kind != DFLASH and "fc_norm.0.weight" in map(_bare, files.tensors):
        head = replace(head, norms_taps="fc_norm")  # which some config.json leave out
    source = HeadSource(files=files, head=head, target=target)
    num_layers = target.shape.num_hidden_layers
    if (head.mask_token_id or 0) >= sizes[1]:
        raise CheckpointError(
            f"{files.folder} has mask_token_id {head.mask_token_id}, and this target has {sizes[1]} tokens: choose a "
            "head of this target"
        )
    layers = head.layers or source.layers
    if not all(0 <= layer <= num_layers for layer in layers):
        raise CheckpointError(
            f"{files.folder} reads the layers {list(layers)}, and this target has {num_layers}: choose a head of this "
            "target"
        )
    source.token_ids()
    if not source.shares_tables:
        return source
    return replace(source, files=kept(files), target=kept(target, source._of_target.values))  # for later updates


def _bare(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _named(name: str) -> str:
    """The name of a stored tensor among our modules."""
    name = _bare(name)
    if name.startswith(f"{SELECTOR}.") and name.endswith("_codebook"):  # which the authors of DFlash store bare
        name += ".weight"
    return name if name.startswith(("lm_head.", "verifier_")) or "." not in name else f"model.{name}"


@dataclass(frozen=True, kw_only=True)
class MtpSource:
    """The MTP layers of a target, with the target's embedding and output; a `WeightSource`."""

    target: Checkpoint  # which has them in its files.
    config: PretrainedConfig  # of a model whose layers they are.
    shape: ModelShape  # of the head.
    tables: WeightSource | None = None  # of the target's later weights without the layers; None with them.
    folder = property(attrgetter("target.folder"))
    context = property(attrgetter("target.context"))
    dtype = property(attrgetter("target.dtype"))
    ties, first_norms, places = True, JOINED_NORMS, MappingProxyType({JOIN: f"model.layers.0.{JOIN}"})
    lean_runner, library_runner = f"{_EXTENSION}.runner:PairRunner", f"{_EXTENSION}.library:MtpRunner"

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """The stored names by ours."""
        files, counts = self.target.tensors, (self.target.shape.num_hidden_layers, self.shape.num_hidden_layers)
        own = {ours: name for name in files for ours in our_names(name, *counts)}
        return {name: name for name in self._shared if name in files} | own

    @property
    def _shared(self) -> Collection[str]:
        """Tensors of the target itself."""
        return {EMBEDDING, OUTPUT, *([NORM] if shares_norm(self.config.model_type) else [])}

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """All tensors by the names of our modules."""
        return {ours: self.target.tensors[name] for ours, name in self._stored.items()}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`."""
        stored = self._stored[name]
        found = (self.tables if self.tables and stored in self._shared else self.target).read(stored, **wanted)
        swaps = name == _JOIN and HIDDEN_FIRST in stored  # the head has a single layer
        return found.roll(found.shape[1] // 2, 1) if swaps else found

    @property
    def has_layer(self) -> bool:
        """Whether the target's files have the MTP layers."""
        return _JOIN in self.tensors

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer whose input the head reads: the one after the last, for the last one's output."""
        return (self.target.shape.num_hidden_layers + reads_before_norm(self.config.model_type),)

    def more_parameters(self) -> Mapping[str, tuple[int, ...]]:
        """See `TapSource`."""
        return {}

    def extend(self, model: PreTrainedModel) -> None:
        """Add the modules that an MTP layer has beyond a decoder layer; see `TapSource`.

        These are the norms of the embedding and of the hidden state, and the linear layer that joins them. Each layer
        after the first also gets a final norm of its own.
        """
        width: int = model.config.hidden_size
        layers: Any = model.get_decoder().layers
        for number, layer in enumerate(layers):
            kind: Any = type(layer.input_layernorm)
            norm = partial(kind, width, eps=model.config.rms_norm_eps)
            added = {"enorm": norm(), "hnorm": norm(), "eh_proj": nn.Linear(2 * width, width, bias=False)}
            for name, module in (added | ({"norm": norm()} if number else {})).items():
                layer.register_module(name, module)

    def updated(self, target: WeightSource | None, files: WeightSource | None) -> WeightSource | None:
        """See `TapSource`; weights of a target without the layer leave it as it is, with the target's new tables."""
        if target is None:
            return files
        own = replace(self, target=cast("Checkpoint", target), tables=None)
        return own if own.has_layer else replace(self, tables=kept(target, lambda: self._shared))


def source_of(files: WeightSource | None, target: WeightSource) -> HeadSource | MtpSource:
    """The source of a head, in its own files or in its target's; raises as `of_target` and `mtp_of`."""
    if files is None:
        return mtp_of(target)
    head = getattr(files, "head", None)
    assert isinstance(head, HeadConfig)
    return of_target(files, head, target)


def describe_mtp(folder: Path) -> ModelShape:
    """The sizes of a target's MTP head, with its modules, from its config.json alone; raises what a run would."""
    head = mtp_of(inspect(folder, config_alone=True))
    return head.shape if head.shape.modules else with_modules(head).shape


def mtp_of(target: WeightSource) -> MtpSource:
    """Return a target's MTP layers as a head; ConfigError if not supported, CheckpointError if files lack them."""
    if not isinstance(target, Checkpoint):
        raise ConfigError(
            "draft=mtp reads the files of the target: give a folder, or an id of the hub, without an adapter"
        )
    config = target.config

    def field(name: str) -> Parsed:
        return getattr(config, name, None)

    check_mtp(field, target.folder)
    own = type(config).from_dict(of_modules(config.to_dict(), num_modules(field)))
    vocab_size, width = target.shape.vocab_size, target.shape.hidden_size
    shape = replace(
        shape_of(own),
        shares_embedding=True,
        target_vocab_size=vocab_size,
        target_hidden_size=width,
        num_taps=1,
        sees_by_itself=any(record_of(own.model_type).windows_of(own)),
    )
    source = MtpSource(target=target, config=own, shape=with_join(shape))
    if target.tensors and not source.has_layer:
        raise CheckpointError(
            f"{target.folder} lacks the MTP layer that its config.json calls for: copy or download it again, or give "
            "another draft"
        )
    if target.tensors and source.tensors[_JOIN].storage and HIDDEN_FIRST in source._stored[_JOIN]:
        raise CheckpointError(f"{target.folder} stores packed MTP layers, which are not read: give another draft")
    return source
