"""`task=evaluate`: what it records, what its gate lets through, and sums that find a change of distribution."""

import math
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import record_of
from llama_ssp.extensions.evaluate import task
from llama_ssp.extensions.evaluate.martingales import CERTAIN, FAULTS, SCORES, Rounds, Sum, roles_of, sums_of
from llama_ssp.extensions.evaluate.probabilities import SampledText, Scorer
from llama_ssp.models import prefill
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.reports.records import CompletionLine
from llama_ssp.reports.summary import CompletionPair, pairs_of
from llama_ssp.settings.drafters import DRAFTERS, of_kind
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.engine.likelihoods import log_probs_of
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling import rules
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.uniforms import Draws
from llama_ssp.weights.checkpoint import inspect
from tests.extensions.evaluate.law_faults import plant
from tests.helpers.composed import compose_run
from tests.helpers.decoders import change_runs, complete, make_decoder, parts_of, tree_of
from tests.helpers.extensions import copying, need
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import grid, heavy, slow
from tests.helpers.models import FAMILIES, build_checkpoint
from tests.helpers.plugins import in_this_process, with_law
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.reports import report

SMALL = ("task=evaluate", "prompt=for i in range(", "num_samples=20", "max_new_tokens=3")


def ids(ended: Ended) -> dict[tuple[str, int], list[int]]:
    return {(line["mode"], line["sample"]): line["token_ids"] for line in ended.lines}


@pytest.mark.heavy
def test_an_interrupted_evaluation_is_resumed_to_the_verdict_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while the target scores the texts, and a crash loses half of them."""
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    ended = launch(*SMALL, "evaluate.gate=true", f"run_dir={alone}")
    assert ended.code == 0, ended.err
    verdict, drawn = ended.summary["evaluation"], ids(ended)
    assert verdict["passed"]
    assert "suite=distribution passed: plain and speculative samples can come from one" in ended.out
    assert "suite=distribution passed; 120 tokens for 1 prompt" in ended.err

    def stopping(recorded: Iterable[CompletionLine]) -> list[CompletionPair]:
        os.kill(os.getpid(), signal.SIGTERM)
        return pairs_of(recorded)

    with monkeypatch.context() as patch:
        patch.setattr(task, "pairs_of", stopping)
        ended = launch(*SMALL, f"run_dir={cut}")
    assert (ended.code, ended.summary["evaluation"], ended.status) == (4, None, "interrupted\n"), ended.err
    file = cut / "run.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[5:25]))
    ended = launch(*SMALL, "gate=true", f"run_dir={cut}")
    assert (ended.code, ended.summary["evaluation"], ids(ended)) == (0, verdict, drawn)

    assert report([str(alone)]) == 0
    page = (alone / "report.html").read_text()
    assert "<b>suite=distribution passed</b>: plain and speculative samples can come from one distribution" in page
    assert re.search(r"<td[^>]*>p-value, next tokens</td><td[^>]*>[0-9.]+</td>", page)


@pytest.mark.seconds
def test_a_closed_gate_ends_with_1_after_all_is_recorded(tmp_path: Path) -> None:
    closed = launch("task=evaluate", "suite=arithmetic", "num_prompts=4", "gate=true", f"run_dir={tmp_path}/run")
    assert (closed.code, closed.summary["evaluation"]["passed"], len(closed.lines)) == (1, False, 8)
    assert closed.status.startswith("1: suite=arithmetic failed: the rates of right answers, plain ")
    assert closed.status.removeprefix("1: ").strip() in closed.err


VERIFY = rules.verify_speculative


def faulty(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> Verdict:
    """The probabilities at twice the temperature are roots, normalised."""
    roots_BTV = draft.drawn_law.sqrt()
    flat_BTV = roots_BTV / roots_BTV.sum(-1, keepdim=True).clamp_min(1e-30)
    return VERIFY(Draft(draft.ids_BK, flat_BTV), target_probs_BTV, draws=draws)


@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [True, False])
def test_a_draft_verified_at_twice_its_temperature_fails(
    is_faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are verified as if drawn at twice their temperature: a third of the samples shows it."""
    if is_faulty:
        monkeypatch.setattr(rules, "verify_speculative", faulty)
    ended = launch("task=evaluate", "gate=true", "num_samples=80", f"run_dir={tmp_path}/run")
    assert ended.code == int(is_faulty), ended.err
    assert ("samples come from different distributions" in ended.err) is is_faulty


