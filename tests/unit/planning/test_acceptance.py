"""The acceptance of a pair: a measured figure, the user's, or the default, and what a plan makes of each."""

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import yaml

from llama_ssp import catalogue
from llama_ssp.machines import hardware
from llama_ssp.manifest import conf_of_extensions
from llama_ssp.planning import acceptance as module
from llama_ssp.planning.acceptance import (
    DECLINE,
    HEAD_DECLINE,
    Acceptance,
    acceptance_of,
    expected,
    known,
    tokens_by_length,
    tree_tokens,
)
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.spec import PlannedPair
from llama_ssp.settings.drafters import DRAFTERS, DrafterRecord
from llama_ssp.settings.trees import tree_shape
from tests.helpers.extensions import module_of, need
from tests.helpers.lengths import FINDER
from tests.helpers.own_conf import OwnConf
from tests.helpers.planning import make_spec, times_of
from tests.helpers.runs import with_toys

A100 = hardware.load("8xa100_80gb")


def of_pair(target: str, draft: str, temperature: float | None = 0.8) -> Any:
    return known(target, draft, temperature=temperature)


def tokens(acceptance: float, num_draft_tokens: int) -> float:
    return tokens_by_length((acceptance,) * num_draft_tokens)[-1]


def entry(acceptance: float, **others: float) -> dict[str, Any]:
    return {"target": "7B", "draft": "tinyllama_1B", "acceptance": acceptance, "source": "measured", **others}


def keep(own_conf: OwnConf, *pairs: dict[str, Any]) -> None:
    """Write a table of pairs."""
    own_conf("pairs.yaml", yaml.safe_dump({"pairs": [*pairs]}))
    module.all_pairs.cache_clear()


def test_a_quantized_target_shares_the_figure_of_the_pair_with_its_source() -> None:
    found = of_pair("65B_8bit", "7B", 0.5)
    assert (found.probability, found.is_forecast, found.ends) == (0.79, False, None)
    assert "610 -> 270" in found.source


def test_acceptance_follows_a_line_between_temperatures_and_the_nearest_figure_beyond_them(own_conf: OwnConf) -> None:
    keep(own_conf, entry(0.8, temperature=0.0), entry(0.6, low=0.1, high=0.99, temperature=1.0))
    found = {at: of_pair("7B", "tinyllama_1B", at) for at in (0.0, 0.4, 0.9, 8.0, None)}
    expected_at = {0.0: 0.8, 0.4: 0.72, 0.9: 0.62, 8.0: 0.0, None: 0.8}
    assert {at: one.probability for at, one in found.items()} == pytest.approx(expected_at)
    assert found[0.9].ends == pytest.approx((0.17, 0.971))
    assert found[0.0].source == "measured"
    assert found[0.4].source == "between temperature 0 and 1: measured; measured"
    assert of_pair("7B", "tinyllama_1B", 1.2).source == "measured; -0.03 from temperature 1 to 1.2"


@pytest.mark.parametrize("draft", ["eagle3_llama3_8B", "mine"])
def test_acceptance_and_its_ends_are_continuous_in_temperature(draft: str, own_conf: OwnConf) -> None:
    if draft == "mine":
        entries = entry(0.8, temperature=0.2, num_draft_tokens=7), entry(0.6, low=0.5, high=0.7, temperature=0.9)
        keep(own_conf, *({**one, "target": "llama3_8B", "draft": draft} for one in entries))
    else:
        module_of("heads")

    def tokens_at(temperature: float) -> list[float]:
        found = of_pair("llama3_8B", draft, temperature)
        figures = found.probability, *(found.ends or ())
        return [one for figure in figures for one in (figure, *tokens_by_length(found.by_position(figure, 7)))]

    steps = [tokens_at(0.01 * number) for number in range(131)]
    for before, after in pairwise(steps):
        assert [*after[:8]] == pytest.approx(before[:8], abs=0.08)
        assert len(after) != len(before) or after == pytest.approx(before, abs=0.08)


def test_what_a_user_wrote_comes_before_the_package_and_who_knows_a_pair_before_both(own_conf: OwnConf) -> None:
    keep(own_conf, entry(0.5) | {"target": "30B", "draft": "7B"})
    assert of_pair("30B", "7B").probability == 0.5
    known_by = [lambda _pair: None, lambda pair: module.Acceptance(probability=0.3, source=pair.rule)]
    found = expected(PlannedPair("30B", "7B", 0.8, "block"), known_by)
    assert (found.probability, found.source) == (0.3, "block")
    assert expected(PlannedPair("30B", "7B", 0.8, "block"), known_by[:1]).probability == 0.5


