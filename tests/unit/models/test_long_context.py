"""Llama 3 in small at 32k positions: nothing but attention's own work grows with the square of the text.

Shapes: B sequences, T positions.
"""

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures import engine
from llama_ssp.architectures.engine import PREFILL_CHUNK
from llama_ssp.kernels.parts import SINGLES
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Held, Prompts, read_prompts
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.registry import operators
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.lanes import pairs
from tests.helpers.models import load_lean, tiny_model
from tests.helpers.operator_count import LargestTensor
from tests.unit.models.llama.test_decoder import random_ids

CONTEXT, PROMPT = 32768, 3000
ROPE = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CAPACITIES = 8192, CONTEXT


def runner(*, head_dim: int = 16, cache_dtype: str = "auto", num_layers: int = 2) -> LeanRunner:
    """Groups of four queries; attention is compiled for heads of 16 dimensions, and takes masks for others."""
    if not operators.made("attention", "cpu", torch.float32, 16, SINGLES):
        pytest.skip("this processor has no compiled attention")
    return load_small(head_dim=head_dim, cache_dtype=cache_dtype, num_layers=num_layers)


def load_small(*, head_dim: int = 16, cache_dtype: str = "auto", num_layers: int = 2) -> LeanRunner:
    """The same, whatever computes it."""
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rope_parameters": ROPE}
    model = tiny_model("llama", head_dim=head_dim, num_hidden_layers=num_layers, **sizes)
    return load_lean(model, precision=Precision(cache_dtype=cache_dtype))


@torch.inference_mode()
def read(model: LeanRunner, capacity: int, num_tokens: int) -> Tensor:
    """The logits behind a prompt, in a cache of so many slots."""
    model.allocate(batch_size=1, capacity=capacity)
    prompts = Prompts(random_ids(1, num_tokens), torch.tensor([num_tokens]), [num_tokens], longest=num_tokens)
    return read_prompts(model, prompts, rows=[0], buckets=Buckets(step=64, num_slots=capacity))


@pytest.mark.seconds
@pairs(head_dim=[16, 8], cache_dtype=["auto", "int8"])
def test_the_largest_tensor_of_a_prompt_grows_no_faster_than_its_context(head_dim: int, cache_dtype: str) -> None:
    """A mask of all positions would have 4 GiB."""
    largest = []
    for capacity in CAPACITIES:
        with LargestTensor() as made:  # type: ignore[no-untyped-call]
            read(runner(head_dim=head_dim, cache_dtype=cache_dtype), capacity, capacity // 16)
        largest.append(made.num_bytes)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < 2**26


@torch.inference_mode()
@pytest.mark.parametrize("head_dim", [16, 8])
def test_a_chunk_behind_a_long_text_needs_no_more_memory_than_behind_a_short_one(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention takes masks, the chunks become shorter."""
    monkeypatch.setattr(engine, "MASKED_PAIRS", 512 * 2048)
    model, largest = runner(head_dim=head_dim, num_layers=1), list[int]()
    model.allocate(batch_size=1, capacity=CONTEXT)
    read(model, CONTEXT, 8)
    for length in (2048, 16384):
        held, lengths = [Held(length - PREFILL_CHUNK, 0)], torch.tensor([length])
        prompts = Prompts(random_ids(1, length), lengths, [length], longest=length, held=held)
        with LargestTensor() as made:  # type: ignore[no-untyped-call]
            read_prompts(model, prompts, rows=[0], buckets=Buckets(step=64, num_slots=CONTEXT))
        largest.append(made.num_bytes)
    assert largest[1] <= largest[0]


@torch.inference_mode()
def test_shorter_chunks_of_a_long_prompt_have_the_logits_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = runner(head_dim=8)
    whole = read(model, 2048, 1300)
    monkeypatch.setattr(engine, "MASKED_PAIRS", 2**16)
    torch.testing.assert_close(read(model, 2048, 1300), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.seconds
def test_texts_do_not_depend_on_the_room_that_a_long_context_leaves() -> None:
    """Speculatively, behind a prompt of some thousand tokens."""
    prompt = tuple(random_ids(1, PROMPT)[0].tolist())
    texts = []
    for room in (64, CONTEXT - PROMPT - 16):
        decoder = make_decoder(runner(), runner(num_layers=1), temperature=0.8, num_draft_tokens=4)
        decoder.make_room([Request(index=0, prompt_ids=prompt, max_new_tokens=room)])
        [done] = complete(decoder, [Request(index=0, prompt_ids=prompt, max_new_tokens=24)])
        texts.append(done.token_ids)
    assert len(texts[0]) == 24
    assert texts[0] == texts[1]


@pytest.mark.seconds
@torch.inference_mode()
def test_the_last_positions_of_32k_are_attended_to_as_by_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(operators, "made", lambda *_case, **_how: None)
        model = load_small()
        assert model.uses_masks == (not is_compiled)
        read(model, CONTEXT, PROMPT)
        model.move(torch.arange(PROMPT)[None], torch.arange(CONTEXT - 5 - PROMPT, CONTEXT - 5)[None])
        found.append(model.forward(random_ids(1, 5), torch.arange(CONTEXT - 5, CONTEXT)[None], bucket=CONTEXT))
    compiled, by_mask = found
    assert float((compiled - by_mask).abs().max()) < 1e-4 * float(by_mask.std())
