"""The origin of a run is named without loading it, with the links between GPUs that the driver lists."""

from pathlib import Path

import pytest

from llama_ssp.reports.provenance import gpu_links

HEADER = "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m"
SWITCHED = f"""{HEADER}
GPU0\t X \tNV18\tNV18\tNV18\tPXB\t0-31\t0
GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-31\t0
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t32-63\t1
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PAIRED = f"""{HEADER}
GPU0\t X \tNV4\tSYS\tSYS\tPXB\t0-31
GPU1\tNV4\t X \tSYS\tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tPHB\tSYS\t32-63
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t32-63
"""


@pytest.mark.parametrize(
    ("matrix", "links"),
    [
        (SWITCHED, "NV18 between all GPUs"),
        (PAIRED, "NV4 between GPUs 0-1, SYS between GPUs 0-2 0-3 1-2 1-3, PHB between GPUs 2-3"),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n", "none, the GPU is alone"),
    ],
)
def test_links_between_gpus_are_those_of_nvidia_smi(
    matrix: str, links: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matrix").write_text(matrix)
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$*" = "topo -m" ] && /bin/cat \'{tmp_path}/matrix\'\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_links() == links


def test_a_driver_that_is_away_or_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_links() == "unknown: nvidia-smi is not installed"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert "exit status 9" in gpu_links()
