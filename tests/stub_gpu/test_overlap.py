"""Drafting that overlaps verification on stub devices: its rounds are graphs, and no host waits inside of one."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.settings import catalogue
from tests.stub_gpu.overlapped_settings import PIECES, SETTINGS, Setting
from tests.stub_gpu.process import Stub, lines_of

RANKS = sorted({setting.num_ranks for setting in SETTINGS.values()})
Left = dict[str, dict[str, Any]]


def decode(stub: Stub, out: Path, *names: str, num_ranks: int, **settings: float) -> list[Left]:
    """What each rank has left of each setting."""
    stub.run("-m", "tests.stub_gpu.overlapped", out, *names, ranks=num_ranks, **settings)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def seen(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Left]]:
    """What each rank has left, by the number of ranks; all settings of a number decode in the same processes."""
    found = {}
    for num_ranks in RANKS:
        names = [name for name, setting in SETTINGS.items() if setting.num_ranks == num_ranks]
        found[num_ranks] = decode(stub, tmp_path_factory.mktemp(f"{num_ranks}"), *names, num_ranks=num_ranks)
    return found


every_setting = pytest.mark.parametrize("name", SETTINGS)
captured = pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.cuda_graphs])


def lefts(seen: dict[int, list[Left]], name: str) -> tuple[Setting, list[dict[str, Any]]]:
    """A setting and what each rank has left of it."""
    setting = SETTINGS[name]
    return setting, [left[name] for left in seen[setting.num_ranks]]


@every_setting
def test_all_rows_are_finished_without_a_fault(seen: dict[int, list[Left]], name: str) -> None:
    """`overlapped` ends with an error if a part of a round makes the host wait."""
    setting, found = lefts(seen, name)
    assert [each["faults"] for each in found] == [[]] * setting.num_ranks
    assert [each["finished"] for each in found] == [setting.batch_size] * setting.num_ranks


@captured
def test_each_piece_is_captured_once_and_then_replayed(seen: dict[int, list[Left]], name: str) -> None:
    setting, found = lefts(seen, name)
    assert all(each["is_captured"] for each in found)
    assert [each["num_captured"] for each in found] == [[len(PIECES), 0, 0]] * setting.num_ranks


@captured
def test_between_rounds_are_the_launches_one_pinned_copy_and_at_most_one_wait(
    seen: dict[int, list[Left]], name: str
) -> None:
    _, found = lefts(seen, name)
    for each in found:
        replays, rest = each["between"][: len(PIECES)], each["between"][len(PIECES) :]
        assert len({line for line in replays if line.startswith("replay")}) == len(PIECES)
        copies = [line for line in rest if line.startswith("copy device->pinned")]
        waits = [line for line in rest if line == "wait event"]
        assert len(copies) == 1
        assert len(waits) <= 1
        assert len(rest) == 1 + len(waits), each["between"]


@captured
def test_a_round_has_two_messages_and_the_probabilities_between_two_ranks(
    seen: dict[int, list[Left]], name: str
) -> None:
    """Ids and the verdict go to all ranks; messages inside of a model that ranks share are counted apart."""
    setting, found = lefts(seen, name)
    num_target = setting.num_ranks - setting.num_draft_ranks
    for rank, each in enumerate(found):
        nodes = dict(zip(PIECES, each["nodes"], strict=True))
        sends = setting.rule != "coupled" and rank in {0, num_target}
        assert nodes["exchange"].count("nccl") == 1 + sends
        assert nodes["verify"].count("nccl") == 1
        assert bool(nodes["draft"].count("nccl")) == (rank >= num_target and setting.num_draft_ranks > 1)
        assert bool(nodes["score"].count("nccl")) == (rank < num_target and num_target > 1)


def test_only_what_top_k_leaves_is_sent(seen: dict[int, list[Left]]) -> None:
    """Floats for K = 4 tokens of each row: probabilities with their ids, or those of the whole vocabulary."""
    shape = catalogue.load("tiny").shape
    assert shape
    for name, width in (("top-k", 2 * 20), ("five rows", shape.vocab_size)):
        setting, (_, of_draft) = lefts(seen, name)
        assert of_draft["sent_bytes"] == [4 * setting.batch_size * 4 * width]


def test_a_run_overlaps_on_two_devices_and_says_how_well(stub: Stub, tmp_path: Path) -> None:
    run, journal = tmp_path / "run", tmp_path / "journal"
    output = stub.run(
        "launch/run.py", "device=cuda", "task=generate", "prompt=import os", "max_new_tokens=48", "ignore_eos=true",
        "placement=own_gpu", "speculation.overlap=true", f"run_dir={run}", ranks=2, STUB_GPU_JOURNAL=journal,
        STUB_GPU_REPLAY_US=2000,
    )  # fmt: skip
    assert (run / "status").read_text().startswith("done")
    assert "continuing without CUDA graphs" not in output
    assert lines_of(journal, about="fault") == []
    assert all(line.endswith(": 0") for line in lines_of(journal, about="graphs that use it"))
    overlap = json.loads((run / "summary.json").read_text())["overlap"]
    assert [each["rank"] for each in overlap["ranks"]] == [0, 1]
    assert all(0 < each["waited_s"] < each["rounds_s"] for each in overlap["ranks"])
