"""Penalties, biases and bans are those of transformers and OpenAI, see drafted tokens, and keep the law exact."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.context import Context, Rows, count_tokens, penalty
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_speculative
from tests.helpers.decoders import complete, make_decoder, outcome, requests
from tests.helpers.exact_law import exact_law
from tests.helpers.lanes import first, heavy, pairs
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.table_models import TableModel, joint_law, random_table

PROMPT = (3, 1, 1)
PENALIZED = {
    "repetition": SamplingConfig(temperature=0.7, repetition_penalty=1.5),
    "frequency": SamplingConfig(temperature=0.7, frequency_penalty=0.6),
    "presence": SamplingConfig(temperature=1.0, presence_penalty=-0.8, top_k=3),
    "all": SamplingConfig(
        temperature=1.3, repetition_penalty=0.7, frequency_penalty=0.4, presence_penalty=0.3, top_p=0.9, min_p=0.1
    ),
    "biases": SamplingConfig(temperature=0.7, logit_bias={0: 1.5, 3: -0.6}, repetition_penalty=1.3),
    # 3, 1 and 1 precede the text, so that words are completed across its beginning, inside it and by drafted tokens.
    "words": SamplingConfig(temperature=0.9, bad_words=["?"], bad_ids=((1, 2), (1, 1, 3), (0, 0), (2, 3, 1, 1, 1))),
    "a single token": SamplingConfig(temperature=0.9, bad_words=["?"], bad_ids=((2,),), top_k=2),
    "first tokens": SamplingConfig(temperature=0.8, min_new_tokens=2, eos_ids=(0, 3)),
}


def by_hand(logits_V: Tensor, new: tuple[int, ...], sampling: SamplingConfig) -> Tensor:
    """One row, with transformers' own processors over prompt and text, and plain counts of the text alone."""
    ids, num_prompt = torch.tensor([PROMPT + new], dtype=torch.long), len(PROMPT)
    biases: list[list[list[int] | float]] = [[[token], bias] for token, bias in sampling.logit_bias.items()]
    for change in (
        biases and SequenceBiasLogitsProcessor(biases),
        sampling.bad_ids and NoBadWordsLogitsProcessor([[*word] for word in sampling.bad_ids]),
        sampling.min_new_tokens
        and MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_new_tokens, [*sampling.eos_ids]),
    ):
        if change:
            logits_V = change(ids, logits_V[None].clone())[0]
    if sampling.repetition_penalty != 1:
        logits_V = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, logits_V[None].clone())[0]
    counts_V = torch.bincount(ids[0, len(PROMPT) :], minlength=len(logits_V)).to(logits_V.dtype)
    return logits_V - sampling.frequency_penalty * counts_V - sampling.presence_penalty * (counts_V > 0)


def penalized(target: TableModel, sampling: SamplingConfig) -> tuple[Tensor, ...]:
    """The target's conditional law after the prompt, for every prefix."""
    process, laws = processor(sampling), []
    for length, logits in enumerate(target.logits):
        prefixes = [*product(range(target.vocab_size), repeat=length)]
        rows = [
            torch.stack([by_hand(table[code], prefix, sampling) for code, prefix in enumerate(prefixes)])
            for table in logits
        ]
        laws.append(process(torch.stack(rows)))
    return tuple(laws)


def law_error(rule: Rule, sampling: SamplingConfig, *, num_draft_tokens: int, is_point_mass: bool = False) -> float:
    target, draft = (random_table(seed=seed, num_tables=3, max_length=num_draft_tokens) for seed in (12, 22))
    measured = exact_law(
        rule, target=target, draft=draft, num_draft_tokens=num_draft_tokens, is_point_mass=is_point_mass, prompt=PROMPT
    )
    return float((measured - joint_law(penalized(target, sampling))).abs().max())


@pytest.mark.parametrize("is_point_mass", first([False, True]))
@pytest.mark.parametrize("num_draft_tokens", [1, heavy(2)])
@pairs(name=[*PENALIZED], rule_name=["speculative", "block"])
def test_the_text_has_exactly_the_penalized_targets_law(
    rule_name: str, name: str, num_draft_tokens: int, is_point_mass: bool
) -> None:
    rule = make_rule(PENALIZED[name], VerificationConfig(rule=rule_name))
    error = law_error(rule, PENALIZED[name], num_draft_tokens=num_draft_tokens, is_point_mass=is_point_mass)
    assert error < 1e-12


class WithoutDraftedTokens(Rule):
    """A rule whose target counts prompt and text alone."""

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        assert context
        process, first = super().process, context._replace(last_BT=context.last_BT[:, :1])
        return torch.cat([process(logits_B1V, first) for logits_B1V in logits_BTV.split(1, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, None) for name in ("repetition", "words", "first tokens")),
        ("biases", {"logit_bias": {0: 1.5}}),
        ("words", {"bad_ids": ((1, 2), (1, 1, 3), (2, 3, 1, 1, 1))}),
        ("words", {"bad_ids": ((1, 2), (1, 3), (0, 0), (2, 3, 1, 1, 1))}),
        ("first tokens", {"min_new_tokens": 1}),
        ("first tokens", {"eos_ids": (0,)}),
    ],
)
def test_a_change_that_is_wrong_or_leaves_out_the_drafted_tokens_is_caught(
    name: str, fault: dict[str, Any] | None
) -> None:
    sampling = PENALIZED[name]
    rule = make_rule(replace(sampling, **fault or {}), VerificationConfig())
    if fault is None:
        rule = WithoutDraftedTokens(processor(sampling), verify_speculative, penalize=penalty(sampling))
    assert law_error(rule, sampling, num_draft_tokens=2) > 1e-3


def test_tokens_are_counted_up_to_each_position_and_no_further() -> None:
    tokens_BS = torch.tensor([[5, 5, 2, 7, 7, 7], [1, 5, 1, 1, 3, 0]])
    rows = Rows(tokens_BS, torch.tensor([3, 2]), torch.zeros(2).long(), prompt_lengths_B=torch.tensor([1, 2]))
    context = rows.before(torch.tensor([[2, 3], [1, 2]]))
    counts_BTV, new_BTV = (
        count_tokens(context, first, vocab_size=8) for first in (torch.zeros(2).long(), rows.prompt_lengths_B)
    )
    assert counts_BTV[0].tolist() == [[0, 0, 1, 0, 0, 2, 0, 0], [0, 0, 1, 0, 0, 2, 0, 1]]
    assert counts_BTV[1].tolist() == [[0, 1, 0, 0, 0, 1, 0, 0], [0, 2, 0, 0, 0, 1, 0, 0]]
    assert new_BTV[0].tolist() == [[0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1, 0, 1]]
    assert new_BTV[1].tolist() == [[0] * 8, [0, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["biases", heavy("words"), heavy("first tokens"), heavy("all")])
def test_rounds_with_penalties_are_traced(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = PrefixRunner(sharpness=1.0), PrefixRunner(seed=1, sharpness=1.0)
    made, by_python = (make_decoder(target, draft, sampling=PENALIZED[name], replay=traced) for traced in (True, False))
    assert outcome(complete(made, requests(30))) == outcome(complete(by_python, requests(30)))
    assert caplog.messages == []


def test_without_penalties_there_is_nothing_to_compute() -> None:
    assert penalty(SamplingConfig()) is None
    assert not make_rule(SamplingConfig(), VerificationConfig()).needs_context
