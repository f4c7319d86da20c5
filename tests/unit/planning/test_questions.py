"""The planner answers `questions.yaml` and `rentals.yaml` as an expert does; of each, 28 of 30 must agree."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp import plan
from llama_ssp.planning.plan import Plan, document
from llama_ssp.run.commands import plan as command
from llama_ssp.settings.schema import Offload, PlacementConfig, TargetKind, TargetPlacement

QUESTIONS, RENTALS = (
    yaml.safe_load(Path(__file__).with_name(name).read_text()) for name in ("questions.yaml", "rentals.yaml")
)
MOST_DISAGREEMENTS = 2


def _plan(arguments: dict[str, Any]) -> Plan:
    placement = arguments.get("placement")
    if isinstance(placement, dict):
        target = dict(placement["target"])
        kind, offload = TargetKind[target.pop("kind")], Offload[target.pop("offload")]
        placement = PlacementConfig(target=TargetPlacement(kind=kind, offload=offload, **target))
    return plan(**arguments | {"placement": placement})


def _disagreements(arguments: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    """Yield every point in which the plan differs from the answer."""
    found = _plan(arguments)
    content = document(found)
    time = content["time"]
    figures = {
        "fits": content["fits"],
        "tight": content["is_tight"],
        "plain_ms": time["plain_ms_per_token"],
        "speculative_ms": time["speculative_ms_per_token"],
        "tokens_per_s": time["plain_tokens_per_s"],
        "kv_bytes_per_token": content["target"]["kv_bytes_per_token"],
        "best_k": time["best_num_draft_tokens"],
        "largest_batch": content["largest_batch"],
        "draft_kind": content["draft"] and content["draft"]["kind"],
        "num_replicas": content["job"]["num_replicas"],
    }
    for key, wanted in answer.items():
        if key in figures:
            agrees = wanted[0] <= figures[key] <= wanted[1] if isinstance(wanted, list) else figures[key] == wanted
            if not agrees:
                yield f"{key} is {figures[key]}, expected {wanted}"
        elif key == "faster_than":
            if found.timing.best_s >= _plan(wanted).timing.best_s:
                yield f"it is not faster than {wanted}"
        else:
            yield from _other_words(content, key, wanted)


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


def test_there_are_thirty_questions_each_with_arithmetic_and_an_answer() -> None:
    for questions in QUESTIONS, RENTALS:
        assert len(questions) == len({one["question"] for one in questions}) == 30
        for one in questions:
            assert one["question"].endswith("?")
            assert one["arithmetic"]
            assert one.get("answer") or one["holds"]


def test_the_planner_agrees_with_the_expert() -> None:
    found = {one["question"]: [*_disagreements(one["plan"], one["answer"])] for one in QUESTIONS}
    wrong = {question: points for question, points in found.items() if points}
    assert len(wrong) <= MOST_DISAGREEMENTS, "\n".join(f"{question} {points}" for question, points in wrong.items())


def test_an_answer_that_differs_is_a_disagreement() -> None:
    seven = {"target": "7B", "hardware": "g5_12xlarge", "num_gpus": 1}
    assert [*_disagreements(seven, {"fits": True, "plain_ms": [1, 100]})] == []
    for answer in ({"fits": False}, {"plain_ms": [1, 2]}, {"changes": "draft=none"}, {"says": "a word"}):
        assert len([*_disagreements(seven, answer)]) == 1, answer


def _at(content: Any, path: str) -> Any:  # noqa: ANN401 - a part of a document
    for key in path.split("."):
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


def _differences(content: dict[str, Any], question: dict[str, Any]) -> Iterator[str]:
    """Yield every point in which a document differs from the answer."""
    for path, wanted in question.get("answer", {}).items():
        found = _at(content, path)
        agrees = wanted[0] <= found <= wanted[1] if isinstance(wanted, list) else found == wanted
        if not agrees:
            yield f"{path} is {found}, expected {wanted}"
    for path, published in question.get("holds", {}).items():
        low, high = _at(content, path)
        if not low <= published <= high:
            yield f"{path} is {low} to {high}, published {published}"


@pytest.mark.seconds
def test_the_planner_rents_as_the_expert_does(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: dict[str, list[str]] = {}
    for one in RENTALS:
        command.main([*one["command"].split(), "format=json"])
        if points := [*_differences(json.loads(capsys.readouterr().out), one)]:
            wrong[one["question"]] = points
    assert len(wrong) <= MOST_DISAGREEMENTS, "\n".join(f"{question} {points}" for question, points in wrong.items())


def test_an_answer_that_differs_is_a_difference() -> None:
    content = {"fits": True, "machines": [{"machine": "a", "ms": 3.0, "range": [2.0, 4.0]}]}
    for answer in ({"fits": False}, {"machines.0.ms": [4, 5]}, {"machines.0.machine": "b"}):
        assert len([*_differences(content, {"answer": answer})]) == 1, answer
    assert len([*_differences(content, {"holds": {"machines.0.range": 4.5}})]) == 1
    agreed = {"fits": True, "machines.0.ms": [2, 3], "machines.0.machine": "a"}
    assert [*_differences(content, {"answer": agreed, "holds": {"machines.0.range": 2.0}})] == []
