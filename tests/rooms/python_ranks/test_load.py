"""What `load(..., ranks=N)` refuses before a rank is started."""

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp import load
from llama_ssp.errors import ConfigError
from tests.helpers.hub import shipped


def test_what_ranks_of_their_own_cannot_have_is_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (AutoModelForCausalLM.from_pretrained(shipped(name)) for name in ("tiny", "tiny-draft"))
    tokenizer = AutoTokenizer.from_pretrained(shipped("tiny"))
    refused: list[dict[str, Any]] = [{"model": target}, {"draft": draft}, {"tokenizer": tokenizer}]
    for given in refused:
        [name] = given
        with pytest.raises(ConfigError, match=f"^{name} is a .*, which the processes of ranks= do not have: give its"):
            load(**{"model": "tiny", **given}, ranks=2)
    with pytest.raises(ConfigError, match="ranks=0 must be one whole"):
        load("tiny", ranks=0)
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="ranks=2: torchrun has started 1 already, so leave ranks= out"):
        load("tiny", ranks=2)
