"""The parameters of models whose layers differ, from the fields of their config: latents, recurrences, experts.

They are arithmetic, so a plan needs no library for them; tests hold them to the modules of transformers. Records of
families have the functions at the end (`Family.modules`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llama_ssp.architectures.matrices import GATED, Inventory, KeptStates, Matrix, joined
from llama_ssp.catalogue import ModelShape

Field = Callable[[str], Any]
"""Gives a field of a config by name, None if there is none."""
LINEAR, FULL = "linear_attention", "full_attention"
_NAMES = {"mamba": LINEAR, "attention": FULL}
_LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


class Layers:
    """Collects the parameters of each layer of a model; methods take the indices of layers."""

    def __init__(self, field: Field, shape: ModelShape, *, num_norms: int = 2) -> None:
        self.field, self.shape, self.width = field, shape, shape.hidden_size
        self.all = range(shape.num_hidden_layers)
        self._layers: list[dict[str, Any]] = [
            {"matrices": Counter[Matrix](), "vectors": num_norms * self.width, "cached_values": 0, "states": ()}
            for _ in self.all
        ]

    def others(self, places: Iterable[int]) -> list[int]:
        """Return the indices of all other layers."""
        return sorted({*self.all} - {*places})

    def size(self, name: str) -> int:
        """Return a size of the config; 0 if it has none."""
        return self.field(name) or 0

    def add_vectors(self, places: Iterable[int], number: int) -> None:
        """Count elements beside matrices in each of these layers, in addition to its norms of the width."""
        for place in places:
            self._layers[place]["vectors"] += number

    def add(
        self,
        places: Iterable[int],
        part: str,
        rows: Mapping[str, int],
        *,
        columns: int = 0,
        cut: int | None = 0,
        copies: int = 1,
        **how: Any,
    ) -> None:
        """Count matrices of a part of these layers by name, by default with inputs of the model's width."""
        for name, size in rows.items():
            how["name"] = f"model.layers.*.{part}.{name}"
            matrix = Matrix(module=name, num_rows=size, num_columns=columns or self.width, cut=cut, **how)
            for place in places:
                self._layers[place]["matrices"][matrix] += copies

    def add_output(
        self, places: Iterable[int], part: str, name: str, columns: int, *, cut: int | None = 1, **how: Any
    ) -> None:
        """Count a matrix back to the model's width."""
        self.add(places, part, {name: self.width}, columns=columns, cut=cut, **how)

    def add_mlp(
        self,
        places: Iterable[int],
        units: int,
        *,
        part: str = "mlp",
        shared: str = "",
        names: Iterable[str] = GATED,
        is_cut: bool = True,
    ) -> None:
        """Count an MLP of `units`, perhaps the `shared` one, its last matrix back to the model's width."""
        *first, last = (f"{shared}{name}" for name in names)
        self.add(places, part, dict.fromkeys(first, units), cut=0 if is_cut else None)
        self.add_output(places, part, last, units, cut=1 if is_cut else None)

    def add_experts(
        self,
        places: Collection[int],
        *,
        part: str = "mlp",
        first: str = "gate_up_proj",
        width: int = 0,
        bias: bool = False,
    ) -> None:
        """Count experts in these layers, perhaps with inputs of another `width`, and their router."""
        shape, width = self.shape, width or self.width
        units, how = shape.moe_intermediate_size, {"copies": shape.num_experts, "num_chosen": 1}
        self.add(places, part, {f"experts.{first}": units * (1 + (first == "gate_up_proj"))}, columns=width, **how)
        self.add(places, part, {"experts.down_proj": width}, columns=units, cut=1, **how)
        self.add_vectors(places, shape.num_experts * (self.width + bias))

    def add_attention(
        self,
        places: Collection[int],
        *,
        part: str = "self_attn",
        last: str = "o_proj",
        head_norms: int = 0,
        gates: bool = False,
        is_cut: bool = True,
    ) -> None:
        """Count attention with keys and values, `head_norms` vectors of its head dim, and gates beside queries."""
        shape = self.shape
        queries, keys = (count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads))
        made = {"q_proj": queries * (1 + gates), "k_proj": keys, "v_proj": keys}
        self.add(places, part, made, cut=0 if is_cut else None)
        self.add_output(places, part, last, queries, cut=1 if is_cut else None)
        biases = queries + 2 * keys + self.width if self.field("attention_bias") else 0
        self.add_vectors(places, head_norms * shape.head_dim + biases)
        self._cache(places)

    def _cache(self, places: Iterable[int]) -> None:
        """Count keys and values, or latents, of a token."""
        shape = self.shape
        for place in places:
            values = shape.latent_width or 2 * shape.num_key_value_heads * shape.head_dim
            self._layers[place]["cached_values"] = values

    def add_latents(self, places: Collection[int]) -> None:
        """Count attention whose keys and values are made of a latent."""
        shape, size, part = self.shape, self.size, "self_attn"
        heads, key_dim = shape.num_attention_heads, shape.qk_nope_head_dim + shape.qk_rope_head_dim
        rank, of_queries = shape.latent_width - shape.qk_rope_head_dim, size("q_lora_rank")
        if of_queries:
            self.add(places, part, {"q_a_proj": of_queries}, cut=None)
            self.add(places, part, {"q_b_proj": heads * key_dim}, columns=of_queries)
        else:
            self.add(places, part, {"q_proj": heads * key_dim})
        self.add(places, part, {"kv_a_proj_with_mqa": shape.latent_width}, cut=None)
        made = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.add(places, part, {"kv_b_proj": made}, columns=rank, is_plain=True)  # attention reads it as it is
        self.add_output(places, part, "o_proj", heads * shape.v_head_dim)
        biases = of_queries + shape.latent_width + self.width if self.field("attention_bias") else 0
        self.add_vectors(places, of_queries + rank + biases)
        self._cache(places)

    def add_mamba(
        self, places: Collection[int], *, sizes: tuple[int, ...], width: int, has_norm: bool = True, part: str = "mamba"
    ) -> None:
        """Count Mamba 2 mixers of heads, their dim, groups and a state; every rank has them whole."""
        heads, dim, groups, state = sizes
        inner, channels = heads * dim, heads * dim + 2 * groups * state
        self.add(places, part, {"in_proj": inner + channels + heads}, cut=None)
        self.add_output(places, part, "out_proj", inner, cut=None)
        has_bias = any(map(self.field, ("mamba_conv_bias", "use_conv_bias")))
        self.add_vectors(places, channels * (width + has_bias) + 3 * heads + has_norm * inner)
        self.keep(places, channels, width, inner * state)

    def keep(self, places: Iterable[int], channels: int, width: int, values: int = 0, *, num_units: int = 0) -> None:
        """Count the states of layers."""
        for place in places:
            kept = KeptStates(num_layers=1, num_channels=channels, width=width, num_values=values, num_units=num_units)
            self._layers[place]["states"] = (kept,)

    def inventory(self, *, table: str = "embed_tokens") -> Inventory:
        """All parameters."""
        shape = self.shape
        embedding = Matrix(module=table, num_rows=shape.vocab_size, num_columns=self.width, cut=0)
        return joined(
            [layer_of(shape, **layer) for layer in self._layers],
            final_vectors=self.width,
            embeddings=(embedding,),
            head=None if shape.tie_word_embeddings else replace(embedding, module="lm_head"),
        )


