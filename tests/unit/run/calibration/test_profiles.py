"""What a profile is measured from, and in which order."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.process import Ranks
from llama_ssp.run.calibration import profiles
from llama_ssp.run.calibration.model_pairs import PairTime, RandomLlama
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.worlds import ONE_CORE

pytestmark = pytest.mark.seconds

PAIR = PairTime(RandomLlama(64, 1, 64), plain_s=1.0, draft_s=1.0, verify_s=1.0, other_s=1.0)


class LoggedPairs:
    """Pairs that only say what is done with them."""

    def __init__(self, log: list[str], comm: Comm, *, apart: bool = False) -> None:
        self._log, self._name = log, f"{'apart' if apart else 'shared'} {comm.size}"
        log.append(f"load {self._name}")

    def turn(self) -> None:
        self._log.append(f"turn {self._name}")

    def times(self) -> list[PairTime]:
        return [PAIR._replace(plain_s=float(self._name[-1]))]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pairs_of_all_profiles_decode_in_the_same_turns_after_the_parts(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[list[str]] = [[] for _ in range(num_ranks)]
    own = threading.local()

    def parts(number: int, _name: str) -> Any:  # noqa: ANN401 - stands for a Profile
        own.log.append(f"parts {number}")
        return SimpleNamespace(num_ranks=number)

    def measured(comm: ThreadComm) -> list[profiles.Measured]:
        own.log = logs[comm.rank]
        ranks = Ranks(rank=comm.rank, size=num_ranks, local_rank=comm.rank, local_size=num_ranks)
        return profiles.measure(
            replace(ONE_CORE, comm=comm, ranks=ranks, device=torch.device("meta")), parts, lambda *_step: None
        )

    monkeypatch.setattr(profiles, "Pairs", lambda comm, **options: LoggedPairs(own.log, comm, **options))
    first, *others = on_ranks(thread_comms(num_ranks), measured)
    assert [each.parts.num_ranks for each in first] == [1, 2][:num_ranks]
    assert [[time.plain_s for time in each.together] for each in first] == [[1.0], [2.0]][:num_ranks]
    assert [len(each.apart) for each in first] == [0, 1][:num_ranks]
    assert not any(others)
    shared = ["shared 2", "apart 2"] if num_ranks > 1 else []
    more = [f"parts {num_ranks}"] if num_ranks > 1 else []
    turns = [f"turn {name}" for name in ("shared 1", *shared)] * profiles.NUM_TURNS
    assert logs[0] == ["parts 1", *more, *(f"load {name}" for name in ("shared 1", *shared)), *turns]
    for log in logs[1:]:
        assert log == [*more, *(f"load {name}" for name in shared), *(f"turn {name}" for name in shared * 9)]
