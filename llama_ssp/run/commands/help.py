"""`--help`: the text of help.txt, in which a line in braces stands for settings, options, tasks or names.

A topic opens with its name in capitals and a colon, at the margin. `--help` alone prints an overview, `--help TOPIC`
one topic, `--help SETTING` the topics that explain it, `--help all` everything.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.settings import catalogue
from llama_ssp.settings.described import DescribedSetting, options_of, settings_of, task_settings
from llama_ssp.settings.drafters import drafters
from llama_ssp.settings.schema import DERIVED, LAUNCHER, RunConfig, SlurmConfig
from llama_ssp.words import visible

_ALL, _WIDTH = "all", 118
_PLACE = re.compile(r"^ *\{(\w+)([^}\n]*)\}$", re.MULTILINE)


def show(words: Sequence[str]) -> None:
    """Print what the words after `--help` ask for; raises ConfigError for a word that no topic has."""
    file = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    text = _PLACE.sub(lambda place: _filled(place[1], place[2].split()), file)
    head, *parts = (part.strip("\n") for part in re.split(r"^(?=[A-Z]+: )", text, flags=re.MULTILINE))
    topics = {part.partition(":")[0].lower(): part for part in parts}
    if _ALL in words:
        shown = [head, *parts]
    elif words:
        names = {topic for word in words for topic in _topics_of(word.partition("=")[0], topics)}
        shown = [part for topic, part in topics.items() if topic in names]
    else:
        titles = [f"  {topic:<13}{part.partition(': ')[2].splitlines()[0]}" for topic, part in topics.items()]
        listed = "\n".join(["TOPICS: --help TOPIC, --help SETTING, or --help all", *titles])
        shown = [head, topics["start"], listed, topics["examples"], topics["exit"]]
    print(visible("\n\n".join(shown)))


def _topics_of(word: str, topics: dict[str, str]) -> list[str]:
    """The topic itself, or those that explain a setting, or else those that mention the word."""
    if word.lower() in topics:
        return [word.lower()]
    for before in (r"^ +(?:[\w.]+\.)?", r"(?<!\w)"):
        whole = re.compile(rf"{before}{re.escape(word)}(?!\w)", re.MULTILINE)
        if found := [topic for topic, part in topics.items() if whole.search(part)]:
            return found
    problem = unknown_name("topic", word, [_ALL, *topics])
    raise ConfigError(f"{problem}; the name of a setting finds its topic too")


def entries(settings: Iterable[DescribedSetting], indent: str = "") -> str:
    """Write settings as entries of a topic."""
    return "\n".join(_entry(f"{indent}{one.key}={one.default}", one.meaning) for one in settings)


def _filled(kind: str, words: Sequence[str]) -> str:
    """The lines for a place such as {settings seed sampling.}, {options draft} or {names model}."""
    if kind == "names":
        return _wrapped(" ".join(catalogue.names(words[0])), "  ", "  ")
    if kind == "options":
        return "\n".join(_entry(f"{words[0]}={name}", said) for name, said in options_of(words[0]).items())
    if kind == "tasks":
        tasks = options_of("task").items()
        return "\n".join(
            f"{_entry(f'task={name}', said)}\n{entries(task_settings(name), '  ')}".rstrip() for name, said in tasks
        )
    groups = tuple(word for word in words if word.endswith("."))
    return entries(one for one in _settings() if one.key in words or one.key.startswith(groups))


def _settings() -> Iterable[DescribedSetting]:
    """All settings, without those that follow from others, and without the fields of `model` once more."""
    found = [*settings_of(RunConfig), *settings_of(SlurmConfig, f"{LAUNCHER}.")]
    found += [one for draft in drafters().values() for one in settings_of(draft.config, "draft.")]
    kept = {(one.key, one.meaning): one for one in found}.values()
    return (one for one in kept if not one.key.startswith((*DERIVED, "draft.model.")))


def _entry(name: str, meaning: str) -> str:
    return _wrapped(meaning, f"  {name:<32} ", " " * 35).rstrip()


def _wrapped(text: str, first: str, later: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )
