"""`--help` by topic: cuts into sections what Hydra prints from conf/hydra/help/llama_ssp.yaml.

A section opens with its topic in capitals and a colon, at the margin. `--help` alone prints an overview, `--help TOPIC`
one section, `--help WORD` every section that has the word, `--help all` all of them.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence

from llama_ssp.config import catalogue
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.visible import visible

ALL = "all"
_HEADING = re.compile(r"^(?: {2})?([A-Z]+): ", re.MULTILINE)
_IN_OVERVIEW = ("start", "examples", "exit")


def check(words: Sequence[str]) -> None:
    """Raise ConfigError for words after `--help` that are in no section."""
    text = (catalogue.conf_dir() / "hydra" / "help" / "llama_ssp.yaml").read_text(encoding="utf-8")
    topics = [match[1].lower() for match in _HEADING.finditer(text)]
    for word in words:
        if word.lower() not in {ALL, *topics} and not _has(text, word):
            raise ConfigError(f"{unknown_name('topic', word, [ALL, *topics])}; a setting's name finds its topic too")


@contextlib.contextmanager
def printing(words: Sequence[str]) -> Iterator[None]:
    """Print, of the help that the block writes, what the words after `--help` ask for."""
    written = io.StringIO()
    try:
        with contextlib.redirect_stdout(written):
            yield
    finally:
        print(visible(_chosen(written.getvalue(), words).strip("\n")))


def _chosen(text: str, words: Sequence[str]) -> str:
    before, sections = _sections(text)
    if not words:
        return _overview(before, sections)
    if ALL in words:
        return text
    named = {word.lower() for word in words} & sections.keys()
    kept = [
        section
        for topic, section in sections.items()
        if topic in named or any(word.lower() not in sections and _has(section, word) for word in words)
    ]
    return "\n\n".join(kept)


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


def _has(text: str, word: str) -> bool:
    """Whether a text has a word, such as the last one of a setting's key."""
    return re.search(rf"(?<!\w){re.escape(word.rstrip('='))}(?!\w)", text) is not None
