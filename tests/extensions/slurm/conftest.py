"""One cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.extensions.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