@pytest.mark.heavy
@pytest.mark.parametrize("rule", ["block", slow("coupled")])
def test_every_rule_passes(rule: str, tmp_path: Path) -> None:
    ended = launch(*SMALL, "gate=true", f"verification={rule}", f"run_dir={tmp_path}/run")
    assert ended.code == 0, ended.err


@pytest.mark.heavy
def test_no_residual_is_expected_of_a_head_whose_second_token_has_another_law_than_its_first(tmp_path: Path) -> None:
    sizes = "num_samples=40", "max_new_tokens=12", "batch_size=40"
    ended = launch("task=evaluate", "prompt=import", *sizes, "draft=tiny-eagle", f"run_dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    measures = ended.summary["evaluation"]["measures"]
    assert not [found for found in measures if "after a rejection" in found["name"]]


@pytest.mark.parametrize(
    ("arguments", "rounds"),
    [
        ((), Rounds(sees_rejections=True)),
        (
            ("verification=block", "sampling.repetition_penalty=1.2"),
            Rounds(rule="block", sees_rejections=True, penalizes=True),
        ),
        (("verification=coupled",), Rounds(rule="coupled")),
        (("model.dtype=bf16",), Rounds()),
        (("draft.model.cache_dtype=int8",), Rounds()),
        (("draft=ngram",), Rounds(rule=CERTAIN)),
        (("draft.greedy=true",), Rounds(rule=CERTAIN)),
        (("speculation.tree=2x2x1",), Rounds(widths=(2, 2, 1))),
        (("draft=ngram", "speculation.tree=3x1"), Rounds(rule=CERTAIN, widths=(3, 1))),
        (("speculation.tree=dynamic-6x2x3",), Rounds(rule=CERTAIN, widths=(3, 3))),
        (("draft.fallback=ngram", "speculation.num_draft_tokens=auto"), Rounds(num_known=0)),
        (("draft.tokenizer=own",), Rounds(num_known=0)),
    ],
    ids=str,
)
def test_scores_follow_how_rounds_draft_and_verify(arguments: tuple[str, ...], rounds: Rounds) -> None:
    given = ["task=evaluate", *arguments]
    if not any("dtype" in argument for argument in arguments):
        given.append("model.dtype=fp32")
    config, _ = compose_run(*given)
    assert task.rounds_of(config, has_head=False) == rounds
    of_head = task.rounds_of(config, has_head=True)
    assert (of_head.sees_rejections, of_head.num_known) == (False, min(rounds.num_known, 1))


@pytest.mark.seconds
def test_the_texts_of_a_plugins_law_are_judged_by_its_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a round's first token alone, since it may depend on where a round began; it has read what it needs."""
    (with_law(tmp_path) / "my_reading.py").write_text(READING)
    in_this_process(tmp_path, monkeypatch)
    reading = replace(DRAFTERS.of("near"), make="my_reading:Reading", prepare="my_reading:read")
    monkeypatch.setitem(DRAFTERS.records, "near", reading)
    for rule in ("speculative", "block", "coupled"):
        config, _ = compose_run(*SMALL, "model.dtype=fp32", "draft=none", f"verification={rule}")
        rounds = task.rounds_of(replace(config, draft=of_kind("near")), has_head=False)
        assert rounds == Rounds(rule=rule, num_known=1)
    words = ("--config-dir", f"{tmp_path}/conf", *SMALL, "draft=near", "suite=distribution", f"run_dir={tmp_path}/run")
    assert launch(*words).well().summary["evaluation"]["passed"]
    monkeypatch.setitem(DRAFTERS.records, "near", replace(DRAFTERS.of("near"), draws=False))
    undeclared = launch(*words[:-1], f"run_dir={tmp_path}/undeclared")
    assert undeclared.code == 2
    assert "the draft draws from a law, and its DrafterRecord does not say so: give it draws=True\n" in undeclared.err


def test_rounds_of_a_greedy_draft_and_a_fallback_with_a_law_are_not_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("adaptive")
    in_this_process(with_law(tmp_path), monkeypatch)
    words = ("draft.greedy=true", "draft.fallback=near", "speculation.num_draft_tokens=auto")
    config, _ = compose_run(*SMALL, "model.dtype=fp32", *words)
    assert task.rounds_of(config, has_head=False) == Rounds(num_known=0)


READING = """
from my_laws import NearDrafter


def read(config, *tokenizers):
    return "what it needs"


class Reading(NearDrafter):
    def __init__(self, parts):
        super().__init__(parts)
        assert parts.prepared == "what it needs"
"""
PROMPT = (3, 1, 4)
TEXTS = [(5,), (1, 5, 9), (2, 6, 5, 3, 5, 8, 9), (7, 9), (3, 2, 3, 8, 4)]
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0),
    "sampled": SamplingConfig(temperature=0.7, top_k=6),
    "penalized": SamplingConfig(temperature=1.3, repetition_penalty=1.5, presence_penalty=0.3),
}


