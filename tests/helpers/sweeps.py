"""Sweeps for tests of reports: runs over temperature and K whose true medians are known."""

import math
import random
from dataclasses import replace
from functools import cache
from itertools import product

from llama_ssp.reports.records import CompletionLine, Summary
from llama_ssp.reports.runs import Run
from tests.helpers.runs import FAST, PLAIN, summary

PLAIN_MS = 5.0
"""True median of the prompts' plain ms/token."""
NUM_TOKENS, NUM_SAMPLES = 20, 2


def true_speedup(*, temperature: float, k: int) -> float:
    """True median of the prompts' speed-ups."""
    return 1.0 + 0.2 * k - 0.5 * temperature


def true_acceptance(*, temperature: float) -> float:
    """True mean of the prompts' acceptances."""
    return 0.9 - 0.3 * temperature


def simulated_sweep(draw: random.Random, *, num_prompts: int = 15) -> list[Run]:
    """A run for each temperature and K; prompts differ more than the samples of a prompt do."""
    return [
        simulated_run(draw, name=f"sweep/{number}", temperature=temperature, k=k, num_prompts=num_prompts)
        for number, (temperature, k) in enumerate(product((0.0, 1.0), (2, 4)))
    ]


def simulated_run(draw: random.Random, *, name: str, temperature: float, k: int, num_prompts: int) -> Run:
    lines = []
    for index in range(num_prompts):
        plain_ms = PLAIN_MS * math.exp(draw.gauss(0, 0.2))
        fast_ms = plain_ms / (true_speedup(temperature=temperature, k=k) * math.exp(draw.gauss(0, 0.3)))
        accepts = min(max(true_acceptance(temperature=temperature) + draw.uniform(-0.1, 0.1), 0.0), 1.0)
        for sample in range(NUM_SAMPLES):
            lines.append(_line(PLAIN, index, sample, ms_per_token=plain_ms))
            fast = _line(FAST, index, sample, ms_per_token=fast_ms)
            accepted = [int(draw.random() < accepts) for _ in range(40)]
            lines.append(
                replace(fast, accepted_lengths=accepted, examined_lengths=[1] * 40, num_rounds=40, draft_lengths=None)
            )
    settings = {"sampling.temperature": temperature, "speculation.num_draft_tokens": k, "run_dir": name}
    return Run(name=name, status="done", summary=_summary(k), lines=tuple(lines), settings=settings)


@cache
def _summary(k: int) -> Summary:
    """A summary with this K: its figures are those of other lines, since intervals come from lines alone."""
    return summary(PLAIN, FAST, num_draft_tokens=k)


def _line(kind: CompletionLine, index: int, sample: int, *, ms_per_token: float) -> CompletionLine:
    return replace(
        kind,
        index=index,
        sample=sample,
        num_new_tokens=NUM_TOKENS,
        token_ids=[1] * NUM_TOKENS,
        ms=ms_per_token * NUM_TOKENS,
        first_token_ms=2 * ms_per_token,
    )
