"""The MTP layer of a target's own checkpoint drafts as its public definition says, and a faulty one is one sentence."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from torch import Tensor

from llama_ssp.architectures.engine import PREFILL_CHUNK
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.library import MtpRunner
from llama_ssp.extensions.heads.records import OF_TARGET
from llama_ssp.extensions.heads.sources import MtpSource, mtp_of
from llama_ssp.extensions.modules.building import load_modules
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.models.cache import Taps
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.source import storage_of
from tests.helpers import head_drafts
from tests.helpers.edits import edit_config, edit_tensors
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.head_drafts import Seen, check, check_greedy
from tests.helpers.in_process import launch
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, refusal
from tests.helpers.mtp_layers import MTP_LAYOUTS, UNCHAINED, WithStates, save_with_mtp
from tests.helpers.packed_checkpoints import pack_checkpoint
from tests.helpers.recorded import WatchedGraphs
from tests.helpers.text_laws import LibraryLogits, counted
from tests.helpers.tokenizers import save_tokenizer

CPU, WIDTH = torch.device("cpu"), 64
FEW_TOKENS = 8
"""A vocabulary of which a random head drafts some tokens that a random target would choose."""
PROMPTS = ((5, 3, 4), (2,), (7, 6, 7, 6, 7))
IDS_BT = torch.tensor([[5, 9, 17, 4, 100, 33, 2, 8, 50]])


def loaded(folder: Path) -> tuple[Runner, Any, MtpSource]:
    """A target and its head on one rank."""
    origin = mtp_of(target := inspect(folder))
    runner = load_model(Loading(target, dtype=torch.float32))
    assert not hasattr(runner, "extend")
    return runner, load_model(Loading(origin, dtype=torch.float32, target=runner)), origin


def decode(target: Runner, head: Any, origin: MtpSource, **how: Any) -> list[Any]:
    """Texts with a head; see `head_drafts.decode`."""
    kind = HeadDrafter if origin.shape.num_hidden_layers == 1 else head.make_drafter
    return head_drafts.decode(target, kind, head, origin.layers, width=WIDTH, prompts=PROMPTS, **how)


LIGHT = ("qwen2", "glm4_moe", "qwen3_next", "exaone_moe", "ernie4_5_moe", "mimo_v2_flash")


@pytest.mark.seconds
@pytest.mark.parametrize("family", [*LIGHT, *(heavy(name) for name in sorted(MTP_LAYOUTS.keys() - {*LIGHT}))])
def test_logits_are_those_of_the_public_definition(family: str, tmp_path: Path) -> None:
    """Of a pair with the target's hidden state, and of the next one, with the layer's own."""
    model, reference = save_with_mtp(tmp_path, family, num_modules=3 if family == UNCHAINED else 1)
    runner, head, origin = loaded(tmp_path)
    check_model(origin, num_ranks=2)
    taps = Taps(origin.layers, width=WIDTH, dtype=torch.float32, device=CPU)
    positions_BT, embedding_VE = torch.arange(8)[None], model.get_input_embeddings().weight
    for each in (runner, head):
        each.allocate(batch_size=1, capacity=64, num_rolled_back=4)
    taps.allocate(batch_size=1, num_slots=64)
    with torch.inference_mode():
        runner.forward(IDS_BT[:, :8], positions_BT, bucket=64, taps=taps)
        states = WithStates(model)(IDS_BT[:, :8], output_hidden_states=True).hidden_states
        states_LE = states[origin.layers[0]][0, :7]
        torch.testing.assert_close(taps.read(positions_BT)[0, :7], states_LE, atol=1e-5, rtol=1e-5)
        hidden_BTE = head.hidden_of(taps.read(positions_BT[:, :7]))
        found_BTE, first_BRV = head.extend(
            IDS_BT[:, 1:8], hidden_BTE, positions_BT[:, :7], bucket=64, score_positions_B1=torch.tensor([[6]])
        )
        assert found_BTE.shape[1] == 1
        if family == UNCHAINED:
            _, second_BRV = head.extend(IDS_BT[:, 2:], hidden_BTE, positions_BT[:, :7], bucket=64, module=1)
            second_BRV = second_BRV[:, -1:]
        else:
            _, second_BRV = head.extend(IDS_BT[:, 8:], found_BTE, positions_BT[:, 7:], bucket=64)
    for logits_BRV, number in ((first_BRV, 8), (second_BRV, 9)):
        wanted_V = reference(embedding_VE[IDS_BT[0, 1:number]], states_LE)
        torch.testing.assert_close(logits_BRV[0, 0], wanted_V, atol=1e-5, rtol=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "shape", "num_modules"),
    [
        ("qwen2", "2x2x1", 1),
        heavy("qwen3_next", None, 1),
        slow("qwen2", None, 1),
        slow("glm4_moe", "2x2x1", 1),
        ("glm4_moe", None, 3),
        heavy("mimo_v2_flash", None, 3),
        heavy("deepseek_v3", None, 2),
        heavy("ernie4_5_moe", None, 1),
        heavy("deepseek_v3", "2x2x1", 2),
        heavy("exaone_moe", None, 1),
        heavy("ernie4_5_moe", "2x2x1", 1),
        heavy("exaone_moe", "2x2x1", 1),
    ],
)
def test_every_step_of_every_round_has_the_distribution_of_the_reference(
    family: str, shape: str | None, num_modules: int, tmp_path: Path
) -> None:
    """A tree is drafted by the first module alone. So hot, most tokens are accepted."""
    model, reference = save_with_mtp(tmp_path, family, vocab_size=FEW_TOKENS, num_modules=num_modules)
    if shape and num_modules > 1:
        _, reference = save_with_mtp(tmp_path / "one", family, vocab_size=FEW_TOKENS)
    target, head, origin = loaded(tmp_path)
    seen, table_VE = Seen(), model.get_input_embeddings().weight.detach()
    hot = {"temperature": 4.0} if num_modules > 1 else {}
    drafted = 3 if shape else num_modules + 2
    decode(target, head, origin, seen=seen, batch_size=2, tree=shape, num_drafted=drafted, num_new=24, **hot)

    def wanted(text: list[int], states_LE: Tensor, drafted: list[int]) -> Tensor:
        return reference(table_VE[[*text[1:], *drafted]], states_LE).detach().double()

    assert check(seen, WithStates(model), origin.layers, shape, wanted, **hot) > 24


@pytest.mark.parametrize("family", [heavy("glm4_moe"), heavy("mimo_v2_flash")])
def test_modules_read_what_they_have_missed_in_shorter_rounds_and_in_rounds_without_a_draft(
    family: str, tmp_path: Path
) -> None:
    model, reference = save_with_mtp(tmp_path, family, vocab_size=FEW_TOKENS, num_modules=3)
    target, head, origin = loaded(tmp_path)
    seen, table_VE = Seen(), model.get_input_embeddings().weight.detach()
    choices = [*map(DraftChoice, [3, *[1] * 12, 2, *[0] * 33, 4, 1, 3, 0, 3])]
    hot: dict[str, Any] = {"temperature": 4.0}
    decode(target, head, origin, seen=seen, batch_size=3, choices=choices, num_new=80, num_drafted=4, **hot)
    assert {len(ids_K) for _, ids_K, _ in seen} == {1, 2, 3, 4}

    def wanted(text: list[int], states_LE: Tensor, drafted: list[int]) -> Tensor:
        return reference(table_VE[[*text[1:], *drafted]], states_LE).detach().double()

    assert check(seen, WithStates(model), origin.layers, None, wanted, **hot) > 24


IN_BLOCKS = {"linear_num_value_heads": 32, "linear_value_head_dim": 4}
"""Sizes of which all products are our own, which can be recorded; experts of a CPU wait for it."""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "recorder", "numbers", "num_modules"),
    [
        ("qwen2", WatchedGraphs, (1, 2, 3, 4), 1),
        ("qwen3_5_text", WatchedGraphs, (3,), 1),
        slow("qwen3_5_text", WatchedGraphs, (1, 2, 4), 1),
        slow("glm4_moe", False, (1, 2, 3, 4), 1),
        slow("deepseek_v3", False, (1, 2, 3, 4), 1),
        heavy("glm4_moe", False, (3,), 3),
        heavy("mimo_v2_flash", False, (4,), 3),
        slow("mimo_v2_flash", False, (1, 2, 3), 3),
        slow("deepseek_v3", False, (1, 2, 3, 4), 2),
        heavy("ernie4_5_moe", False, (2,), 1),
        heavy("exaone_moe", False, (2,), 1),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(
    family: str,
    recorder: Any,
    numbers: tuple[int, ...],
    num_modules: int,
    tmp_path: Path,
) -> None:
    """For each K, batches of one and of three, launched and recorded."""
    more = IN_BLOCKS if family == "qwen3_5_text" else {"tie_word_embeddings": False} if family == "ernie4_5_moe" else {}
    save_with_mtp(tmp_path, family, vocab_size=32, num_modules=num_modules, **more)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][FEW_TOKENS:] *= 0.01  # so that a random head drafts tokens of a random target
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target, head, origin = loaded(tmp_path)
    ways = [
        {"num_drafted": number, "batch_size": size, "replay": replay}
        for number in numbers
        for size, replay in ((1, False), (3, recorder))
    ]
    assert check_greedy(target, PROMPTS, partial(decode, target, head, origin), ways, num_new=12) > len(numbers)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "num_modules"),
    [
        ("glm4_moe", 2),
        heavy("mimo_v2_flash", 3),
        heavy("qwen2", 1),
        heavy("qwen3_next", 1),
        heavy("exaone_moe", 1),
        heavy("ernie4_5_moe", 1),
        heavy("deepseek_v3", 2),
    ],
)
def test_two_ranks_compute_what_one_does_with_the_target_s_tables(
    family: str, num_modules: int, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path, family, num_modules=num_modules)
    _, whole, origin = loaded(tmp_path)
    found = extended_on_two_ranks(origin, num_modules)
    torch.testing.assert_close(found, extended(whole, num_modules), atol=1e-5, rtol=1e-5)


def extended(head: Any, num_modules: int, *, width: int = WIDTH) -> Tensor:
    """Logits (1, T, V) of the last module for pairs of made hidden states."""
    head.allocate(batch_size=1, capacity=64)
    with torch.inference_mode():
        hidden_BTE = torch.linspace(-1, 1, 8 * width).view(1, 8, width)
        last = {"module": num_modules - 1} if num_modules > 1 else {}
        return head.extend(IDS_BT[:, 1:], hidden_BTE, torch.arange(8)[None], bucket=64, **last)[1]  # type: ignore[no-any-return]


def extended_on_two_ranks(origin: MtpSource, num_modules: int, **parts: Any) -> Tensor:
    """The same of slices on two ranks, which both have the result."""
    comms, width = thread_comms(2), origin.shape.hidden_size
    parts |= {"dtype": torch.float32, "device": CPU}
    if origin.config.model_type == "qwen2":
        heads: list[Any] = [load_model(Loading(origin, comm=comm, **parts)) for comm in comms]
    else:
        modules = [load_modules(Loading(origin.target, comm=comm, **parts)) for comm in comms]
        targets = on_ranks(comms, lambda comm: ModuleRunner(modules[comm.rank], comm=comm))
        own = [load_modules(Loading(origin, comm=comm, **parts), tables=targets[comm.rank].tables) for comm in comms]
        heads = on_ranks(comms, lambda comm: MtpRunner(own[comm.rank], comm=comm))
        assert heads[1].tables[0] is targets[1].tables[0]
    found = on_ranks(comms, lambda comm: extended(heads[comm.rank], num_modules, width=width))
    assert found[0].equal(found[1])
    return found[0]


@pytest.mark.parametrize(
    ("family", "num_modules"),
    [*((name, 1) for name in LIGHT if name != UNCHAINED), (UNCHAINED, 3), ("glm4_moe", 3), heavy("deepseek_v3", 2)],
)
def test_a_plan_counts_the_layers_by_config_json_alone(family: str, num_modules: int, tmp_path: Path) -> None:
    save_with_mtp(tmp_path, family, num_modules=num_modules)
    origin = mtp_of(inspect(tmp_path))
    check_readable(tmp_path, "none", of=OF_TARGET)
    (tmp_path / "model.safetensors").unlink()
    shape, _ = read_config(tmp_path, of=OF_TARGET)
    assert shape.is_head
    stored = sum(torch.Size(facts.shape).numel() for facts in origin.tensors.values())
    assert inventory(shape).num_parameters == stored
    assert inventory(replace(shape, modules=None)).num_layers == num_modules
    if family in {"exaone_moe", "ernie4_5_moe", UNCHAINED}:
        assert shape.num_experts == 0


def without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if name not in key}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return remove


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("mtp_layers"), "lacks the MTP layer that its config.json calls for"),
        (without("mtp_layers.0.mlp.up_proj"), "lacks 1 of the 18 tensors that its config.json calls for"),
        (lambda folder: edit_config(folder, num_nextn_predict_layers=0), "has none: give an EAGLE-3 head"),
        (lambda folder: edit_config(folder, intermediate_size=128), r"q?up_proj.weight is \[160, 64\], not \[128"),
    ],
)
def test_a_target_without_its_mtp_layer_is_one_sentence(
    change: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path, "qwen2")
    change(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=sentence):
        check_model(mtp_of(inspect(tmp_path)), num_ranks=1)


def test_other_families_are_one_sentence(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "ernie4_5", num_nextn_predict_layers=1)
    said = "reads the MTP layers of deepseek_v3, ernie4_5_moe, .* models, and .* is a ernie4_5 model: give"
    with pytest.raises(ConfigError, match=said):
        mtp_of(inspect(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ernie4_5"
    assert "is a ernie4_5 model" in refusal(lambda: check_readable(tmp_path, "none", of=OF_TARGET))


@pytest.mark.heavy
def test_modules_draft_the_same_behind_a_beginning_that_is_not_read_again(tmp_path: Path) -> None:
    """Rows that get their prompts sooner share other rounds, so that a last round may draft more than a text takes."""
    save_with_mtp(tmp_path, "glm4_moe", vocab_size=FEW_TOKENS, num_modules=3, max_position_embeddings=1024)
    target, head, origin = loaded(tmp_path)
    header = tuple((number * number // 3) % FEW_TOKENS for number in range(PREFILL_CHUNK + 40))
    prompts = [header, (*header, 5, 6), (7, 2), (*header, 5, 1)]

    def drafts(*, reuses: bool) -> tuple[list[tuple[Any, Any]], dict[tuple[int, ...], Tensor], int]:
        seen = Seen()
        how: dict[str, Any] = {"batch_size": 2, "reuses": reuses, "seen": seen, "width": WIDTH, "prompts": prompts}
        done = head_drafts.decode(target, head.make_drafter, head, origin.layers, **how)
        laws = {tuple(text): law for text, _, law in seen}
        return [(each.token_ids, each.accepted_lengths) for each in done], laws, sum(d.num_reused_tokens for d in done)

    (texts, found, number), (wanted_texts, wanted, none) = drafts(reuses=True), drafts(reuses=False)
    assert number >= PREFILL_CHUNK > none == 0
    assert texts == wanted_texts
    both = found.keys() & wanted.keys()
    assert len(both) > sum(len(accepted) for _, accepted in texts) // 2
    for text in both:
        torch.testing.assert_close(found[text], wanted[text], atol=1e-5, rtol=1e-4)


@pytest.mark.heavy
def test_modules_draft_what_those_of_transformers_do(tmp_path: Path) -> None:
    """The library's own reading of a chain of modules, in files of DeepSeek V3."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    save_with_mtp(tmp_path, "deepseek_v3", num_modules=3)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[234]\."]  # by which it finds its modules
    own: Any = MtpModel.from_pretrained(model).eval()
    assert len(own.layers) == 3
    target, head, origin = loaded(tmp_path)
    seen, number = Seen(), 0
    decode(target, head, origin, seen=seen, batch_size=2)
    for text, ids_K, law_TV in seen:
        if text == [0, 0]:
            continue
        ids, cache = torch.tensor([text]), MtpCache(config=model.config.get_mtp_config())
        with torch.inference_mode():
            states = model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
            for module, drafted in enumerate(ids_K):
                ids, places = ids[:, 1:], torch.arange(1 + module, len(text) + module)[None]
                states = own.forward_layer(module, states, places, cache, input_ids=ids)
                wanted_V = (own.shared_head(states[0, -1]) / head_drafts.TEMPERATURE).softmax(-1)
                torch.testing.assert_close(law_TV[module], wanted_V, atol=1e-5, rtol=1e-4)
                ids, number = torch.cat([ids, drafted.view(1, 1)], dim=1), number + 1
    assert number > 24


