"""Numbers in sentences, control characters written out, and unknown names answered with the one meant."""

import shlex
from pathlib import Path

import pytest

from llama_ssp.errors import InterruptedRun, similar_name, unknown_name
from llama_ssp.settings.compose import groups_of
from llama_ssp.text import messages
from llama_ssp.text.messages import counted, installing, rounded, visible
from tests.helpers.extensions import need
from tests.helpers.repository import ROOT

SHOWN = {
    (0.5543,): "0.554",
    (9.4,): "9.40",
    (9.996,): "10.0",
    (99.96,): "100",
    (999.6,): "1000",
    (10324.0,): "10324",
    (0,): "0.00",
    (99.6,): "99.6",
    (999.96, 4): "1000",
    (99.996, 4): "100.0",
    (1.5, 4): "1.500",
}


@pytest.mark.parametrize(("given", "shown"), SHOWN.items())
def test_a_number_keeps_its_digits_and_has_no_exponent(given: tuple[float, int], shown: str) -> None:
    assert rounded(*given) == shown


def test_one_thing_is_in_words_and_others_in_digits() -> None:
    assert (counted(1, "node"), counted(0, "GPU"), counted(8, "GPU")) == ("one node", "0 GPUs", "8 GPUs")


SEQUENCES = {
    "\x1b[2J\x1b[1;1H": "\\x1b[2J\\x1b[1;1H",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x1b]8;;http://x\x1b\\y": "\\x1b]8;;http://x\\x1b\\y",
    "\x9b31m\x9d0;t\x9c\x90\x84": "\\x9b31m\\x9d0;t\\x9c\\x90\\x84",
    "a\bb\rc\x7f\x00\x0b\x0c": "a\\x08b\\rc\\x7f\\x00\\x0b\\x0c",
    "\u202egpj.exe\u2066": "\\u202egpj.exe\\u2066",
    "\udc9b": "\\udc9b",
}


@pytest.mark.parametrize(("text", "shown"), SEQUENCES.items())
def test_a_sequence_is_visible_whole_or_split_over_any_tokens(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert "".join(map(visible, text)) == shown
    assert visible(shown) == shown


def test_text_newlines_and_tabs_stay() -> None:
    text = "def f():\n\treturn 'é', '你好', '🙂', '\u200f\u05d0', '\\x1b'\n"
    assert visible(text) == text


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
    "hardware a100": "a100_40gb",
    "hardware H100": "h100",
    "hardware mi300": "mi300x",
    "hardware p4d": "p4d_24xlarge",
    "hardware p5": "p5_48xlarge",
    "hardware rtx4900": "rtx4090",
    "hardware b20": "b200",
    "model 70B": "llama2_70B",
    "model tinyllama": "tinyllama_1B",
    "model tiny_draft": "tiny-draft",
    "model 65B_4bit": "65B_8bit",
    "model tyni": "tiny",
    "model 30b": "30B",
    "model 8B": None,
    "model xyzzy": None,
}


@pytest.mark.parametrize(("words", "meant"), MEANT.items())
def test_names_that_contain_the_given_text_come_before_those_that_look_alike(words: str, meant: str | None) -> None:
    if meant == "65B_8bit":
        need("eight_bits")
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


def test_an_installed_program_names_no_file_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "install -e '.[serve]'" in installing("serve")
    naming = [path.name for path in (ROOT / "llama_ssp").rglob("*.py") if "pip install -e" in path.read_text("utf-8")]
    assert naming == ["messages.py"]
    monkeypatch.setattr(messages, "__file__", str(tmp_path / "llama_ssp" / "text" / "messages.py"))
    assert installing("serve") == "pip install 'llama-ssp[serve]'"
