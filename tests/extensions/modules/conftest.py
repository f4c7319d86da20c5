"""What the tests of this extension share with the tests of the core's models."""

from tests.unit.models.conftest import saved  # noqa: F401 - a fixture
