"""`--help` by topic: an overview, a section, the sections of a setting, or everything."""

import pytest

from tests.helpers.in_process import Ended, launch

pytestmark = pytest.mark.seconds


def helped(*words: str) -> Ended:
    ended = launch("--help", *words)
    assert (ended.code, ended.err) == (0, "")
    return ended


def test_the_overview_fits_a_terminal_and_names_every_topic() -> None:
    overview, everything = helped().out, helped("all").out
    topics = [line.partition(":")[0] for line in everything.splitlines() if line.partition(":")[0].isupper()]
    assert len(topics) > 10
    assert len(overview.splitlines()) < 60 < len(everything.splitlines())
    for topic in topics:
        assert topic in overview or f"  {topic.lower()} " in overview, topic
        assert helped(topic.lower()).out.startswith(f"{topic}: ")


def test_a_setting_finds_its_topic_and_several_are_shown_in_the_order_of_the_help() -> None:
    for word, topic in (("temperature", "SAMPLING"), ("stop_strings=", "LENGTH"), ("tp_size", "PLACEMENT")):
        shown = helped(word).out
        assert shown.startswith(f"{topic}: ")
        assert word.rstrip("=") in shown
    shown = helped("sampling", "models").out
    assert shown.startswith("MODELS: ")
    assert "\n\nSAMPLING: " in shown


def test_an_unknown_topic_is_one_sentence() -> None:
    ended = launch("--help", "samplign")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("unknown topic 'samplign': there are all, examples, ")
    assert ended.err.endswith("did you mean sampling?; the name of a setting finds its topic too\n")
