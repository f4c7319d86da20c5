"""Families whose layers see windows, or that need something put in their place: texts, number formats, refusals."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.families import MORE
from llama_ssp.architectures.family import check_servable, inventory, record_of
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.extensions.modules.attention import BY_POSITION, SOFTCAPPED
from llama_ssp.extensions.modules.building import build_empty, load_modules
from llama_ssp.extensions.modules.families import mask_argument
from llama_ssp.extensions.modules.latents import LATENT
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.kernels.latents import by_torch
from llama_ssp.kernels.parts import SINGLES
from llama_ssp.models import prefill
from llama_ssp.models.cache import Masks
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.weights import rank_shares
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.lanes import heavy, sample, slow
from tests.helpers.library_kinds import tiny_sizes
from tests.helpers.models import (
    FAMILIES,
    VOCAB_SIZE,
    build_checkpoint,
    library_logits,
    load_ranks,
    refusal,
    tiny_config,
)
from tests.helpers.texts import library_greedy, part_at_a_near_tie
from tests.unit.models.conftest import Saved

SavedModels = Callable[[str], Saved]
CPU = torch.device("cpu")
KINDS = ("mistral", "qwen2, windows", "qwen3, windows", "gemma", "gemma2", "gemma3_text", "gpt_neo", "phi")
# Largest difference of narrow formats, in units of the logits' scale.
TOLERANCES = {torch.bfloat16: 0.15, torch.float16: 0.02}
LENGTHS = (3, 14, 21)
NUM_NEW_TOKENS = 12


def load(folder: Path, comm: Comm | None = None) -> Runner:
    return load_model(Loading(inspect(folder), comm=comm or Comm.single()))


def random_ids(*shape: int) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(4))


def requests(lengths: tuple[int, ...], *, num_tokens: int = NUM_NEW_TOKENS) -> list[Request]:
    ids = random_ids(len(lengths), max(lengths)).tolist()
    prompts = [tuple(row[:length]) for row, length in zip(ids, lengths, strict=True)]
    return [Request(index=index, prompt_ids=prompt, max_new_tokens=num_tokens) for index, prompt in enumerate(prompts)]


NO_RECORD = [kind for kind in FAMILIES if not record_of(kind.partition(",")[0]).is_written]
REFUSED = ("bloom", "openai-gpt", "mamba")
ON_ONE = ("codegen", "diffllama", "mpt")
LIGHT = ("mistral", "phi3", "mixtral", "nanochat", "gemma4_text", "xglm")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        *((kind, 2) for kind in LIGHT),
        *(slow(kind, 2) for kind in FAMILIES if kind not in LIGHT),
        *(slow(kind, 1) for kind in FAMILIES),
        *((slow if place % 12 else heavy)(kind, 3) for place, kind in enumerate(FAMILIES)),
    ],
)
def test_greedy_text_beyond_the_windows_is_the_librarys_with_and_without_a_draft(
    saved: SavedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_ranks: int
) -> None:
    """Ragged prompts, read in chunks of 8; the draft is a layer of the same kind, and whole on every rank."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    folder, model = saved(kind)
    build_checkpoint(tmp_path, kind, num_hidden_layers=1)
    comms = thread_comms(num_ranks)
    targets, drafts = load_ranks(folder, comms), [load(tmp_path) for _ in comms]

    def texts(comm: Comm) -> list[list[int]]:
        decoders = [
            make_decoder(targets[comm.rank], draft, batch_size=2, comm=comm) for draft in (None, drafts[comm.rank])
        ]
        return [done.token_ids for decoder in decoders for done in complete(decoder, requests(LENGTHS))]

    prompts = [request.prompt_ids for request in requests(LENGTHS)]
    wanted = [library_greedy(model, prompt, num_tokens=NUM_NEW_TOKENS) for prompt in prompts]
    for found in on_ranks(comms, texts):
        for prompt, own, ids in zip(2 * prompts, 2 * wanted, found, strict=True):
            assert not part_at_a_near_tie(model, prompt, own, ids[: len(own)])


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in NO_RECORD])
def test_a_plan_counts_the_parameters_of_every_family_with_a_record(saved: SavedModels, kind: str) -> None:
    folder, model = saved(kind)
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}  # tied ones once
    wanted = sum(tensor.numel() for tensor in tensors.values())
    assert inventory(inspect(folder).shape).num_parameters == wanted
    assert read_config(folder)[0] == inspect(folder).shape


