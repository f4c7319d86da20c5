"""`--help` by topic: cuts help.txt into sections, without composing a config.

A section opens with its topic in capitals and a colon, at the margin. `--help` alone prints an overview, `--help TOPIC`
one section, `--help SETTING` every section that explains the setting, `--help all` all of them.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from llama_ssp.config import catalogue
from llama_ssp.config.machines import hardware
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.visible import visible

ALL = "all"
_HEADING = re.compile(r"^([A-Z]+): ", re.MULTILINE)
_IN_OVERVIEW = ("start", "examples", "exit")


def show(words: Sequence[str]) -> None:
    """Print what the words after `--help` ask for; raises ConfigError for a word that no section has."""
    text = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    for place, names in (("{model_names}", catalogue.names()), ("{hardware_names}", hardware.names())):
        text = text.replace(place, _in_lines(names, indent=len(re.findall(rf"^( *){place}", text, re.MULTILINE)[0])))
    print(visible(_chosen(text, words)))


def _in_lines(names: Iterable[str], *, indent: int) -> str:
    """Wrap the names of a catalogue, from column `indent` on."""
    return ("\n" + " " * indent).join(textwrap.wrap(" ".join(names), width=118 - indent, break_on_hyphens=False))


def _chosen(text: str, words: Sequence[str]) -> str:
    before, sections = _sections(text)
    if not words:
        return _overview(before, sections)
    if ALL in words:
        return text.strip("\n")
    kept: set[str] = set()
    for word in (each.partition("=")[0] for each in words):
        found = _topics_of(word, sections)
        if not found:
            names = [ALL, *sections]
            raise ConfigError(f"{unknown_name('topic', word, names)}; the name of a setting finds its topic too")
        kept |= {*found}
    return "\n\n".join(section for topic, section in sections.items() if topic in kept)


def _topics_of(word: str, sections: dict[str, str]) -> list[str]:
    """Return the topic itself, or the topics that explain a setting, or else those that mention the word."""
    if word.lower() in sections:
        return [word.lower()]
    explaining = [topic for topic, section in sections.items() if _has(section, word, before=r"^ +(?:[\w.]+\.)?")]
    return explaining or [topic for topic, section in sections.items() if _has(section, word)]


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Return what stands before the first heading, and each section by its topic in small letters."""
    before, *parts = _HEADING.split(text)
    topics, bodies = parts[::2], parts[1::2]
    return before.strip("\n"), {
        topic.lower(): f"{topic}: {body}".rstrip() for topic, body in zip(topics, bodies, strict=True)
    }


def _overview(before: str, sections: dict[str, str]) -> str:
    lines = [
        f"  {topic:<13}{section.partition(': ')[2].partition(chr(10))[0]}"
        for topic, section in sections.items()
        if topic not in _IN_OVERVIEW
    ]
    start, examples, exit_codes = (sections[topic] for topic in _IN_OVERVIEW)
    topics = "\n".join(["TOPICS: --help TOPIC, --help SETTING, or --help all", *lines])
    return "\n\n".join([before, start, topics, examples, exit_codes])


def _has(text: str, word: str, *, before: str = r"(?<!\w)") -> bool:
    """Whether a text has a word, such as the last one of a setting's key, behind a pattern."""
    return re.search(rf"{before}{re.escape(word)}(?!\w)", text, re.MULTILINE) is not None