def accept_mostly(folder: Path) -> None:
    """Let a target follow its newest token almost alone, and its modules the token that they read."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.02)
        if name.endswith(("eh_proj.weight", "mtp.fc.weight", "mtp_linear_proj.0.weight")):
            tensor.copy_(torch.cat([torch.eye(WIDTH), 0.1 * tensor[:, WIDTH:]], dim=1))
        if name.endswith((".enorm.weight", "norm_embedding.weight", "emb_norm.0.weight")):
            tensor.copy_(torch.ones(WIDTH))
        if name.endswith(("final_layernorm.weight", "shared_head.norm.weight", "mtp.norm.weight")):
            tensor.copy_(tensors["model.norm.weight"])
    tensors["model.embed_tokens.weight"] *= 10
    tensors["lm_head.weight"] *= 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "rule_name", "num_modules"),
    [
        heavy("glm4_moe", "block", 3),
        heavy(UNCHAINED, "speculative", 3),
        slow("glm4_moe", "speculative", 3),
        heavy("ernie4_5_moe", "speculative", 1),
        heavy("exaone_moe", "block", 1),
    ],
)
def test_sampled_texts_have_the_target_s_law_with_modules_that_are_mostly_accepted(
    family: str, rule_name: str, num_modules: int, tmp_path: Path
) -> None:
    """A false alarm has a chance of 1 in 10 000."""
    from transformers import AutoModelForCausalLM

    save_with_mtp(tmp_path, family, num_modules=num_modules, vocab_size=32, tie_word_embeddings=False)
    accept_mostly(tmp_path)
    target, head, origin = loaded(tmp_path)
    sampling, prompt = SamplingConfig(temperature=1.0, top_k=3), PROMPTS[0]
    how: dict[str, Any] = {"sampling": sampling, "rule_name": rule_name, "num_samples": 2000}
    done = decode(target, head, origin, batch_size=250, num_new=4, **how)
    accepted = [number for each in done for number in each.accepted_lengths]
    assert sum(accepted) > 0.5 * sum(sum(each.draft_lengths) for each in done)
    library = LibraryLogits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32"))
    for length in (2, 3, 4):
        texts = [tuple(each.token_ids[:length]) for each in done]
        counts, expected = counted(library, prompt, texts, sampling=sampling)
        assert chisquare(counts, expected).pvalue > 1e-4 / 3


LATENT_OF_BLOCKS = {
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
"""Sizes whose slices are of whole blocks, but for the rows of latents with a rotary part, as in published files."""


@pytest.mark.parametrize(
    ("family", "num_modules"),
    [
        heavy("glm4_moe", 2),
        heavy("mimo_v2_flash", 3),
        heavy("exaone_moe", 1),
        heavy("deepseek_v3", 2),
        heavy("ernie4_5_moe", 1),
    ],
)
@of_all_formats
def test_modules_of_fp8_checkpoints_run_as_they_are_stored(family: str, num_modules: int, tmp_path: Path) -> None:
    """The product of both inputs is stored in 16 or 32 bits, as published files have it."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32}
    sizes |= {"v_head_dim": 32} if family == UNCHAINED else LATENT_OF_BLOCKS if family == "deepseek_v3" else {}
    save_with_mtp(tmp_path / "origin", family, num_modules=num_modules, **sizes)
    for module in range(num_modules):
        shutil.rmtree(tmp_path / "origin" / f"module {module}")
    pack_checkpoint(tmp_path / "origin", tmp_path / "packed", tmp_path / "numbers", "fp8")
    numbers = load_file(tmp_path / "numbers" / "model.safetensors")
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    for name in [name for name in packed if name.endswith("eh_proj.weight")]:
        del packed[f"{name}_scale_inv"]
        packed[name] = numbers[name]
    save_file(packed, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})

    origin = mtp_of(inspect(tmp_path / "packed"))
    storage = storage_of(origin)
    assert storage
    assert sum(bool(facts.storage) for facts in origin.tensors.values()) >= 7 * num_modules
    check_model(origin, num_ranks=2, quantization=storage)
    precision = Precision(quantization=storage, is_stored=True)
    parts = {"num_modules": num_modules, "width": 256}
    wanted = extended(load_model(Loading(mtp_of(inspect(tmp_path / "numbers")), dtype=torch.float32)), **parts)
    one_rank = extended(load_model(Loading(origin, dtype=torch.float32, precision=precision)), **parts)
    for found in (one_rank, extended_on_two_ranks(origin, num_modules, precision=precision)):
        assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()


