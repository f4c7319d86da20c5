"""Rows of a batch with settings of their own: the law of each is exact, and its text is that of a batch of its own."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.engine import sets_of_steps
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.engine import batch_space
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling import by_row
from llama_ssp.speculate.sampling.by_row import ByRow, settings_of
from llama_ssp.speculate.sampling.context import Context, penalty
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.row_steps import RowSteps
from llama_ssp.speculate.sampling.rules import make_rule
from tests.helpers.decoders import complete, make_decoder, requests
from tests.helpers.exact_law import EVERY_STEP, exact_law
from tests.helpers.operator_count import OperatorSizes
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.table_models import joint_law, random_table

MIXED = [
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.25, top_k=3),
    SamplingConfig(temperature=1.0, top_p=0.7, min_p=0.125),
    SamplingConfig(temperature=0.5, top_k=2, top_p=0.9),
    SamplingConfig(temperature=1.5, frequency_penalty=0.5, presence_penalty=-0.25, min_new_tokens=2, eos_ids=(2,)),
    SamplingConfig(temperature=0.75, repetition_penalty=1.5, logit_bias={0: 1.5, 3: -0.5}, min_p=0.25),
    SamplingConfig(temperature=0.0, repetition_penalty=2.0, logit_bias={2: 0.25}),
    SamplingConfig(temperature=1.25, top_nsigma=0.75, top_p=0.9),
]
PROMPT = (3, 1, 1)


@pytest.fixture(autouse=True)
def _few_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_row, "MOST_BIASES", 3)
    monkeypatch.setattr(batch_space, "NUM_SETTINGS", len(settings_of(MIXED[0])))


def settings(samplings: list[SamplingConfig]) -> Tensor:
    return torch.tensor([settings_of(sampling) for sampling in samplings], dtype=torch.float64)


def alone(logits_BTV: Tensor, context: Context, sampling: SamplingConfig) -> Tensor:
    """What a batch with these settings makes of its logits."""
    if penalize := penalty(sampling):
        logits_BTV = penalize(logits_BTV, context)
    if sampling.temperature:
        return processor(sampling)(logits_BTV)
    return torch.zeros_like(logits_BTV).scatter_(-1, logits_BTV.argmax(-1, keepdim=True), 1.0)


def law_error(rule_name: str, *, is_point_mass: bool = False, of_rows: list[SamplingConfig] = MIXED) -> Tensor:
    """The largest error (G,) of the law of each row's text, which gets the settings `of_rows`."""
    num_draft_tokens, num_tables = 1, len(MIXED)
    target, draft = (random_table(seed=seed, num_tables=num_tables, max_length=num_draft_tokens) for seed in (13, 23))
    sampling = SamplingConfig(temperature=1.0, by_row=True)
    rule = make_rule(sampling, VerificationConfig(rule=rule_name))
    measured = exact_law(
        rule,
        target=target,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        is_point_mass=is_point_mass,
        prompt=PROMPT,
        settings_GX=settings(of_rows),
    )
    wanted = []
    for length, logits in enumerate(target.logits):
        prefixes = [(*PROMPT, *prefix, 0) for prefix in product(range(4), repeat=length)]  # none looks at the last
        lengths_B = torch.full((len(prefixes),), len(PROMPT))
        context = Context(torch.tensor(prefixes), lengths_B, lengths_B, lengths_B[:, None] + length - 1)
        wanted.append(
            torch.stack([alone(table[:, None], context, one)[:, 0] for table, one in zip(logits, MIXED, strict=True)])
        )
    return (measured - joint_law(tuple(wanted))).abs().amax(1)


@pytest.mark.parametrize(
    ("rule_name", "is_point_mass"), [("speculative", False), ("block", False), ("speculative", True)]
)
def test_the_law_of_each_row_of_a_mixed_batch_is_that_of_its_settings(rule_name: str, is_point_mass: bool) -> None:
    assert float(law_error(rule_name, is_point_mass=is_point_mass).max()) < 1e-12


def test_settings_of_the_neighbour_are_found_out() -> None:
    assert (law_error("speculative", of_rows=MIXED[-1:] + MIXED[:-1]) > 1e-3).sum() == len(MIXED) - 1  # two are greedy


