"""Models of any Llama shape that compute the function of a shipped small model.

Target and draft compute the same small model, `tiny`, or `tiny-draft` if one of the shapes is too narrow for `tiny` or
has tied embeddings. Noise on the draft's output head sets the agreement of the two; `training.agreement` measured which
noise gives which agreement, and stored it in a file. A draft head computes a shipped head, which its extension names,
with noise on its output head too: one layer cannot compute `tiny`, so it agrees as often as that head at most. Module
`expansion` places the numbers. A tensor or slice is made on its device when it is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from llama_ssp import catalogue
from llama_ssp.architectures.model_files import read_json
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.synthetic.expansion import Implant, obstacle
from llama_ssp.extensions.synthetic.records import AGREEMENT_FILE, agreement_of
from llama_ssp.registry import imported
from llama_ssp.settings.draft_heads import HEADS
from llama_ssp.settings.schema import RunConfig
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import Checkpoint, inspect
from llama_ssp.weights.source import TensorFacts, Wanted, WeightSource

SMALL_MODELS = ("tiny", "tiny-draft")
TOKEN_MAP = "d2t"
"""The tensor of a head with the tokens of its target that it drafts."""
_LAYER_TENSORS = (
    *(f"self_attn.{kind}_proj" for kind in "qkvo"),
    *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)


@dataclass(frozen=True)
class Synthetic:
    """A Llama shape that computes a small model, or the shape of a head a small head; a `MadeSource`."""

    small: WeightSource  # the small model, whose tokenizer and end-of-sequence tokens are used.
    shape: ModelShape  # the large shape, without `expansion.obstacle`.
    # standard deviation of the noise on the small output head, or its tied embedding, in units of the head's root mean
    # square.
    noise: float = 0.0
    # whether fp32 matrices hold fp16 values, as from a 16-bit checkpoint, so that a CPU keeps them in 16 bits.
    in_16_bits: bool = False
    folder = property(attrgetter("small.folder"))
    dtype = property(attrgetter("small.dtype"))

    @property
    def context(self) -> int:
        """The maximum sequence length, at most the small model's."""
        return min(self.shape.max_position_embeddings, self.small.context)

    @cached_property
    def config(self) -> PretrainedConfig:
        """See `WeightSource`."""
        tokens = {f"{kind}_token_id": getattr(self.small.config, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        rotary = {"rope_type": "default", "rope_theta": self._implant.theta}
        return llama_config(self.shape, rms_norm_eps=self._implant.eps, rope_parameters=rotary, **tokens)

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """All tensors by their names in transformers."""
        layers, facts = range(self.shape.num_hidden_layers), dict[str, TensorFacts]()
        names = [f"model.layers.{layer}.{tensor}.weight" for layer in layers for tensor in _LAYER_TENSORS]
        names.append("model.norm.weight")
        if not self.shape.tie_word_embeddings:
            names.append("lm_head.weight")
        if self.shape.is_head:
            names += ["model.layers.0.hidden_norm.weight", "model.fc.weight"]
            facts[TOKEN_MAP] = TensorFacts(dtype=None, shape=(self.shape.vocab_size,))
        else:
            names.append("model.embed_tokens.weight")
        for name in names:
            gather = self._implant.gather(name)
            sizes = (len(gather.rows_O), len(gather.columns_I))
            facts[name] = TensorFacts(dtype=self.dtype, shape=sizes[1:] if name.endswith("norm.weight") else sizes)
        return facts

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Make a tensor or a slice of it, on its device; see `WeightSource.read`."""
        if name == TOKEN_MAP:
            return self._token_map()
        gather = self._implant.gather(name)
        if (dim := wanted.get("dim")) is not None:
            gather = gather.cut(dim, wanted["parts"])
        small = self.small.read(gather.source, dtype=torch.float32)
        head = "model.embed_tokens.weight" if self.small.shape.tie_word_embeddings else "lm_head.weight"
        if self.noise and gather.source == head:
            generator = torch.Generator().manual_seed(0)
            root_mean_square = float(small.square().mean().sqrt())
            small += self.noise * root_mean_square * torch.randn(small.shape, generator=generator)
        small = small.to(wanted.get("device"))
        dtype = wanted.get("dtype") or self.dtype
        is_rounded = self.in_16_bits and dtype is torch.float32 and small.ndim > 1
        values = gather.make(small.view(-1, small.shape[-1]), dtype=torch.float16 if is_rounded else dtype).to(dtype)
        return values[0] if small.ndim == 1 else values

    def layers_of(self, small_layers: Sequence[int]) -> tuple[int, ...]:
        """Return the layers whose inputs equal those of the given layers of the small model."""
        starts = {small: layer for layer, (small, counts) in enumerate(self._implant.layers) if counts}
        return tuple(starts[layer] for layer in small_layers)

    def of_head(self, small: WeightSource, shape: ModelShape, agreement: float) -> "Synthetic":
        """See `MadeSource`."""
        if reason := obstacle(small.shape, shape):
            name = small.folder.name
            raise ConfigError(f"weights=synthetic needs the shape of a head that can hold {name} ({reason})")
        return replace(self, small=small, shape=shape, noise=noise_for(small.folder, agreement))

    def _token_map(self) -> Tensor:
        """Make `d2t` of a head: the small head's tokens, then the first remaining ones, which are never drafted."""
        size = self.shape.vocab_size
        small_ids = torch.arange(self.small.shape.vocab_size) + self.small.read(TOKEN_MAP)
        is_free_V = torch.ones(self.shape.num_token_ids, dtype=torch.bool).index_fill_(0, small_ids, value=False)
        return torch.cat([small_ids, is_free_V.nonzero()[:, 0]])[:size] - torch.arange(size)

    @cached_property
    def _implant(self) -> Implant:
        config = self.small.config
        theta = config.rope_parameters["rope_theta"]
        return Implant(self.small.shape, self.shape, small_eps=config.rms_norm_eps, small_theta=theta)


def of_run(config: RunConfig, device: str) -> list[WeightSource]:
    """Make the sources of a run on such a device; raises as `synthesize`."""
    shapes = [entry.shape for entry in (config.model, config.draft.model) if entry and entry.shape]
    # On a CPU 16 bits hold the numbers, as planned.
    return synthesize(shapes, agreement=agreement_of(config), in_16_bits=device == "cpu")


def synthesize(shapes: Sequence[ModelShape], *, agreement: float, in_16_bits: bool = False) -> list[WeightSource]:
    """Make the sources of a target, or of a target and its draft, which may be a head; no tensor is made yet.

    `agreement` is the probability that a drafted token is accepted, as measured by `training.agreement`. ConfigError if
    no noise is known for it, or a shape is too small.
    """
    target_shape, *others = shapes
    small = choose_small(shapes)
    target = Synthetic(small=small, shape=target_shape, in_16_bits=in_16_bits)
    drafts: list[WeightSource] = [
        _head_of(target, shape, agreement)
        if shape.is_head
        else replace(target, shape=shape, noise=noise_for(small.folder, agreement))
        for shape in others
    ]
    return [target, *drafts]


def _head_of(target: Synthetic, shape: ModelShape, agreement: float) -> WeightSource:
    make = next(filter(None, (kind.synthesize for kind in HEADS.all().values())), None)
    if make is None:
        raise ConfigError("weights=synthetic has no draft heads here: give a draft model, as in draft=7B")
    return cast("WeightSource", imported(make, setting="weights")(target, shape, agreement))


def choose_small(shapes: Sequence[ModelShape]) -> Checkpoint:
    """Choose the best small model that all these shapes can hold, with a head if there is one; ConfigError for none."""
    reasons, models = [], [shape for shape in shapes if not shape.is_head]
    for name in SMALL_MODELS if len(models) == len(shapes) else SMALL_MODELS[:1]:
        checkpoint = inspect(hub.resolve(catalogue.load(name)))
        found = [reason for shape in models if (reason := obstacle(checkpoint.shape, shape))]
        if not found:
            return checkpoint
        reasons.append(f"{name}: {found[0]}")
    raise ConfigError(f"weights=synthetic needs shapes that can hold a shipped model ({'; '.join(reasons)})")


def noise_for(folder: Path, agreement: float) -> float:
    """Interpolate the noise that gives an agreement between the measured points in the small model's folder."""
    points = read_json(folder / AGREEMENT_FILE)["points"]
    curve = sorted((point["agreement"], point["noise"]) for point in points)
    for (low, more_noise), (high, less_noise) in pairwise(curve):
        if low <= agreement <= high:
            return float(more_noise + (agreement - low) / (high - low) * (less_noise - more_noise))
    raise ConfigError(f"synthetic.agreement={agreement} must be between {curve[0][0]} and {curve[-1][0]}")


def llama_config(shape: ModelShape, **more: Any) -> LlamaConfig:
    """Make the configuration of a Llama with this shape, and with `more` settings of transformers."""
    known = LlamaConfig().to_dict()
    sizes = {name: size for name, size in asdict(shape).items() if name in known and name != "model_type"}
    return LlamaConfig(**sizes, **more)
