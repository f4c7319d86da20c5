"""The stub device, for all tests of this folder."""

import pytest

from tests.stub_gpu.build import Stub, find_stub


@pytest.fixture(scope="session")
def stub() -> Stub:
    """The stub device, built from source; skips where there is no CUDA build of torch or no compiler."""
    found = find_stub()
    if isinstance(found, str):
        pytest.skip(found)
    return found
