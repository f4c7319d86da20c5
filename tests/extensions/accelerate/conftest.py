"""Groups of gloo ranks for the cells of this extension."""

from pathlib import Path

import pytest

from tests.distributed.conftest import cases_of, pairs, seen  # noqa: F401 - fixtures
from tests.distributed.ranks import Case
from tests.unit.models.conftest import saved  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> list[Case]:
    """All cases of the tests of this extension."""
    return cases_of(request.session, Path(__file__).parent)
