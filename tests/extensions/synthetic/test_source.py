"""Holds synthetic weights to the shipped model's function, on every rank, and shapes to what that needs."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp import catalogue
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.synthetic.expansion import obstacle
from llama_ssp.extensions.synthetic.records import HEAD_AGREEMENT
from llama_ssp.extensions.synthetic.source import Synthetic, choose_small, llama_config, synthesize
from llama_ssp.kernels.linear import PlainLinear, half_scale
from llama_ssp.models.cache import Taps
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.source import WeightSource
from tests.helpers.extensions import of_heads
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import load_lean
from tests.helpers.operator_count import LargestTensor
from tests.helpers.shapes import SHAPES, llama_shape

pytestmark = pytest.mark.seconds

CPU = torch.device("cpu")
NUM_TOKENS = 40
TEXTS = torch.randint(3, 4096, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def make(shape: ModelShape) -> Synthetic:
    [synthetic] = synthesize([shape], agreement=1.0)
    assert isinstance(synthetic, Synthetic)
    return synthetic


def head_shape(target: ModelShape, *, num_drafted: int) -> ModelShape:
    """A head that is as wide as its target and drafts so many tokens."""
    return replace(
        target,
        model_type="eagle3",
        num_hidden_layers=1,
        num_key_value_heads=4,
        vocab_size=num_drafted,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
    )


@pytest.mark.heavy
def test_numbers_in_16_bits_are_held_by_fp16_and_others_are_not() -> None:
    for in_16_bits in (True, False):
        target, draft = synthesize([llama_shape(num_hidden_layers=10)] * 2, agreement=0.8, in_16_bits=in_16_bits)
        scales = [
            half_scale(origin.read(name, dtype=torch.float32).contiguous())
            for origin in (target, draft)
            for name, facts in origin.tensors.items()
            if len(facts.shape) > 1
        ]
        assert all(scales) is in_16_bits


def small_logits(small: WeightSource) -> Tensor:
    """The library's own answer for the small model."""
    model = AutoModelForCausalLM.from_pretrained(small.folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(TEXTS).logits
    return logits


def lean(synthetic: Synthetic, comm: Comm) -> LeanRunner:
    """This rank's slices in the lean decoder, whose kernels are not worth choosing here."""
    return load_lean(synthetic, dtype=torch.float32, comm=comm, kernel=PlainLinear)


def logits(runner: Runner) -> Tensor:
    """A prefill, and the rest in rounds of five tokens."""
    runner.allocate(batch_size=len(TEXTS), capacity=NUM_TOKENS)
    positions = torch.arange(NUM_TOKENS).expand_as(TEXTS)
    cuts = [30, 5, 5]
    pieces = zip(TEXTS.split(cuts, dim=1), positions.split(cuts, dim=1), strict=True)
    return torch.cat([runner.forward(ids, places, bucket=NUM_TOKENS) for ids, places in pieces], dim=1)


def assert_same_function(found: Tensor, synthetic: Synthetic, wanted: Tensor) -> None:
    """Logits up to 1e-4; a tied head adds one number to all of a row, which no probability can tell."""
    vocab_size = wanted.shape[-1]
    lacking = found[..., vocab_size:]
    assert found.shape[-1] == synthetic.shape.vocab_size
    assert (lacking < wanted.min() - 100).all(), "a token that the tokenizer lacks could be drawn"
    found = found[..., :vocab_size]
    if synthetic.shape.tie_word_embeddings:
        found, wanted = found.log_softmax(-1), wanted.log_softmax(-1)
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        *({"tied": name, "more of everything": heavy(name)}.get(name, slow(name)) for name in SHAPES),
        slow("tinyllama_1B"),
    ],
)
def test_a_larger_shape_computes_the_small_models_logits(name: str) -> None:
    synthetic = make(SHAPES.get(name) or catalogue.load(name).shape or llama_shape())
    assert_same_function(logits(lean(synthetic, Comm.single())), synthetic, small_logits(synthetic.small))