@pytest.mark.parametrize(
    ("kind", "num_heads"), [("mistral", 2), ("gemma4_text", 2), ("gemma4_text, keys", 4), ("deepseek_v3", 8)]
)
def test_a_plan_counts_the_cache_of_each_of_two_ranks(saved: SavedModels, kind: str, num_heads: int) -> None:
    """Global heads have another width, and the last layers may have none; where they are fewer, ranks have all.

    A latent of 16 and 8 numbers is in no row of 32, and whole on every rank.
    """
    folder, comms = saved(kind)[0], thread_comms(2)
    runners: list[Any] = load_ranks(folder, comms)

    def held(comm: Comm) -> int:
        runner = runners[comm.rank]
        runner.allocate(batch_size=3, capacity=24)
        runner.forward(random_ids(3, 8), torch.arange(8).repeat(3, 1), bucket=24)
        return sum(whole.nbytes for whole in runner.cache.in_rows())

    shape = read_config(folder)[0]
    model = PlannedModel(name=kind, shape=shape, dtype=Dtype.fp32, quantization="none")
    assert on_ranks(comms, held) == 2 * [3 * 24 * model.slot_bytes(num_heads)]


def test_rope_parameters_by_kind_of_layer_are_refused_for_one_set() -> None:
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="this llama model has rope_parameters for full_attention, and its layers"):
        check_servable({"model_type": "llama", "rope_parameters": nested}.get)
    check_servable({"model_type": "llama", "rope_parameters": {"rope_type": "default", "factor": 1.0}}.get)


def test_a_family_that_does_not_fit_the_cache_is_refused_by_a_short_text(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "bloom")
    with pytest.raises(ConfigError, match=r"^bloom models do not run with the static cache \(ValueError: "):
        load(tmp_path)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in REFUSED else (slow if place % 6 and kind not in ON_ONE else heavy)(kind)
        for place, kind in enumerate({**FAMILIES, **MORE})
    ],
)
def test_a_plan_refuses_what_a_run_refuses_in_the_same_words(tmp_path: Path, kind: str, num_ranks: int) -> None:
    """By config.json alone; of a run on one rank with the comparison of short texts, on two with all checks."""
    build_checkpoint(tmp_path, kind, **MORE.get(kind, {}))
    found = refusal(lambda: check_model(inspect(tmp_path), num_ranks=num_ranks)) or refusal(lambda: load(tmp_path))
    assert refusal(lambda: check_readable(tmp_path, "none", num_ranks=num_ranks)) == found
    shape = read_config(tmp_path)[0]
    model = PlannedModel(name="mine", shape=shape, dtype=Dtype.fp32, quantization="none")
    planned = refusal(lambda: rank_shares(model, num_ranks=num_ranks))
    assert found in {planned, shape.refusal}
    assert bool(found) == (kind in REFUSED or (num_ranks == 2 and kind in ON_ONE))


OTHERS = [
    kind
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in {*FAMILIES, *MORE}
    and not CONFIG_MAPPING[kind].sub_configs
    # Too large to be made here, or of sizes that the library's own checks bind to each other.
    and kind
    not in {"blt", "git", "cohere_compass_text", "dbrx", "prophetnet", "reformer", "xlnet", "zamba", "zamba2", "zaya"}
]


@pytest.mark.seconds
@pytest.mark.parametrize("kind", sample(OTHERS, always={"bart", "bert", "gpt_neox_japanese", "longcat_flash"}))
def test_every_kind_of_the_library_gives_its_greedy_text_or_is_refused_by_plan_and_run_alike(
    tmp_path: Path, kind: str
) -> None:
    """On one rank, with and without look-up; those that can be encoders are decoders here."""
    model = build_checkpoint(tmp_path, kind, **tiny_sizes(kind))
    refused = refusal(lambda: check_readable(tmp_path, "none"))
    assert refused == (refusal(lambda: check_model(inspect(tmp_path), num_ranks=1)) or refusal(lambda: load(tmp_path)))
    assert (kind not in {"bert", "gpt_neox_japanese", "longcat_flash"}) or not refused
    if refused:
        return
    runner = load(tmp_path)
    for is_looked_up in (False, True):
        decoder = make_decoder(runner, None, ngram=is_looked_up, batch_size=2)
        for request, done in zip(requests(LENGTHS), complete(decoder, requests(LENGTHS)), strict=True):
            wanted = library_greedy(model, request.prompt_ids, num_tokens=NUM_NEW_TOKENS)
            part_at_a_near_tie(model, request.prompt_ids, wanted, done.token_ids[: len(wanted)])


