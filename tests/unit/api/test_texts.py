"""The text of a completion continues its prompt exactly, also where the tokenizer drops the first space of a text."""

import pytest

from llama_ssp import Pair, load
from tests.helpers.models import build_checkpoint
from tests.helpers.tokenizers import LAYOUTS, layout


@pytest.fixture(scope="module", params=["llama", "gemma", "bytes"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random model that is its own draft, with a tokenizer of each layout."""
    assert request.param in LAYOUTS
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = layout(request.param)
    build_checkpoint(folder, "llama", vocab_size=len(tokenizer), eos_token_id=None)
    tokenizer.save_pretrained(folder)
    return load(folder, folder)


def test_prompt_and_text_are_what_transformers_decodes(pair: Pair) -> None:
    prompt = "if x is"
    found = pair.generate(prompt, num_samples=200, max_new_tokens=4, temperature=1.5)
    for each in found:
        whole = pair.tokenizer.decode(each.prompt_ids + each.token_ids, skip_special_tokens=True)
        assert prompt + each.text == whole
    assert any(each.text.startswith(" ") for each in found), "no text begins with a space: the test shows nothing"
