"""Attention to latents: the library's texts on any ranks, in rounds, trees and fewer bits; and the bytes of a plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from llama_ssp import catalogue
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.modules import latents
from llama_ssp.extensions.modules.building import OwnLinear, load_modules
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.machines import hardware
from llama_ssp.models import prefill
from llama_ssp.models.cache import Masks
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.weights import Loading
from llama_ssp.planning.model import PlannedModel, expands_latents, planned_model
from llama_ssp.planning.weights import model_bytes, rank_shares, step_bytes
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers import rolled_back
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.extensions import need
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.held import held_bytes
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, load_ranks, tiny_model
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.packed_checkpoints import pack_checkpoint
from tests.helpers.texts import library_greedy, part_at_a_near_tie

ODD: dict[str, Any] = {
    "hidden_size": 80,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 19,
    "kv_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 7,
    "v_head_dim": 9,
    "head_dim": 6,
}
EVEN = ODD | {"qk_nope_head_dim": 8}
"""Rotary numbers of the library's DeepSeek V2 are complex ones, at even places."""
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
WHOLE = ODD | {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 12}
"""The CPU's operator takes these, and torch's operators odd sizes."""
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": ODD | _ROUTED,  # Kimi K2 has its layers
    "deepseek_v3, whole": WHOLE | _ROUTED,
    "deepseek_v2": EVEN | _ROUTED,
    "deepseek_v2, queries": EVEN | _ROUTED | {"q_lora_rank": None},
    "glm4_moe_lite": ODD | {key: value for key, value in _ROUTED.items() if "dense" not in key},
    "minicpm3": ODD,
}
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 5,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 3,
    "head_dim": 2,
    "first_k_dense_replace": 2,
}
PROMPTS = ((5, 3, 4), tuple(range(2, 41)), (7, 7, 6, 9, 12, 40, 3, 8, 11, 13, 2, 5))
LONG_RANK = {"kv_lora_rank": 64, "num_hidden_layers": 2, "first_k_dense_replace": 2}
Saved = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with a tiny checkpoint of one of FAMILIES, and the model as the library holds it."""

    @cache
    def build(kind: str) -> tuple[Path, PreTrainedModel]:
        folder = tmp_path_factory.mktemp("latents")
        return folder, build_checkpoint(folder, kind.partition(",")[0], **FAMILIES[kind])

    return build


def requests(num_tokens: int = 10) -> list[Request]:
    return [Request(index=number, prompt_ids=ids, max_new_tokens=num_tokens) for number, ids in enumerate(PROMPTS)]


def runner_of(model: PreTrainedModel, **options: Any) -> ModuleRunner:
    latents.use_latents(model)
    return ModuleRunner(model, comm=Comm.single(), **options)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("deepseek_v3", 3),
        ("minicpm3", 1),
        ("deepseek_v3, whole", 2),
        *(heavy(kind, 2) for kind in FAMILIES if "whole" not in kind),
        *(slow(kind, number) for kind in FAMILIES for number in (1, 3, 4)),
    ],
)
def test_greedy_text_is_the_librarys_on_any_ranks(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, kind: str, num_ranks: int
) -> None:
    """Chunks of 32 tokens of a prompt are expanded, and shorter ones, a text alone among them, are not."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 32)
    folder, model = saved(kind)
    shape = read_config(folder)[0]
    assert [expands_latents(shape, number) for number in (1, 12, 32)] == [False, False, True]
    comms = thread_comms(num_ranks)
    targets: list[Any] = load_ranks(folder, comms)
    wanted = [library_greedy(model, prompt, num_tokens=10) for prompt in PROMPTS]

    def texts(comm: Comm) -> list[list[int]]:
        return [done.token_ids for done in complete(make_decoder(targets[comm.rank], None, comm=comm), requests())]

    for found in on_ranks(comms, texts):
        for prompt, own, ids in zip(PROMPTS, wanted, found, strict=True):
            assert not part_at_a_near_tie(model, prompt, own, ids[: len(own)])


@torch.inference_mode()
def test_a_text_without_a_cache_has_the_librarys_logits_with_a_mask_too() -> None:
    """Such as the library makes of texts side by side in one row, and of windows."""
    model = tiny_model("deepseek_v3", **FAMILIES["deepseek_v3, whole"], num_hidden_layers=2)
    ids_BT = torch.arange(3, 15)[None]
    given = {"position_ids": torch.arange(6).repeat(2)[None], "use_cache": False}
    wanted_BTV = model(ids_BT, **given).logits
    runner_of(model)
    torch.testing.assert_close(model(ids_BT, **given).logits, wanted_BTV)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v3, whole"])
