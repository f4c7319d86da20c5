"""The planner answers three files of questions as an expert does; of each, all but two must agree."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp import plan
from llama_ssp.planning.advisers import ADVISERS
from llama_ssp.planning.plan import document
from llama_ssp.run.commands import plan as command
from tests.helpers.in_process import call
from tests.helpers.lanes import heavy, slow

QUESTIONS, RENTALS, DRAFTING = (
    yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())
    for name in ("questions", "rentals", "drafting")
)
MOST_DISAGREEMENTS = 2
_OF_ADVICE = {"changes", "any_change", "no_change", "says", "says_not"}
_IS_ADVISED = any(one.changes for one in ADVISERS.all().values())


def _differences(content: dict[str, Any], question: dict[str, Any]) -> Iterator[str]:
    """Yield every point in which a document differs from the answer."""
    for key, wanted in question.get("answer", {}).items():
        if key in _OF_ADVICE:
            yield from _other_words(content, key, wanted)
        elif key == "faster_than":
            if _best_ms(content["time"]) >= _best_ms(document(plan(**wanted))["time"]):
                yield f"it is not faster than {wanted}"
        else:
            found = _at(content, key)
            agrees = wanted[0] <= found <= wanted[1] if isinstance(wanted, list) else found == wanted
            if not agrees:
                yield f"{key} is {found}, expected {wanted}"
    for path, published in question.get("holds", {}).items():
        low, high = _at(content, path)
        if not low <= published <= high:
            yield f"{path} is {low} to {high}, published {published}"


def _answerable(question: dict[str, Any]) -> dict[str, Any]:
    """The question without what only advice answers, if nobody advises."""
    answer = question.get("answer", {})
    kept = {key: wanted for key, wanted in answer.items() if _IS_ADVISED or key.partition(".")[0] not in _OF_ADVICE}
    return {**question, "answer": kept}


def _at(content: Any, path: str) -> Any:
    for key in path.split("."):
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


def _best_ms(time: dict[str, Any]) -> float:
    return float(min(filter(None, (time["plain_ms_per_token"], time["speculative_ms_per_token"]))))


def _other_words(content: dict[str, Any], key: str, wanted: str) -> Iterator[str]:
    changes, warnings = [change["settings"] for change in content["changes"]], content["warnings"]
    holds = {
        "changes": bool(changes) and wanted in changes[0],
        "any_change": any(wanted in settings for settings in changes),
        "no_change": not any(wanted in settings for settings in changes),
        "says": any(wanted in said for said in warnings),
        "says_not": not any(wanted in said for said in warnings),
    }
    if not holds[key]:
        yield f"{key} {wanted}, found {warnings if key.startswith('says') else changes}"


def _is_agreed(contents: Iterator[dict[str, Any]], questions: list[dict[str, Any]]) -> None:
    assert len(questions) == len({one["question"] for one in questions}) >= 25
    assert all(one["arithmetic"] and (one.get("answer") or one["holds"]) for one in questions)
    asked = zip(contents, map(_answerable, questions), strict=True)
    found = {one["question"]: [*_differences(content, one)] for content, one in asked}
    wrong = {question: points for question, points in found.items() if points}
    assert len(wrong) <= MOST_DISAGREEMENTS, "\n".join(f"{question} {points}" for question, points in wrong.items())


@pytest.mark.seconds
def test_the_planner_agrees_with_the_expert() -> None:
    _is_agreed((document(plan(**one["plan"])) for one in QUESTIONS), QUESTIONS)


@pytest.mark.seconds
@pytest.mark.parametrize("questions", [heavy(RENTALS), slow(DRAFTING)], ids=["rentals", "drafting"])
def test_the_planner_knows_prompts_batches_and_drafts_as_the_expert_does(
    questions: list[dict[str, Any]],
) -> None:
    asked = ([*one["command"].split(), "format=json"] for one in questions)
    _is_agreed((json.loads(call(command.main, settings).out) for settings in asked), questions)


def test_an_answer_that_differs_is_a_difference() -> None:
    content = {"fits": True, "machines": [{"ms": 3.0, "range": [2.0, 4.0]}], "changes": [], "warnings": []}
    for answer in ({"fits": False}, {"machines.0.ms": [4, 5]}, {"changes": "draft=none"}, {"says": "a word"}):
        assert len([*_differences(content, {"answer": answer})]) == 1, answer
    assert len([*_differences(content, {"holds": {"machines.0.range": 4.5}})]) == 1
    agreed = {"fits": True, "machines.0.ms": [2, 3], "no_change": "draft=none"}
    assert [*_differences(content, {"answer": agreed, "holds": {"machines.0.range": 2.0}})] == []
