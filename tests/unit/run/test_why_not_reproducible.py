"""`reproducible=true` says in one sentence what the models of a run lack."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llama_ssp.run.decoders import _why_not_reproducible


@pytest.mark.parametrize(
    ("device", "kinds", "words"),
    [
        ("cuda", ["llama"], "is for CPUs so far"),
        ("cpu", ["llama", "lfm2"], "lfm2 models run on the modules of transformers"),
        ("cpu", ["llama"], "needs compiled products and attention for all layers"),
    ],
)
def test_a_sentence_names_what_lacks(device: str, kinds: list[str], words: str) -> None:
    sources = [Mock(origin=Mock(shape=Mock(model_type=kind, is_head=False))) for kind in kinds]
    models: Any = Mock(target=Mock(device=torch.device(device)), sources=sources)
    assert words in _why_not_reproducible(models)