@pytest.mark.parametrize(
    ("num_more", "reason"),
    [(0, "have other logits with the static cache than in transf"), (1, r"do not run with the static cache \(Runtime")],
)
def test_a_family_with_other_logits_is_refused_by_a_short_text(
    saved: SavedModels, monkeypatch: pytest.MonkeyPatch, num_more: int, reason: str
) -> None:
    wrong = lambda _self, ids, bucket: {None: torch.zeros(1, 1, ids.shape[1], bucket + num_more)}  # noqa: E731
    monkeypatch.setattr(Masks, "rows", wrong)
    with pytest.raises(ConfigError, match=f"nanochat models {reason}"):
        load(saved("nanochat")[0])


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "qwen2_moe", "gpt_oss"])
def test_a_cpu_has_its_own_products_for_the_librarys_linear_layers(tmp_path: Path, kind: str) -> None:
    """Heads, tied ones too, and experts; weights in 16 bits have the logits of fp32, which holds the same numbers."""
    model = build_checkpoint(tmp_path, kind, dtype=torch.bfloat16).float()
    origin = inspect(tmp_path)
    runner: Any = load_model(Loading(origin, dtype=torch.float32))
    runner.allocate(batch_size=1, capacity=24)
    ids_BT, positions_BT = random_ids(1, 16), torch.arange(16)[None]
    found, wanted = runner.forward(ids_BT, positions_BT, bucket=24)[0], library_logits(model, ids_BT[0])
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    left = {name for name, each in runner._model.named_parameters() if each.ndim > 1}
    routers = {f"model.layers.{layer}.mlp.{name}.weight" for layer in range(2) for name in ("gate", "router")}
    assert left <= {"model.embed_tokens.weight", *routers}


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("mixtral", "int8_weight_only"), ("mixtral", "int4_weight_only"), ("gpt_oss", "int8_weight_only")],
)
def test_quantized_experts_are_those_of_the_rounded_weights(tmp_path: Path, kind: str, quantization: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    model = build_checkpoint(tmp_path, kind, **sizes)
    precision = Precision(quantization=quantization)
    runner = load_model(Loading(inspect(tmp_path), precision=precision))
    runner.allocate(batch_size=1, capacity=24)
    ids_BT, positions_BT = random_ids(1, 16), torch.arange(16)[None]
    found, wanted = runner.forward(ids_BT, positions_BT, bucket=24)[0], library_logits(model, ids_BT[0])
    apart = float((found - wanted).norm() / wanted.norm())
    assert 1e-4 < apart < {"int8_weight_only": 0.03, "int4_weight_only": 0.3}[quantization]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [*KINDS, "gpt_neox"])
