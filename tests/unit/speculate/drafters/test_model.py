"""A draft model proposes tokens that it knows itself, in the target's width, whoever asks for them."""

import pytest
import torch
from torch.nn.functional import pad

from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.rules import make_rule
from tests.helpers.decoders import parts_of
from tests.helpers.lanes import pairs
from tests.helpers.prefix_runner import PrefixRunner

CPU = torch.device("cpu")


def model_drafter(*, vocab_size: int, temperature: float = 0.9) -> ModelDrafter:
    """For a target of 11 tokens."""
    rule = make_rule(SamplingConfig(temperature=temperature), VerificationConfig())
    return ModelDrafter(parts_of(PrefixRunner(vocab_size, sharpness=1.0), rule=rule, num_draft_tokens=4, vocab_size=11))


def proposed(drafter: ModelDrafter, *, num_rows: int = 1, num_tokens: int = 4) -> Draft:
    """What it drafts behind two tokens in each row."""
    tokens_BS = pad(torch.arange(2 * num_rows).view(num_rows, 2) % 11, (0, 8))
    lengths_B = torch.full((num_rows,), 2)
    drafter.allocate(batch_size=num_rows, num_slots=10)
    prompts = Prompts(tokens_BS, lengths_B, [2] * num_rows, longest=2)
    drafter.prefill(prompts, rows=range(num_rows), buckets=Buckets(step=10, num_slots=10))
    uniforms_BKP = torch.rand(num_rows, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = Rows(tokens_BS, lengths_B, torch.zeros_like(lengths_B), torch.zeros_like(lengths_B))
    return drafter.propose(rows, num_tokens=num_tokens, uniforms_BKP=uniforms_BKP, bucket=10)


@pairs(vocab_size=[5, 11, 14], temperature=[0.0, 0.9])
def test_a_head_of_another_width_is_cut_or_filled_up_with_what_is_never_drafted(
    vocab_size: int, temperature: float
) -> None:
    """Nor does the draft fail on a text with tokens that it lacks: the target may choose its padding."""
    draft = proposed(model_drafter(vocab_size=vocab_size, temperature=temperature), num_rows=50)
    assert int(draft.ids_BK.max()) < min(vocab_size, 11)
    if not draft.is_certain:
        assert draft.drawn_law.shape == (50, 5, 11)
        torch.testing.assert_close(draft.drawn_law[:, :4].sum(-1), torch.ones(50, 4))
        assert not draft.drawn_law[..., vocab_size:].any()


def test_a_narrower_draft_whose_logits_are_no_numbers_is_survived() -> None:
    """What is drawn of them is any id; the verdict tells all ranks."""
    drafter = model_drafter(vocab_size=5)
    assert isinstance(drafter.runner, PrefixRunner)
    drafter.runner.head.fill_(torch.nan)
    draft = proposed(drafter)
    assert draft.drawn_law[:, :4].isnan().all()
    if draft.ids_BK.max() < 5:
        pytest.skip("this processor draws ids that the draft has")


def test_a_round_drafts_as_many_tokens_as_it_is_told_whatever_uniforms_it_has() -> None:
    draft = proposed(model_drafter(vocab_size=11), num_tokens=2)
    assert draft.ids_BK.shape == (1, 2)
    assert draft.probs_like(torch.zeros(1, 3, 11)).shape == (1, 3, 11)
