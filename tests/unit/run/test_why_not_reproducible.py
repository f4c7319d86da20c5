"""`reproducible=true` says in one sentence what loaded models lack that no check of settings could know."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llama_ssp.run.decoders import _why_not_reproducible


@pytest.mark.parametrize(
    ("device", "words"), [("cuda", "is for CPUs so far"), ("cpu", "needs compiled products and attention for all")]
)
def test_a_sentence_names_what_lacks(device: str, words: str) -> None:
    models: Any = Mock(target=Mock(device=torch.device(device)))
    assert words in _why_not_reproducible(models)
