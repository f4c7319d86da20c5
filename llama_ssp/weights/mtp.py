"""The first MTP layer of a checkpoint as a `WeightSource`: the draft head of its own model; see `architectures.mtp`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Unpack

from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.architectures.mtp import HIDDEN_FIRST, JOIN, check_mtp, of_one_layer, our_name, with_join
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.weights.checkpoint import Checkpoint, shape_of
from llama_ssp.weights.source import TensorFacts, Wanted, WeightSource

_SHARED = "model.embed_tokens.weight", "lm_head.weight"
_JOIN = f"model.layers.0.{JOIN}.weight"


@dataclass(frozen=True, kw_only=True)
class MtpSource:
    """The MTP layer of a target, with its target's embedding and output; a `WeightSource`.

    Attributes:
        target: which has it in its files.
        config: of a model whose one layer it is.
        shape: of the head.
    """

    target: Checkpoint
    config: PretrainedConfig
    shape: ModelShape
    folder = property(attrgetter("target.folder"))
    context = property(attrgetter("target.context"))
    dtype = property(attrgetter("target.dtype"))

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """The stored names by ours."""
        files = self.target.tensors
        own = {ours: name for name in files if (ours := our_name(name, self.target.shape.num_hidden_layers))}
        return own | {name: name for name in _SHARED if name in files}

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
        """The layer whose input the head reads: the output behind the last one."""
        return (self.target.shape.num_hidden_layers,)


def mtp_of(target: WeightSource) -> MtpSource:
    """The head that a target's own MTP layer is.

    ConfigError if it has none that is read, CheckpointError if its files lack it.
    """
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
