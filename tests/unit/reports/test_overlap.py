"""What a summary, a report and the terminal say of drafting that overlapped verification."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from llama_ssp.console.tables import summary_table
from llama_ssp.reports import figures, plots
from llama_ssp.reports.records import CompletionLine, RankActivity, RankMemory, RunFacts, Summary
from llama_ssp.reports.runs import Run
from llama_ssp.reports.summary import round_gains, summarise
from tests.helpers.pictures import said
from tests.helpers.runs import FAST

LINE = replace(
    FAST, num_rounds=5, accepted_lengths=[1, 4, 2, 0, 1], examined_lengths=[1, 4, 3, 1, 1],
    draft_s=0.005, verify_s=0.04, other_s=0.005,
)  # fmt: skip
ACTIVITIES = [
    RankActivity(rank=0, rounds_s=10.0, waited_s=1.0),
    RankActivity(rank=1, rounds_s=10.0, waited_s=2.0),
    RankActivity(rank=2, rounds_s=10.0, waited_s=5.0),
]


def summary(*lines: CompletionLine) -> Summary:
    facts = RunFacts(
        task="latency", model="big", draft="small", world_size=3, seed=7, memory=[RankMemory(rank=0)],
        placement={"target": {"ranks": [0, 1]}, "draft": {"ranks": [2]}, "num_replicas": 1},
    )  # fmt: skip
    return summarise(facts, lines, num_draft_tokens=4, activities=ACTIVITIES)


def test_a_summary_has_the_idle_shares_and_the_dropped_tokens() -> None:
    overlap = summary(LINE).overlap
    assert overlap is not None
    assert overlap.target_idle_share == pytest.approx(0.15)
    assert overlap.draft_idle_share == pytest.approx(0.5)
    assert (overlap.num_drafted_tokens, overlap.num_dropped_tokens) == (20, 12)


def test_a_run_that_does_not_overlap_has_none() -> None:
    facts = RunFacts(task="latency", model="big", draft=None, placement={}, world_size=1, seed=7, memory=[])
    assert summarise(facts, [], num_draft_tokens=0).overlap is None


def test_the_target_adds_a_token_after_a_rejection_alone() -> None:
    assert round_gains([1, 4, 2, 0, 1], 4, waits=False) == [1, 4, 3, 1, 1]
    assert round_gains([4, 2, 0, 1], 4, waits=True) == [4, 3, 1, 2]


def test_the_timeline_shows_work_and_waiting_of_both_models() -> None:
    chart = figures.round_timeline(Run(name="r", status="done", summary=summary(LINE), lines=(LINE,)))
    assert chart is not None
    assert said(plots.picture(chart)) == [
        "target: 8.500 ms", "target idle: 1.500 ms", *[f"draft, step {step}: 1.250 ms" for step in (1, 2, 3, 4)],
        "draft idle: 5.000 ms",
    ]  # fmt: skip


def test_the_terminal_says_how_long_either_model_waited() -> None:
    console = Console(width=100, record=True, file=StringIO())
    console.print(summary_table(summary(LINE)))
    assert "overlap:  target idle 15 %, draft idle 50 %; 12 of 20 drafted tokens dropped" in console.export_text()