def layer_of(shape: ModelShape, *, matrices: Mapping[Matrix, int], vectors: int, **others: Any) -> Inventory:
    """A layer of a model.

    Args:
        shape: sizes of the model.
        matrices: number of copies of each matrix; a matrix with `num_chosen` is one of experts.
        vectors: number of all other elements.
        others: more fields of the inventory.
    """
    chosen = shape.num_experts_per_tok / max(shape.num_experts, 1)
    layer = (
        replace(matrix, copies=count, num_chosen=matrix.num_chosen * chosen * count)
        for matrix, count in matrices.items()
    )
    return Inventory(
        layer=tuple(layer), layer_vectors=vectors, embeddings=(), head=None, final_vectors=0, num_layers=1, **others
    )


def kinds_of(field: Field, number: int) -> list[str]:
    """The kind of each layer of a hybrid, however its files list them."""
    if found := field("layer_types") or field("layers_block_type"):
        return [_NAMES.get(kind, kind) for kind in found]
    if pattern := field("hybrid_override_pattern"):
        return [_LETTERS[letter] for letter in pattern]
    other = "conv" if field("model_type") == "lfm2" else LINEAR
    full = (field("linear_attn_config") or {}).get("full_attn_layers")
    full = [place - 1 for place in full] if full else field("attn_layer_indices") or field("full_attn_idxs")
    if full is None:
        interval = field("full_attention_interval") or 4
        full = {"bamba": (), "granitemoehybrid": (), "lfm2": range(number), "kimi_linear": range(4, number, 4)}.get(
            field("model_type"), range(interval - 1, number, interval)
        )
    return [FULL if place in full else other for place in range(number)]


def _places(kind: str, kinds: Sequence[str]) -> list[int]:
    return [place for place, each in enumerate(kinds) if each == kind]


