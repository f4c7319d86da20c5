"""Measures how much of the package its core is, and how much the core says of extensions.

    python -m tests.measures

Prints a table: lines of Python with and without extensions, references to extensions outside them, attributes that
are set on objects from outside their classes, and exceptions from the formatter and the linter. A second table has
abilities that are no extensions: lines without extensions that name them, and files with such lines.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_ssp import manifest
from tests.helpers.repository import ROOT

PACKAGE = ROOT / "llama_ssp"
EXTENSIONS = PACKAGE / "extensions"
OF_THE_CORE = {"int8", "acceptance", "self", "auto"}
"""Names that extensions share with what the core speaks of: a format of numbers, the figure of a pair, a first
argument, a device or a number format that is chosen."""

WOVEN = {
    "trees": r"[Tt]ree",
    "experts": r"[Ee]xpert",
    "recurrent layers": r"[Rr]ecurren|LayerState|State(Cache|View)|KeptStates|num_kept",
    "overlap": r"[Oo]verlap|[Ff]lying",
    "sums over ranks": r"own_sums|OwnSums|with_peers|[Bb]oard\b",
}
"""Abilities of the core, and expressions that find their names; docs/design/extensions.md says what keeps them."""


def num_lines(files: list[Path]) -> int:
    """Count lines of files."""
    return sum(len(file.read_text().splitlines()) for file in files)


def names_of(extension: str) -> set[str]:
    """Public names that an extension's records define."""
    files = [*(EXTENSIONS / extension).glob("records.py"), *(EXTENSIONS / extension / "records").glob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    defined = [node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {name for name in defined if not name.startswith("_")}


def references(file: Path, extensions: Sequence[str]) -> Iterator[str]:
    """Yield the places where a file's syntax tree names or imports an extension, or says what asks for it."""
    names = set[str]().union(*map(names_of, extensions))
    asked = {
        word.partition("=")[2]
        for extension in extensions
        for word in manifest.EXTENSIONS[extension]
        if not word.startswith(("argument=", "field=", "model_type="))
    }
    asked -= OF_THE_CORE
    modules = tuple(f"llama_ssp.extensions.{extension}" for extension in extensions)
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Name(id=found) | ast.Attribute(attr=found) | ast.alias(name=found) if found in names:
                pass
            case ast.Constant(value=str(found)) if found in asked or found.startswith(modules):
                pass
            case ast.ImportFrom(module=str(found)) if found.startswith(modules):
                pass
            case _:
                continue
        yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {found}"


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that statements assign to."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (part for each in targets if each for part in getattr(each, "elts", [each])):
            if isinstance(target, ast.Attribute):
                yield target


def is_own(target: ast.Attribute) -> bool:
    """Whether an attribute is one of the object whose method assigns to it."""
    return isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}


def set_from_outside(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield assignments to attributes whose names classes of other files of the package have, and their comments."""
    owners: dict[str, set[Path]] = {}
    for file, tree in trees.items():
        fields = [
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        for name in (*fields, *(target.attr for target in assigned(tree) if is_own(target))):
            owners.setdefault(name, set()).add(file)
    for file, tree in trees.items():
        for target in assigned(tree):
            if not is_own(target) and file not in owners.get(target.attr, {file}):
                _, _, reason = file.read_text().splitlines()[target.lineno - 1].partition("  # ")
                yield f"{file.relative_to(ROOT)}:{target.lineno} {ast.unparse(target)}: {reason or 'no reason'}"


def main() -> None:
    """Print the table, and what it counts where that should be nothing."""
    files = sorted(PACKAGE.rglob("*.py"))
    core = [file for file in files if EXTENSIONS not in file.parents or file == EXTENSIONS / "__init__.py"]
    named = [found for file in core if file.name != "manifest.py" for found in references(file, manifest.present())]
    outside = [*set_from_outside({file: ast.parse(file.read_text()) for file in files})]
    text = "".join(file.read_text() for file in files)
    rows = {
        "lines of Python": num_lines(files),
        "lines of Python without extensions": num_lines(core),
        "references to extensions outside them": len(named),
        "attributes set from other files": len(outside),
        "# fmt: skip": text.count("# fmt: skip"),
        "noqa": text.count("# noqa"),
    }
    for name, number in rows.items():
        print(f"{name:<34}{number:>7,}")
    for name, expression in WOVEN.items():
        counts = [sum(bool(re.search(expression, line)) for line in file.read_text().splitlines()) for file in core]
        print(f"{name:<34}{sum(counts):>7,} lines in {sum(map(bool, counts))} files")
    print(*named, *outside, sep="\n")


if __name__ == "__main__":
    main()
