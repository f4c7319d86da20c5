"""The planner answers the questions of `questions.yaml` as an expert does; 28 of 30 must agree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from llama_ssp import plan
from llama_ssp.planning.plan import Plan, document
from llama_ssp.settings.schema import Offload, PlacementConfig, TargetKind, TargetPlacement

QUESTIONS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text())
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
    assert len(QUESTIONS) == 30
    assert all(one["question"].endswith("?") and one["arithmetic"] and one["answer"] for one in QUESTIONS)


def test_the_planner_agrees_with_the_expert() -> None:
    found = {one["question"]: [*_disagreements(one["plan"], one["answer"])] for one in QUESTIONS}
    wrong = {question: points for question, points in found.items() if points}
    assert len(wrong) <= MOST_DISAGREEMENTS, "\n".join(f"{question} {points}" for question, points in wrong.items())


def test_an_answer_that_differs_is_a_disagreement() -> None:
    seven = {"target": "7B", "hardware": "g5_12xlarge", "num_gpus": 1}
    assert [*_disagreements(seven, {"fits": True, "plain_ms": [1, 100]})] == []
    for answer in ({"fits": False}, {"plain_ms": [1, 2]}, {"changes": "draft=none"}, {"says": "a word"}):
        assert len([*_disagreements(seven, answer)]) == 1, answer
