"""What the repository says of itself: the first sentence of every folder and module, and the pages made of them.

Nothing here is written by hand: a folder is described by its `__init__`, a module by its docstring, a file of settings
by its first comment.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from llama_ssp import manifest
from llama_ssp.catalogue import head_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("llama_ssp", "launch", "conf", "benchmarks", "training", "tests", "docs")
PACKAGE = "llama_ssp"
EXTENSIONS = ROOT / PACKAGE / "extensions"
_SKIPPED = re.compile(r"/(__pycache__|shipped|results)(/|$)|/conf/hardware/this_machine")
_SENTENCE = re.compile(r"(.+?[.!?:])(?=\s+[A-Z`(*]|\s*$)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that holds modules or settings.

    Attributes:
        path: relative to the repository.
        sentence: of its `__init__`; empty where it has none.
        files: each file's first sentence, by its name.
    """

    path: PurePosixPath
    sentence: str = ""
    files: dict[str, str] = field(default_factory=dict)


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or comment, on one line and without its full stop."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    match = _SENTENCE.match(paragraph)
    return (match[1] if match else paragraph).rstrip(".:")


@cache
def docstring(file: Path) -> str:
    """Return the docstring of a module; empty where it has none."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def folders() -> Iterator[Folder]:
    """Every folder that the map shows, parents first."""
    for top in FOLDERS:
        found = sorted(path for path in (ROOT / top).rglob("*") if path.suffix in {".py", ".yaml"})
        found = [path for path in found if not _SKIPPED.search(path.as_posix())]
        for parent in sorted({path.parent for path in found}):
            described = {path.name: _described(path) for path in found if path.parent == parent}
            yield Folder(
                path=PurePosixPath(parent.relative_to(ROOT).as_posix()),
                sentence=described.pop("__init__.py", ""),
                files=described,
            )


def _described(path: Path) -> str:
    return first_sentence(docstring(path) if path.suffix == ".py" else head_of(path))


def map_page() -> str:
    """Make the page that lists every folder and file with its first sentence."""
    lines = [
        "# Map of the repository",
        "The build makes this page from the docstring of each module and the first comment of each settings file.",
    ]
    for folder in folders():
        lines.append(f"## `{folder.path}/`")
        if folder.sentence:
            lines.append(f"{folder.sentence}.")
        entries = [f"- {_link(folder.path, name)}: {sentence}" for name, sentence in folder.files.items()]
        if entries:
            lines.append("\n".join(entries))
    return "\n\n".join(lines) + "\n"


def _link(folder: PurePosixPath, name: str) -> str:
    """Return the name of a file, as a link where it has a page of the API."""
    if folder.parts[0] != PACKAGE or not name.endswith(".py"):
        return f"`{name}`"
    below = PurePosixPath(*folder.parts[1:], name).with_suffix(".md")
    return f"[`{name}`](api/{below})"


def pages_of_extensions() -> dict[str, str]:
    """Make the page that lists the extensions; returns it with those of each extension, by their paths below `docs`."""
    pages = {}
    for name in manifest.EXTENSIONS:
        file, missing = (
            EXTENSIONS / name / "page.md",
            f"# {name}\n\nThis installation has no `llama_ssp/extensions/{name}`.\n",
        )
        pages[f"extensions/{name}.md"] = file.read_text(encoding="utf-8") if file.exists() else missing
    lines = ["# Extensions", docstring(EXTENSIONS / "__init__.py")]
    notebooks = {f"extensions/{file.name}": file.read_text(encoding="utf-8") for file in EXTENSIONS.glob("*/*.ipynb")}
    lines += [f"- [{page.splitlines()[0].lstrip('# ')}]({PurePosixPath(path).name})" for path, page in pages.items()]
    return {"extensions/index.md": "\n\n".join(lines) + "\n", **pages, **notebooks}


def api_pages() -> dict[str, str]:
    """Make a page for every public module of the package, by its path below `reference/`."""
    pages = {}
    index = ["# API", "Every public module of `llama_ssp`. Start with [`llama_ssp`](#llama_ssp) and its two functions:"]
    index.append(f"::: {PACKAGE}\n    options:\n      heading_level: 2\n      show_root_full_path: true")
    for folder in folders():
        if folder.path.parts[0] != PACKAGE:
            continue
        below = PurePosixPath(*folder.path.parts[1:])
        index.append(f"## `{'.'.join(folder.path.parts)}` {{ #package-{'-'.join(folder.path.parts)} }}")
        if folder.sentence:
            index.append(f"{folder.sentence}.")
        entries = []
        for name, sentence in folder.files.items():
            if not name.endswith(".py"):
                continue
            page = (below / name).with_suffix(".md")
            pages[f"api/{page}"] = f"::: {'.'.join((*folder.path.parts, name.removesuffix('.py')))}\n"
            entries.append(f"- [`{name.removesuffix('.py')}`]({page}): {sentence}")
        if entries:
            index.append("\n".join(entries))
    return {"api/index.md": "\n\n".join(index) + "\n", **pages}


def api_navigation(paths: list[str]) -> list[object]:
    """Return the entries of the API in mkdocs' own form: a list per folder, modules by their names.

    Args:
        paths: of the pages, relative to the documentation.
    """
    by_folder: dict[str, list[object]] = {}
    entries: list[object] = []
    for path in paths:
        below = PurePosixPath(path).relative_to("reference/api")
        if str(below) == "index.md":
            entries.append(path)
            continue
        group = entries if len(below.parts) == 1 else by_folder.setdefault(str(below.parent), [])
        group.append({below.stem: path})
    return [*entries, *({folder.replace("/", "."): group} for folder, group in by_folder.items())]
