"""Hybrids: texts of rounds that take tokens back, of rows that are refilled, and of drafts that catch up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.modules.building import build_empty
from llama_ssp.extensions.modules.described import with_modules
from llama_ssp.extensions.modules.tensor_parallel import shard
from llama_ssp.models import prefill
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.weights import model_bytes, rank_shares, shares
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine import held, loop
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect, shape_of
from tests.helpers.decoders import ScriptedLength, complete, make_decoder
from tests.helpers.fake_comm import thread_comms
from tests.helpers.lanes import slow
from tests.helpers.models import FAMILIES, VOCAB_SIZE, load_ranks, tiny_config
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.texts import library_greedy, part_at_a_near_tie
from tests.unit.models.conftest import Saved

SavedModels = Callable[[str], Saved]
Check = Callable[[str, list[RowCompletion]], None]
HYBRIDS = [kind for kind in FAMILIES if record_of(kind.partition(",")[0]).recurrent]
LENGTHS = (3, 30, 14, 1, 21)
NUM_NEW_TOKENS = 16


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in chunks of 8, between rounds of other rows."""
    for module in (engine, prefill, loop, held):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 8)


def load(folder: Path) -> Runner:
    return load_model(Loading(inspect(folder)))


def nearby(runner: Runner) -> Runner:
    """The same model with other weights, so that some of its tokens are accepted."""
    generator = torch.Generator().manual_seed(1)
    for parameter in runner._model.parameters():  # type: ignore[attr-defined]
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return runner


def requests() -> list[Request]:
    """Prompts of several lengths, one of them twice."""
    ids = torch.randint(
        2, VOCAB_SIZE, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(4)
    ).tolist()
    prompts = [tuple(row[:length]) for row, length in zip(ids, LENGTHS, strict=True)]
    return [
        Request(index=index, prompt_ids=prompts[index], max_new_tokens=NUM_NEW_TOKENS - index, sample=sample)
        for index, sample in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0))
    ]


@pytest.fixture
def check(saved: SavedModels) -> Check:
    """Compare texts with transformers' own."""
    known: dict[Request, list[int]] = {}

    def compare(kind: str, found: list[RowCompletion]) -> None:
        model = saved(kind)[1]
        for done in found:
            request = done.request
            if request not in known:
                known[request] = library_greedy(model, request.prompt_ids, num_tokens=request.max_new_tokens)
            part_at_a_near_tie(model, request.prompt_ids, known[request], done.token_ids[: len(known[request])])

    return compare


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "batch_size", "number"),
    [("qwen3_next", 2, 3), *(slow(kind, *sizes) for kind in HYBRIDS for sizes in ((1, 8), (2, 1), (5, 4)))],
)
def test_texts_are_the_librarys_whatever_rounds_take_back(
    saved: SavedModels, check: Check, kind: str, batch_size: int, number: int
) -> None:
    """Rows accept different numbers of tokens; smaller batches are refilled while they decode, with a prompt twice."""
    target, draft = load(saved(kind)[0]), load(saved(kind)[0])
    alike = complete(make_decoder(target, draft, num_draft_tokens=number, batch_size=batch_size), requests())
    check(kind, alike)
    assert all({*done.accepted_lengths[:-1]} <= {number} for done in alike)
    draft = nearby(draft)
    mixed = complete(make_decoder(target, draft, num_draft_tokens=number, batch_size=batch_size), requests())
    check(kind, mixed)
    assert len({length for done in mixed for length in done.accepted_lengths}) > 1
    for ngram in (False, True):
        check(kind, complete(make_decoder(target, None, ngram=ngram, batch_size=batch_size), requests()))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "reads_late"), [("bamba", True), *(slow(kind, late) for kind in HYBRIDS for late in (False, True))]
)
def test_a_draft_that_skips_rounds_takes_in_what_it_missed(
    saved: SavedModels, check: Check, kind: str, reads_late: bool
) -> None:
    """Its states are then those of the text: it drafts what the target chooses."""
    decoder = make_decoder(load(saved(kind)[0]), load(saved(kind)[0]), num_draft_tokens=3, batch_size=2)
    plain, drafted = DraftChoice(0), DraftChoice(3)
    decoder.length = ScriptedLength([drafted, plain, plain, DraftChoice(2), plain, drafted], reads_late=reads_late)
    found = complete(decoder, requests())
    check(kind, found)
    for done in found:
        pairs = [*zip(done.accepted_lengths, done.draft_lengths, strict=True)][:-1]
        assert all(accepted == examined for accepted, examined in pairs)
    assert {examined for done in found for examined in done.draft_lengths} == {0, 2, 3}


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["granitemoehybrid, dense", *map(slow, HYBRIDS)])
def test_a_draft_that_runs_ahead_goes_back_behind_all_that_was_in_flight(
    saved: SavedModels, check: Check, kind: str
) -> None:
    """Rounds overlap, so that a rejection takes up to 2 K - 1 tokens back; with more states it drafts no better."""
    target, draft = load(saved(kind)[0]), nearby(load(saved(kind)[0]))
    mixed = complete(overlapped_decoder(target, draft, num_draft_tokens=3, batch_size=2), requests())
    check(kind, mixed)
    assert len({length for done in mixed for length in done.accepted_lengths}) > 1
    draft.allocate(batch_size=2, capacity=8, num_rolled_back=40)
    again = complete(overlapped_decoder(target, draft, num_draft_tokens=3, batch_size=2), requests())
    assert [done.accepted_lengths for done in again] == [done.accepted_lengths for done in mixed]


