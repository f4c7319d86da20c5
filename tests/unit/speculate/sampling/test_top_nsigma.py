"""Top-n sigma keeps the tokens that its formula keeps, at any temperature, and a text has the law of what is kept."""

import math

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import make_rule
from tests.helpers.exact_law import law_error
from tests.helpers.table_models import random_table


def kept(logits: list[float], **sampling: float) -> list[int]:
    config = SamplingConfig(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    probs_V = processor(config)(torch.tensor(logits, dtype=torch.float64))
    assert float(probs_V.sum()) == pytest.approx(1)
    return [token for token, prob in enumerate(probs_V.tolist()) if prob]


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize(
    ("number", "wanted"), [(0.001, [3]), (0.49, [3]), (0.51, [2, 3]), (1.5, [1, 2, 3]), (100.0, [0, 1, 2, 3])]
)
def test_tokens_within_so_many_deviations_of_the_largest_logit_are_kept(
    number: float, wanted: list[int], temperature: float
) -> None:
    logits = [0.0, 4.0, 6.0, 8.0, -math.inf]  # mean 4.5, variance (20.25 + 0.25 + 2.25 + 12.25) / 4 = 8.75
    assert kept(logits, top_nsigma=number * 4 / math.sqrt(8.75), temperature=temperature) == wanted


def test_a_token_that_is_forbidden_does_not_count() -> None:
    """Else the deviation would be infinite, and every token left."""
    logits = [0.0, 4.0, 6.0, 8.0]
    assert kept([*logits, -math.inf], top_nsigma=0.7) == kept(logits, top_nsigma=0.7) == [2, 3]


def test_all_that_tie_are_kept() -> None:
    assert kept([1.0, 1.0, 1.0], top_nsigma=0.1) == [0, 1, 2]


def test_the_filters_after_it_see_what_it_has_left() -> None:
    logits = [math.log(each) for each in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_p=0.45) == [0, 1]
    assert kept(logits, top_p=0.45, top_nsigma=0.75) == [0]  # of two tokens, the first holds 4/7


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_the_text_has_the_law_of_what_it_leaves(rule: str) -> None:
    sampling = SamplingConfig(temperature=1.3, top_nsigma=0.8)
    target, draft = (random_table(seed=seed, num_tables=2, max_length=2) for seed in (3, 5))
    made = make_rule(sampling, VerificationConfig(rule=rule))
    assert law_error(made, sampling, target=target, draft=draft, num_draft_tokens=2) < 1e-12
