"""Pairs with a figure of their own: which file wins, and what a run stores."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.config import folders
from llama_ssp.errors import SspError
from llama_ssp.planning.acceptance import known as module
from llama_ssp.planning.acceptance.known import known, store
from llama_ssp.planning.acceptance.pair import Acceptance, DraftedPair
from tests.helpers.own_conf import OwnConf


def of_pair(target: str, draft: str, temperature: float | None = 0.8) -> Acceptance:
    found = known(DraftedPair(target=target, draft=draft, temperature=temperature))
    assert found
    return found


def entry(acceptance: float, **others: float) -> dict[str, Any]:
    return {"target": "7B", "draft": "tinyllama_1B", "acceptance": acceptance, "source": "measured", **others}


def test_a_pair_has_its_own_figure_with_its_source_and_a_quantized_target_shares_it() -> None:
    found = of_pair("65B", "7B")
    assert found.probability == 0.79
    assert not found.is_forecast
    assert "610 -> 270" in of_pair("65B_8bit", "7B").source
    assert known(DraftedPair(target="7B", draft="tinyllama_1B")) is None


def test_a_figure_of_the_pair_has_a_range_around_it() -> None:
    low, high = of_pair("65B", "7B").ends
    assert 0.7 < low < 0.79 < high < 0.86


def test_a_draft_without_a_model_has_its_figure_with_any_target_and_the_range_of_its_texts() -> None:
    assert of_pair("any", "ngram").probability == 0.24
    assert of_pair("any", "ngram").ends == (0.09, 0.54)


def test_what_is_stored_is_found_with_its_range_and_measuring_again_replaces_it(own_conf: OwnConf) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    file = store(entry(0.7, low=0.66, high=0.74, temperature=0.8))
    assert file == folders.user_dir() / "measured_pairs.yaml"
    assert of_pair("7B", "tinyllama_1B") == Acceptance(probability=0.7, low=0.66, high=0.74, source="measured")
    store(entry(0.71, low=0.69, high=0.73, temperature=0.8))
    assert of_pair("7B", "tinyllama_1B").probability == 0.71
    assert len(yaml.safe_load(file.read_text())["pairs"]) == 1


def test_the_figure_at_the_nearest_temperature_is_taken(own_conf: OwnConf) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    store(entry(0.8, temperature=0.0))
    store(entry(0.6, temperature=1.0))
    assert [of_pair("7B", "tinyllama_1B", at).probability for at in (0.0, 0.4, 0.9)] == [0.8, 0.8, 0.6]


def test_what_a_user_wrote_comes_before_what_was_measured_and_both_before_the_package(own_conf: OwnConf) -> None:
    store(entry(0.5) | {"target": "30B", "draft": "7B"})
    assert of_pair("30B", "7B").probability == 0.5
    own_conf("pairs.yaml", "pairs: [{target: 30B, draft: 7B, acceptance: 0.4}]\n")
    module._files.cache_clear()
    assert of_pair("30B", "7B").probability == 0.4


def test_a_folder_that_cannot_be_written_is_one_sentence(own_conf: OwnConf, tmp_path: Path) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    folders.user_dir().joinpath("measured_pairs.yaml").mkdir()
    with pytest.raises(SspError, match=r"measured_pairs.yaml cannot be written \(.*\): make its folder writable"):
        store(entry(0.5))
    assert tmp_path.is_dir()
