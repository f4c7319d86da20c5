"""The parameters of models whose layers differ, from the fields of their config: latents, recurrences, experts.

They are arithmetic, so a plan needs no library for them; tests hold them to the modules of transformers. Records of
families have the functions at the end (`Family.modules`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.architectures.matrices import GATED, Inventory, KeptStates, Matrix
from llama_ssp.catalogue import ModelShape

Field = Callable[[str], Any]
"""Gives a field of a config by name, None if there is none."""
LINEAR, FULL = "linear_attention", "full_attention"
_NAMES = {"mamba": LINEAR, "attention": FULL}
_LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def mean_layers(
    layers: Mapping[Matrix, int], *, num_layers: int, vectors: int, final_vectors: int, chosen: float = 0.0,
    **others: Any,
) -> Inventory:  # fmt: skip
    """The inventory of layers that differ, counted in their mean.

    Args:
        layers: copies of each matrix in all layers; those with `num_chosen` are experts.
        num_layers: of the model.
        vectors: elements of all else in all layers.
        final_vectors: and outside of them.
        chosen: the share of its experts that a token chooses.
        others: further fields of the inventory.
    """
    of_layer, rest = divmod(vectors, num_layers)
    layer = (
        replace(matrix, copies=count / num_layers, num_chosen=matrix.num_chosen * chosen * count / num_layers)
        for matrix, count in layers.items()
    )
    return Inventory(
        layer=tuple(layer), layer_vectors=of_layer, final_vectors=final_vectors + rest, num_layers=num_layers, **others
    )


class Layers:
    """Collects what the layers of a model hold; see `mean_layers`.

    Attributes:
        vectors: elements beside matrices; at first two norms of the width in each layer.
        states: of recurrent layers.
        num_cached: layers with keys and values.
    """

    def __init__(self, field: Field, shape: ModelShape, *, num_norms: int = 2) -> None:
        self.field, self.shape, self.width = field, shape, shape.hidden_size
        self._matrices = Counter[Matrix]()
        self.vectors, self.num_cached = num_norms * shape.num_hidden_layers * shape.hidden_size, 0
        self.states: tuple[KeptStates, ...] = ()

    def size(self, name: str) -> int:
        """A size of the config; 0 without."""
        return self.field(name) or 0

    def add(self, number: int, rows: Mapping[str, int], *, columns: int = 0, cut: int | None = 0, **how: Any) -> None:
        """Count matrices by name in `number` layers, by default with inputs of the model's width."""
        for name, size in rows.items() if number else ():
            self._matrices[Matrix(module=name, num_rows=size, num_columns=columns or self.width, cut=cut, **how)] += (
                number
            )

    def add_output(self, number: int, name: str, columns: int, *, cut: int | None = 1, **how: Any) -> None:
        """Count a matrix back to the model's width."""
        self.add(number, {name: self.width}, columns=columns, cut=cut, **how)

    def add_mlp(
        self, number: int, units: int, *, part: str = "", names: Iterable[str] = GATED, is_cut: bool = True
    ) -> None:
        """Count an MLP of `units`, its last matrix back to the model's width."""
        *first, last = (f"{part}{name}" for name in names)
        self.add(number, dict.fromkeys(first, units), cut=0 if is_cut else None)
        self.add_output(number, last, units, cut=1 if is_cut else None)

    def add_experts(self, number: int, *, first: str = "gate_up_proj", width: int = 0, bias: bool = False) -> None:
        """Count experts in `number` layers, perhaps with inputs of another `width`, and their router."""
        shape, copies = self.shape, number * self.shape.num_experts
        units = shape.moe_intermediate_size
        width = width or self.width
        self.add(copies, {f"experts.{first}": units * (1 + (first == "gate_up_proj"))}, columns=width, num_chosen=1)
        self.add(copies, {"experts.down_proj": width}, columns=units, cut=1, num_chosen=1)
        self.vectors += copies * (self.width + bias)

    def add_attention(
        self, number: int, *, last: str = "o_proj", head_norms: int = 0, gates: bool = False, is_cut: bool = True
    ) -> None:
        """Count attention with keys and values, `head_norms` vectors of its head dim, and gates beside queries."""
        shape = self.shape
        queries, keys = (count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads))
        self.add(number, {"q_proj": queries * (1 + gates), "k_proj": keys, "v_proj": keys}, cut=0 if is_cut else None)
        self.add_output(number, last, queries, cut=1 if is_cut else None)
        self.vectors += number * (head_norms * shape.head_dim)
        if self.field("attention_bias"):
            self.vectors += number * (queries + 2 * keys + self.width)
        self.num_cached = number

    def add_latents(self, number: int) -> None:
        """Count attention whose keys and values are made of a latent."""
        shape, size = self.shape, self.size
        heads, key_dim = shape.num_attention_heads, shape.qk_nope_head_dim + shape.qk_rope_head_dim
        rank, of_queries = shape.latent_width - shape.qk_rope_head_dim, size("q_lora_rank")
        if of_queries:
            self.add(number, {"q_a_proj": of_queries}, cut=None)
            self.add(number, {"q_b_proj": heads * key_dim}, columns=of_queries)
        else:
            self.add(number, {"q_proj": heads * key_dim})
        self.add(number, {"kv_a_proj_with_mqa": shape.latent_width}, cut=None)
        made = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.add(number, {"kv_b_proj": made}, columns=rank, is_plain=True)  # attention reads it as it is
        self.add_output(number, "o_proj", heads * shape.v_head_dim)
        self.vectors += number * (of_queries + rank)
        if self.field("attention_bias"):
            self.vectors += number * (of_queries + shape.latent_width + self.width)
        self.num_cached = number

    def add_mamba(self, number: int, *, sizes: tuple[int, ...], width: int, has_norm: bool = True) -> None:
        """Count Mamba 2 mixers of heads, their dim, groups and a state; every rank has them whole."""
        heads, dim, groups, state = sizes
        inner, channels = heads * dim, heads * dim + 2 * groups * state
        self.add(number, {"in_proj": inner + channels + heads}, cut=None)
        self.add_output(number, "out_proj", inner, cut=None)
        has_bias = any(map(self.field, ("mamba_conv_bias", "use_conv_bias")))
        self.vectors += number * (channels * (width + has_bias) + 3 * heads + has_norm * inner)
        self.keep(number, channels, width, inner * state)

    def keep(self, number: int, channels: int, width: int, values: int = 0, *, num_units: int = 0) -> None:
        """Count the states of layers."""
        if number:
            self.states = (
                KeptStates(
                    num_layers=number, num_channels=channels, width=width, num_values=values, num_units=num_units
                ),
            )  # fmt: skip

    def inventory(self, *, table: str = "embed_tokens") -> Inventory:
        """All parameters."""
        shape = self.shape
        embedding = Matrix(module=table, num_rows=shape.vocab_size, num_columns=self.width, cut=0)
        of_layer = shape.latent_width or 2 * shape.num_key_value_heads * shape.head_dim
        return mean_layers(
            self._matrices, num_layers=shape.num_hidden_layers, vectors=self.vectors, final_vectors=self.width,
            chosen=shape.num_experts_per_tok / max(shape.num_experts, 1), embeddings=(embedding,),
            head=None if shape.tie_word_embeddings else replace(embedding, module="lm_head"),
            cached_values=self.num_cached * of_layer, states=self.states,
        )  # fmt: skip


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
        full = {
            "bamba": (), "granitemoehybrid": (), "lfm2": range(number), "kimi_linear": range(4, number, 4),
        }.get(field("model_type"), range(interval - 1, number, interval))  # fmt: skip
    return [FULL if place in full else other for place in range(number)]