@pytest.mark.parametrize(
    "chosen",
    [
        [1],
        [1, 1, 1],
        [0, 1, 1],
        [1, 2, 1, 1, 1],
        [1, 3, 4, 5, 6],
        [*range(len(MIXED))],
        [8, 7, 6, 5, 1, 1],
        [2, 3, 1, 1],
    ],
)
@pytest.mark.parametrize("num_vacant", [0, 3])
@pytest.mark.parametrize("few", [False, True], ids=["as needed", "of graphs"])
def test_steps_of_other_rows_change_no_bit(chosen: list[int], num_vacant: int, few: bool) -> None:
    """In batches of some of these rows, whose steps are as many as they need, with vacant rows before and between."""
    samplings = [MIXED[place] for place in chosen]
    steps = RowSteps.of(samplings, limits=False, few=few)
    num_rows, vocab_size = len(samplings) + num_vacant, 300
    generator = torch.Generator().manual_seed(3)
    logits_BTV = 3 * torch.randn(num_rows, 3, vocab_size, generator=generator)
    tokens_BS = torch.randint(vocab_size, (num_rows, 9), generator=generator)
    lengths_B = torch.full((num_rows,), 4)
    context = Context(tokens_BS, lengths_B, lengths_B, torch.arange(4, 7).expand(num_rows, -1), settings(samplings))
    rows = [*range(num_rows)][:: 2 if num_vacant > len(samplings) else 1][-len(samplings) :]
    settings_BX = torch.zeros(num_rows, context.sampling_BX.shape[1], dtype=torch.float64)
    settings_BX[:, 0] = 1
    settings_BX[rows] = context.sampling_BX
    context = context._replace(sampling_BX=settings_BX)
    found_BTV = ByRow()(logits_BTV, context._replace(steps=steps))
    for row, sampling in zip(rows, samplings, strict=True):
        one = context.some(slice(row, row + 1))
        assert found_BTV[row].equal(alone(logits_BTV[row : row + 1], one, sampling)[0]), sampling


@pytest.mark.parametrize("num_rows", [1, 2, 7, 32])
def test_rounds_that_are_graphs_have_few_sets_of_steps_which_have_all_that_rows_need(num_rows: int) -> None:
    kinds = [MIXED[1], MIXED[0], MIXED[3], MIXED[5], MIXED[6]]
    of_graphs = set()
    for numbers in product(range(num_rows + 1), repeat=2):
        for other, third, limits in product(kinds, kinds, (False, True)):
            samplings = [*[other] * numbers[0], *[third] * numbers[1], *[kinds[0]] * num_rows][:num_rows]
            needed, few = (RowSteps.of(samplings, limits=limits, few=each) for each in (False, True))
            assert all(have >= need for have, need in zip(vars(few).values(), vars(needed).values(), strict=True))
            of_graphs.add((*list(vars(few).values())[:3], few.limits, min(few.most, num_rows)))
    assert len(of_graphs) == sets_of_steps(num_rows)


def test_a_row_costs_its_neighbours_no_sort_and_no_count_of_their_tokens() -> None:
    """Of 16 rows, two truncate: two are sorted; rows without settings run what a softmax needs."""
    context_of: Any = {
        number: Context(
            torch.zeros(number, 9, dtype=torch.long),
            torch.zeros(number, dtype=torch.long),
            torch.full((number,), 4),
            torch.arange(4, 7).expand(number, -1),
            settings([MIXED[1]] * number),
        )
        for number in (2, 16)
    }
    plain, mixed = [MIXED[1]] * 16, [*[MIXED[1]] * 14, MIXED[3], MIXED[4]]
    counted = {}
    for name, samplings in (("plain", plain), ("mixed", mixed), ("penalized", [*plain[1:], MIXED[6]])):
        steps = RowSteps.of(samplings, limits=False)
        logits_BTV = torch.randn(16, 3, 1000)
        context = context_of[16]._replace(sampling_BX=settings(samplings))
        with OperatorSizes() as sizes:
            ByRow()(logits_BTV, context._replace(steps=steps))
        counted[name] = sizes
    assert counted["plain"].num_kernels <= 4
    assert not counted["plain"].of("sort")
    assert not counted["plain"].of("scatter")
    assert max(counted["mixed"].of("sort")) == 2 * 3 * 1000
    assert sum(size > 2 * 3 * 1000 for size in counted["penalized"].of("scatter")) == 1, "of the best tokens"


def served(*, batch_size: int, lag: int = 0) -> Decoder:
    made = make_decoder(
        PrefixRunner(),
        PrefixRunner(seed=1),
        batch_size=batch_size,
        eos_ids=[4],
        replay=False,
        sampling=SamplingConfig(temperature=1.0, by_row=True),
    )
    made.lag = lag
    return made