def look_back(tensors: dict[str, Tensor]) -> None:
    """Let what layers attend to outweigh the token that they read, so that a draft shows which pairs it has read."""
    for name in [name for name in tensors if name.endswith("self_attn.o_proj.weight")]:
        tensors[name] *= 30


@pytest.mark.parametrize(
    ("family", "num_modules"),
    [
        heavy("glm4_moe", 2),
        heavy("mimo_v2_flash", 3),
        heavy("qwen2", 1),
        pytest.param("ernie4_5_moe", 1, marks=pytest.mark.seconds),
    ],
)
def test_a_run_goes_on_with_the_texts_and_rounds_of_an_undisturbed_one(
    family: str, num_modules: int, tmp_path: Path
) -> None:
    """Finished texts are kept, and others are made from the start in other batches. So hot, most tokens are accepted.

    Prompts are longer than what every round reads again.
    """
    save_with_mtp(tmp_path / "model", family, num_modules=num_modules)
    edit_tensors(tmp_path / "model" / "model.safetensors", look_back)
    save_tokenizer(tmp_path / "model", VOCAB_SIZE)
    prompts = [" ".join(f"t{number * step % 90 + 3}" for number in range(30 - step)) for step in (5, 7, 11)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = (
        "task=generate",
        "model=local",
        f"model.path={tmp_path}/model",
        "draft=mtp",
        f"prompts={tmp_path}/prompts.txt",
        "num_samples=2",
        "batch_size=2",
        "max_new_tokens=16",
        f"run_dir={tmp_path}/run",
        "sampling.temperature=4",
    )

    def texts() -> dict[tuple[int, int], tuple[Any, ...]]:
        done = launch(*words).well().lines
        return {(each["index"], each["sample"]): (each["token_ids"], each["accepted_lengths"][:-1]) for each in done}

    whole, file = texts(), tmp_path / "run" / "run.jsonl"
    assert sum(sum(accepted) for _, accepted in whole.values()) > 6 * 5
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    assert texts() == whole