def kept_by(runner: Any) -> list[torch.Tensor]:
    """The states behind the last tokens, and the saved ones."""
    return [
        each
        for cache in (runner._states, runner._saved)
        for part in (cache.inputs, cache.states)
        for each in part.values()
    ]


@pytest.mark.seconds
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_plan_counts_the_slots_and_the_states_that_are_allocated(saved: SavedModels, kind: str) -> None:
    folder = saved(kind)[0]
    runner: Any = load(folder)
    runner.allocate(batch_size=3, capacity=24, num_rolled_back=4)
    runner.forward(torch.ones(3, 2, dtype=torch.int64), torch.arange(2).repeat(3, 1), bucket=24)
    held = sum(each.nbytes for each in (*runner.cache.in_rows(), *kept_by(runner)))
    shape = read_config(folder)[0]
    model = PlannedModel(name=kind, shape=shape, dtype=Dtype.fp32, quantization="none")
    assert held == 3 * (24 * model.slot_bytes(shape.num_key_value_heads) + model.state_bytes(5, 1))
    tensors = {tensor.data_ptr(): tensor.numel() for tensor in saved(kind)[1].state_dict().values()}  # tied ones once
    assert inventory(shape).num_parameters == sum(tensors.values())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_keep_the_states_of_their_heads_as_planned(saved: SavedModels, num_ranks: int) -> None:
    """Four key heads on three ranks: two, one and one."""
    folder, comms = saved("qwen3_next")[0], thread_comms(num_ranks)
    runners: list[Any] = load_ranks(folder, comms)
    for runner in runners:
        runner.allocate(batch_size=3, capacity=24, num_rolled_back=4)
    held = [sum(each.nbytes for each in kept_by(runner)) for runner in runners]
    shape = read_config(folder)[0]
    model = PlannedModel(name="mine", shape=shape, dtype=Dtype.fp32, quantization="none")
    parts = rank_shares(model, num_ranks=num_ranks)
    assert held == [3 * model.state_bytes(5, 1, held=part) for part in parts]
    assert sum(held) == 3 * model.state_bytes(5, 1)


@pytest.mark.parametrize("kind", ["kimi_linear", *map(slow, ("qwen3_next", "olmo_hybrid"))])
def test_a_plan_counts_the_weights_of_a_rank_where_attention_and_recurrence_share_a_name(
    saved: SavedModels, kind: str
) -> None:
    origin = with_modules(inspect(saved(kind)[0]))
    model = PlannedModel(name="mine", shape=origin.shape, dtype=Dtype.fp32, quantization="none")
    planned = model_bytes(shares(origin.shape, num_ranks=2)[0], model, device="cuda").total_bytes
    modules = build_empty(origin)
    loading = Loading(origin, comm=Comm(rank=0, size=2))
    shard(modules, origin.shape, loading.comm, own=loading.own_shard, whole=loading.kept_whole)
    assert planned == pytest.approx(sum(parameter.nbytes for parameter in modules.parameters()), rel=0.01)


@pytest.mark.parametrize("kind", ["qwen3_5", *map(slow, ("qwen3_5_moe",))])
def test_the_text_model_of_a_multimodal_checkpoint_runs_alone(tmp_path: Path, kind: str) -> None:
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    text = tiny_config(f"{kind}_text").to_dict()
    parts: dict[str, Any] = {"text_config": text, "vision_config": vision | {"intermediate_size": 32}}
    config = CONFIG_MAPPING[kind](**parts)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    runner, ids_1T = load(tmp_path), torch.arange(24)[None] * 7 % VOCAB_SIZE
    runner.allocate(batch_size=1, capacity=24)
    with torch.inference_mode():
        wanted, found = model(input_ids=ids_1T).logits, runner.forward(ids_1T, torch.arange(24)[None], bucket=24)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.std()))


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_shape_of_a_hybrid_names_a_kind_of_its_layers(family: str, saved: SavedModels) -> None:
    """Trees and drafts with tokenizers of their own are refused for it."""
    (folder, model), kinds = saved(family), record_of(family.partition(",")[0]).recurrent
    assert read_config(folder)[0].recurrent == shape_of(model.config).recurrent == kinds[0]
