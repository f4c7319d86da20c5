"""What does not combine is refused by every door with the same sentence, and what the table does not name runs."""

from pathlib import Path
from typing import Any

import pytest

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.combinations import abilities, clashes, table
from tests.helpers.doors import ALONE, config_of, has_sentence, patch, save_models, words_of
from tests.helpers.in_process import launch
from tests.helpers.lanes import first
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

HYBRIDS = ["lfm2", "qwen3_5_text", "granitemoehybrid"]
OF_LIBRARY: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("a tree", "a draft without trees"): ({"draft": "ngram"}, {"tree": "2x1"}),
    ("a dynamic tree", "a draft without a model"): ({"draft": "ngram"}, {"tree": "dynamic-8x3x3"}),
    ("a tree", "an own tokenizer"): ({"model": "{target}", "draft": "{own}", "tokenizer": "own"}, {"tree": "2x1"}),
    ("a tree", "sampling by a rule without trees"): ({}, {"tree": "2x1", "verification": "coupled"}),
    ("a tree", "penalties"): ({}, {"tree": "2x1", "presence_penalty": 1.0}),
    ("a tree", "a chosen K"): ({}, {"tree": "2x1", "num_draft_tokens": "auto"}),
    ("a tree", "a replicated draft"): ({"placement": "replicated"}, {"tree": "2x1"}),
    ("a tree", "a recurrent model"): ({"model": "{hybrid}", "draft": "{hybrid}"}, {"tree": "2x1", "temperature": 0}),
    ("a head", "an own tokenizer"): ({"draft": "tiny-eagle", "tokenizer": "own"}, {}),
    ("an own tokenizer", "a recurrent draft"): ({"draft": "{hybrid}", "tokenizer": "own"}, {}),
    ("a block", "more than a block"): ({"model": "{target}", "draft": "{block}"}, {"num_draft_tokens": 5}),
    ("a rule without sampling", "sampling"): ({}, {"verification": "greedy", "temperature": 0.7}),
}
"""Arguments of `load` and of `generate`, for the pairs that have some."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("doors"))


@pytest.mark.seconds
@pytest.mark.parametrize("name", abilities())
def test_an_ability_alone_is_not_refused(name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    patch([name], monkeypatch)
    config = config_of(ALONE[name].format_map(folders).split(), [name])
    assert abilities()[name](config)
    assert not [*clashes(config)]


@pytest.mark.seconds
@pytest.mark.parametrize("both", [both for both in table() if "requests by row" not in both], ids=" x ".join)
def test_the_command_line_refuses_two_abilities_with_their_sentence(
    both: tuple[str, str], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(both, monkeypatch)
    ended = launch(*words_of(both, folders), f"run_dir={tmp_path}")
    assert (ended.code, has_sentence(ended.err, both)) == (2, True), ended.err


@pytest.mark.parametrize("both", table(), ids=" x ".join)
def test_no_decoder_is_built_for_two_abilities(
    both: tuple[str, str], folders: dict[str, Path], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever door has let them in."""
    patch(both, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        build_decoder(pair.models, config_of(words_of(both, folders), both), speculative=True)
    assert has_sentence(str(caught.value), both)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("both", "of_load", "of_generate"), [(both, *given) for both, given in OF_LIBRARY.items() if both in table()]
)
def test_the_library_refuses_two_abilities_with_their_sentence(
    both: tuple[str, str],
    of_load: dict[str, Any],
    of_generate: dict[str, Any],
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(both, monkeypatch)
    names: dict[str, Any] = {name: str(value).format_map(folders) for name, value in of_load.items()}
    with pytest.raises(ConfigError) as caught:
        load(**{"model": "tiny", "draft": "tiny-draft"} | names).generate("t5 t6", max_new_tokens=4, **of_generate)
    assert has_sentence(str(caught.value), both)


@pytest.mark.seconds
@pytest.mark.parametrize("family", first(HYBRIDS))
def test_the_library_drafts_no_tree_for_a_hybrid(family: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path, VOCAB_SIZE)
    hybrid = load(tmp_path, tmp_path, dtype="fp32")
    chain, plain = (hybrid.generate("t5 t6", temperature=0, plain=plain)[0].token_ids for plain in (False, True))
    assert chain == plain
    with pytest.raises(ConfigError, match=f"^tree scores several .* as this {family} model has.* leave tree out$"):
        hybrid.generate("t5 t6", temperature=0, tree="2x2")
