"""The pins that tests ran with and the ranges that pyproject.toml allows agree."""

import tomllib
from itertools import chain

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.helpers.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    """Read a constraints file: the version of each package."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


def ranges() -> dict[str, SpecifierSet]:
    """Read pyproject.toml: what each other package may be, the extras included."""
    lines = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    found = [requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT["name"]]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in found}


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins("constraints.txt")
    assert {name for name, allowed in ranges().items() if name not in pinned or pinned[name] not in allowed} == set()


def test_the_lowest_pins_are_the_lower_ends_of_the_ranges() -> None:
    lowest = {name: version for name, version in pins("constraints-lowest.txt").items() if name in ranges()}
    assert {
        name for name, version in lowest.items() if f">={version.removesuffix('.0')}" not in str(ranges()[name])
    } == set()
