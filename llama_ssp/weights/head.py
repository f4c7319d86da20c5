"""Draft heads as a `WeightSource`, with their target's embedding and output where their files have none.

All public layouts (`architectures.heads`) are read as they are: their tensors get the names of the modules that
`models.llama` builds. So do tensors of the first MTP layer of a checkpoint (`architectures.mtp`), which is the draft
head of its own model. `d2t` and `t2d` map the vocabulary of a head to the target's:

    d2t    (D,)  the target's id of token i is i + d2t[i]
    t2d    (V,)  whether the head can draft a token of the target

Shapes: D tokens that the head drafts, V vocabulary of the target.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Unpack

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.architectures.heads import DFLASH, MASK, HeadConfig
from llama_ssp.architectures.mtp import HIDDEN_FIRST, JOIN, check_mtp, of_one_layer, our_name, with_join
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.registry import imported
from llama_ssp.weights.checkpoint import Checkpoint, shape_of
from llama_ssp.weights.source import TensorFacts, Wanted, WeightSource

EMBEDDING, OUTPUT, TOKEN_MAP = "model.embed_tokens.weight", "lm_head.weight", "d2t"
_JOIN = f"model.layers.0.{JOIN}.weight"


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """The files of a head, or its recipe, for the target that it drafts for; a `WeightSource`."""

    files: WeightSource
    head: HeadConfig
    target: WeightSource
    folder = property(attrgetter("files.folder"))
    config = property(attrgetter("files.config"))  # of a model whose one layer the head has; `vocab_size` is D.
    context = property(attrgetter("target.context"))  # The head's rotary positions go as far.
    dtype = property(attrgetter("files.dtype"))

    @cached_property
    def shape(self) -> ModelShape:
        """See `WeightSource`."""
        return replace(self.files.shape, shares_embedding=EMBEDDING not in self._stored)

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
        shared = (name for name in (EMBEDDING, OUTPUT) if self.files.tensors and name not in own)
        return own | {name: self.target.tensors[self._of_target[name]] for name in shared}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`."""
        if name not in self._stored:
            return self.target.read(self._of_target[name], **wanted)
        found = self.files.read(self._stored[name], **wanted)
        return found.flatten() if name == MASK else found

    @cached_property
    def _of_target(self) -> Mapping[str, str]:
        """The stored names in the target of the embedding and the output."""
        vocabulary_of = imported("llama_ssp.models.huggingface.modules:vocabulary_of", setting="draft")
        return dict(zip((EMBEDDING, OUTPUT), vocabulary_of(self.target), strict=True))

    @property
    def shares_output(self) -> bool:
        """Whether its files have no output of their own, so that it has its target's."""
        return OUTPUT not in self.files.tensors

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs the head reads."""
        return self.head.layers_of(self.target.shape.num_hidden_layers)

    def token_ids(self) -> Tensor:
        """The target's id of each token that the head drafts, (D,).

        CheckpointError if the map is missing, leads out of the target's vocabulary or twice to one token, or
        contradicts `t2d`.
        """
        size, vocab_size = self.shape.vocab_size, self.shape.num_token_ids
        steps_D, known_V = self._map(TOKEN_MAP, size), self._map("t2d", vocab_size)
        if steps_D is None:
            if size == vocab_size:
                return torch.arange(size)
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
    """The head of a target; CheckpointError if it is another one's, or its map of tokens is faulty."""
    sizes = target.shape.hidden_size, target.shape.vocab_size
    own = files.shape.target_hidden_size, files.shape.target_vocab_size
    if sizes != own:
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
    if not all(0 <= layer < num_layers for layer in source.layers):
        raise CheckpointError(
            f"{files.folder} reads the layers {list(source.layers)}, and this target has {num_layers}: choose a head "
            "of this target"
        )
    source.token_ids()
    return source


def _bare(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _named(name: str) -> str:
    """The name of a stored tensor among our modules."""
    name = _bare(name)
    return name if name.startswith(("lm_head.", "verifier_")) or "." not in name else f"model.{name}"


@dataclass(frozen=True, kw_only=True)
class MtpSource:
    """The MTP layer of a target, with its target's embedding and output; a `WeightSource`."""

    target: Checkpoint  # which has it in its files.
    config: PretrainedConfig  # of a model whose one layer it is.
    shape: ModelShape  # of the head.
    folder = property(attrgetter("target.folder"))
    context = property(attrgetter("target.context"))
    dtype = property(attrgetter("target.dtype"))

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """The stored names by ours."""
        files = self.target.tensors
        own = {ours: name for name in files if (ours := our_name(name, self.target.shape.num_hidden_layers))}
        return own | {name: name for name in (EMBEDDING, OUTPUT) if name in files}

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """All tensors by the names of our modules."""
        return {ours: self.target.tensors[name] for ours, name in self._stored.items()}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`."""
        found = self.target.read(stored := self._stored[name], **wanted)
        swaps = name == _JOIN and HIDDEN_FIRST in stored
        return found.roll(found.shape[1] // 2, 1) if swaps else found

    @property
    def has_layer(self) -> bool:
        """Whether the target's files have it."""
        return _JOIN in self.tensors

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer whose input the head reads: the one after the last, for the last one's output."""
        return (self.target.shape.num_hidden_layers,)


def mtp_of(target: WeightSource) -> MtpSource:
    """The head that a target's own MTP layer is; ConfigError if none is read, CheckpointError if files lack it."""
    if not isinstance(target, Checkpoint):
        raise ConfigError(
            "draft=mtp reads the files of the target: give a folder, or an id of the hub, without an adapter"
        )
    config = target.config
    check_mtp(lambda name: getattr(config, name, None), target.folder)
    one = type(config).from_dict(of_one_layer(config.to_dict()))
    vocab_size, width = target.shape.vocab_size, target.shape.hidden_size
    shape = replace(
        shape_of(one), shares_embedding=True, target_vocab_size=vocab_size, target_hidden_size=width, num_taps=1
    )
    source = MtpSource(target=target, config=one, shape=with_join(shape))
    if target.tensors and not source.has_layer:
        raise CheckpointError(
            f"{target.folder} lacks the MTP layer that its config.json calls for: copy or download it again, or give "
            "another draft"
        )
    if target.tensors and source.tensors[_JOIN].storage and HIDDEN_FIRST in source._stored[_JOIN]:
        raise CheckpointError(f"{target.folder} stores packed MTP layers, which are not read: give another draft")
    return source
