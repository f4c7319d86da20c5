"""One rule for all processors: the structure says what may follow, and they choose among it.

Where they leave nothing, the text ends if it may end there; otherwise what is asked for cannot be.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from tests.extensions.serve.server import Server, serving
from tests.helpers.extensions import need


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with load("tiny", "tiny-draft") as pair:
        yield pair


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Server]:
    need("serve")
    with serving(pair) as server:
        yield server


def id_of(pair: Pair, text: str) -> str:
    [token] = pair.tokenizer(text, add_special_tokens=False).input_ids
    return str(token)


SERVED: list[tuple[dict[str, Any], set[str], str]] = [
    ({"guided_regex": "yes|no", "min_tokens": 30}, {"yes", "no"}, "stop"),
    ({"guided_regex": "(a|b){3}", "min_tokens": 30, "temperature": 0}, set(), "stop"),
    ({"guided_regex": "yes|no", "ignore_eos": True}, {"yes", "no"}, "stop"),
    ({"guided_regex": "yes|no", "ignore_eos": True, "min_tokens": 30}, {"yes", "no"}, "stop"),
    ({"guided_regex": "x{40}", "min_tokens": 30, "max_tokens": 30}, set(), "length"),
    ({"guided_regex": "yes", "logit_bias": {"bias": -100}}, {"yes"}, "stop"),
    ({"guided_regex": "yes|no", "logit_bias": {"other": 100}}, {"yes", "no"}, "stop"),
    ({"guided_regex": "yes", "stop": ["y"]}, {"yes"}, "stop"),
    ({"guided_regex": "yes(, yes)?", "stop": ["s"]}, {"ye"}, "stop"),
    ({"guided_regex": "yes", "stop": ["y"], "min_tokens": 30}, {"yes"}, "stop"),
    ({"guided_json": {"const": {"a": 1}}, "min_tokens": 60}, set(), "stop"),
]


@pytest.mark.seconds
@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("number", range(len(SERVED)))
def test_processors_choose_among_what_may_follow(pair: Pair, server: Server, number: int, *, has_draft: bool) -> None:
    asked, texts, reason = SERVED[number]
    biases = {id_of(pair, "y" if name == "bias" else "z"): value for name, value in asked.get("logit_bias", {}).items()}
    more: dict[str, Any] = {"logit_bias": biases} if biases else {}
    body = {"prompt": "x = ", "max_tokens": 64, "seed": 1} | asked | more | {"speculative": has_draft}
    [choice] = server.complete(**body)["choices"]
    assert choice["finish_reason"] == reason
    assert not texts or choice["text"] in texts


@pytest.mark.parametrize("how", [{}, {"plain": True}], ids=str)
def test_words_that_are_banned_end_a_text_that_may_end_and_are_an_error_elsewhere(pair: Pair, how: Any) -> None:
    [done] = pair.generate("x = ", regex="ab?", bad_words=["b"], max_new_tokens=8, **how)
    assert (done.text, done.finish_reason) == ("a", "eos")
    [done] = pair.generate("x = ", regex="a", min_new_tokens=5, max_new_tokens=8, **how)
    assert (done.text, done.finish_reason) == ("a", "eos")
    with pytest.raises(ConfigError, match="token 2: no token is left that the constraint of the text allows"):
        pair.generate("x = ", regex="ab", bad_words=["b"], max_new_tokens=8, **how)
