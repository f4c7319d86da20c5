"""What a model family is: one record of facts, which the planner, the loader, the checks and the models read.

A family lives in one module of this package, whose `FAMILY` is its record. Code outside the package adds one with
`register`. Nothing here imports torch: where a family needs code that does, its record names it as `module:function`.

Shapes: L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_ssp import architectures
from llama_ssp.architectures.gated import gated
from llama_ssp.architectures.inventory import Inventory
from llama_ssp.config.registry import Registry
from llama_ssp.config.schema import ModelShape
from llama_ssp.errors import PlacementError

Windows = Callable[[Any], tuple[int | None, ...]]
"""Maps a config of the library to how many positions each layer sees, its own included; None for all of them."""


def no_windows(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
    """Every layer sees all positions."""
    return (None,) * int(config.num_hidden_layers)


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
    """Layers of the kind `sliding_attention` see the config's window."""
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about the models of one `model_type`.

    Attributes:
        model_type: the family's name in config.json.
        parameters: lists the parameters of a model of these sizes.
        is_llama_kind: the lean decoder computes it: the Llama function up to biases, norms of queries and keys, and
            rotary frequencies.
        windows: see `Windows`; None for a family whose layers have no sliding windows.
        mask_by_layer_type: the library's model takes one mask for each kind of layer, not one for all.
        num_masks: masks of a forward that exist at once.
        attention: the library's name of the attention that a model is built with.
        keeps_scores: no fused kernel computes its attention, so a forward keeps the scores of all heads.
        ties_unless_said: config.json without `tie_word_embeddings` means that head and embedding are one matrix.
        cuts_vocabulary: ranks share the embedding out, whether or not the library's plan says so.
        cuts_own_embedding: also where the embedding is a class of the family's own.
        tp_plan: the plan of tensor parallelism, where the library has none: style by module.
        check_files: `module:function` that compares a checkpoint with its config before a model is built; None for
            nothing.
        adapt: `module:function` that replaces what the library's modules lack; None for nothing.
    """

    model_type: str
    parameters: Callable[[ModelShape], Inventory]
    is_llama_kind: bool = False
    windows: Windows | None = None
    mask_by_layer_type: bool = False
    num_masks: int = 1
    attention: str = "sdpa"
    keeps_scores: bool = False
    ties_unless_said: bool = False
    cuts_vocabulary: bool = False
    cuts_own_embedding: bool = False
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    check_files: str | None = None
    adapt: str | None = None

    @property
    def name(self) -> str:
        """What the registry calls it."""
        return self.model_type

    def windows_of(self, config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
        """How many positions each layer of a model sees; see `Windows`."""
        return (self.windows or no_windows)(config)

    def attention_pair_bytes(self, *, num_heads: int, value_bytes: int) -> int:
        """What a forward keeps for each pair of a position and a slot that it may see.

        The masks; and, where no fused kernel computes attention, the scores of all heads and what becomes of them in
        fp32.
        """
        scores = num_heads * (value_bytes + 4) if self.keeps_scores else 0
        return 1 + self.num_masks * value_bytes + scores


FAMILIES: Registry[Family] = Registry(architectures.__name__, "FAMILY", setting="model_type")
register, families = FAMILIES.register, FAMILIES.all


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        PlacementError: there is none.
    """
    known = families()
    if model_type not in known:
        *others, last = sorted(known)
        message = f"{model_type} models are not supported: one of {', '.join(others)} or {last} is required"
        raise PlacementError(message)
    return known[model_type]


def record_of(model_type: str) -> Family:
    """The facts about a family; one without a record has no quirks, and is refused where its parameters matter."""
    return families().get(model_type) or Family(model_type=model_type, parameters=gated)


def inventory(shape: ModelShape) -> Inventory:
    """List the parameters of a model.

    Raises:
        PlacementError: its family is not known.
    """
    return family_of(shape.model_type).parameters(shape)