@pytest.mark.parametrize("how", ["chain", "tree", "overlap"])
def test_one_text_per_seed_whatever_is_drafted_and_rolled_back(how: str, kind: str) -> None:
    """Drafts from a model of one layer are mostly wrong; a tree of the target's own has an accepted path."""
    num_layers = 2 if how == "tree" else 1
    target, draft = (
        runner_of(tiny_model("deepseek_v3", **FAMILIES[kind], num_hidden_layers=number)) for number in (2, num_layers)
    )
    options: dict[str, Any] = {"temperature": 1.0, "rule_name": "coupled", "batch_size": 3}
    if how == "tree":  # of which no text per seed is known but the greedy one
        options = {"batch_size": 3}
    plain = complete(make_decoder(target, None, **options), requests())
    if how == "overlap":
        decoder = overlapped_decoder(target, draft, **options)
    else:
        decoder = make_decoder(target, draft, tree="2x2x1" if how == "tree" else None, **options)
    drafted = complete(decoder, requests())
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    accepted = [length for done in drafted for length in done.accepted_lengths]
    assert max(accepted) > 0
    assert how == "tree" or min(accepted) == 0


@torch.inference_mode()
@pytest.mark.parametrize(("rank", "rotary"), [(64, 8), (64, 16), (16, 16)])
@pytest.mark.parametrize(("cache_dtype", "near"), [("auto", 1e-5), ("bf16", 0.05), ("int8", 0.07), ("fp8", 0.2)])
def test_a_chunk_and_single_steps_have_the_same_logits_also_of_fewer_bits(
    cache_dtype: str, near: float, rank: int, rotary: int
) -> None:
    """The chunk of 40 tokens is expanded, the steps are not; the key with positions has a scale of its own."""
    sizes = LONG_RANK | {"kv_lora_rank": rank, "qk_rope_head_dim": rotary, "head_dim": rotary}
    model = tiny_model("deepseek_v3", **sizes)
    ids, places = torch.arange(3, 43)[None], torch.arange(40)[None]
    wanted = model(ids).logits[0]
    runner = runner_of(model, cache_dtype=cache_dtype)
    runner.allocate(batch_size=1, capacity=48)
    whole = runner.forward(ids, places, bucket=48)[0]
    steps = torch.cat([runner.forward(*(x[:, t : t + 1] for x in (ids, places)), bucket=48)[0] for t in range(40)])
    for found in whole, steps:
        assert float((found - wanted).abs().max() / wanted.std()) < near
    [row, *_] = runner.cache.in_rows()  # one head of both parts
    numbers = rank + rotary + (2 * 4 if cache_dtype in {"int8", "fp8"} else 0)
    assert row.shape == (1, 1, 48, numbers)


def of_library() -> rolled_back.OfLibrary:
    return rolled_back.OfLibrary("deepseek_v3", latents.use_latents, **SMALL)