def _dense(field: Field, shape: ModelShape) -> Sequence[int]:
    """The layers with an MLP in place of experts."""
    if not shape.num_experts:
        return range(shape.num_hidden_layers)
    kinds = field("mlp_layer_types")
    return _places("dense", kinds) if kinds else range(shape.num_dense_layers)


def latent(field: Field, shape: ModelShape, *, cuts_shared: bool = True, biases_router: bool = True) -> Inventory:
    """DeepSeek and its kind: attention to latents, experts in most layers if there are any."""
    layers, dense = Layers(field, shape), _dense(field, shape)
    others = layers.others(dense)
    layers.add_latents(layers.all)
    layers.add_mlp(dense, shape.intermediate_size)
    layers.add_experts(others, bias=biases_router)
    layers.add_mlp(others, shape.shared_intermediate_size, shared="shared_experts.", is_cut=cuts_shared)
    return layers.inventory()


def gpt_oss(field: Field, shape: ModelShape) -> Inventory:
    """Biases everywhere, in experts too, and a sink of each head."""
    layers = Layers(field, shape)
    layers.add_attention(layers.all)
    layers.add_experts(layers.all)
    of_expert = 2 * shape.moe_intermediate_size + shape.hidden_size + 1
    layers.add_vectors(layers.all, shape.num_attention_heads + shape.num_experts * of_expert)
    return layers.inventory()


