"""A machine on which machine-install.sh runs."""

from pathlib import Path

import pytest

from tests.helpers.installer import Machine, make_machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Python 3.11, a C compiler, much free disk, no GPU."""
    return make_machine(tmp_path)