@dataclass(frozen=True, kw_only=True)
class RecordingComm(ThreadComm):
    """Notes how large this rank's part of every sum is."""

    sizes: list[float] = field(default_factory=list)

    def all_reduce(self, values: Tensor) -> Tensor:
        self.sizes.append(float(values.float().square().mean().sqrt()))
        return super().all_reduce(values)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [slow("more of everything", 3), slow("larger groups", 2), heavy("larger groups", 8), slow("tied", 4)],
)
def test_every_rank_has_a_part_in_every_sum(name: str, num_ranks: int) -> None:
    """3 ranks hold 3, 3 and 2 of 8 key-value heads; 8 ranks outnumber 4 of them and share them.

    In a layer that does not count, the parts cancel. The embedding alone is left out: a token's row is on one rank.
    """
    synthetic = make(SHAPES[name])
    comms = [RecordingComm(**vars(comm)) for comm in thread_comms(num_ranks)]
    runners = [lean(synthetic, comm) for comm in comms]
    wanted = small_logits(synthetic.small)
    for found in on_ranks(comms, lambda comm: logits(runners[comm.rank])):
        assert_same_function(found, synthetic, wanted)
    parts_RS = torch.tensor([comm.sizes for comm in comms])
    sums_per_forward = 1 + 2 * synthetic.shape.num_hidden_layers
    counted_RFS = parts_RS.view(num_ranks, -1, sums_per_forward)[:, :, 1:]
    share_RFS = counted_RFS / counted_RFS.amax(dim=0)
    assert share_RFS.min() > 0.05