def _num_dense(field: Field, shape: ModelShape) -> int:
    """Layers with an MLP in place of experts."""
    if not shape.num_experts:
        return shape.num_hidden_layers
    kinds = field("mlp_layer_types")
    return kinds.count("dense") if kinds else shape.num_dense_layers


def latent(field: Field, shape: ModelShape, *, cuts_shared: bool = True, biases_router: bool = True) -> Inventory:
    """DeepSeek and its kind: attention to latents, experts in most layers if there are any."""
    layers, number = Layers(field, shape), shape.num_hidden_layers
    num_dense = _num_dense(field, shape)
    layers.add_latents(number)
    layers.add_mlp(num_dense, shape.intermediate_size)
    layers.add_experts(number - num_dense, bias=biases_router)
    layers.add_mlp(number - num_dense, shape.shared_intermediate_size, part="shared_experts.", is_cut=cuts_shared)
    return layers.inventory()


def gpt_oss(field: Field, shape: ModelShape) -> Inventory:
    """Biases everywhere, in experts too, and a sink of each head."""
    layers, number = Layers(field, shape), shape.num_hidden_layers
    layers.add_attention(number)
    layers.add_experts(number)
    of_expert = 2 * shape.moe_intermediate_size + shape.hidden_size + 1
    layers.vectors += number * (shape.num_attention_heads + shape.num_experts * of_expert)
    return layers.inventory()


