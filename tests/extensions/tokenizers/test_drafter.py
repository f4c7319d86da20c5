"""A draft with another vocabulary drafts what its model says of its own text, and the target's text stays its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from llama_ssp.extensions.tokenizers.alignment import Alignment
from llama_ssp.extensions.tokenizers.drafter import IntersectionDrafter
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule
from tests.extensions.tokenizers.own_vocabulary import ALIGNMENT, NUM_OWN_IDS, Spelling, intersection_drafter, own_text
from tests.helpers.decoders import ScriptedLength, complete, make_decoder, requests
from tests.helpers.lanes import grid, heavy
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.text_laws import counted

SAMPLING = SamplingConfig(temperature=0.9)
PENALIZED = SamplingConfig(temperature=1.2, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.2)


class Checked(IntersectionDrafter):
    """Compares each draft with what the model says of the whole text, token by token."""

    num_checked = 0

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft, and compare."""
        draft = super().propose(
            rows, num_tokens=num_tokens, uniforms_BKP=uniforms_BKP, bucket=bucket, num_unread=num_unread
        )
        for row, length in enumerate(rows.lengths_B.tolist()):
            num_prompt = int(self._text._prompt_lengths_B[row if rows.places is None else rows.places[row]])
            if not 0 < num_prompt < length:
                continue  # vacant
            ids = rows.tokens_BS[row, :length].tolist()
            text = own_text(ids[:num_prompt], ids[num_prompt:], most=self._most_tokens)
            for place, token in enumerate(draft.ids_BK[row].tolist()):
                assert isinstance(self.runner, PrefixRunner)
                logits_V = self.vocabularies.to_target(self.runner.logits(text)[None])[0]
                torch.testing.assert_close(draft.drawn_law[row, place], processor(SAMPLING)(logits_V))
                self.num_checked += 1
                shared = ALIGNMENT.shared[token]
                assert shared is not None, "a token was drafted that the draft lacks"
                text.append(shared)
        return draft


def decoder(
    *,
    num_draft_tokens: int = 3,
    kind: type[IntersectionDrafter] = IntersectionDrafter,
    sharpness: float = 1.0,
    **options: Any,
) -> Decoder:
    draft = PrefixRunner(NUM_OWN_IDS, seed=1, sharpness=sharpness)

    def make(rule: Rule) -> IntersectionDrafter:
        return intersection_drafter(draft, rule, num_draft_tokens=num_draft_tokens, kind=kind)

    return make_decoder(PrefixRunner(sharpness=sharpness), None, make_drafter=make, **options)


@pytest.mark.seconds
@grid(batch_size=[1, 3], num_draft_tokens=[1, 6], lag=[0, 1])
def test_every_draft_is_the_models_own_after_its_own_text(batch_size: int, num_draft_tokens: int, lag: int) -> None:
    made = decoder(
        num_draft_tokens=num_draft_tokens,
        kind=Checked,
        sharpness=0.3,
        batch_size=batch_size,
        sampling=SAMPLING,
        replay=False,
    )
    made.lag = lag
    done = complete(made, requests())
    accepted = [length for each in done for length in each.accepted_lengths]
    assert {0, num_draft_tokens} <= {*accepted}, "whole drafts are accepted and rejected"
    assert isinstance(made.round.drafters[0], Checked)
    assert made.round.drafters[0].num_checked > 100


@pytest.mark.parametrize("num_pauses", [3, 70])
def test_every_draft_is_right_after_rounds_without_one(num_pauses: int) -> None:
    made = decoder(kind=Checked, sampling=SAMPLING, replay=False, batch_size=2)
    made.length = ScriptedLength([*[DraftChoice(0)] * num_pauses, DraftChoice(3), DraftChoice(2)])
    wanted = [replace(request, max_new_tokens=90) for request in requests()[:2]]
    assert {len(done.token_ids) for done in complete(made, wanted)} == {90}
    assert isinstance(made.round.drafters[0], Checked)
    assert made.round.drafters[0].num_checked > 4


def test_a_text_as_long_as_the_drafts_context_goes_on_without_growing() -> None:
    made = decoder(kind=Checked, sampling=SAMPLING, replay=False)
    drafter = made.round.drafters[0]
    assert isinstance(drafter, Checked)
    drafter.runner.max_position_embeddings = 48
    (done,) = complete(made, [Request(index=0, prompt_ids=(4,) * 7, max_new_tokens=32)])
    assert len(done.token_ids) == 32
    assert drafter._text.num_slots == 48
    assert int(drafter._text._most) == 45


@pytest.mark.parametrize("rule_name", ["speculative", "coupled"])
def test_the_target_under_other_ids_is_always_accepted(rule_name: str) -> None:
    """Its text, its positions and what penalties count are then the target's."""
    renamed = [4, 7, 0, 10, 3, 9, 1, 5, 2, 8, 6]
    target, draft = PrefixRunner(sharpness=1.0), PrefixRunner(sharpness=1.0)
    draft.table[renamed], draft.head[:, renamed] = target.table, target.head
    alignment = Alignment(shared=tuple(renamed), pieces=tuple((token,) for token in renamed))
    spelling = Spelling(alignment, lambda ids: [renamed[token] for token in ids])
    made = make_decoder(
        target,
        None,
        sampling=PENALIZED,
        rule_name=rule_name,
        batch_size=3,
        make_drafter=lambda rule: intersection_drafter(draft, rule, spelling=spelling),
    )
    for done in complete(made, requests()):
        assert {*done.accepted_lengths[:-1]} <= {3}


@pytest.mark.seconds
@pytest.mark.parametrize("rule_name", ["speculative", heavy("block"), heavy("coupled")])
def test_sampled_texts_have_the_targets_law(rule_name: str) -> None:
    """A false alarm has a chance of 1 in 10 000; tokens whose share is off by 5 % of it are found in 99 of 100 runs."""
    target, prompt, num_texts = PrefixRunner(sharpness=1.0), (2, 3), 4000
    made = decoder(sampling=SAMPLING, rule_name=rule_name, batch_size=500, num_draft_tokens=2)
    wanted = [Request(index=0, sample=sample, prompt_ids=prompt, max_new_tokens=3) for sample in range(num_texts)]
    texts = [tuple(done.token_ids) for done in complete(made, wanted)]
    for length in (1, 2, 3):
        counts, expected = counted(target, prompt, [text[:length] for text in texts], sampling=SAMPLING)
        assert chisquare(counts, expected).pvalue > 1e-4 / 9