@pytest.mark.parametrize("sampling", [MIXED[2], MIXED[3], MIXED[5], MIXED[6]])
def test_a_row_that_has_ended_takes_no_step_from_its_neighbours(sampling: SamplingConfig) -> None:
    """The first row ends early, with the settings of the last one."""
    first, middle, last = (
        replace(request, sampling=one, seed=3, max_new_tokens=number, ignores_eos=True)
        for request, one, number in zip(requests(40), (sampling, MIXED[1], sampling), (3, 40, 40), strict=False)
    )
    together = complete(served(batch_size=3), [first, middle, last])
    [alone] = complete(served(batch_size=1), [last])
    assert together[2].token_ids == alone.token_ids


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_has_the_text_of_a_batch_of_its_own(lag: int) -> None:
    """Greedy rows have the text of greedy runs, and sampled ones that of a run with their seed and settings."""
    wanted = [
        replace(request, sampling=sampling, seed=100 + request.index, ignores_eos=request.index % 2 == 0)
        for request, sampling in zip(requests(24), (*MIXED[1:5], *MIXED[6:]), strict=True)
    ]
    greedy = [replace(one, index=7 + one.index, sampling=MIXED[0]) for one in wanted[:2]]
    whole = complete(served(batch_size=3, lag=lag), [*wanted, *greedy])
    for done in whole:
        request = done.request
        [one] = complete(served(batch_size=1), [request])
        assert request.sampling
        run = make_decoder(
            PrefixRunner(),
            PrefixRunner(seed=1),
            sampling=request.sampling,
            replay=False,
            eos_ids=[] if request.ignores_eos else [4],
        )
        assert request.seed is not None
        run.settings = replace(run.settings, seed=request.seed)
        [in_run] = complete(run, [replace(request, sampling=None, seed=None)])
        assert done.token_ids == one.token_ids == in_run.token_ids


def test_a_dropped_request_frees_its_row_for_the_next() -> None:
    made, wanted = (
        served(batch_size=2),
        [replace(one, sampling=MIXED[1], seed=1, ignores_eos=True) for one in requests()[:4]],
    )
    dropped = False

    def more(run: Decoding, _number: int) -> list[Request] | None:
        nonlocal dropped
        if not dropped and any(len(row.token_ids) > 3 for row in run.rows.decoding):
            run.drop([0, 3])
            dropped = True
        return None if dropped else []

    with torch.inference_mode():
        ended = [
            update.completion.request.index
            for updates in made.run(wanted, more=more)
            for update in updates
            if update.completion.finish_reason
        ]
    assert sorted(ended) == [1, 2]


@pytest.mark.seconds
def test_extreme_settings_have_the_law_of_a_batch_of_their_own() -> None:
    """Every setting at its bounds and far beyond, alone and with each of some others, of logits with minus infinity."""
    temperatures = [0.0, 1e-6, 1.0, 1e38, 1e60, 1e300]
    fields: list[dict[str, Any]] = [
        {},
        *({"top_k": number} for number in (1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**70)),
        *({"top_p": share} for share in (1e-300, 1e-12, 1 - 2**-53, 1.0)),
        *({"min_p": share} for share in (1e-300, 1e-30, 1.0)),
        *({"top_nsigma": number} for number in (1e-300, 0.5, 1e300)),
        *({"repetition_penalty": number} for number in (0.01, 100.0)),
        *({name: number} for name in ("frequency_penalty", "presence_penalty") for number in (-1e4, 1e4)),
        {"logit_bias": {0: 1e4, 1: -1e4}},
    ]
    samplings = [
        SamplingConfig(temperature=temperature, **{**one, **other})
        for temperature in temperatures
        for one, other in product(fields, fields)
    ]
    num_rows, vocab_size = len(samplings), 50
    generator = torch.Generator().manual_seed(5)
    logits_BTV = 30 * torch.randn(num_rows, 1, vocab_size, generator=generator)
    logits_BTV[..., 7] = -torch.inf
    tokens_BS = torch.randint(vocab_size, (num_rows, 9), generator=generator)
    lengths_B = torch.full((num_rows,), 4)
    context = Context(tokens_BS, lengths_B, lengths_B, torch.full((num_rows, 1), 8), settings(samplings))
    found_BTV = ByRow()(logits_BTV, context._replace(steps=EVERY_STEP))
    for row, sampling in enumerate(samplings):
        one = context.some(slice(row, row + 1))
        assert found_BTV[row].equal(alone(logits_BTV[row : row + 1], one, sampling)[0]), sampling
        assert found_BTV[row].sum() == pytest.approx(1), sampling