def test_narrow_formats_come_as_close_as_their_rounding_allows(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = build_checkpoint(tmp_path, kind, dtype=dtype)
    runner = load(tmp_path)
    runner.allocate(batch_size=1, capacity=24)
    ids_BT, positions_BT = random_ids(1, 16), torch.arange(16)[None]
    pieces = [
        runner.forward(ids_BT[:, part], positions_BT[:, part], bucket=24) for part in (slice(0, 11), slice(11, 16))
    ]
    found, wanted = torch.cat(pieces, 1)[0], library_logits(model, ids_BT[0])
    assert (found - wanted).abs().max() < TOLERANCES[dtype] * wanted.std()


RUNS = [kind for kind in {**FAMILIES, **MORE} if kind not in REFUSED]


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", sample(RUNS, always={"xglm", "falcon_h1", "gemma4_text", "nemotron_h, experts"}))
def test_every_family_runs_in_16_bits_with_the_dtypes_of_the_librarys_buffers(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """Rounding may choose another expert. Caches have the format of the weights, and texts come with look-up too."""
    build_checkpoint(tmp_path, kind, dtype=dtype, **MORE.get(kind, {}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    runner: Any = load_model(Loading(inspect(tmp_path), dtype=dtype))
    wanted_buffers = dict(model.named_buffers())
    for name, found in runner._model.named_buffers() if isinstance(runner, ModuleRunner) else ():
        assert found.dtype == wanted_buffers[name].dtype, name
        assert torch.equal(found, wanted_buffers[name]), name
    runner.allocate(batch_size=1, capacity=24)
    ids_BT, positions_BT = random_ids(1, 16), torch.arange(16)[None]
    with torch.inference_mode():
        logits_TV, wanted_TV = runner.forward(ids_BT, positions_BT, bucket=24)[0], model(ids_BT).logits[0].float()
    assert (logits_TV - wanted_TV).norm() < 0.3 * wanted_TV.norm()
    kept = [*runner.cache.in_rows(), *(runner._states.inputs.values() if runner.is_recurrent else ())]
    assert {whole.dtype for whole in kept} == {dtype}
    for is_looked_up in (False, True):
        decoder = make_decoder(runner, None, ngram=is_looked_up, batch_size=2)
        assert [len(done.token_ids) for done in complete(decoder, requests((3, 14), num_tokens=4))] == [4, 4]


@pytest.mark.seconds
@pytest.mark.parametrize(("kind", "form"), [("gpt_neo", "sdpa"), ("gemma2", SOFTCAPPED)])
def test_where_inputs_are_quantized_attention_takes_one_position_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    build_checkpoint(tmp_path, kind)
    precision = Precision(quantization="int8")
    model = load_modules(Loading(inspect(tmp_path), precision=precision))
    runner = ModuleRunner(model, comm=Comm.single())
    runner.allocate(batch_size=1, capacity=40)
    spy = Mock(wraps=ALL_ATTENTION_FUNCTIONS[BY_POSITION[form]])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, BY_POSITION[form], spy)
    runner.forward(random_ids(1, 8), torch.arange(8)[None], bucket=8)
    assert spy.call_count == 2


@pytest.mark.parametrize("form", BY_POSITION)
@torch.inference_mode()
def test_attention_by_position_gives_each_position_what_it_gets_alone_to_the_last_bit(form: str) -> None:
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    query_BHTD, key_BNSD, value_BNSD = torch.randn(1, 8, 5, 64), torch.randn(1, 4, 300, 64), torch.randn(1, 4, 300, 64)
    if form == LATENT:
        module = SimpleNamespace(
            qk_nope_head_dim=48,
            v_head_dim=32,
            kv_lora_rank=64,
            kv_b_proj=nn.Linear(64, 8 * (48 + 32)),
            attend=partial(by_torch, kept=SINGLES),
        )
        key_BNSD, value_BNSD = torch.randn(1, 1, 300, 64), torch.randn(1, 1, 300, 16)
    mask_B1TS = torch.zeros(1, 1, 5, 300).masked_fill_(torch.arange(300) > torch.arange(290, 295)[:, None], -torch.inf)
    options = {"scaling": 0.2, "softcap": 3.0} if form == SOFTCAPPED else {"scaling": 0.2}
    attend = ALL_ATTENTION_FUNCTIONS[BY_POSITION[form]]
    joint, _ = attend(module, query_BHTD, key_BNSD, value_BNSD, mask_B1TS, **options)
    for place in range(5):
        part = slice(place, place + 1)
        alone, _ = attend(module, query_BHTD[:, :, part], key_BNSD, value_BNSD, mask_B1TS[:, :, part], **options)
        assert torch.equal(joint[:, part], alone)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["gpt_neo", "gpt2", "gpt_bigcode", "opt"])
def test_a_round_may_look_behind_the_last_position_that_a_model_has_learned(tmp_path: Path, kind: str) -> None:
    """Prompt and new tokens fill the context; the last rounds draft and verify behind it."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    model = build_checkpoint(target, kind, **MORE.get(kind, {}), max_position_embeddings=32)
    build_checkpoint(draft, kind, **MORE.get(kind, {}), max_position_embeddings=32, num_hidden_layers=1)
    [request] = requests((20,), num_tokens=12)
    [done] = complete(make_decoder(load(target), load(draft), num_draft_tokens=5), [request])
    wanted = library_greedy(model, request.prompt_ids, num_tokens=12)
    assert not part_at_a_near_tie(model, request.prompt_ids, wanted, done.token_ids)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2, windows", "gemma2", "gemma3_text", "gpt_neo"])
def test_masks_take_the_bytes_that_are_planned(kind: str) -> None:
    config = tiny_config(kind)
    masks = Masks(record_of(config.model_type).windows_of(config), capacity=24, dtype=torch.float32, device=CPU)
    rows = masks.rows(torch.arange(8)[None], bucket=16)
    given = mask_argument(config, rows)
    stacked = [given] if isinstance(given, Tensor) else []
    tensors = {id(mask): mask for mask in (*rows.values(), *stacked)}
    planned = record_of(config.model_type).attention_pair_bytes(num_heads=0, value_bytes=4) - 1
    most = {"qwen2, windows": 2}.get(kind, 1)  # plans do not know which layers of a Qwen have windows
    assert sum(mask.nbytes for mask in tensors.values()) == 8 * 16 * planned * most


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("granite", {"sliding_window": 64}, "of 64 tokens in a context of 128, which .* gemma2, .*mistral"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends in both directions"),
        ("llama", {"is_causal": False}, "attends in both directions"),
        (
            "llama",
            {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}},
            r"has rope_type \['default'\]: default, dynamic, linear, .*, yarn is required",
        ),
        ("llama", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention, whose tokens see no"),
        ("qwen3", {"layer_types": ["indexed_attention"]}, "indexed_attention, whose tokens read slots that an index"),
        ("llama", {"layer_types": ["linear_attention"]}, "linear_attention, whose states do not roll back here"),
    ],
)
def test_models_that_the_static_cache_cannot_serve_are_refused(
    family: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_servable((tiny_config(family).to_dict() | changes).get)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("rwkv", "wkv"),
        ("xlstm", "mlstm"),
        ("mamba", "linear_attention"),
        ("jamba", "linear_attention (Mamba 1)"),
        ("minimax", "linear_attention (lightning attention)"),
        ("zamba2", "hybrid, linear_attention (Mamba 2 with shared attention blocks)"),
    ],
)
def test_a_recurrence_without_a_rule_is_refused_for_its_layers(tmp_path: Path, kind: str, layers: str) -> None:
    """By the plan and by the run, though such a config.json has no heads."""
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    for check in (partial(check_readable, tmp_path, "none"), partial(inspect, tmp_path, config_alone=True)):
        found = refusal(check) or refusal(lambda: check_model(inspect(tmp_path, config_alone=True), num_ranks=1))
        assert f"has layers of kind {layers}, whose states do not roll back here" in found


def test_a_bias_of_scores_by_distance_is_refused_by_plan_and_run_alike(tmp_path: Path) -> None:
    kind: Any = CONFIG_MAPPING["falcon"]
    kind(alibi=True).save_pretrained(tmp_path)
    plan, run = partial(check_readable, tmp_path, "none"), partial(inspect, tmp_path, config_alone=True)
    for check in plan, lambda: check_model(run(), num_ranks=1):
        assert "this falcon model has alibi=true, a bias of scores by distance" in refusal(check)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": 128}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("gemma4_text", {"use_bidirectional_attention": "vision"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_models_that_only_look_alike_are_served(family: str, changes: dict[str, object]) -> None:
    check_servable(tiny_config(family, **changes).to_dict().get)


def test_a_table_of_positions_of_another_length_is_refused_before_masks_of_its_square_are_made(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "gpt_neo")
    tiny_config("gpt_neo", max_position_embeddings=2**22).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"wpe.weight has 128 rows, and .*max_position_embeddings=4194304"):
        build_empty(inspect(tmp_path))


@pytest.mark.seconds
def test_a_hybrid_without_a_mask_of_its_whole_text_is_compared_with_quantized_inputs_too(tmp_path: Path) -> None:
    """Attention by position gets no mask in the library's own forward, which the static cache is held against."""
    build_checkpoint(tmp_path, "nemotron_h", hidden_size=128, intermediate_size=256)
    precision = Precision(quantization="int8")
    load_model(Loading(inspect(tmp_path), device=torch.device("cpu"), comm=Comm.single(), precision=precision))
