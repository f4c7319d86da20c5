"""Holds every file to the habits that no linter knows: opening docstring, nothing of one machine."""

import ast
import re
from urllib.parse import urlsplit

from tests.helpers.repository import PYTHON_FOLDERS, ROOT, files, modules

MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
INSTALL_FILES = re.compile(r"pyproject\.toml|constraints.*\.txt|machine-install\.sh|\.ci/run|justfile|\.pre-commit.*")
PUBLIC_HOSTS = {"download.pytorch.org"}


def test_every_python_file_opens_with_a_docstring() -> None:
    sources = {path: (ROOT / path).read_text() for path in modules(*PYTHON_FOLDERS)}
    assert [path for path, source in sources.items() if source and not ast.get_docstring(ast.parse(source))] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {
        path: match.group()
        for path in files()
        if (match := MACHINE_PATH.search((ROOT / path).read_text(errors="ignore")))
    }
    assert found == {}


def test_packages_come_from_public_hosts_alone() -> None:
    install_files = [path for path in files() if INSTALL_FILES.fullmatch(str(path))]
    urls = {url for path in install_files for url in re.findall(r"\w+://[^\s\"')]*", (ROOT / path).read_text())}
    assert {urlsplit(url).hostname for url in urls} <= PUBLIC_HOSTS
