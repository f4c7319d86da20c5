"""Draft heads in training draft as they do in use, learn what they are measured by, and are saved as they compute."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import one_pass_heads
from tests.helpers.draft_heads import make_tensors, reference, save_original
from training.head import step_gradient
from training.head_model import BlockHead, EagleHead, Head, Unrolled, load_head, save_head, tapped_layers
from training.model import llama_config
from training.objectives import TEMPERATURE

VOCABULARY, PAIRS, STEPS = 100, 12, 4
CONFIG = llama_config(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, markov_rank=16, mask_token_id=2, block_size=STEPS, aux_hidden_state_layer_ids=[2, 5, 7],
)  # fmt: skip
TABLE_VE = torch.randn(VOCABULARY, 64)
ALL_P = torch.arange(PAIRS)


@pytest.fixture(params=[EagleHead, BlockHead])
def head(request: pytest.FixtureRequest) -> Head:
    """A head with large random weights, which can draft every second token."""
    torch.manual_seed(0)
    made: Head = request.param(CONFIG, torch.arange(0, VOCABULARY, 2), TABLE_VE)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def row() -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and tokens of a row."""
    return torch.randn(1, PAIRS, 192), torch.randint(VOCABULARY, (1, PAIRS))


@torch.no_grad()
@pytest.mark.parametrize("head", [EagleHead], indirect=True)
def test_every_chain_of_a_row_is_what_drafting_from_its_start_gives(head: EagleHead) -> None:
    taps_BPC, ids_BP = row()
    unrolled = head.unroll(taps_BPC, ids_BP, ALL_P, STEPS)
    for start in range(PAIRS - STEPS + 1):
        f_BPE = head.features(taps_BPC[:, : start + 1])
        for step in range(STEPS):
            h_BPE = head.states(f_BPE, head.embed(ids_BP[:, : start + step + 1]), Unrolled())[:, -1:]
            torch.testing.assert_close(unrolled[step][:, start], head.logits(h_BPE)[:, 0])
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
    taps_BPC, ids_BP = row()
    before = head.unroll(taps_BPC, ids_BP, ALL_P, 2)
    head.scale_taps(torch.full((192,), 32.0))
    save_head(head, tmp_path)
    torch.testing.assert_close(load_head(tmp_path, TABLE_VE).unroll(taps_BPC, ids_BP, ALL_P, 2), before)
    stored = load_file(tmp_path / "model.safetensors")
    assert (torch.arange(50) + stored["d2t"]).tolist() == stored["t2d"].nonzero().flatten().tolist()


def test_a_target_that_is_too_shallow_is_refused() -> None:
    assert tapped_layers(10) == (2, 5, 7)
    with pytest.raises(ValueError, match="2 layers"):
        tapped_layers(2)


@torch.no_grad()
def test_a_head_computes_what_its_paper_says(tmp_path: Path) -> None:
    tensors, table_VE = make_tensors(), torch.randn(4096, 256)
    taps_PX, ids_P = torch.randn(PAIRS, 768), torch.randint(4096, (PAIRS,))
    head, starts_A = load_head(save_original(tmp_path / "head", tensors), table_VE), torch.tensor([PAIRS - 2])
    for step, logits_1AW in enumerate(head.unroll(taps_PX[None], ids_P[None], starts_A, 2)):
        wanted_V = reference(tensors, table_VE[ids_P[: PAIRS - 1 + step]], taps_PX[: PAIRS - 1])
        torch.testing.assert_close(logits_1AW[0, 0].double(), wanted_V[head.drafted_ids()], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_head_of_one_pass_computes_what_its_definition_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, width = "dspark", one_pass_heads.WIDTH
    config = one_pass_heads.CONFIGS[layout] | {"markov_head_type": "rnn"}
    monkeypatch.setitem(one_pass_heads.CONFIGS, layout, config)
    tensors = one_pass_heads.make_tensors(layout)
    table_VE, output_VE = tensors.pop("embed_tokens.weight"), tensors["lm_head.weight"]
    del tensors["confidence_head.proj.weight"]
    head = load_head(one_pass_heads.save_head(tmp_path, layout, tensors), table_VE)
    taps_PX, ids_P = torch.randn(PAIRS, 3 * width), torch.randint(one_pass_heads.VOCABULARY, (PAIRS,))
    starts = [2, 7]
    for step, logits_1AW in enumerate(head.unroll(taps_PX[None], ids_P[None], torch.tensor(starts), STEPS)):
        for start, logits_W in zip(starts, logits_1AW[0], strict=True):
            text, drafted = [0, *ids_P[: start + 1].tolist()], ids_P[start + 1 : start + 1 + step].tolist()
            wanted_V = one_pass_heads.reference(layout, tensors, text, taps_PX[: start + 1], drafted,
                                                num_drafted=STEPS, table_VE=table_VE, output_VE=output_VE)  # fmt: skip
            torch.testing.assert_close(logits_W.double(), wanted_V[head.drafted_ids()], atol=1e-4, rtol=1e-4)
