"""The draft head in training drafts as it does in use, learns what it is measured by, and is saved as it computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.draft_heads import make_tensors, reference, save_original
from training.head import step_gradient
from training.head_model import Head, Unrolled, load_head, save_head, tapped_layers
from training.model import llama_config
from training.objectives import TEMPERATURE

VOCABULARY, PAIRS, STEPS = 100, 12, 4
CONFIG = llama_config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
)


@pytest.fixture
def head() -> Head:
    """A head with large random weights, which can draft every second token."""
    torch.manual_seed(0)
    made = Head(CONFIG, torch.arange(0, VOCABULARY, 2))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


@torch.no_grad()
def test_every_chain_of_a_row_is_what_drafting_from_its_start_gives(head: Head) -> None:
    taps_BPC, embeddings_BPE = torch.randn(2, PAIRS, 192), torch.randn(2, PAIRS, 64)
    unrolled = head.unroll(taps_BPC, embeddings_BPE, STEPS)
    for start in range(PAIRS - STEPS + 1):
        f_BPE = head.features(taps_BPC[:, : start + 1])
        for step in range(STEPS):
            h_BPE = head.states(f_BPE, embeddings_BPE[:, : start + step + 1], Unrolled())[:, -1:]
            torch.testing.assert_close(unrolled[step][:, start + step], head.logits(h_BPE)[:, 0])
            f_BPE = torch.cat((f_BPE, h_BPE), dim=1)


@pytest.mark.parametrize("mix", [0.0, 0.4, 1.0])
def test_the_gradient_is_that_of_divergence_and_total_variation(mix: float) -> None:
    torch.manual_seed(0)
    p_NW = torch.randn(5, 8, dtype=torch.float64).softmax(-1)[:, :6].float()
    logits_NW = torch.randn(5, 6, requires_grad=True)
    weights_N, places_N = torch.rand(5), torch.tensor([0, 3, -1, 5, 2])
    step = step_gradient(p_NW, logits_NW.detach(), places_N, weights_N, mix)
    q_NW = (logits_NW / TEMPERATURE).softmax(-1)
    accepted_N = torch.minimum(p_NW, q_NW).sum(-1)
    loss_N = -(1.0 - mix) * (p_NW * q_NW.log()).sum(-1) - mix * accepted_N
    (loss_N * weights_N).sum().backward()
    torch.testing.assert_close(step.logits_NW, logits_NW.grad)
    torch.testing.assert_close(step.acceptance_N, accepted_N.detach())
    torch.testing.assert_close(step.survival_N[1], (q_NW[1, 3] / p_NW[1, 3]).clamp(max=1.0).detach())
    assert step.survival_N[2] == 0.0


@torch.no_grad()
def test_a_saved_head_computes_the_same_and_names_its_vocabulary(head: Head, tmp_path: Path) -> None:
    for parameter in head.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    taps_BPC, embeddings_BPE = torch.randn(1, PAIRS, 192), torch.randn(1, PAIRS, 64)
    before = head.unroll(taps_BPC, embeddings_BPE, 2)
    head.scale_taps(torch.full((192,), 32.0))
    save_head(head, tmp_path)
    torch.testing.assert_close(load_head(tmp_path).unroll(taps_BPC, embeddings_BPE, 2), before)
    stored = load_file(tmp_path / "model.safetensors")
    assert (torch.arange(50) + stored["d2t"]).tolist() == stored["t2d"].nonzero().flatten().tolist()


def test_a_target_that_is_too_shallow_is_refused() -> None:
    assert tapped_layers(10) == (2, 5, 7)
    with pytest.raises(ValueError, match="2 layers"):
        tapped_layers(2)


@torch.no_grad()
def test_a_head_computes_what_its_paper_says(tmp_path: Path) -> None:
    tensors = make_tensors()
    taps_PX, embedded_PE = torch.randn(PAIRS, 768), torch.randn(PAIRS, 256)
    head = load_head(save_original(tmp_path / "head", tensors))
    for step, logits_1PW in enumerate(head.unroll(taps_PX[None], embedded_PE[None], 2)):
        known = embedded_PE[: PAIRS - 1 + step], taps_PX[: PAIRS - 1]
        wanted_W = reference(tensors, *known)[head.drafted_ids()]
        torch.testing.assert_close(logits_1PW[0, PAIRS - 2 + step].double(), wanted_W, atol=1e-4, rtol=1e-4)
