"""The cells of docs/guides/python.md run in order, and show what the page says."""

import doctest
import re

import pytest

from tests.helpers.repository import ROOT

PAGE = "docs/guides/python.md"


def cells(text: str) -> str:
    """The page's cells as one session, each at its own lines."""
    kept, is_cell = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_cell = line == "```pycon"
            kept.append("")
        else:
            kept.append(line if is_cell else "")
    return "\n".join(kept) + "\n"


def run(text: str) -> tuple[str, int]:
    """Run a page; returns what differs, and the number of cells' statements."""
    differences: list[str] = []
    session = doctest.DocTestParser().get_doctest(cells(text), {}, PAGE, PAGE, 0)
    found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(session, out=differences.append)
    return "".join(differences), found.attempted


@pytest.mark.heavy
def test_every_cell_of_the_notebook_shows_what_the_page_says() -> None:
    text = (ROOT / PAGE).read_text()
    differences, num_statements = run(text)
    assert differences == ""
    assert num_statements == len(re.findall(r"^>>> ", text, re.MULTILINE)) > 20


def test_a_cell_that_shows_something_else_is_found() -> None:
    page = "```pycon\n>>> number = 2\n```\n\n    >>> not_a_cell\n\n```pycon\n>>> number + 1\n4\n```\n"
    differences, num_statements = run(page)
    assert "Expected:\n    4\nGot:\n    3" in differences
    assert num_statements == 2