@pytest.mark.parametrize("tensor", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_slices_are_slices_of_the_whole(tensor: str) -> None:
    synthetic, name = make(llama_shape()), f"model.layers.4.{tensor}.weight"
    whole = synthetic.read(name)
    for dim, size in enumerate(whole.shape):
        parts = [range(size // 2, size), range(10)]
        kept = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        assert torch.equal(synthetic.read(name, dim=dim, parts=parts), whole.index_select(dim, kept))


def test_bf16_loses_nothing_where_the_shape_lets_all_factors_be_powers_of_two() -> None:
    synthetic = make(catalogue.load("7B").shape or llama_shape())
    for tensor in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
        name = f"model.layers.3.{tensor}.weight"
        assert torch.equal(
            synthetic.read(name, dtype=torch.bfloat16).float(), synthetic.read(name, dtype=torch.float32)
        )


LLAMAS = [
    name for name in catalogue.names("model") if (found := catalogue.load(name).shape) and found.model_type == "llama"
]


@pytest.mark.parametrize("name", LLAMAS)
def test_every_llama_shape_of_the_catalogue_can_be_made_and_saved(name: str, tmp_path: Path) -> None:
    synthetic = make(shape := catalogue.load(name).shape or llama_shape())
    assert synthetic.context == 2048
    assert synthetic.config.rms_norm_eps > 0
    assert synthetic.tensors["model.norm.weight"].shape == (synthetic.shape.hidden_size,)
    llama_config(shape).save_pretrained(tmp_path)
    assert read_config(tmp_path)[0] == shape


def test_a_pair_computes_one_small_model_that_both_shapes_can_hold() -> None:
    wide, tied = llama_shape(), llama_shape(tie_word_embeddings=True)
    assert choose_small([wide]).folder.name == "tiny"
    assert {origin.folder.name for origin in synthesize([wide, tied], agreement=0.7)} == {"tiny-draft"}
    with pytest.raises(ConfigError, match=r"tiny: hidden_size is 64, .* tiny-draft: hidden_size is 64"):
        choose_small([replace(wide, hidden_size=64)])


def load_pair(target: WeightSource, origin: WeightSource, comm: Comm) -> tuple[Runner, Any]:
    """A target and its head, or this rank's slices of them."""
    runner, head = (load_model(Loading(each, dtype=torch.float32, comm=comm)) for each in (target, origin))
    assert isinstance(head, of_heads("runner").HeadRunner)
    assert not isinstance(runner, of_heads("runner").HeadRunner)
    return runner, head


def drafts(runner: Runner, head: Any, origin: Any) -> tuple[Tensor, Tensor]:
    """Logits over the target's vocabulary, from the taps of all pairs and from the head's own states of them."""
    taps = Taps(origin.layers, width=origin.target.shape.hidden_size, dtype=torch.float32, device=CPU)
    taps.allocate(batch_size=len(TEXTS), num_slots=NUM_TOKENS)
    for each in (runner, head):
        each.allocate(batch_size=len(TEXTS), capacity=NUM_TOKENS)
    positions_BT = torch.arange(NUM_TOKENS).expand_as(TEXTS)
    runner.forward(TEXTS, positions_BT, bucket=NUM_TOKENS, taps=taps)
    ids_BP, places_BP = TEXTS[:, 1:], positions_BT[:, :-1]
    hidden_BPE = head.hidden_of(taps.read(places_BP))
    hidden_BPE, first_BPV = head.extend(ids_BP, hidden_BPE, places_BP, bucket=NUM_TOKENS)
    _, second_BPV = head.extend(ids_BP, hidden_BPE, places_BP, bucket=NUM_TOKENS)
    return first_BPV, second_BPV


@pytest.mark.parametrize(
    ("name", "num_drafted", "num_ranks"),
    [heavy("more of everything", 3000, 2), slow("the same vocabulary", 2048, 1), slow("hardly room", 2048, 1)],
)
def test_a_larger_head_drafts_as_the_small_one_from_the_taps_of_a_larger_target(
    name: str, num_drafted: int, num_ranks: int
) -> None:
    shape = SHAPES[name]
    target, origin = synthesize([shape, head_shape(shape, num_drafted=num_drafted)], agreement=HEAD_AGREEMENT)
    small, files = (inspect(hub.resolve(catalogue.load(name))) for name in ("tiny", "tiny-eagle"))
    assert files.head
    small_head = of_heads("sources").of_target(files, files.head, small)
    assert isinstance(origin, of_heads("sources").HeadSource)
    assert isinstance(origin.files, Synthetic)
    assert origin.files.noise == 0
    assert origin.shape.vocab_size == num_drafted
    wanted = drafts(*load_pair(small, small_head, Comm.single()), small_head)
    ids_D, comms = small_head.token_ids(), thread_comms(num_ranks)
    pairs = [load_pair(target, origin, comm) for comm in comms]
    for found in on_ranks(comms, lambda comm: drafts(*pairs[comm.rank], origin)):
        for found_BPV, wanted_BPV in zip(found, wanted, strict=True):
            assert found_BPV.shape[-1] == shape.vocab_size
            assert (found_BPV[..., ids_D] - wanted_BPV[..., ids_D]).abs().max() < 1e-3
            others_BPV = found_BPV.index_fill(-1, ids_D, float("-inf"))
            assert (others_BPV < wanted_BPV[..., ids_D].min() - 100).all(), "a token could be drafted that it lacks"


@pytest.mark.parametrize(
    ("changes", "num_drafted", "reason"),
    [
        ({"tie_word_embeddings": True}, 2048, r"tiny: its embeddings are tied\)"),
        ({}, 2000, "can hold tiny-eagle .vocab_size is 2000, and at least 2048 is required"),
        ({"vocab_size": 4096}, 3000, "can hold tiny-eagle .vocab_size is 3000, and 2048 of 4096 tokens are drafted"),
    ],
)
def test_a_pair_that_cannot_hold_the_shipped_head_is_refused(
    changes: dict[str, Any], num_drafted: int, reason: str
) -> None:
    shape = llama_shape(**changes)
    with pytest.raises(ConfigError, match=reason):
        synthesize([shape, head_shape(shape, num_drafted=num_drafted)], agreement=0.5)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_is_made_without_the_rest(dim: int) -> None:
    """So a rank never holds more than its shard and one tensor."""
    synthetic, name = make(llama_shape(intermediate_size=6400)), "model.layers.4.mlp.down_proj.weight"
    largest, whole = LargestTensor(), synthetic.tensors[name].shape  # type: ignore[no-untyped-call]
    with largest:
        synthetic.read(name, dim=dim, parts=[range(16)])
    assert largest.num_bytes < whole[0] * whole[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 9}, "num_hidden_layers is 9, and at least 10 is required"),
        ({"hidden_size": 256}, "hidden_size is 256, and at least 257 is required"),
        ({"head_dim": 16}, "head_dim is 16, and at least 32"),
        ({"intermediate_size": 1000}, "intermediate_size is 1000, and at least 1024"),
        ({"vocab_size": 4000}, "vocab_size is 4000, and at least 4096"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, and at least 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_key_value_heads is 6, and at least 8"),
        ({"tie_word_embeddings": True}, "its embeddings are tied"),
    ],
)
def test_what_stands_in_the_way_is_named(changes: dict[str, int], reason: str) -> None:
    assert reason in (obstacle(choose_small([llama_shape()]).shape, llama_shape(**changes)) or "")
