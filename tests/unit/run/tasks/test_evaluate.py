"""`task=evaluate` from its command to its verdict: what it records, how it resumes, and what its gate lets through."""

import json
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.evaluation.martingales import CERTAIN, Rounds
from llama_ssp.reports.records import CompletionLine
from llama_ssp.reports.summary import CompletionPair, pairs_of
from llama_ssp.run.commands import report
from llama_ssp.run.tasks import evaluate
from llama_ssp.speculate.sampling import rules
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.composed import compose_run
from tests.helpers.in_process import launch

SMALL = ("task=evaluate", "prompt=for i in range(", "num_samples=20", "max_new_tokens=3")


def verdict(run_dir: Path) -> Any:  # noqa: ANN401 - an object, or null
    """What the summary says."""
    return json.loads((run_dir / "summary.json").read_text())["evaluation"]


def lines(run_dir: Path) -> list[bytes]:
    return (run_dir / "run.jsonl").read_bytes().splitlines(keepends=True)


@pytest.mark.heavy
def test_an_interrupted_evaluation_is_resumed_to_the_verdict_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while the target scores the texts, and a crash loses half of them."""
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    ended = launch(*SMALL, "evaluate.gate=true", f"run_dir={alone}")
    assert ended.code == 0, ended.err
    assert verdict(alone)["passed"]
    assert "suite=distribution passed: plain and speculative samples can come from one" in ended.out
    assert "suite=distribution passed; 120 tokens for 1 prompt" in ended.err

    def stopping(recorded: Iterable[CompletionLine]) -> list[CompletionPair]:
        os.kill(os.getpid(), signal.SIGTERM)
        return pairs_of(recorded)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "pairs_of", stopping)
        ended = launch(*SMALL, f"run_dir={cut}")
    assert (ended.code, verdict(cut)) == (4, None), ended.err
    assert (cut / "status").read_text() == "interrupted\n"
    (cut / "run.jsonl").write_bytes(b"".join(lines(cut)[5:25]))
    assert launch(*SMALL, "gate=true", f"run_dir={cut}").code == 0
    assert verdict(cut) == verdict(alone)
    found = (
        {(line["mode"], line["sample"]): line["token_ids"] for line in map(json.loads, lines(folder))}
        for folder in (cut, alone)
    )
    assert next(found) == next(found)

    assert report.main([str(alone)]) == 0
    page = (alone / "report.html").read_text()
    assert "<b>suite=distribution passed</b>: plain and speculative samples can come from one distribution" in page
    assert re.search(r"<td[^>]*>p-value, next tokens</td><td[^>]*>[0-9.]+</td>", page)


def test_a_closed_gate_ends_with_1_after_all_is_recorded(tmp_path: Path) -> None:
    closed = launch("task=evaluate", "suite=arithmetic", "num_prompts=4", "gate=true", f"run_dir={tmp_path}/run")
    assert closed.code == 1
    assert verdict(tmp_path / "run")["passed"] is False
    status = (tmp_path / "run" / "status").read_text()
    assert status.startswith("1: suite=arithmetic failed: the rates of right answers, plain ")
    assert status.removeprefix("1: ").strip() in closed.err
    assert len(lines(tmp_path / "run")) == 8
    assert (tmp_path / "run" / "report.html").exists()


def double_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify with the probabilities that the draft would have at twice its temperature: their roots, normalised."""
    verify = rules.verify_speculative

    def faulty(draft: rules.Draft, target_probs_BTV: Any, *, draws: Draws) -> rules.Verdict:  # noqa: ANN401
        assert draft.probs_BTV is not None
        roots_BTV = draft.probs_BTV.sqrt()
        flat_BTV = roots_BTV / roots_BTV.sum(-1, keepdim=True).clamp_min(1e-30)
        return verify(rules.Draft(draft.ids_BK, flat_BTV), target_probs_BTV, draws=draws)

    monkeypatch.setattr(rules, "verify_speculative", faulty)


@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [True, False])
def test_a_draft_verified_at_twice_its_temperature_fails(
    is_faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Already a third of the samples shows it. docs/guides/evaluate.md has the power of all of them."""
    if is_faulty:
        double_the_temperature(monkeypatch)
    ended = launch("task=evaluate", "gate=true", "num_samples=80", f"run_dir={tmp_path}/run")
    assert ended.code == int(is_faulty), ended.err
    assert ("samples come from different distributions" in ended.err) is is_faulty


@pytest.mark.heavy
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_every_rule_passes(rule: str, tmp_path: Path) -> None:
    ended = launch(*SMALL, "gate=true", f"verification={rule}", f"run_dir={tmp_path}/run")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("arguments", "rounds"),
    [
        ((), Rounds(sees_rejections=True)),
        (("verification=block", "sampling.repetition_penalty=1.2"),
         Rounds(rule="block", sees_rejections=True, penalizes=True)),
        (("verification=coupled",), Rounds(rule="coupled")),
        (("model.dtype=bf16",), Rounds()),
        (("draft.model.cache_dtype=int8",), Rounds()),
        (("draft=ngram",), Rounds(rule=CERTAIN)),
        (("draft.greedy=true",), Rounds(rule=CERTAIN)),
        (("speculation.tree=2x2x1",), Rounds(widths=(2, 2, 1))),
        (("draft=ngram", "speculation.tree=3x1"), Rounds(rule=CERTAIN, widths=(3, 1))),
        (("speculation.tree=dynamic-6x2x3",), Rounds(rule=CERTAIN, widths=(3, 3))),
    ],
    ids=str,
)  # fmt: skip
def test_scores_follow_how_rounds_draft_and_verify(arguments: tuple[str, ...], rounds: Rounds) -> None:
    given = ["task=evaluate", *arguments]
    if not any("dtype" in argument for argument in arguments):
        given.append("model.dtype=fp32")
    assert evaluate.rounds_of(compose_run(*given)[0]) == rounds
