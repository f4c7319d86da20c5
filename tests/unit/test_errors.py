"""A name that is unknown gets the one that was meant, if there is one; an interruption says how to go on."""

import shlex

import pytest

from llama_ssp.errors import InterruptedRun, similar_name, unknown_name
from llama_ssp.settings.compose import groups_of


def mixed(name: str) -> str:
    """The name with all letters but the first in reverse."""
    return name[0] + name[:0:-1]


@pytest.mark.parametrize("group", sorted(groups_of()))
def test_letters_in_the_wrong_order_lead_to_the_option_that_was_meant(group: str) -> None:
    options = groups_of()[group]
    for name in options:
        if mixed(name) not in options:
            assert "; did you mean " in unknown_name(group, mixed(name), options), name


MEANT = {
    "hardware a100": "a100_40gb", "hardware H100": "h100", "hardware mi300": "mi300x", "hardware p4d": "p4d_24xlarge",
    "hardware p5": "p5_48xlarge", "hardware rtx4900": "rtx4090", "hardware b20": "b200",
    "model 70B": "llama2_70B", "model tinyllama": "tinyllama_1B", "model tiny_draft": "tiny-draft",
    "model 65B_4bit": "65B_8bit", "model tyni": "tiny", "model 30b": "30B", "model 8B": None, "model xyzzy": None,
}  # fmt: skip


@pytest.mark.parametrize(("words", "meant"), MEANT.items())
def test_names_that_contain_the_given_text_come_before_those_that_look_alike(words: str, meant: str | None) -> None:
    group, given = words.split()
    assert similar_name(given, sorted(groups_of()[group])) == meant


def test_nothing_similar_is_no_hint() -> None:
    assert unknown_name("model", "xyzzy", ["tiny", "30B"]) == "unknown model 'xyzzy': there are 30B, tiny"


@pytest.mark.parametrize("run_dir", ["outputs/1", "my runs/1", "it's $HOME", "a;b"])
def test_the_way_to_go_on_can_be_pasted_into_a_shell(run_dir: str) -> None:
    told = str(InterruptedRun.in_folder(run_dir)).removeprefix("interrupted; ")
    again, _, _ = told.partition(" with the same settings")
    assert shlex.split(again) == [f"run_dir={run_dir}"]
    assert again.startswith("run_dir=") is (run_dir == "outputs/1")