def test_a_pair_that_nobody_measured_has_the_default_which_the_table_bears_out(own_conf: OwnConf) -> None:
    found: Any = expected(PlannedPair("13B", "mine", 0.8, "speculative"))
    assert (found.probability, found.ends, found.is_forecast) == (0.75, (0.5, 0.88), True)
    for extension in ("heads", "copies", "tokenizers"):  # whose pairs are in the table
        need(extension)
    files = [folder / "pairs.yaml" for folder in (catalogue.conf_dir(), *conf_of_extensions())]
    table = [entry["acceptance"] for file in files if file.is_file() for entry in catalogue.read(file).get("pairs", [])]
    assert found.source.endswith(f"are at {min(table)} to {max(table)}, two thirds of them above 0.75")
    assert sum(figure > found.probability for figure in table) == 2 * len(table) // 3
    assert all(found.ends[0] - 0.01 <= figure <= found.ends[1] for figure in table)
    own_conf("pairs.yaml", "default: {acceptance: 0.6}\n")
    assert (of_pair("13B", "mine").probability, of_pair("30B", "7B", 0.5).probability) == (0.6, 0.8)


@pytest.mark.parametrize("pair", catalogue.read(catalogue.conf_dir() / "pairs.yaml")["pairs"])
def test_every_measured_pair_has_a_source_and_its_figure_is_that_of_plans(pair: dict[str, Any]) -> None:
    found = of_pair(pair["target"], pair["draft"], pair.get("temperature"))
    assert (found.probability, found.source, found.is_forecast) == (pair["acceptance"], pair["source"], False)
    assert len(pair["source"]) > 20


def test_a_plan_of_a_pair_that_nobody_measured_shows_low_and_high_and_how_to_measure_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_toys(monkeypatch)
    spec = make_spec("llama3_70B", "llama3_1B", num_ranks=8, acceptance=None)
    plan = make_plan(spec, A100)
    time, low_high = document(plan)["time"], (0.5, 0.88)
    assert time["tokens_per_round_range"] == pytest.approx([tokens(end, 4) for end in low_high])
    for name in ("acceptance", "tokens_per_round", "speculative_ms_per_token", "best_num_draft_tokens"):
        low, high = time[f"{name}_range"]
        assert low <= time[name] <= high, name
    assert time["acceptance_is_forecast"]
    assert "llama-ssp run task=toys task.keep=true model=llama3_70B draft=llama3_1B" in "\n".join(plan.notes)


def test_a_figure_that_the_user_gave_has_no_range_and_a_run_that_finds_k_is_never_slower_than_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec("13B", "7B", acceptance=0.7)
    assert times_of(spec, A100).tokens_per_round_range is None
    monkeypatch.setitem(DRAFTERS.records, "mine", DrafterRecord(name="mine", make="mine:make"))
    slow = times_of(replace(spec, acceptance=None, chooser=FINDER, free_draft="mine", draft=None), A100)
    assert slow.speculative_s_range[1] <= slow.plain_s_range[1]
    assert slow.tokens_per_round_range[1] > 2 * slow.tokens_per_round_range[0], "nobody knows this drafter"


def test_no_k_is_recommended_on_a_guess() -> None:
    need("advice")
    spec = make_spec("llama3_70B", "llama3_1B", num_ranks=8, acceptance=None, num_draft_tokens=1)
    plan = make_plan(spec, A100)
    low, high = document(plan)["time"]["best_num_draft_tokens_range"]
    assert low < high
    assert not [warning for warning in plan.warnings if "speculation.num_draft_tokens=" in warning]
    assert any(note.startswith(f"the best K is {low} to {high}") for note in plan.notes)
    given = make_plan(replace(spec, acceptance=0.8), A100)
    assert any("speculation.num_draft_tokens=" in warning for warning in given.warnings)


