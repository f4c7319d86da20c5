"""Links between GPUs are those that the driver lists, and ranks that share a model should have the fastest."""

from pathlib import Path

import pytest

from llama_ssp.machines.machine import gpu_links, note_on_links, read_links

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


APART = f"""{HEADER}
GPU0\t X \tSYS\tNV4\tSYS\tPXB\t0-31
GPU1\tSYS\t X \tSYS\tNV4\tSYS\t0-31
GPU2\tNV4\tSYS\t X \tSYS\tSYS\t32-63
GPU3\tSYS\tNV4\tSYS\t X \tSYS\t32-63
"""
ALONE = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n"


def drive(script: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put a driver's program that answers so into the only folder of programs."""
    read_links.cache_clear()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    patch.setenv("PATH", str(folder))


def answer(matrix: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "matrix").write_text(matrix)
    drive(f'[ "$*" = "topo -m" ] && /bin/cat \'{folder}/matrix\'', folder, patch)


@pytest.mark.parametrize(
    ("matrix", "links"),
    [
        (SWITCHED, "NV18 between all GPUs"),
        (PAIRED, "NV4 between GPUs 0-1, SYS between GPUs 0-2 0-3 1-2 1-3, PHB between GPUs 2-3"),
        (ALONE, "none, the GPU is alone"),
    ],
)
def test_links_between_gpus_are_those_of_nvidia_smi(
    matrix: str, links: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(matrix, tmp_path, monkeypatch)
    assert gpu_links() == links


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ((APART, [2], None), "0,2,1,3"),
        ((APART, [0, 1, 4, 2], "0,1,2,3"), "0,2,1,3"),
        ((APART, [2], "3,2,1,0"), "3,1,2,0"),
        ((APART, [2], "0,2,1,3"), None),
        ((APART, [4, 1, 3, 0], None), None),
        ((APART, [2], "GPU-53a1"), None),
        ((APART, [2], "4,5,6,7"), None),
        ((PAIRED, [2], None), None),
        ((SWITCHED, [2], None), None),
        ((ALONE, [2], None), None),
    ],
)
def test_ranks_that_share_a_model_are_offered_an_order_of_gpus_with_faster_links(
    asked: tuple[str, list[int], str | None], order: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, sizes, visible = asked
    answer(matrix, tmp_path, monkeypatch)
    note = note_on_links(sizes, 4, visible)
    wanted = "2 ranks that share a model have SYS between their GPUs, and in another order NV4: CUDA_VISIBLE_DEVICES="
    assert note == (order and f"{wanted}{order}; nvidia-smi topo -m explains")


def test_a_driver_that_is_away_or_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    read_links.cache_clear()
    assert gpu_links() == "unknown: nvidia-smi is not installed"
    assert note_on_links([2], 4, None) is None
    drive("exit 9", tmp_path, monkeypatch)
    assert "exit status 9" in gpu_links()
