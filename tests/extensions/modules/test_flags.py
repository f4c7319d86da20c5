"""Cuts against uncut models: each family with each flag and pattern of its configuration, on 1, 2 and 3 ranks.

The whole sweep (--slow) takes 5.5 minutes of one core. It stands in for a comparison with uncut layers at load, for
which every rank would read whole layers; docs/benchmarks/families.md has its outcomes.
"""

from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.families import MORE
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import split_model
from llama_ssp.errors import PlacementError
from llama_ssp.extensions.modules.building import load_modules
from llama_ssp.extensions.modules.described import describe
from llama_ssp.extensions.modules.tensor_parallel import shard
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import inspect, shape_of
from tests.helpers.fake_comm import thread_comms
from tests.helpers.flags import EQUAL, NO_EFFECT, NOT_BUILT, REFUSED, flags_of, outcome
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import FAMILIES, build_checkpoint, tiny_config

KINDS = {kind: MORE.get(kind, {}) for kind in (*FAMILIES, *MORE)}
SAMPLE = {
    "stablelm": ("qk_layernorm=true", "use_qkv_bias=true"),
    "cohere": ("use_qk_norm=true",),
    "beam": ("",),
    "gemma3n_text": ("activation_sparsity_pattern",),
    "phi": ("qk_layernorm=true",),
    "gpt_oss": ("attention_bias=false",),
    "llama": ("attention_bias=true", "mlp_bias=true"),
}
BENT = {
    **dict.fromkeys(("gemma", "gemma3_text"), "use_bidirectional_attention=true"),
    "doge": "is_moe=true",
    "falcon": "alibi=true",
}
"""Flags of models that do not run, of kinds that do."""


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *(pytest.param(kind, flags, id=f"{kind}, sample") for kind, flags in SAMPLE.items()),
        *((slow if place % 36 else heavy)(kind, None) for place, kind in enumerate(KINDS)),
    ],
)
def test_every_flag_of_a_family_gives_ranks_the_logits_of_the_uncut_model_or_is_refused(
    tmp_path: Path, kind: str, flags: tuple[str, ...] | None
) -> None:
    sizes, changes = KINDS[kind], flags_of(kind, KINDS[kind])
    found = {
        flag: outcome(kind, sizes, changes[flag], tmp_path / str(place)) for place, flag in enumerate(flags or changes)
    }
    as_it_is = found.get("", EQUAL)
    assert flags is None or {*found.values()} == {EQUAL}, found
    for flag, how in found.items():
        assert how == (REFUSED if flag == BENT.get(kind) else as_it_is) or how in {NO_EFFECT, NOT_BUILT}, flag


@pytest.mark.parametrize(
    ("place", "width"), [("self_attn.sub_norm", 64), ("self_attn.key_norm", 32), ("mlp.sub_norm", 160)]
)
def test_a_norm_over_features_that_ranks_share_is_refused_by_name(place: str, width: int) -> None:
    """One of a head's width is whole on every rank."""
    shape = shape_of(tiny_config("llama"))

    def cut_with(width: int) -> None:
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        model.set_submodule(f"model.layers.1.{place}", nn.RMSNorm(width))
        shard(model, shape, Comm(rank=0, size=2), own=split_model(shape, num_ranks=2)[0])

    with pytest.raises(PlacementError, match=rf"layers.1.{place}.weight spans {width} features, which ranks share"):
        cut_with(width)
    cut_with(8)


def test_a_plan_cuts_the_gates_of_attention_where_ranks_do(tmp_path: Path) -> None:
    """At heads, and those of an MLP at units: 128 features of 8 heads over 4 key-value heads, on 3 ranks."""
    build_checkpoint(tmp_path, "beam", **MORE["beam"])
    shape, origin = describe(tmp_path), inspect(tmp_path)
    for own, comm in zip(split_model(shape, num_ranks=3), thread_comms(3), strict=True):
        found = dict(load_modules(Loading(origin, comm=comm)).named_parameters())
        planned = {matrix.module: matrix.num_rows for matrix in inventory(shape).of_rank(own).layer}
        for name, place in (("self_attn.gate_proj", "self_attn.gate_proj"), ("gate_proj", "mlp.gate_proj")):
            assert len(found[f"model.layers.0.{place}.weight"]) == planned[name]
