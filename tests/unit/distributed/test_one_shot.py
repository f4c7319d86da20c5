"""When the one step is taken instead of NCCL; the step itself needs several GPUs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llama_ssp.distributed import comms, one_shot
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.one_shot import SIZES, OneShot, largest_gain

FASTER, SLOWER = (1e-6, 2e-6), (3e-6, 2e-6)


@pytest.mark.parametrize(
    ("first", "second", "most_bytes"),
    [
        ([FASTER] * 5, [FASTER] * 5, SIZES[-1]),
        ([FASTER] * 3 + [SLOWER] * 2, [FASTER] * 5, SIZES[2]),
        ([FASTER] * 5, [FASTER, None, FASTER, FASTER, FASTER], SIZES[0]),
        ([SLOWER] + [FASTER] * 4, [FASTER] * 5, 0),
        ([None] * 5, [FASTER] * 5, 0),
    ],
    ids=[
        "always faster",
        "small ones are faster on the slowest rank",
        "wrong on one rank",
        "slow from the start",
        "wrong",
    ],
)
def test_it_pays_up_to_the_largest_message_that_all_ranks_got_right_and_sooner(
    first: list[tuple[float, float] | None], second: list[tuple[float, float] | None], most_bytes: int
) -> None:
    assert largest_gain([first, second]) == most_bytes


def test_only_short_aligned_numbers_go_that_way() -> None:
    class Group:
        group_name = "0"

    end = OneShot({}, group=Group(), most_bytes=64)  # type: ignore[arg-type]
    assert end.takes(torch.zeros(16))
    assert end.takes(torch.zeros(32, dtype=torch.float16))
    assert not end.takes(torch.zeros(17))
    assert not end.takes(torch.zeros(20, dtype=torch.float16))
    assert not end.takes(torch.zeros(2, 3))
    assert end.takes(torch.zeros(8)[4:])
    assert not end.takes(torch.zeros(8)[1:5])
    assert not end.takes(torch.zeros(4, dtype=torch.int64))


class Device:
    """A device that calls nobody else: events pass at once, or never."""

    def __init__(self, *, comes_to_an_end: bool = True) -> None:
        self.comes_to_an_end = comes_to_an_end
        self.nccl_calls = 0

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        return SimpleNamespace(
            record=lambda: None,
            query=lambda: self.comes_to_an_end,
            elapsed_time=lambda _: 1.0,
            synchronize=lambda: None,
        )

    def all_reduce(self, _values: torch.Tensor, *, group: object) -> None:
        assert group
        self.nccl_calls += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(dist, "all_reduce", found.all_reduce)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(one_shot, "_PATIENCE_S", 0.05)
    return found


@pytest.mark.parametrize("step", ["allocate", "open", "measure"])
def test_a_rank_that_fails_alone_goes_the_way_of_the_others(
    step: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, told = [], []

    def take(name: str, *_: object) -> dict[torch.dtype, torch.Tensor]:
        taken.append(name)
        if name == step:
            raise RuntimeError("no way between the GPUs")
        return {torch.float32: torch.zeros(1)}

    def gather_text(text: str) -> list[str]:
        told.append(text)
        return [text, text]

    monkeypatch.setattr(one_shot, "_allocate", lambda *_: take("allocate"))
    monkeypatch.setattr(one_shot, "_open", lambda *_: take("open"))
    monkeypatch.setattr(OneShot, "all_reduce", lambda *_: take("measure"))
    group = SimpleNamespace(group_name="0")
    assert OneShot.join(group, gather_text, torch.device("cpu")) is None  # type: ignore[arg-type]
    names, failed = ["allocate", "open", "measure"], ["", "", "[null, null, null, null, null]"]
    place = names.index(step)
    assert taken == names[: place + 1]
    assert told[1:] == [*["has room", "joined"][:place], failed[place]]
    assert device.nccl_calls == (len(SIZES) * (one_shot._NUM_CALLS + 2) if step == "measure" else 0)


def test_a_device_that_comes_to_no_end_is_given_up(device: Device) -> None:
    assert one_shot._seconds(lambda: None) == 1e-3 / one_shot._NUM_CALLS
    device.comes_to_an_end = False
    with pytest.raises(RuntimeError, match=r"within 0\.05 s"):
        one_shot._seconds(lambda: None)


def test_groups_of_gpus_look_for_it_unless_they_are_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(OneShot, "join", lambda *_: asked.append("join"))
    monkeypatch.setattr(comms, "_one_shots", {})
    for tries in (False, True):
        group = SimpleNamespace(WORLD=SimpleNamespace())
        monkeypatch.setattr(dist, "group", group)
        Comm.of_world(rank=0, size=2, device=torch.device("cuda"), crowded=False, tries_one_shot=tries)
        assert asked == ["join"] * tries
