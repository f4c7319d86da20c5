"""`--help` by topic: fills help.txt with settings of the schema and options of `conf`, and cuts it into sections.

A section opens with its topic in capitals and a colon, at the margin. `--help` alone prints an overview, `--help TOPIC`
one section, `--help SETTING` every section that explains the setting, `--help all` all of them.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.machines import hardware
from llama_ssp.settings import catalogue
from llama_ssp.settings.described import DescribedSetting, options_of, settings_of, task_settings
from llama_ssp.settings.drafters import drafters
from llama_ssp.settings.schema import DERIVED, LAUNCHER, RunConfig, SlurmConfig
from llama_ssp.visible import visible

ALL = "all"
_PLACE = re.compile(r"^ *\{(?P<kind>\w+)(?P<words>[^}\n]*)\}$", re.MULTILINE)
_NAMES: Mapping[str, Callable[[], list[str]]] = {"model_names": catalogue.names, "hardware_names": hardware.names}
_WHOLE: Mapping[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
_HEADING = re.compile(r"^([A-Z]+): ", re.MULTILINE)
_IN_OVERVIEW = ("start", "examples", "exit")


def show(words: Sequence[str]) -> None:
    """Print the sections that the words after `--help` ask for; raises ConfigError for a word that no section has."""
    text = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    print(visible(_chosen(_PLACE.sub(_filled, text), words)))


def _filled(place: re.Match[str]) -> str:
    """Fill a line such as {settings seed sampling.} or {options task}."""
    kind, words = place["kind"], place["words"].split()
    if kind in _NAMES:
        return textwrap.fill(" ".join(_NAMES[kind]()), 118, initial_indent="  ", subsequent_indent="  ", **_WHOLE)
    if kind == "options":
        return "\n".join(_entry(f"{words[0]}={name}", said) for name, said in options_of(words[0]).items())
    if kind == "tasks":
        return "\n".join(_of_task(name, said) for name, said in options_of("task").items())
    return entries(each for each in _settings() if any(_is_of(each.key, word) for word in words))


def entries(settings: Iterable[DescribedSetting]) -> str:
    """Write settings as entries of a section."""
    return "\n".join(_entry(f"{each.key}={each.default}", each.meaning) for each in settings)


def _entry(name: str, meaning: str) -> str:
    return textwrap.fill(meaning, 118, initial_indent=f"  {name:<32} ", subsequent_indent=" " * 35, **_WHOLE).rstrip()


def _of_task(name: str, said: str) -> str:
    settings = [each for each in task_settings(name) if each.key != "task.default_prompts"]
    return "\n".join(
        [_entry(f"task={name}", said), *(_entry(f"  {each.key}={each.default}", each.meaning) for each in settings)]
    )


def _is_of(key: str, word: str) -> bool:
    return key == word or (word.endswith(".") and key.startswith(word))


def _settings() -> list[DescribedSetting]:
    """All settings, without those that follow from others, and without the fields of `model` once more."""
    found = [*settings_of(RunConfig), *settings_of(SlurmConfig, f"{LAUNCHER}.")]
    found += [each for draft in drafters().values() for each in settings_of(draft.config, "draft.")]
    kept = {(each.key, each.meaning): each for each in found}.values()
    return [each for each in kept if not each.key.startswith((*DERIVED, "draft.model."))]


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
