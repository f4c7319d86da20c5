"""What rounds cost before a run chooses K: measured once, kept in the run folder, and read again."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.extensions.adaptive.records import LENGTHS
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.schema import SpeculationConfig
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from tests.helpers.in_process import launch
from tests.helpers.lanes import slow

CHUNK_S = 1.0
REQUEST = Request(index=0, prompt_ids=(0, 1), max_new_tokens=20)


class TimedRounds:
    """Stands for a decoder whose rounds take planted times: a plain one 1 s, others by K and by the measurement."""

    def __init__(self, seconds: Callable[[int, int], float], of_one: Callable[[int, int], float] | None = None) -> None:
        self.round = SimpleNamespace(drafters=[object()], steps=None, max_tokens_per_round=9)
        self.length, self.picks_rows, self.batch_size, self.of_one = FixedLength(0), bool(of_one), 8, of_one
        self.seconds, self.timed = seconds, list[list[int]]()

    def make_room(self, requests: Sequence[Request]) -> None:
        """Needs none."""

    def choose_by(self, length: FixedLength) -> None:
        """Keep what chooses K."""
        self.length = length

    def time_rounds(
        self,
        choices: Sequence[DraftChoice],
        *,
        num_slots: int,
        num_rows: int | None = None,
    ) -> list[float]:
        """The planted times, and those to read a chunk that was skipped."""
        self.timed.append([choice.num_tokens for choice in choices])
        seconds = self.of_one if num_rows == 1 and self.of_one else self.seconds
        return [
            seconds(each.num_tokens, len(self.timed)) + CHUNK_S * (each.num_unread > 2) if each.num_tokens else 1.0
            for each in choices
        ]


def tuned(seconds: Callable[[int, int], float], *of_one: Callable[[int, int], float]) -> tuple[Any, list[list[int]]]:
    """What chooses K after the measurement, and the lengths that each measurement has timed."""
    config = load("tiny", "tiny-draft").config
    speculation = SpeculationConfig(num_draft_tokens="auto", acceptance=0.8)
    decoder: Any = TimedRounds(seconds, *of_one)
    make_ready(decoder, [REQUEST], replace(config, speculation=speculation), comm=Comm.single())
    return decoder.length, decoder.timed


@pytest.mark.seconds
@pytest.mark.parametrize(("of_a_token", "left"), [(0.3, [0, *LENGTHS, 1, 0]), (1.1, [0, 0])])
def test_drafts_that_lose_whatever_is_accepted_are_timed_twice_only(of_a_token: float, left: list[int]) -> None:
    """As in a large batch, where each drafted token costs a plain one and a draft step."""
    length, timed = tuned(lambda number, _: 1 + of_a_token * number)
    assert timed[3] == [0, *LENGTHS, 1, 0]
    assert timed[4] == timed[-1] == left
    assert bool(length.choose([0]).num_tokens) is (of_a_token < 1)


def test_long_drafts_that_others_slowed_down_do_not_make_short_ones_cheap() -> None:
    """A round with one drafted token takes 1.9 s and adds 1.8 tokens; a line through all has it at less."""
    length, _ = tuned(lambda number, _: (1 + 0.9 * number) * (2.0 if number == max(LENGTHS) else 1.0))
    assert length.choose([0]) == DraftChoice(0)


def test_measurements_that_others_slowed_down_do_not_count() -> None:
    length, _ = tuned(lambda number, measurement: (1 + 0.3 * number) * (1.0 if measurement % 2 else 9.0))
    assert length.choose([0]).num_tokens


def test_rounds_of_one_row_are_measured_where_rows_are_left_out() -> None:
    length, timed = tuned(lambda number, _: 1 + 1.1 * number, lambda number, _: 1 + 0.1 * number)
    assert [0, *LENGTHS, 1, 0] == timed[0] == timed[-1]
    chosen = []
    for length.num_rows in (1, 8):
        chosen.append(length.choose([0]).num_tokens)
    assert chosen[0] > chosen[1] == 0


WORDS = (
    "task=generate",
    "model=tiny-draft",
    "draft=ngram",
    "speculation.num_draft_tokens=auto",
    "sampling=greedy",
    "max_new_tokens=24",
)


@pytest.mark.heavy
def test_a_run_that_chooses_k_measures_once_and_is_resumed_with_the_same_costs(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("import\nfrom\n")
    words = (*WORDS, f"prompts={tmp_path}/p.txt", f"run_dir={tmp_path}/run")
    assert launch(*words).code == 0
    costs, file = tmp_path / "run" / "round_costs.json", tmp_path / "run" / "run.jsonl"
    measured, (first, second) = costs.read_text(), file.read_text().splitlines()
    assert {cost["num_tokens"] for cost in json.loads(measured)["rounds"]} == {0, 1, 2, 3, 4, 6, 8}
    file.write_text(first + "\n")
    ended = launch(*words)
    assert costs.read_text() == measured
    again = ended.lines[1]
    assert again["text"] == json.loads(second)["text"]
    assert len(again["draft_lengths"]) == again["num_rounds"]
    fast = ended.summary["speculative"]
    assert sum(fast["drafted_histogram"]) == fast["num_rounds"]


@pytest.mark.seconds
@pytest.mark.parametrize("content", ['{"rounds": [], "catch_up_seconds": []}', slow("[NaN]")])
def test_damaged_costs_are_a_sentence(content: str, tmp_path: Path) -> None:
    words = (*WORDS, "prompt=import", f"run_dir={tmp_path}/run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "round_costs.json").write_text(content)
    launch(*words).check_refusal("round_costs.json of run_dir ", "delete it to measure again")
