"""The hook of mkdocs that adds the pages which are made from the code; mkdocs.yml names it."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.hooks import repository, settings


def pages() -> dict[str, str]:
    """Make every generated page, by its path below `docs`."""
    made = {
        "reference/settings.md": settings.page(),
        "reference/map.md": repository.map_page(),
        "changelog.md": _from_root("CHANGELOG.md"),
        "contributing.md": _from_root("CONTRIBUTING.md"),
    }
    made |= repository.pages_of_extensions()
    return made | {f"reference/{path}": page for path, page in repository.api_pages().items()}


def _from_root(name: str) -> str:
    """Read a page of the repository's root; its links into `docs` start there."""
    return (repository.ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and those of the API to the navigation."""
    made = pages()
    for path, page in made.items():
        files.append(File.generated(config, path, content=page))
    lists: dict[str, list[object]] = {
        "reference/api/index.md": repository.api_navigation([path for path in made if "/api/" in path]),
        "extensions/index.md": [path for path in made if path.startswith("extensions/") and path.endswith(".md")],
    }
    _expand(config.nav or [], lists)
    return files


def _expand(entries: list[object], lists: dict[str, list[object]]) -> None:
    """Replace each page that opens a list by the list, at any depth."""
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        for title, value in entry.items():
            if isinstance(value, list):
                _expand(value, lists)
            else:
                entry[title] = lists.get(value, value)
