"""Families whose layers see windows, or that need something put in their place: texts, number formats, refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama_ssp.config.schema import Quantization
from llama_ssp.decoding.state import Request
from llama_ssp.distributed.comms import Comm
from llama_ssp.errors import ConfigError
from llama_ssp.models import prefill
from llama_ssp.models.backends import load_model, load_modules
from llama_ssp.models.checkpoint import inspect
from llama_ssp.models.families import check_servable, windows_of
from llama_ssp.models.interface import Runner
from llama_ssp.models.quantization import Precision
from llama_ssp.models.runner import ModuleRunner
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.models import VOCAB_SIZE, WINDOW, build_checkpoint, library_logits, tiny_config
from tests.helpers.texts import library_greedy, part_at_a_near_tie
from tests.unit.models.conftest import Saved

SavedModels = Callable[[str], Saved]
CPU = torch.device("cpu")
KINDS = ("mistral", "qwen2, windows", "qwen3, windows", "gemma", "gemma2", "gemma3_text", "gpt_neo")
# Largest difference of narrow formats, in units of the logits' scale.
TOLERANCES = {torch.bfloat16: 0.15, torch.float16: 0.02}
LENGTHS = (3, 14, 21)
NUM_NEW_TOKENS = 20


def load(folder: Path, comm: Comm | None = None) -> Runner:
    return load_model(inspect(folder), dtype=None, device=CPU, comm=comm or Comm.single())


def random_ids(*shape: int) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(4))


def requests(lengths: tuple[int, ...], *, num_tokens: int = NUM_NEW_TOKENS) -> list[Request]:
    ids = random_ids(len(lengths), max(lengths)).tolist()
    prompts = [tuple(row[:length]) for row, length in zip(ids, lengths, strict=True)]
    return [Request(index=index, prompt_ids=prompt, max_new_tokens=num_tokens) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_beyond_the_windows_is_the_librarys_with_and_without_a_draft(
    saved: SavedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_ranks: int
) -> None:
    """Ragged prompts, read in chunks of 8; the draft is a layer of the same kind, and whole on every rank."""
    monkeypatch.setattr(prefill, "CHUNK", 8)
    folder, model = saved(kind)
    build_checkpoint(tmp_path, kind, num_hidden_layers=1)
    comms = thread_comms(num_ranks)
    targets, drafts = [load(folder, comm) for comm in comms], [load(tmp_path) for _ in comms]

    def texts(comm: Comm) -> list[list[int]]:
        decoders = [
            make_decoder(targets[comm.rank], draft, batch_size=2, comm=comm) for draft in (None, drafts[comm.rank])
        ]
        return [done.token_ids for decoder in decoders for done in complete(decoder, requests(LENGTHS))]

    for found in on_ranks(comms, texts):
        for request, ids in zip(2 * requests(LENGTHS), found, strict=True):
            wanted = library_greedy(model, request.prompt_ids, num_tokens=NUM_NEW_TOKENS)
            assert not part_at_a_near_tie(model, request.prompt_ids, wanted[: len(ids)], ids)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", ["gpt_neo", "gemma2"])
def test_an_int8_round_is_decoding_one_by_one(tmp_path: Path, kind: str) -> None:
    """Attention of their own too takes one position after the other where inputs are quantized."""
    build_checkpoint(tmp_path, kind, hidden_size=128)
    precision = Precision(quantization=Quantization.int8)
    model = load_modules(inspect(tmp_path), dtype=None, device=CPU, comm=Comm.single(), precision=precision)
    runner = ModuleRunner(model, comm=Comm.single())
    runner.allocate(batch_size=1, capacity=40)
    ids_BT = random_ids(1, 33)
    runner.forward(ids_BT[:, :8], torch.arange(8)[None], bucket=8)
    for start in range(8, 33, 5):
        steps_BT = torch.arange(start, start + 5)[None]
        together = runner.forward(ids_BT.gather(1, steps_BT), steps_BT, bucket=40)
        alone = [runner.forward(ids_BT[:, [step]], torch.tensor([[step]]), bucket=40) for step in steps_BT[0].tolist()]
        assert (together - torch.cat(alone, 1)).abs().max() < 1e-5 * together.std()


def test_a_round_may_look_behind_the_last_position_that_gpt_neo_has_learned(tmp_path: Path) -> None:
    """Prompt and new tokens fill the context; the last rounds draft and verify behind it."""
    model = build_checkpoint(tmp_path, "gpt_neo", max_position_embeddings=32)
    [request] = requests((20,), num_tokens=12)
    decoder = make_decoder(load(tmp_path), load(tmp_path), num_draft_tokens=5)
    [done] = complete(decoder, [request])
    assert not part_at_a_near_tie(
        model, request.prompt_ids, library_greedy(model, request.prompt_ids, num_tokens=12), done.token_ids
    )


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("llama", (None, None)),
        ("mistral", (WINDOW, WINDOW)),
        ("qwen2", (None, None)),
        ("qwen3, windows", (None, WINDOW)),
        ("gemma2", (WINDOW, None)),
        ("gpt_neo", (WINDOW, None)),
    ],
)
def test_windows_belong_to_layers(kind: str, windows: tuple[int | None, ...]) -> None:
    assert windows_of(tiny_config(kind)) == windows


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "phi3",
            {"sliding_window": 64},
            "of 64 tokens in a context of 128, which .* gemma2, .*mistral",
        ),
        ("olmo3", {"sliding_window": 64}, "sliding windows"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends in both directions"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
            "dynamic",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
    ],
)
def test_models_that_the_static_cache_cannot_serve_are_refused(
    family: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_servable(tiny_config(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": 128}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_models_that_only_look_alike_are_served(family: str, changes: dict[str, object]) -> None:
    check_servable(tiny_config(family, **changes))
