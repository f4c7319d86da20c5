"""What `load(..., ranks=N)` refuses before a rank is started."""

import inspect
import json
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp import load
from llama_ssp.errors import ConfigError
from tests.helpers.hub import shipped


@pytest.mark.seconds
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


def test_every_argument_goes_to_ranks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not given too, as their defaults, which JSON can hold."""
    calls = dict[str, Any]()

    class Ranks:
        def __init__(self, num_ranks: int, **_: object) -> None:
            calls["ranks"] = num_ranks

        def call(self, name: str, given: dict[str, Any], _hear: object) -> dict[str, Any]:
            calls[name] = json.loads(json.dumps(given))
            return {}

        def close(self) -> None:
            pass

    monkeypatch.setattr("llama_ssp.extensions.python_ranks.pair.StartedRanks", Ranks)
    load("tiny", {"kind": "self", "layers": [0, 2]}, ranks=2, spare_rows=3, placement="sharded")
    assert calls["ranks"] == 2
    assert calls["load"].keys() == inspect.signature(load).parameters.keys() - {"ranks"}
    given = {name: value for name, value in calls["load"].items() if value is not None}
    assert given == {
        "model": "tiny",
        "draft": {"kind": "self", "layers": [0, 2]},
        "device": "auto",
        "tokenizer": "same",
        "placement": "sharded",
        "spare_rows": 3,
        "reproducible": False,
    }
