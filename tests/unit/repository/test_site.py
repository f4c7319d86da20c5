"""The pages that are made from the code: every module, setting and finding is on one, with words of its own."""

import re
from pathlib import PurePosixPath

import pytest

from docs.hooks import repository, settings
from tests.helpers.repository import ROOT, files, modules

SECTIONS = ["Question", "Method", "Result", "Decision"]


def test_the_map_names_every_module_and_every_file_of_settings_with_its_first_sentence() -> None:
    shown = {folder.path / name: sentence for folder in repository.folders() for name, sentence in folder.files.items()}
    python = [path for path in modules(*repository.FOLDERS) if path.name != "__init__.py"]
    yaml = [path for path in files() if path.parts[0] == "conf"]
    wanted = {PurePosixPath(path.as_posix()) for path in [*python, *yaml]}
    assert {str(path) for path in wanted if not shown.get(path)} == set()
    text = repository.map_page()
    assert {str(path) for path in wanted if f"`{path.name}`" not in text} == set()


def test_every_package_says_what_it_is_for() -> None:
    packages = [folder for folder in repository.folders() if folder.path.parts[0] == repository.PACKAGE]
    assert [str(folder.path) for folder in packages if not folder.sentence] == []


def test_every_public_module_has_a_page_of_the_api() -> None:
    pages = repository.api_pages()
    for path in modules(repository.PACKAGE):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        below = PurePosixPath(*path.parts[1:]).with_suffix(".md")
        assert path.name == "__init__.py" or pages[f"api/{below}"] == f"::: {name}\n"


def test_every_setting_has_a_meaning() -> None:
    assert [each.key for each in settings.described() if not each.meaning] == []


def test_every_finding_has_a_question_a_method_a_result_and_a_decision_and_the_newest_comes_first() -> None:
    for page in (ROOT / "docs" / "findings").glob("*.md"):
        entries = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
        for entry in entries:
            found = re.findall(r"^- \*(\w+)\.\* \S", entry, re.MULTILINE)
            assert found == SECTIONS or re.search(r"^\| question \|.*\| decision \|$", entry, re.MULTILINE), entry[:60]
        days = [entry[:10] for entry in entries]
        assert days == sorted(days, reverse=True), page


@pytest.mark.parametrize("front", ["README.md", "docs/index.md"])
@pytest.mark.parametrize(
    ("wanted", "page", "anchor"),
    [
        ("own GPU", "guides/placement.md", "Put the draft on its own GPU"),
        ("exit code 3", "reference/runs.md", "Exit codes"),
        ("add a drafter", "extending.md", "A drafter"),
    ],
)
def test_what_readers_ask_first_is_one_click_from_the_front_page(
    front: str, wanted: str, page: str, anchor: str
) -> None:
    rows = [line for line in (ROOT / front).read_text().splitlines() if line.startswith("|") and wanted in line]
    assert any(page in row for row in rows)
    assert f"# {anchor}\n" in (ROOT / "docs" / page).read_text()