def expected(runner: PrefixRunner, token_ids: tuple[int, ...], sampling: SamplingConfig) -> list[float]:
    """One token after the other, from the whole prefix."""
    found = []
    for place, token in enumerate(token_ids):
        ids = [*PROMPT, *token_ids[:place]]
        logits = runner.logits(ids).double()
        for known in set(ids):
            if sampling.penalizes:
                scaled = logits[known] * 1.5 if logits[known] < 0 else logits[known] / 1.5
                logits[known] = scaled - 0.3 * (known in token_ids[:place])
        logits = logits / (sampling.temperature or 1)
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
        found.append(max(float(logits.log_softmax(-1)[token]), float(torch.tensor(1e-30).log())))
    return found


@grid(batch_size=(1, 2, 7), num_positions=(1, 3, 9), sampling=tuple(SAMPLINGS.values()))
def test_every_token_has_its_log_probability(batch_size: int, num_positions: int, sampling: SamplingConfig) -> None:
    runner = PrefixRunner()
    scorer = Scorer(runner, log_probs_of(sampling), batch_size=batch_size, longest=10, num_positions=num_positions)
    texts = [SampledText(prompt_ids=PROMPT, token_ids=ids) for ids in TEXTS]
    with torch.inference_mode():
        found = [score.log_probs for batch in scorer.score(texts) for score in batch]
    assert [len(row) for row in found] == [len(ids) for ids in TEXTS]
    for row, ids in zip(found, TEXTS, strict=True):
        assert row == pytest.approx(expected(runner, ids, sampling), abs=1e-4)


def test_a_prompt_is_read_once_for_all_its_texts() -> None:
    runner = PrefixRunner()
    scorer = Scorer(runner, log_probs_of(SAMPLINGS["greedy"]), batch_size=1, longest=10, num_positions=9)
    with torch.inference_mode():
        list(scorer.score([SampledText(prompt_ids=PROMPT, token_ids=(1, 2))] * 5))
    assert runner.num_forwards == 1 + 5


HYBRIDS = [kind for kind in FAMILIES if record_of(kind.partition(",")[0]).recurrent]


