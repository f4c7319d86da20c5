"""The tests of this folder share the checkpoints of `tests.unit.models`."""

from tests.unit.models.conftest import saved

__all__ = ["saved"]
