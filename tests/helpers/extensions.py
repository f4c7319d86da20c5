"""What tests of the core take from extensions; without the extension they are skipped."""

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from llama_ssp import manifest
from llama_ssp.settings.drafters import DRAFTERS
from llama_ssp.settings.schema import DrafterConfig

if TYPE_CHECKING:  # the configuration of the tests imports no torch, and no client of the hub
    from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts


PRESENT = manifest.present()
"""The extensions of this installation, whatever tests put in their place."""


def need(extension: str) -> None:
    """Skip the test if this installation lacks an extension."""
    if extension not in PRESENT:
        pytest.skip(f"needs llama_ssp/extensions/{extension}")


def missing_in(text: str) -> str | None:
    """The missing extension that a failure names, as `manifest.absent` does, or that a test imports; None without one.

    The package itself imports no extension: an import there stays a failure.
    """
    found = re.search(r"needs the (\w+) extension, which was removed", text)
    files = re.findall(r"^(\S+\.py):\d+: ", text, re.MULTILINE)
    if files and files[-1].startswith(("tests/", "benchmarks/", "training/")):
        found = found or re.search(r"No module named '(?:llama_ssp|tests)\.extensions\.(\w+(?:\.\w+)?)", text)
    if found is None:
        return None
    # A module of an extension goes with what it needs.
    extension = manifest.NEEDS.get(found[1], found[1].partition(".")[0])
    return f"llama_ssp/extensions/{extension}" if extension not in PRESENT else None


def copies(**settings: Any) -> DrafterConfig:
    """The settings of prompt look-up."""
    need("copies")
    return DRAFTERS.of("ngram").config(kind="ngram", **settings)


def copying(parts: "DrafterParts") -> "Drafter":
    """A drafter by prompt look-up, by default in a row's own text."""
    own = copies(longest=3, history=0)
    from llama_ssp.extensions.copies.drafter import NgramDrafter

    return NgramDrafter(parts if isinstance(parts.config, type(own)) else replace(parts, config=own))


def module_of(name: str) -> Any:
    """A module of an extension, such as `heads.sources`."""
    need(name.partition(".")[0])
    return import_module(f"llama_ssp.extensions.{name}")


def of_heads(module: str) -> Any:
    """A module of the extension of draft heads."""
    return module_of(f"heads.{module}")
