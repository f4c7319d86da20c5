"""A catalogue shape at its true size: 1.1 B parameters, on one rank and on two, in fp32 and bf16."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp import catalogue
from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.weights.synthetic import Synthetic, synthesize
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.models import load_lean
from tests.helpers.prompts import PROMPTS
from tests.helpers.texts import library_greedy

NUM_TOKENS = 48


@dataclass(frozen=True)
class Text:
    """A prompt with the tiny model's greedy continuation, and the tiny model's logits of the latter."""

    ids: list[int]
    num_prompt: int
    logits_TV: Tensor


def synthetic_1b() -> Synthetic:
    shape = catalogue.load("tinyllama_1B").shape
    assert shape
    [synthetic] = synthesize([shape], agreement=1.0)
    assert isinstance(synthetic, Synthetic)
    return synthetic


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    folder = synthetic_1b().folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS[::7]:
        prompt_ids = tokenizer(prompt).input_ids
        ids = [*prompt_ids, *library_greedy(model, prompt_ids, num_tokens=NUM_TOKENS)]
        with torch.inference_mode():
            texts.append(Text(ids, len(prompt_ids), model(torch.tensor([ids[:-1]])).logits[0, len(prompt_ids) - 1 :]))
    return texts


def logits(num_ranks: int, dtype: torch.dtype, texts: list[Text]) -> list[Tensor]:
    """The large model's logits of the same texts, as rank 0 has them."""
    comms = thread_comms(num_ranks)
    runners = [load_lean(synthetic_1b(), dtype=dtype, comm=comm, kernel=PlainLinear) for comm in comms]

    def of_rank(comm: ThreadComm) -> list[Tensor]:
        runner, found = runners[comm.rank], []
        runner.allocate(batch_size=1, capacity=128)
        for text in texts:
            ids_BT = torch.tensor([text.ids[:-1]])
            positions_BT = torch.arange(ids_BT.shape[1])[None]
            found.append(runner.forward(ids_BT, positions_BT, bucket=128)[0, text.num_prompt - 1 :])
        return found

    return on_ranks(comms, of_rank)[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_its_greedy_text_is_the_tiny_models(num_ranks: int, texts: list[Text]) -> None:
    """Behind every prefix of the tiny model's greedy text the large model prefers the same token."""
    for text, found_TV in zip(texts, logits(num_ranks, torch.float32, texts), strict=True):
        assert (found_TV[:, : text.logits_TV.shape[1]] - text.logits_TV).abs().max() < 1e-4
        assert found_TV.argmax(-1).tolist() == text.ids[text.num_prompt :]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bf16_moves_less_than_a_fiftieth_of_the_probability(num_ranks: int, texts: list[Text]) -> None:
    variations = []
    for text, found_TV in zip(texts, logits(num_ranks, torch.bfloat16, texts), strict=True):
        wanted_TV = torch.nn.functional.pad(
            text.logits_TV.softmax(-1), (0, found_TV.shape[1] - text.logits_TV.shape[1])
        )
        variations.append((found_TV.softmax(-1) - wanted_TV).abs().sum(-1) / 2)
    assert torch.cat(variations).mean() < 0.02