@pytest.mark.seconds
@torch.inference_mode()
@pytest.mark.parametrize("sees_rejected", [False, True])
@pytest.mark.parametrize("law", [rolled_back.text_law, rolled_back.overlap_law])
def test_a_text_over_latents_that_roll_back_has_the_law_of_the_library(
    law: Callable[..., Tensor], sees_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all courses of rounds, overlapped ones too, and not if positions also see the slot of a rejected token."""
    model, rows = of_library(), Masks.rows
    if sees_rejected:
        monkeypatch.setattr(Masks, "rows", lambda self, places, bucket: rows(self, places + 1, bucket=bucket))
    apart = float((law(model) - rolled_back.wanted_law(model)).abs().max())
    assert apart > 1e-4 if sees_rejected else apart < 1e-12


@pytest.mark.seconds
@torch.inference_mode()
@pytest.mark.parametrize("moves", [True, False])
def test_trees_over_latents_have_the_logits_of_the_library_on_every_path(moves: bool) -> None:
    """Not if the latents of the accepted path stay where they were."""
    apart = rolled_back.apart_on_trees(of_library(), moves=moves)
    assert apart < 1e-12 if moves else apart > 1e-3


def test_latents_of_a_beginning_are_read_once(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later prompt takes them from the row of another one, by whole chunks, which are expanded."""
    for module in "speculate.engine.held", "models.prefill":
        monkeypatch.setattr(f"llama_ssp.{module}.PREFILL_CHUNK", 32)
    folder, library = saved("deepseek_v3")
    decoder = make_decoder(load_model(Loading(inspect(folder))), None, ngram=True, batch_size=2)
    prompts = [(*range(2, 42), *more) for more in ((9,), (11, 12), (13, 5, 6))]
    wanted = [Request(index=place, prompt_ids=ids, max_new_tokens=8 + 4 * place) for place, ids in enumerate(prompts)]
    done = complete(decoder, wanted)
    assert [each.num_reused_tokens for each in done] == [0, 32, 32]
    for each in done:
        own = library_greedy(library, each.request.prompt_ids, num_tokens=each.request.max_new_tokens)
        part_at_a_near_tie(library, each.request.prompt_ids, own, each.token_ids[: len(own)])


@torch.inference_mode()
def test_latents_behind_a_window_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the library's attention, with keys and values of the same slots; no kind of the library has both."""
    monkeypatch.setattr(ModuleRunner, "_compare", lambda _: None)
    found, ids_1T = [], 3 * torch.arange(20)[None] + 2
    for is_absorbed in True, False:
        model: Any = tiny_model("deepseek_v3", **FAMILIES["deepseek_v3"])
        model.config.sliding_window = 6
        runner = runner_of(model) if is_absorbed else ModuleRunner(model, comm=Comm.single())
        runner.allocate(batch_size=1, capacity=32)
        found.append(
            torch.cat([runner.forward(ids_1T[:, t : t + 1], torch.tensor([[t]]), bucket=32) for t in range(20)], 1)
        )
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    whole = model(ids_1T, use_cache=False).logits
    apart_T = (found[0] - whole)[0].abs().amax(-1)
    assert apart_T[:6].max() < 1e-5 < apart_T[6:].min()


class _Reads(TorchDispatchMode):
    """Counts the bytes of weights and caches that operators take, as parts of these tensors, but for views.

    With them, what is made of a cache: all tensors of `most` numbers or more.
    """

    def __init__(self, watched: list[Tensor], *, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._starts, self.num_bytes = {each.untyped_storage().data_ptr() for each in watched}, 0
        self._most = most

    def __torch_dispatch__(self, func: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Writing into the cache and looking tokens up read no more than what they return.
        if not (func.is_view or any(name in str(func) for name in ("index_copy", "embedding", "index_select"))):
            flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
            tensors = [each for each in flat if isinstance(each, Tensor)]
            self.num_bytes += sum(
                each.numel() * each.itemsize
                for each in tensors
                if each.numel() >= self._most or each.untyped_storage().data_ptr() in self._starts
            )
        return found


@torch.inference_mode()
@pytest.mark.parametrize("rotary", [8, 16])
@pytest.mark.parametrize("num_slots", [128, 2048])
def test_a_step_reads_the_bytes_of_the_plan(tmp_path: Path, num_slots: int, rotary: int) -> None:
    """Weights once; latents once by the CPU's operator, by torch's for scores and for their sums; no others."""
    need("cpu")
    machine = hardware.load("laptop_cpu")
    sizes = {"qk_rope_head_dim": rotary, "head_dim": rotary, "max_position_embeddings": 4096}
    model = tiny_model("deepseek_v3", **LONG_RANK | sizes)
    model.save_pretrained(tmp_path)
    runner = runner_of(model)
    runner.allocate(batch_size=1, capacity=num_slots)
    last = torch.full((1, 1), num_slots - 1)
    runner.forward(last % VOCAB_SIZE, last, bucket=num_slots)
    wholes = [*runner.cache.in_rows()]
    with _Reads([*model.parameters(), *wholes], most=num_slots * LONG_RANK["kv_lora_rank"]) as reads:
        runner.forward(last % VOCAB_SIZE, last, bucket=num_slots)
    shape = read_config(tmp_path)[0]
    planned = PlannedModel(name="mine", shape=shape, dtype=Dtype.fp32, quantization="none", by_library=True)
    (held,) = rank_shares(planned, num_ranks=1)
    assert planned.has_latent_kernel(machine) == (rotary == 16)
    wanted = step_bytes(held, planned, device="cpu") + num_slots * planned.latent_read_bytes(machine)
    assert reads.num_bytes == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_packed_weights_that_attention_reads_are_unpacked_and_all_others_stay(tmp_path: Path, layout: str) -> None:
    """As DeepSeek V3 is published, in blocks of FP8: the logits are those of the numbers that the files stand for."""
    need("four_bits")
    need("eight_bits")
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "v_head_dim": 32,
        "qk_nope_head_dim": 24,
        "first_k_dense_replace": 2,
    }
    origin, stored, numbered = (tmp_path / name for name in ("origin", "packed", "numbers"))
    build_checkpoint(origin, "deepseek_v3", **wide)
    pack_checkpoint(origin, stored, numbered, layout)
    entry = replace(catalogue.load("local"), path=str(stored), dtype=Dtype.fp32)
    planned = planned_model(entry, device="cpu")
    precision = Precision(quantization=planned.quantization, is_stored=True)
    packed, numbers = (
        ModuleRunner(load_modules(Loading(inspect(folder), dtype=torch.float32, precision=how)), comm=Comm.single())
        for folder, how in zip((stored, numbered), (precision, UNQUANTIZED), strict=True)
    )
    logits = []
    for runner in packed, numbers:
        runner.allocate(batch_size=1, capacity=24)
        logits.append(runner.forward(torch.arange(3, 23)[None], torch.arange(20)[None], bucket=24))
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 1e-4
    (held,) = rank_shares(planned, num_ranks=1)
    linears = [module for module in packed._model.modules() if type(module) is OwnLinear]
    assert len(linears) == 2 * 7, "all but the projection that attention reads"
    found = held_bytes([list(packed._model.parameters()), linears])
    assert found == model_bytes(held, planned, device="cuda").total_bytes


def test_a_kernel_that_packs_weights_leaves_those_that_attention_reads(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "deepseek_v3", **FAMILIES["deepseek_v3"])
    runner: Any = load_model(Loading(inspect(tmp_path), dtype=torch.float32))
    names = latents.projections(runner._model)
    assert len(names) == 2
    for name in names:
        assert runner._model.get_submodule(name).weight.shape == (5 * (7 + 9), 22)
