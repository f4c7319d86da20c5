"""`reproducible=true` says in one sentence what loaded models lack that no check of settings could know."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llama_ssp.run.decoders import _why_not_reproducible, are_reproducible
from tests.helpers.doors import config_of


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "needs our kernels for all layers of one rank"),
        ("cpu", "needs compiled products and attention for all"),
    ],
)
def test_a_sentence_names_what_lacks(device: str, words: str) -> None:
    models: Any = Mock(target=Mock(device=torch.device(device)))
    assert words in _why_not_reproducible(models)


def test_a_draft_counts_where_a_rule_compares_with_its_probabilities() -> None:
    models: Any = Mock(reuse=Mock(are_invariant=False), target=Mock(is_invariant=True))
    for words, expected in (
        ("sampling=greedy", True), ("verification=coupled sampling.temperature=0.7", True),
        ("sampling.temperature=0.7", False), ("draft=none sampling.temperature=0.7", True),
    ):  # fmt: skip
        assert are_reproducible(models, config_of(words.split())) is expected, words
    models.target.is_invariant = False
    assert not are_reproducible(models, config_of(["sampling=greedy"]))
