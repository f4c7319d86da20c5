"""What this process holds and what the node still has, as the kernel tells it."""

from pathlib import Path

import pytest

from llama_ssp.distributed import memory


def test_a_nodes_free_memory_is_what_programs_can_still_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", told)
    assert memory.available_bytes() == 4000 * 1024


def test_a_system_without_proc_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    assert memory.available_bytes() is None
    assert memory.anonymous_bytes() is None