@pytest.mark.parametrize(("name", "stores"), [("tinyllama_1B", [True]), ("local", [False]), ("7B", [])])
def test_a_pair_is_stored_by_the_names_of_its_models_and_local_names_any_folder(
    name: str, stores: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stores pairs refuses the latter; a published pair need not be measured."""
    with_toys(monkeypatch)
    spec = make_spec("65B", "tinyllama_1B", num_ranks=8, acceptance=None, of_draft={"name": name})
    plan = make_plan(spec, A100)
    said = [note for note in plan.notes if "measure the pair" in note]
    assert ["task.keep=true" in sentence for sentence in said] == stores


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.99])
def test_tokens_per_round_is_the_closed_form_of_leviathan(acceptance: float) -> None:
    assert tokens(acceptance, 4) == pytest.approx((1 - acceptance**5) / (1 - acceptance))
    assert acceptance_of(tokens(acceptance, 6) - 1, 6) == pytest.approx(acceptance, abs=1e-9)


def test_a_tree_of_one_child_each_has_the_tokens_of_a_chain_and_more_children_add_some() -> None:
    def of_tree(text: str) -> float:
        return tree_tokens((0.7,) * 3, tree_shape(text))

    assert of_tree("1x1x1") == of_tree("dynamic-3x3x1") == pytest.approx(tokens(0.7, 3))
    assert tokens(0.7, 3) < of_tree("2x1x1") < of_tree("2x2x1") < 4
    # The best nodes of a dynamic tree are at least as good as as many of a fixed shape.
    assert of_tree("2x1x1") < of_tree("dynamic-6x3x2") < of_tree("2x2x2") < of_tree("dynamic-14x3x4") < 4


CURVES = {
    "DeepSeek-V4 MTP": (2.49, 2.54),
    "GLM-5.2 MTP": (2.99, 3.91),
    "Kimi-K2.5 EAGLE-3": (2.88, 3.71),
    "MiniMax-M3 EAGLE-3": (2.83, 3.53),
    "Qwen3.5-397B MTP": (3.39, 5.04),
    "Kimi-K3 DSpark": (2.87, 3.78),
    "SGLang, MT-Bench": (2.90, 3.86),
    "SGLang, HumanEval": (3.34, 4.91),
    "SGLang, GSM8K": (2.55, 2.97),
    "vLLM, MT-Bench": (2.79, 3.54),
    "EAGLE, GSM8K": (2.39, 2.75),
    "EAGLE, CNN/DM": (2.33, 2.70),
    "EAGLE, ShareGPT": (2.26, 2.59),
    "EAGLE, InstructCoder": (2.35, 2.76),
}
"""Published tokens per round of heads at K = 3 and 7, with sources in docs/findings/acceptance.md."""


def test_a_figure_of_k_3_gives_the_published_tokens_of_k_7() -> None:
    """A constant acceptance gives 6 % too many in the median, up to 20 %."""
    errors = []
    for at_three, at_seven in CURVES.values():
        head = Acceptance(
            probability=acceptance_of(at_three - 1, 3), source="", num_draft_tokens=3, decline=HEAD_DECLINE
        )
        by_length = tokens_by_length(head.by_position(head.probability, 7))
        assert by_length[2] == pytest.approx(at_three)
        errors.append(by_length[6] / at_seven - 1)
    assert abs(median(errors)) < 0.01
    assert sum(abs(error) < 0.05 for error in errors) >= 12


def test_a_pair_with_positions_has_theirs_and_further_ones_decline(own_conf: OwnConf) -> None:
    keep(own_conf, entry(0.7, temperature=0.8, low=0.35, high=0.77) | {"by_position": [0.8, 0.7, 0.6]})
    found = of_pair("7B", "tinyllama_1B")
    assert found.by_position(0.7, 5) == pytest.approx((0.8, 0.7, 0.6, 0.6 * DECLINE, 0.6 * DECLINE**2))
    assert found.by_position(0.35, 3) == pytest.approx((0.4, 0.35, 0.3))
    assert found.by_position(0.77, 1) == pytest.approx((0.88,))
    timed = times_of(make_spec("7B", "tinyllama_1B", acceptance=None, temperature=0.8, num_draft_tokens=2), A100)
    assert timed.tokens_per_round == pytest.approx(1 + 0.8 + 0.8 * 0.7)


def test_the_best_k_of_a_head_is_smaller_than_that_of_a_constant_acceptance() -> None:
    """Up to K = 4 both have the same tokens per round; a longer draft gains less than a constant says."""
    need("heads")
    timed = times_of(make_spec("llama3_70B", "eagle3_llama3_70B", acceptance=0.8, num_ranks=4), hardware.load("4xh100"))
    acceptance = timed.acceptance
    declining = tokens_by_length(acceptance.by_position(acceptance.probability, 16))
    by_constant = [
        seconds * declining[number - 1] / tokens(acceptance.probability, number)
        for number, seconds in enumerate(timed.by_num_draft_tokens, start=1)
    ]
    assert timed.best_num_draft_tokens < 1 + by_constant.index(min(by_constant))
