"""The data of the shipped pair: standard library sources and two-digit multiplications.

What it does: finds the running interpreter's own sources, builds the arithmetic lines, and
decides by fixed hashes which sources and which products no model of the pair may ever see.
What it does not do: tokenise, batch, or read anything but the standard library.
"""

import hashlib
import random
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FACTORS = range(10, 100)
SOURCE_HOLDOUT_EVERY = 25
PRODUCT_HOLDOUT_EVERY = 10
# Vendored or generated code, test suites, and tables that are data rather than source.
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "site-packages",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
PRODUCT_PATTERN = re.compile(r"(?<!\d)(\d\d) ?\* ?(\d\d) ?=(?!=)")


@dataclass(frozen=True)
class SourceFile:
    """One standard library source: its path below the library folder and its text."""

    path: str
    text: str


def _bucket(kind: str, name: str, buckets: int) -> int:
    """Returns the fixed bucket of a name: the same on every machine and every run."""
    digest = hashlib.sha256(f"{kind}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % buckets


def is_heldout_source(path: str) -> bool:
    """Tells whether a source (path below the library folder, forward slashes) is held out."""
    return _bucket("source", path, SOURCE_HOLDOUT_EVERY) == 0


def is_heldout_product(first: int, second: int) -> bool:
    """Tells whether a product is held out; both orders of the factors always go together."""
    low, high = sorted((first, second))
    return _bucket("product", f"{low}*{high}", PRODUCT_HOLDOUT_EVERY) == 0


def standard_library_sources() -> list[SourceFile]:
    """Reads the interpreter's sources, sorted by path, without tests and vendored folders."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.parts[0].startswith(SKIPPED_PREFIXES):
            continue
        text = file.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            sources.append(SourceFile(relative.as_posix(), _without_heldout_products(text)))
    return sources


def _without_heldout_products(text: str) -> str:
    """Drops every line that states a held-out product, so that no source can give one away."""
    kept = []
    for line in text.splitlines(keepends=True):
        found = PRODUCT_PATTERN.findall(line)
        if not any(is_heldout_product(int(a), int(b)) for a, b in found):
            kept.append(line)
    return "".join(kept)


def text_files(folder: Path) -> list[SourceFile]:
    """Reads every file below a folder as UTF-8 text, sorted by path."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    texts = [(file, file.read_text(encoding="utf-8", errors="ignore")) for file in files]
    return [SourceFile(file.relative_to(folder).as_posix(), text) for file, text in texts if text.strip()]


def training_sources() -> list[SourceFile]:
    """Returns the sources a model may be trained on."""
    return [s for s in standard_library_sources() if not is_heldout_source(s.path)]


def heldout_sources() -> list[SourceFile]:
    """Returns the sources kept for measurement."""
    return [s for s in standard_library_sources() if is_heldout_source(s.path)]


@cache
def product_pairs(heldout: bool) -> tuple[tuple[int, int], ...]:
    """Returns the held-out or the seen two-digit factor pairs, in a fixed order."""
    return tuple((a, b) for a in FACTORS for b in FACTORS if is_heldout_product(a, b) == heldout)


def product_line(first: int, second: int) -> str:
    """Writes one multiplication, as `37 * 85 = 3145` and a newline."""
    return f"{first} * {second} = {first * second}\n"


def seen_product_lines() -> list[str]:
    """Returns every multiplication line that training may use."""
    return [product_line(a, b) for a, b in product_pairs(heldout=False)]


def auxiliary_line(rng: random.Random) -> str:
    """Writes one helping line: a sum, or a product in which one factor has a single digit.

    Neither can state a two-digit by two-digit product.
    """
    kind = rng.choices(("sum", "short", "long"), weights=(3, 3, 4))[0]
    if kind == "sum":
        first, second = 10 * rng.randrange(1, 900), rng.randrange(10, 900)
        return f"{first} + {second} = {first + second}\n"
    factor = rng.randrange(2, 10)
    other = rng.randrange(10, 100) if kind == "short" else rng.randrange(100, 1000)
    first, second = rng.sample((factor, other), 2)
    return product_line(first, second)


def worked_prompt(first: int, second: int, examples: int = 3) -> str:
    """Builds a prompt of some worked (seen) examples, drawn by a fixed seed, up to the equals sign of the question.

    The answer expected of a model is a space, the digits and a newline.
    """
    rng = random.Random(f"examples:{first}*{second}")
    seen = [pair for pair in product_pairs(heldout=False) if set(pair) != {first, second}]
    lines = [product_line(a, b) for a, b in rng.sample(seen, examples)]
    return "".join(lines) + f"{first} * {second} ="
