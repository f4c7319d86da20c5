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


@pytest.mark.seconds
def test_a_draft_counts_where_a_rule_compares_with_its_probabilities() -> None:
    models: Any = Mock(reuse=Mock(are_invariant=False), target=Mock(is_invariant=True), prepared=None)
    for words, expected in (
        ("sampling=greedy", True),
        ("verification=coupled sampling.temperature=0.7", True),
        ("sampling.temperature=0.7", False),
        ("draft=none sampling.temperature=0.7", True),
    ):
        assert are_reproducible(models, config_of(words.split())) is expected, words
    models.target.is_invariant = False
    assert not are_reproducible(models, config_of(["sampling=greedy"]))


def test_a_copy_of_the_target_counts_as_a_draft_does() -> None:
    """In a format of other sums, such as int4 on a processor without its products."""
    models: Any = Mock(reuse=Mock(are_invariant=True), prepared=Mock(is_invariant=False))
    assert not are_reproducible(models, config_of(["sampling.temperature=0.7"]))
    assert are_reproducible(models, config_of(["sampling=greedy"]))
    models.prepared.is_invariant = True
    assert are_reproducible(models, config_of(["sampling.temperature=0.7"]))