def delta(field: Field, shape: ModelShape) -> Inventory:
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid among layers of attention."""
    layers, number = Layers(field, shape), shape.num_hidden_layers
    is_olmo, is_joint = field("model_type") == "olmo_hybrid", field("model_type") == "qwen3_next"
    linear = _places(LINEAR, kinds_of(field, number))
    size, others = layers.size, layers.others(linear)
    heads, num_values, value_dim = (
        size(f"linear_{name}") for name in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    keys, values, width = heads * size("linear_key_head_dim"), num_values * value_dim, size("linear_conv_kernel_dim")
    joint = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * num_values}
    parts = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": num_values, "in_proj_a": num_values}
    of_olmo = {
        "q_proj": keys,
        "k_proj": keys,
        "v_proj": values,
        "a_proj": num_values,
        "b_proj": num_values,
        "g_proj": values,
    }
    if is_olmo:
        layers.add_mlp(layers.all, shape.intermediate_size)
    if not (is_olmo or is_joint):
        layers.add_output(linear, "linear_attn", "out_proj", values, num_units=heads)
    layers.add(linear, "linear_attn", of_olmo if is_olmo else joint if is_joint else parts, num_units=heads)
    if is_olmo or is_joint:
        layers.add_output(linear, "linear_attn", "o_proj" if is_olmo else "out_proj", values, num_units=heads)
    layers.add_vectors(linear, (2 * keys + values) * width + 2 * num_values + value_dim)
    layers.keep(linear, 2 * keys + values, width, values * size("linear_key_head_dim"), num_units=heads)
    if shape.num_experts:
        layers.add_experts(layers.all)
        layers.add_mlp(layers.all, shape.shared_intermediate_size, shared="shared_expert.")
        layers.add(layers.all, "mlp", {"shared_expert_gate": 1}, cut=None)
    elif not is_olmo:
        layers.add_mlp(layers.all, shape.intermediate_size)
    of_all = shape.num_attention_heads + shape.num_key_value_heads
    layers.add_attention(others, head_norms=of_all if is_olmo else 2, gates=not is_olmo)
    return layers.inventory()


def kimi(field: Field, shape: ModelShape) -> Inventory:
    """Kimi Linear: a gated delta rule with a forget gate among layers of attention to latents."""
    layers, number = Layers(field, shape), shape.num_hidden_layers
    sizes = field("linear_attn_config") or {}
    heads, dim, width = (
        sizes.get(name) or layers.size(other)
        for name, other in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    linear, inner, dense = _places(LINEAR, kinds_of(field, number)), heads * dim, _dense(field, shape)
    with_experts = layers.others(dense)
    part = "self_attn"
    layers.add(linear, part, dict.fromkeys(("q_proj", "k_proj", "v_proj"), inner), num_units=heads)
    layers.add(linear, part, {"forget_gate.f_a_proj": dim}, cut=None)
    layers.add(linear, part, {"forget_gate.f_b_proj": inner}, columns=dim, num_units=heads)
    layers.add(linear, part, {"b_proj": heads}, num_units=heads)
    layers.add(linear, part, {"g_a_proj": dim}, cut=None)
    layers.add(linear, part, {"g_b_proj": inner}, columns=dim, num_units=heads)
    layers.add_output(linear, part, "o_proj", inner, num_units=heads)
    layers.add_vectors(linear, 3 * inner * width + heads + inner + dim)
    layers.keep(linear, 3 * inner, width, inner * dim, num_units=heads)
    layers.add_latents(layers.others(linear))
    layers.add_mlp(dense, shape.intermediate_size)
    layers.add_experts(with_experts, bias=True)
    layers.add_mlp(with_experts, shape.shared_intermediate_size, shared="shared_experts.")
    return layers.inventory()


def convolved(field: Field, shape: ModelShape) -> Inventory:
    """LFM2: short convolutions among layers of attention."""
    layers, number, units = Layers(field, shape), shape.num_hidden_layers, shape.intermediate_size
    full, width, has_bias = _places(FULL, kinds_of(field, number)), field("conv_L_cache"), bool(field("conv_bias"))
    if field("model_type") == "lfm2" and field("block_auto_adjust_ff_dim"):
        step = field("block_multiple_of")
        units = step * -(-int((field("block_ffn_dim_multiplier") or 1) * int(2 * units / 3)) // step)
    dense = range(layers.size("num_dense_layers") if shape.num_experts else number)
    conv, with_experts = layers.others(full), layers.others(dense)
    layers.add(conv, "conv", {"in_proj": 3 * layers.width}, cut=None)
    layers.add_output(conv, "conv", "out_proj", layers.width, cut=None)
    layers.add_vectors(conv, layers.width * (width + 5 * has_bias))
    layers.keep(conv, layers.width, width)
    layers.add_mlp(dense, units, part="feed_forward", names=("w1", "w3", "w2"))
    layers.add_attention(full, last="out_proj", head_norms=2)
    layers.add_experts(with_experts, part="feed_forward", bias=True)
    return layers.inventory()


def mamba(field: Field, shape: ModelShape) -> Inventory:
    """Mamba 2 among layers of attention (Bamba, Granite 4), or beside it in each layer (Falcon-H1)."""
    layers, number, kind = Layers(field, shape), shape.num_hidden_layers, field("model_type")
    is_both, is_granite = kind == "falcon_h1", kind == "granitemoehybrid"
    heads, dim = layers.size("mamba_n_heads"), field("mamba_d_head")
    inner = (field("mamba_d_ssm") if is_both else 0) or layers.size("mamba_expand") * layers.width
    sizes = heads, inner // heads if dim in (None, "auto") else dim, field("mamba_n_groups"), field("mamba_d_state")
    if is_granite:
        layers.add_experts(layers.all if shape.num_experts else (), part="block_sparse_moe")
        shared = layers.size("shared_intermediate_size")
        layers.add(layers.all, "shared_mlp", {"input_linear": 2 * shared})
        layers.add_output(layers.all, "shared_mlp", "output_linear", shared)
    else:
        layers.add_mlp(layers.all, shape.intermediate_size, part="feed_forward")
    full = layers.all if is_both else _places(FULL, kinds_of(field, number))
    layers.add_mamba(
        layers.all if is_both else layers.others(full),
        sizes=sizes,
        width=field("mamba_d_conv"),
        has_norm=not is_both or bool(field("mamba_rms_norm")),
    )
    layers.add_attention(full)
    return layers.inventory()


def nemotron(field: Field, shape: ModelShape) -> Inventory:
    """A mixer in each layer: Mamba 2, attention, an MLP or experts."""
    layers, plain, part = Layers(field, shape, num_norms=1), ("up_proj", "down_proj"), "mixer"
    kinds = kinds_of(field, shape.num_hidden_layers)
    for kind in dict.fromkeys(kinds):
        places = _places(kind, kinds)
        if kind == LINEAR:
            names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
            layers.add_mamba(places, sizes=tuple(map(layers.size, names)), width=field("conv_kernel"), part=part)
        elif kind == FULL:
            layers.add_attention(places, part=part, is_cut=False)
        elif kind == "mlp":
            layers.add_mlp(places, shape.intermediate_size, part=part, names=plain)
        else:
            if width := layers.size("moe_latent_size"):
                layers.add(places, part, {"fc1_latent_proj": width}, cut=None)
                layers.add_output(places, part, "fc2_latent_proj", width, cut=None)
            shared = layers.size("moe_shared_expert_intermediate_size")
            layers.add_experts(places, part=part, first="up_proj", width=width, bias=True)
            layers.add_mlp(places, shared, part=part, shared="shared_experts.", names=plain, is_cut=False)
    return layers.inventory(table="embeddings")
