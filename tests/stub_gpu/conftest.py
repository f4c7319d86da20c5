"""The stub device for the tests of this folder, which are all of the lane `just gpu-stub`."""

from pathlib import Path

import pytest

from tests.stub_gpu.process import Stub, find_stub

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu_stub)


@pytest.fixture(scope="session")
def stub() -> Stub:
    """The stub device, built from source; skips where there is no CUDA build of torch or no compiler."""
    found = find_stub()
    if isinstance(found, str):
        pytest.skip(found)
    return found