@pytest.mark.parametrize("kind", ["lfm2", *map(slow, HYBRIDS)])
def test_several_texts_of_a_prompt_are_scored_from_the_state_after_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read in chunks of 8."""
    for module in (engine, prefill):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 8)
    model, prompt = build_checkpoint(tmp_path, kind), tuple(range(2, 32))
    new = [tuple(range(start, start + 9)) for start in (3, 50, 90)]
    scorer = Scorer(
        load_model(Loading(inspect(tmp_path))),
        log_probs_of(SamplingConfig(temperature=1.0)),
        batch_size=1,
        longest=len(prompt) + 9,
        num_positions=4,
    )
    with torch.inference_mode():
        found = [
            score.log_probs
            for scores in scorer.score([SampledText(prompt_ids=prompt, token_ids=ids) for ids in new])
            for score in scores
        ]
        for ids, log_probs in zip(new, found, strict=True):
            logits_TV = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            wanted = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(log_probs), wanted.double(), rtol=0, atol=1e-4, check_dtype=False)


VOCAB_SIZE, NUM_DRAFT_TOKENS, BATCH_SIZE, NUM_TOKENS = 48, 4, 256, 48
LEAST_P = 1e-3 / (len(SCORES) + 2)
TREE = "2x1x1"
PLAIN, PENALIZED = SamplingConfig(temperature=1.0), SamplingConfig(temperature=1.0, repetition_penalty=1.3)


def sums_of_samples(
    rule_name: str,
    *,
    ngram: bool,
    num_texts: int,
    seed: int = 0,
    sampling: SamplingConfig = PLAIN,
    tree: str | None = None,
) -> dict[str, Sum]:
    """Decode samples of two prompts, and score them."""
    shape = tree_of(tree)
    # Only a draft that is surer than the target rejects a token that takes much of its law along.
    target_sharpness, draft_sharpness = (3.0, 4.0) if tree else (2.0, 0.7)
    target = PrefixRunner(VOCAB_SIZE, seed=seed, sharpness=target_sharpness)
    draft = None if ngram else PrefixRunner(VOCAB_SIZE, seed=seed, sharpness=draft_sharpness)
    decoder = make_decoder(
        target,
        draft,
        sampling=sampling,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        batch_size=BATCH_SIZE,
        rule_name=rule_name,
        ngram=ngram,
        tree=shape,
    )
    change_runs(decoder, seed=seed)
    requests = [
        Request(index=index, sample=sample, prompt_ids=ids, max_new_tokens=NUM_TOKENS)
        for index, ids in enumerate([(3, 1, 4), (5, 9)])
        for sample in range(num_texts // 2)
    ]
    texts = []
    for done in complete(decoder, requests):
        roles = roles_of(done.accepted_lengths, done.examined_lengths, num_tokens=len(done.token_ids))
        texts.append(
            (
                done.request.index,
                SampledText(prompt_ids=done.request.prompt_ids, token_ids=tuple(done.token_ids), roles=tuple(roles)),
            )
        )
    parts = parts_of(draft, rule=make_rule(sampling, VerificationConfig()), num_draft_tokens=NUM_DRAFT_TOKENS)
    drafter = ModelDrafter(parts) if draft else copying(parts)
    rounds = Rounds(
        rule=CERTAIN if ngram and rule_name != "coupled" else rule_name,
        widths=shape.shape.widths if shape else (),
        penalizes=sampling.penalizes,
        sees_rejections=not (ngram or shape or rule_name == "coupled"),
    )
    scorer = Scorer(
        target,
        log_probs_of(sampling),
        batch_size=BATCH_SIZE,
        longest=3 + NUM_TOKENS,
        num_positions=NUM_DRAFT_TOKENS + 1,
        drafter=drafter,
        rounds=rounds,
    )
    scores = []
    with torch.inference_mode():
        for _, of_prompt in groupby(texts, key=lambda entry: entry[0]):
            for batch in scorer.score([text for _, text in of_prompt]):
                scores += batch
    return sums_of(score.sums for score in scores if score.sums)


def sums_for(fault: str, rule_name: str, *, ngram: bool, num_texts: int, seed: int = 0) -> dict[str, Sum]:
    """The sums of samples that a fault would change, were it planted."""
    sampling, tree = (PENALIZED if fault == "forgetful penalty" else PLAIN), (TREE if fault == "kept sibling" else None)
    return sums_of_samples(rule_name, ngram=ngram, num_texts=num_texts, seed=seed, sampling=sampling, tree=tree)


def is_found(sums: dict[str, Sum]) -> bool:
    return min(sums_of.p_value for sums_of in sums.values()) <= LEAST_P


@pytest.mark.seconds
@grid(rule_name=("speculative", "block", "coupled"), ngram=(False, True), sampling=(PLAIN, PENALIZED))
def test_the_sums_of_true_samples_are_as_wide_as_their_variances_say(
    rule_name: str, ngram: bool, sampling: SamplingConfig
) -> None:
    """A false alarm has a probability below 0.001 for each of the 12 cases; the seed is fixed."""
    sums = sums_of_samples(rule_name, ngram=ngram, num_texts=128, sampling=sampling)
    assert not is_found(sums)
    assert all(abs(sums_of.z) < 4.5 for sums_of in sums.values())
    assert sum(sums_of.z**2 for sums_of in sums.values()) > 1, "a variance far too large would hide every fault"


APPLIES = [
    *(
        (rule, False, fault)
        for rule in ("speculative", "block")
        for fault in ("wrong residual", "bonus of the draft", "key of the run")
    ),
    # Copies are certain: the target's own choices decide, without residuals and acceptance.
    *(("speculative", True, fault) for fault in ("bonus of the draft", "key of the run")),
    ("speculative", False, "shifted key"),
    *(
        (rule, False, fault)
        for rule in ("speculative", "block")
        for fault in ("acceptance by the draft's key", "shared uniforms")
    ),
    ("block", False, "weightless residual"),
    ("speculative", False, "kept sibling"),
    ("speculative", False, "shared race"),
    *(("coupled", ngram, fault) for ngram in (False, True) for fault in ("bonus of the draft", "key of the round")),
    # What an n-gram draft copies stands in the text already, so a repetition penalty does not miss it.
    *((rule, False, "forgetful penalty") for rule in ("speculative", "block", "coupled")),
    # `block` with a model as the draft needs many times as many texts of these models.
    *(("speculative", False, fault) for fault in ("u x 0.95", "u x 1.05")),
]
FAST = [
    ("speculative", True, "key of the run"),
    ("block", False, "weightless residual"),
    ("speculative", False, "kept sibling"),
    ("coupled", False, "key of the round"),
]


@pytest.mark.parametrize(
    ("rule_name", "ngram", "fault", "num_seeds"),
    [*(heavy(*case, 1) for case in FAST[:2]), *(slow(*case, 10) for case in APPLIES)],
)
def test_a_planted_fault_is_found_with_every_seed(
    rule_name: str, ngram: bool, fault: str, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, monkeypatch)
    num_texts = 1024 if num_seeds == 1 else 4096 if ngram or fault[0] == "u" else 2048
    sums = (sums_for(fault, rule_name, ngram=ngram, num_texts=num_texts, seed=seed) for seed in range(num_seeds))
    assert all(map(is_found, sums))


@pytest.mark.slow
@pytest.mark.parametrize("ngram", [False, True], ids=["model", "ngram"])
@pytest.mark.parametrize("rule_name", ["speculative", "block", "coupled"])
def test_the_true_rules_raise_no_alarm_with_twenty_seeds(rule_name: str, ngram: bool) -> None:
    """With probability 0.98 at least."""
    for seed in range(20):
        assert not is_found(sums_of_samples(rule_name, ngram=ngram, num_texts=1024, seed=seed))


@pytest.mark.heavy
def test_the_sums_of_true_trees_are_as_wide_as_their_variances_say() -> None:
    """A false alarm has a probability below 0.001; the seed is fixed."""
    sums = sums_of_samples("speculative", ngram=False, num_texts=128, tree=TREE)
    assert not is_found(sums)
    assert all(abs(sums_of.z) < 4.5 for sums_of in sums.values())


@pytest.mark.parametrize(
    ("planted", "rule_name", "meant"),
    [
        slow("wrong residual", "speculative", "a residual drawn from the target"),
        slow("weightless residual", "block", "a residual that forgets the block's weight"),
        slow("shared uniforms", "block", "a residual that shares the draft's uniforms"),
        slow("shared race", "speculative", "a residual that shares the draft's race"),
        slow("kept sibling", "speculative", "a rejected sibling kept in the draft's law"),
        slow("forgetful penalty", "block", "penalties that forget drafted tokens"),
    ],
)
def test_the_power_is_that_of_the_planted_fault(
    planted: str, rule_name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shift that the probabilities of true samples promise is the one that the fault causes.

    To a sixth: the fault leads to other texts, along which the shift is another one.
    """
    place, promised = [*FAULTS].index(meant), sums_for(planted, rule_name, ngram=False, num_texts=1024)
    plant(planted, monkeypatch)
    found = sums_for(planted, rule_name, ngram=False, num_texts=1024)
    names = [name for name in SCORES if name.endswith(meant) and promised[name].varies]
    assert names
    for name in names:
        error = 4 * math.sqrt(promised[name].variance)
        assert promised[name].shifts[place] > error / 4, name
        assert found[name].value == pytest.approx(promised[name].shifts[place], abs=error, rel=1 / 6), name
