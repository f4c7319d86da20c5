"""`--help` by topic: fills help.txt with settings of the schema and options of `conf`, and cuts it into sections.

A section opens with its topic in capitals and a colon, at the margin. `--help` alone prints an overview, `--help TOPIC`
one section, `--help SETTING` every section that explains the setting, `--help all` all of them.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.settings import catalogue
from llama_ssp.settings.described import DescribedSetting, options_of, settings_of, task_settings
from llama_ssp.settings.drafters import drafters
from llama_ssp.settings.schema import DERIVED, LAUNCHER, RunConfig, SlurmConfig
from llama_ssp.words import visible

_ALL = "all"
_PLACE = re.compile(r"^ *\{(?P<kind>\w+)(?P<words>[^}\n]*)\}$", re.MULTILINE)
_WHOLE: Mapping[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
_HEADING = re.compile(r"^([A-Z]+): ", re.MULTILINE)
_IN_OVERVIEW = ("start", "examples", "exit")


def show(words: Sequence[str]) -> None:
    """Print the sections that the words after `--help` ask for; raises ConfigError for a word that no section has."""
    file = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    text = _PLACE.sub(_filled, file).strip("\n")
    before, *parts = _HEADING.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    sections = {topic.lower(): f"{topic}: {body}".rstrip() for topic, body in pairs}
    if not words:
        text = _overview(before.strip("\n"), sections)
    elif _ALL not in words:
        kept = {topic for word in words for topic in _topics_of(word.partition("=")[0], sections)}
        text = "\n\n".join(section for topic, section in sections.items() if topic in kept)
    print(visible(text))


def _filled(place: re.Match[str]) -> str:
    """Fill a line such as {settings seed sampling.}, {options draft} or {names model}."""
    kind, words = place["kind"], place["words"].split()
    if kind == "names":
        names = " ".join(catalogue.names(words[0]))
        return textwrap.fill(names, 118, initial_indent="  ", subsequent_indent="  ", **_WHOLE)
    if kind == "options":
        return "\n".join(_entry(f"{words[0]}={name}", said) for name, said in options_of(words[0]).items())
    if kind == "tasks":
        return "\n".join(_of_task(name, said) for name, said in options_of("task").items())
    whole = tuple(word for word in words if word.endswith("."))
    return entries(each for each in _settings() if each.key in words or each.key.startswith(whole))


def entries(settings: Iterable[DescribedSetting], indent: str = "") -> str:
    """Write settings as entries of a section."""
    return "\n".join(_entry(f"{indent}{each.key}={each.default}", each.meaning) for each in settings)


def _entry(name: str, meaning: str) -> str:
    return textwrap.fill(meaning, 118, initial_indent=f"  {name:<32} ", subsequent_indent=" " * 35, **_WHOLE).rstrip()


def _of_task(name: str, said: str) -> str:
    own = entries((each for each in task_settings(name) if each.key != "task.default_prompts"), "  ")
    return "\n".join(filter(None, [_entry(f"task={name}", said), own]))


def _settings() -> list[DescribedSetting]:
    """All settings, without those that follow from others, and without the fields of `model` once more."""
    found = [*settings_of(RunConfig), *settings_of(SlurmConfig, f"{LAUNCHER}.")]
    found += [each for draft in drafters().values() for each in settings_of(draft.config, "draft.")]
    kept = {(each.key, each.meaning): each for each in found}.values()
    return [each for each in kept if not each.key.startswith((*DERIVED, "draft.model."))]


def _topics_of(word: str, sections: dict[str, str]) -> list[str]:
    """Return the topic itself, or the topics that explain a setting, or else those that mention the word."""
    if word.lower() in sections:
        return [word.lower()]
    for before in (r"^ +(?:[\w.]+\.)?", r"(?<!\w)"):
        whole = re.compile(rf"{before}{re.escape(word)}(?!\w)", re.MULTILINE)
        if found := [topic for topic, section in sections.items() if whole.search(section)]:
            return found
    problem = unknown_name("topic", word, [_ALL, *sections])
    raise ConfigError(f"{problem}; the name of a setting finds its topic too")


def _overview(before: str, sections: dict[str, str]) -> str:
    lines = [
        f"  {topic:<13}{section.partition(': ')[2].splitlines()[0]}"
        for topic, section in sections.items()
        if topic not in _IN_OVERVIEW
    ]
    start, examples, exit_codes = (sections[topic] for topic in _IN_OVERVIEW)
    topics = "\n".join(["TOPICS: --help TOPIC, --help SETTING, or --help all", *lines])
    return "\n\n".join([before, start, topics, examples, exit_codes])