def delta(field: Field, shape: ModelShape) -> Inventory:
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid among layers of attention."""
    layers, size, number = Layers(field, shape), partial(Layers(field, shape).size), shape.num_hidden_layers
    is_olmo, is_joint = field("model_type") == "olmo_hybrid", field("model_type") == "qwen3_next"
    num_linear = kinds_of(field, number).count(LINEAR)
    heads, num_values, value_dim = (
        size(f"linear_{name}") for name in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    keys, values, width = heads * size("linear_key_head_dim"), num_values * value_dim, size("linear_conv_kernel_dim")
    joint = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * num_values}
    parts = {
        "in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": num_values, "in_proj_a": num_values,
    }  # fmt: skip
    of_olmo = {
        "q_proj": keys, "k_proj": keys, "v_proj": values, "a_proj": num_values, "b_proj": num_values, "g_proj": values,
    }  # fmt: skip
    if is_olmo:
        layers.add_mlp(number, shape.intermediate_size)
    if not (is_olmo or is_joint):
        layers.add_output(num_linear, "out_proj", values, num_units=heads)
    layers.add(num_linear, of_olmo if is_olmo else joint if is_joint else parts, num_units=heads)
    if is_olmo or is_joint:
        layers.add_output(num_linear, "o_proj" if is_olmo else "out_proj", values, num_units=heads)
    layers.vectors += num_linear * ((2 * keys + values) * width + 2 * num_values + value_dim)
    layers.keep(num_linear, 2 * keys + values, width, values * size("linear_key_head_dim"), num_units=heads)
    if shape.num_experts:
        layers.add_experts(number)
        layers.add_mlp(number, shape.shared_intermediate_size, part="shared_expert.")
        layers.add(number, {"shared_expert_gate": 1}, cut=None)
    elif not is_olmo:
        layers.add_mlp(number, shape.intermediate_size)
    of_all = shape.num_attention_heads + shape.num_key_value_heads
    layers.add_attention(number - num_linear, head_norms=of_all if is_olmo else 2, gates=not is_olmo)
    return layers.inventory()


def kimi(field: Field, shape: ModelShape) -> Inventory:
    """Kimi Linear: a gated delta rule with a forget gate among layers of attention to latents."""
    layers, number = Layers(field, shape), shape.num_hidden_layers
    sizes = field("linear_attn_config") or {}
    heads, dim, width = (
        sizes.get(name) or layers.size(other)
        for name, other in (
            ("num_heads", "linear_num_heads"), ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )  # fmt: skip
    kinds = kinds_of(field, number)
    num_linear, inner = kinds.count(LINEAR), heads * dim
    num_dense = _num_dense(field, shape)
    layers.add(num_linear, dict.fromkeys(("q_proj", "k_proj", "v_proj"), inner), num_units=heads)
    layers.add(num_linear, {"forget_gate.f_a_proj": dim}, cut=None)
    layers.add(num_linear, {"forget_gate.f_b_proj": inner}, columns=dim, num_units=heads)
    layers.add(num_linear, {"b_proj": heads}, num_units=heads)
    layers.add(num_linear, {"g_a_proj": dim}, cut=None)
    layers.add(num_linear, {"g_b_proj": inner}, columns=dim, num_units=heads)
    layers.add_output(num_linear, "o_proj", inner, num_units=heads)
    layers.vectors += num_linear * (3 * inner * width + heads + inner + dim)
    layers.keep(num_linear, 3 * inner, width, inner * dim, num_units=heads)
    layers.add_mlp(num_dense, shape.intermediate_size)
    if is_early := kinds.index(FULL) <= num_dense:
        layers.add_latents(number - num_linear)
    layers.add_experts(number - num_dense, bias=True)
    layers.add_mlp(number - num_dense, shape.shared_intermediate_size, part="shared_experts.")
    if not is_early:
        layers.add_latents(number - num_linear)
    return layers.inventory()


def convolved(field: Field, shape: ModelShape) -> Inventory:
    """LFM2: short convolutions among layers of attention."""
    layers, number, units = Layers(field, shape), shape.num_hidden_layers, shape.intermediate_size
    num_full, width, has_bias = kinds_of(field, number).count(FULL), field("conv_L_cache"), bool(field("conv_bias"))
    if field("model_type") == "lfm2" and field("block_auto_adjust_ff_dim"):
        step = field("block_multiple_of")
        units = step * -(-int((field("block_ffn_dim_multiplier") or 1) * int(2 * units / 3)) // step)
    num_dense = layers.size("num_dense_layers") if shape.num_experts else number
    layers.add(number - num_full, {"in_proj": 3 * layers.width}, cut=None)
    layers.add_output(number - num_full, "out_proj", layers.width, cut=None)
    layers.vectors += (number - num_full) * layers.width * (width + 5 * has_bias)
    layers.keep(number - num_full, layers.width, width)
    layers.add_mlp(num_dense, units, names=("w1", "w3", "w2"))
    layers.add_attention(num_full, last="out_proj", head_norms=2)
    layers.add_experts(number - num_dense, bias=True)
    return layers.inventory()


def mamba(field: Field, shape: ModelShape) -> Inventory:
    """Mamba 2 among layers of attention (Bamba, Granite 4), or beside it in each layer (Falcon-H1)."""
    layers, number, kind = Layers(field, shape), shape.num_hidden_layers, field("model_type")
    is_both, is_granite = kind == "falcon_h1", kind == "granitemoehybrid"
    heads, dim = layers.size("mamba_n_heads"), field("mamba_d_head")
    inner = (field("mamba_d_ssm") if is_both else 0) or layers.size("mamba_expand") * layers.width
    sizes = heads, inner // heads if dim in (None, "auto") else dim, field("mamba_n_groups"), field("mamba_d_state")
    if is_granite:
        layers.add_experts(number if shape.num_experts else 0)
        shared = layers.size("shared_intermediate_size")
        layers.add(number, {"input_linear": 2 * shared})
        layers.add_output(number, "output_linear", shared)
    else:
        layers.add_mlp(number, shape.intermediate_size)
    num_full = number if is_both else kinds_of(field, number).count(FULL)
    layers.add_mamba(
        number if is_both else number - num_full, sizes=sizes, width=field("mamba_d_conv"),
        has_norm=not is_both or bool(field("mamba_rms_norm")),
    )  # fmt: skip
    layers.add_attention(num_full)
    return layers.inventory()


def nemotron(field: Field, shape: ModelShape) -> Inventory:
    """A mixer in each layer: Mamba 2, attention, an MLP or experts."""
    layers, plain = Layers(field, shape, num_norms=1), ("up_proj", "down_proj")
    for kind, number in Counter(kinds_of(field, shape.num_hidden_layers)).items():
        if kind == LINEAR:
            names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
            layers.add_mamba(number, sizes=tuple(map(layers.size, names)), width=field("conv_kernel"))
        elif kind == FULL:
            layers.add_attention(number, is_cut=False)
        elif kind == "mlp":
            layers.add_mlp(number, shape.intermediate_size, names=plain)
        else:
            if width := layers.size("moe_latent_size"):
                layers.add(number, {"fc1_latent_proj": width}, cut=None)
                layers.add_output(number, "fc2_latent_proj", width, cut=None)
            shared = layers.size("moe_shared_expert_intermediate_size")
            layers.add_experts(number, first="up_proj", width=width, bias=True)
            layers.add_mlp(number, shared, part="shared_experts.", names=plain, is_cut=False)
    return layers.inventory(table="embeddings")
