"""The law of rounds given a text equals what the shipped rules do on tables, and each planted fault is noticed.

`rounds_of_texts` drives the rules themselves (`exact_law`), round after round, and adds up the probability of every
text together with its number of rounds. Given the text, the mean, the variance and the acceptance by position follow.

Shapes: G tables, one for each prefix, V vocabulary, K drafted tokens, N drafts, B texts, T places, D = K + 1.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from llama_ssp.extensions.acceptance import arithmetic
from llama_ssp.extensions.acceptance.arithmetic import Array
from llama_ssp.extensions.acceptance.trees import Place, log_steps, log_steps_of, reach_along
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import Draft, find_topology
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.trees import Tree
from tests.helpers.exact_law import codes_of, processed, round_law
from tests.helpers.lanes import heavy, slow
from tests.helpers.table_models import TableModel, random_table
from tests.helpers.tree_law import round_texts

SAMPLING = SamplingConfig(temperature=0.7)
OTHER = SamplingConfig(temperature=1.0)
END = 2
"""The token that ends a text."""
Text = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A pair of tables whose texts are enumerated: the prefill's token, then rounds up to a length, or to the end."""

    rule: str
    num_draft_tokens: int
    vocab_size: int = 3
    length: int = 4
    has_end: bool = True
    is_certain: bool = False
    tree: str | None = None

    @property
    def models(self) -> tuple[TableModel, TableModel]:
        """Target and draft, deep enough for the last round."""
        sizes = {"num_tables": 1, "max_length": self.length + self.num_draft_tokens, "vocab_size": self.vocab_size}
        return random_table(seed=1, **sizes), random_table(seed=2, **sizes)


CASES = [
    Case("speculative", 1),
    Case("speculative", 2),
    Case("block", 2),
    Case("speculative", 2, is_certain=True),
    Case("block", 2, has_end=False),
    Case("speculative", 1, vocab_size=4),
    Case("block", 2, vocab_size=4, length=3),
]
cases = pytest.mark.parametrize(
    "case",
    [
        *CASES,
        heavy(Case("speculative", 3)),
        heavy(Case("block", 3)),
        heavy(Case("speculative", 2, length=3, tree="2x1")),
        slow(Case("speculative", 2, tree="2x1")),
        slow(Case("speculative", 1, vocab_size=4, has_end=False, length=3, tree="3")),
    ],
    ids=lambda case: "-".join(map(str, vars(case).values())),
)


def after(model: TableModel, length: int) -> TableModel:
    """The tables of all texts of one length: each prefix is a table of its own."""
    size = model.vocab_size
    return TableModel(
        tuple(logits.view(size**length, size**number, size) for number, logits in enumerate(model.logits[length:]))
    )


@cache
def rounds_of_texts(case: Case) -> dict[Text, dict[int, float]]:
    """The probability of every text together with its number of rounds, by driving the shipped rule."""
    target, draft = case.models
    rule = make_rule(SAMPLING, VerificationConfig(rule=case.rule))
    first_V = processed(target, SAMPLING)[0].flatten()
    open_texts: dict[Text, dict[int, float]] = {(token,): {0: float(chance)} for token, chance in enumerate(first_V)}
    found: dict[Text, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for length in range(1, case.length + 1):
        here = {text: rounds for text, rounds in open_texts.items() if len(text) == length}
        laws = []
        if length < case.length:
            laws = (
                laws_of_trees(case, [*here])
                if case.tree
                else round_law(
                    rule,
                    after(target, length),
                    after(draft, length),
                    num_draft_tokens=case.num_draft_tokens,
                    is_point_mass=case.is_certain,
                )
            )
        for text, rounds in here.items():
            if length == case.length or (case.has_end and text[-1] == END):
                for number, chance in rounds.items():
                    found[text][number] += chance
                continue
            code = int(codes_of(torch.tensor([text]), case.vocab_size))
            for num_accepted, law in enumerate(laws):
                news = product(range(case.vocab_size), repeat=num_accepted + 1)
                for new, chance in zip(news, law[code].tolist(), strict=True):
                    whole = cut((*text, *new), case)
                    into = open_texts.setdefault(whole, defaultdict(float))
                    for number, before in rounds.items():
                        into[number + 1] = into.get(number + 1, 0.0) + before * chance
    return {text: dict(rounds) for text, rounds in found.items() if sum(rounds.values()) > 0}


def laws_of_trees(case: Case, texts: Sequence[Text]) -> list[torch.Tensor]:
    """The same as `round_law` of rounds with trees, after some texts of one length."""
    length, size = len(texts[0]), case.vocab_size
    laws = [torch.zeros(size**length, size ** (number + 1)).double() for number in range(case.num_draft_tokens + 1)]
    for text in texts:
        if not case.has_end or text[-1] != END:
            code = int(codes_of(torch.tensor([text]), size))
            of_text = laws_of_tree(str(case.tree), *(one_table(after(model, length), code) for model in case.models))
            for law, own in zip(laws, of_text, strict=True):
                law[code] = own
    return laws


def laws_of_tree(shape: str, target: TableModel, draft: TableModel) -> list[torch.Tensor]:
    """For each number of accepted tokens the law of what one round of a tree adds, by the shipped rule."""
    tree = Tree(tree_shape(shape), torch.device("cpu"))
    return round_texts(tree, processor(SAMPLING), target=target, draft=draft)


def one_table(model: TableModel, number: int) -> TableModel:
    return TableModel(tuple(logits[number : number + 1] for logits in model.logits))


def cut(text: Text, case: Case) -> Text:
    """A text without what follows its end or its length."""
    ends = [place for place, token in enumerate(text) if token == END and case.has_end and place > 0]
    first = [0] if case.has_end and text[0] == END else []
    return text[: min([case.length, *(place + 1 for place in [*first, *ends])])]


def laws_along(model: TableModel, sampling: SamplingConfig, text: Text) -> list[torch.Tensor]:
    laws = processed(model, sampling)
    size = model.vocab_size
    return [
        laws[place][0, int(codes_of(torch.tensor([text[:place]]).view(1, -1).long(), size))]
        for place in range(len(text))
    ]


def log_ratios(case: Case, text: Text, *, draft_sampling: SamplingConfig = SAMPLING, is_swapped: bool = False) -> Array:
    """Log q - log p of every token of a text; of a certain draft 0 for its proposal, else minus infinity."""
    target, draft = case.models
    of_target, of_draft = laws_along(target, SAMPLING, text), laws_along(draft, draft_sampling, text)
    if case.is_certain:
        matches = [law.argmax() == token for law, token in zip(of_draft, text, strict=True)]
        return np.where(matches, 0.0, -np.inf)
    sides = (of_target, of_draft) if is_swapped else (of_draft, of_target)
    with np.errstate(divide="ignore"):
        up, down = (np.log([float(law[token]) for law, token in zip(laws, text, strict=True)]) for laws in sides)
        return up - down


def forecast(case: Case, text: Text, *, shift: int = 0, **of_ratios: Any) -> tuple[float, float, Array]:
    lengths = np.array([len(text)])
    if case.tree:
        steps = [tree_steps(case, text, begin) for begin in range(len(text))]
        placed = arithmetic.by_left_from(np.array([steps]), lengths, case.num_draft_tokens)
        rounds = arithmetic.rounds_of(arithmetic.reach_of(placed), lengths, case.num_draft_tokens)
        return float(rounds.mean_B[0]), float(rounds.variance_B[0]), rounds.visits_BT[0]
    ratios = log_ratios(case, text, **of_ratios)[None]
    placed = arithmetic.by_left(np.roll(ratios, shift, axis=1), lengths, case.num_draft_tokens)
    reach = arithmetic.reach_of(placed, as_block=case.rule == "block" and not case.is_certain)
    rounds = arithmetic.rounds_of(reach, lengths, case.num_draft_tokens)
    return float(rounds.mean_B[0]), float(rounds.variance_B[0]), rounds.visits_BT[0]


def tree_steps(case: Case, text: Text, begin: int, **how: Any) -> Array:
    """Logarithms (D,) of the chances of the tokens from a place on; those after the text are of no account."""
    target, draft = (laws_along(model, SAMPLING, text)[begin:] for model in case.models)
    widths = tree_shape(str(case.tree)).widths[: len(target)]
    places = [
        Place(of_target.double()[None], of_draft.double()[None], torch.tensor([[token]]))
        for of_target, of_draft, token in zip(target, draft, text[begin:], strict=True)
    ][: len(widths)]
    reach = np.concatenate([[1.0], over_all_courses(places, widths, **how)])
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.nan_to_num(np.log(reach[1:]) - np.log(reach[:-1]), nan=-np.inf, neginf=-np.inf)
    return np.append(steps, np.zeros(case.num_draft_tokens - len(steps)))


def over_all_courses(
    places: Sequence[Place], widths: Sequence[int], *, as_drafted: bool = False, forgets: bool = False
) -> Array:
    """The mean (D,) of `reach_along` over all siblings and children, each with the probability that it draws.

    With `as_drafted` siblings are taken to be drawn with equal chances, with `forgets` every node to be reached.
    """
    size = places[0].target_XV.shape[1]
    sizes = [number for width in widths for number in [size] * (width - 1) + [width]]
    courses = torch.tensor([*product(*map(range, sizes))])
    chance_X, taken = torch.ones(len(courses), dtype=torch.float64), iter(courses.split(1, dim=1))

    def pick(weights_XA: torch.Tensor) -> torch.Tensor:
        nonlocal chance_X
        outcome_X1: torch.Tensor = next(taken)
        total_X1 = weights_XA.sum(1, keepdim=True)
        equal = torch.full_like(weights_XA, 1 / weights_XA.shape[1])
        shares_XA = equal if as_drafted else torch.where(total_X1 > 0, weights_XA / total_X1, equal)
        chance_X = chance_X * shares_XA.gather(1, outcome_X1)[:, 0]
        return outcome_X1

    many = [Place(*(part.expand(len(courses), -1) for part in place)) for place in places]
    if forgets:
        return np.cumprod([over_all_courses([place], [width])[0] for place, width in zip(places, widths, strict=True)])
    reach_XD = reach_along(many, widths, pick)
    assert float(chance_X.sum()) == pytest.approx(1, abs=1e-12)
    found: Array = (chance_X @ reach_XD).numpy()
    return found


def moments(rounds: dict[int, float]) -> tuple[float, float]:
    total = sum(rounds.values())
    mean = sum(number * chance for number, chance in rounds.items()) / total
    return mean, sum(number**2 * chance for number, chance in rounds.items()) / total - mean**2


def errors(case: Case, **how: Any) -> Iterator[float]:
    for text, rounds in rounds_of_texts(case).items():
        if sum(rounds.values()) > 1e-9:
            mean, variance = moments(rounds)
            found = forecast(case, text, **how)
            yield max(abs(found[0] - mean), abs(found[1] - variance))


@pytest.mark.seconds
@cases
def test_given_the_text_rounds_have_the_mean_and_the_variance_of_the_shipped_rule(case: Case) -> None:
    assert sum(sum(rounds.values()) for rounds in rounds_of_texts(case).values()) == pytest.approx(1, abs=1e-12)
    assert max(errors(case)) < 1e-12


FAULTS: dict[str, dict[str, Any]] = {
    "p and q swapped": {"is_swapped": True},
    "a place too late": {"shift": 1},
    "a place too early": {"shift": -1},
    "another temperature of the draft": {"draft_sampling": OTHER},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case.rule)
def test_a_planted_fault_is_noticed(case: Case, fault: str) -> None:
    assert max(errors(case, **FAULTS[fault])) > 1e-3


TREES = [
    Case("speculative", 2, tree="2x1"),
    *[heavy(Case("speculative", len(shape.split("x")), tree=shape)) for shape in ("2x2", "3", "1x1x1")],
    heavy(Case("speculative", 1, tree="3", vocab_size=4)),
    slow(Case("speculative", 2, tree="3x2")),
]
trees = pytest.mark.parametrize("case", TREES, ids=lambda case: f"{case.tree} of {case.vocab_size}")


@cache
def laws_of_first_rounds(case: Case) -> list[torch.Tensor]:
    return laws_of_tree(str(case.tree), *case.models)


def errors_of_a_tree(case: Case, **how: Any) -> float:
    """The largest error of what a text accepts of one round, times the probability of the text."""
    (target, _), laws, worst = case.models, laws_of_first_rounds(case), 0.0
    for text in product(range(case.vocab_size), repeat=case.num_draft_tokens):
        chances = [float(law[token]) for law, token in zip(laws_along(target, SAMPLING, text), text, strict=True)]
        reach, left, before = np.exp(np.cumsum(tree_steps(case, text, 0, **how))), 1.0, 1.0
        for place, chance in enumerate(chances):
            before *= chance
            if before:
                code = int(codes_of(torch.tensor([text[: place + 1]]), case.vocab_size))
                left -= float(laws[place][code]) / before
                worst = max(worst, abs(left - reach[place]) * before)
    return worst


@trees
def test_of_a_tree_a_text_accepts_what_the_shipped_rule_accepts(case: Case) -> None:
    assert errors_of_a_tree(case) < 1e-12


@pytest.mark.parametrize("fault", ["as_drafted", "forgets"])
def test_of_a_tree_siblings_are_the_rejected_ones_and_weights_are_carried_down(fault: str) -> None:
    case = Case("speculative", 2, tree="2x1")
    assert errors_of_a_tree(case, **{fault: True}) > 1e-3


def test_draws_of_siblings_have_the_mean_over_all_courses() -> None:
    """4 standard errors of 4,000 means, which a generator always draws alike."""
    generator = torch.Generator().manual_seed(3)
    laws = torch.randn(2, 2, 1, 5, generator=generator).double().mul(1.5).softmax(-1)
    places = [Place(laws[depth, 0], laws[depth, 1], torch.tensor([[token]])) for depth, token in enumerate((1, 3))]
    many = [Place(*(part.expand(4000, -1) for part in place)) for place in places]
    drawn_XD = log_steps(many, (3, 2), generator).cumsum(1).exp()
    error_D = drawn_XD.std(0) / 4000**0.5
    assert (abs(drawn_XD.mean(0) - torch.tensor(over_all_courses(places, (3, 2)))) < 4 * error_D).all()
    assert float(drawn_XD.std(0).min()) > 0.005, "they are drawn apart"


def test_a_tree_of_certain_children_accepts_a_text_as_far_as_it_is_in_it() -> None:
    """Nodes 1 and 2 are children of the root, 3 of 1, 4 and 5 of 2, and 6 of 4."""
    nodes = find_topology(torch.tensor([[0, 0, 1, 2, 2, 4]]), depth=3)
    draft = Draft(torch.tensor([[7, 8, 9, 7, 9, 5]]), nodes=nodes)
    texts = {(8, 7, 5): 3, (8, 9, 5): 2, (7, 9, 5): 2, (7, 7, 5): 1, (9, 7, 5): 0}
    for text, number in texts.items():
        assert log_steps_of(draft, torch.tensor([text])).exp().tolist() == [[1.0] * number + [0.0] * (3 - number)]


def accepted_by_position(case: Case) -> Array:
    """Shares of rounds that no end can cut, over all texts of full length, from the law of the whole process."""
    sums = np.zeros(case.num_draft_tokens + 1)
    for text, rounds in rounds_of_texts(case).items():
        lengths = np.array([len(text)])
        reach = arithmetic.reach_of(
            arithmetic.by_left(log_ratios(case, text)[None], lengths, case.num_draft_tokens),
            as_block=case.rule == "block",
        )
        found = arithmetic.rounds_of(reach, lengths, case.num_draft_tokens)
        of_text = arithmetic.by_position(reach, found, case.num_draft_tokens)
        weight = found.visits_BT[:, case.num_draft_tokens + 1 :].sum() * sum(rounds.values())
        sums += weight * np.array([1.0, *of_text])
    shares: Array = sums[1:] / sums[0]
    return shares


def rounds_by_rule(case: Case) -> Array:
    """The same from the laws of rounds: the target's text before each beginning, then one round."""
    target, draft = case.models
    rule = make_rule(SAMPLING, VerificationConfig(rule=case.rule))
    sums, size = np.zeros(case.num_draft_tokens + 1), case.vocab_size
    begins: dict[Text, float] = {
        (token,): float(chance) for token, chance in enumerate(processed(target, SAMPLING)[0].flatten())
    }
    for length in range(1, case.length - case.num_draft_tokens):
        laws = round_law(rule, after(target, length), after(draft, length), num_draft_tokens=case.num_draft_tokens)
        for text, chance in [one for one in begins.items() if len(one[0]) == length]:
            code = int(codes_of(torch.tensor([text]), size))
            for num_accepted, law in enumerate(laws):
                sums[: num_accepted + 1] += chance * float(law[code].sum())
                for new, share in zip(product(range(size), repeat=num_accepted + 1), law[code].tolist(), strict=True):
                    begins[*text, *new] = begins.get((*text, *new), 0.0) + chance * share
    shares: Array = sums[1:] / sums[0]
    return shares


@pytest.mark.seconds
@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_acceptance_by_position_is_of_the_places_where_rounds_begin(rule: str) -> None:
    case = Case(rule, 2, length=5, has_end=False)
    found = accepted_by_position(case)
    assert found == pytest.approx(rounds_by_rule(case), abs=1e-12)


@pytest.mark.seconds
def test_averages_over_all_places_are_another_figure() -> None:
    """They would count places inside of accepted drafts, where texts are easy."""
    case = Case("speculative", 2, length=5, has_end=False)
    sums = np.zeros(3)
    for text, rounds in rounds_of_texts(case).items():
        placed = arithmetic.by_left(log_ratios(case, text)[None], np.array([5]), 2)
        sums += sum(rounds.values()) * arithmetic.reach_of(placed)[0, 3:5].sum(0)
    assert abs(sums[1:] / sums[0] - rounds_by_rule(case)).max() > 1e-3


def brute_force(
    reach_TD: Array,
    left: int,
    choose: Callable[[int, object], int],
    remember: Callable[..., object],
    memory: object,
) -> dict[int, float]:
    """The law of the number of rounds, path by path."""
    if not left:
        return {0: 1.0}
    number = choose(left, memory)
    law: dict[int, float] = defaultdict(float)
    for accepted in range(min(number + 1, left)):
        is_last = accepted == min(number, left - 1)
        chance = reach_TD[left, accepted] - (0.0 if is_last else reach_TD[left, accepted + 1])
        after_it = brute_force(reach_TD, left - accepted - 1, choose, remember, remember(memory, number, accepted))
        for rounds, share in after_it.items():
            law[rounds + 1] += chance * share
    return law


@pytest.fixture
def reach() -> Array:
    ratios = np.random.default_rng(3).normal(-0.3, 0.7, (1, 9))
    found: Array = arithmetic.reach_of(arithmetic.by_left(ratios, np.array([9]), 3))[0]
    return found


def test_the_draft_length_of_each_place_is_that_of_the_prefix_alone(reach: Array) -> None:
    numbers_T = np.array([0, 1, 3, 2, 1, 3, 3, 2, 1, 2])
    law = brute_force(reach, 8, lambda left, _memory: int(numbers_T[left]), lambda *_: None, None)
    found = arithmetic.rounds_of(reach[None], np.array([9]), numbers_T)
    assert (found.mean_B[0], found.variance_B[0]) == pytest.approx(moments(law), abs=1e-12)


def test_who_knows_the_chances_pays_least(reach: Array) -> None:
    """By comparison with every choice of a K for each place of a short text."""
    costs = {0: 1.0, 1: 1.3, 2: 1.5, 3: 1.6}
    reach_BTD, lengths = reach[None, :6], np.array([5])

    def cost(numbers: tuple[int, ...]) -> float:
        numbers_T = np.array([0, *numbers, 0])
        of_places = np.array([costs[number] for number in numbers_T])
        return float(arithmetic.rounds_of(reach_BTD, lengths, numbers_T, of_places).mean_B[0])

    least = min(map(cost, product(costs, repeat=4)))
    assert arithmetic.least_cost(reach_BTD, lengths, costs)[0] == pytest.approx(least, abs=1e-12)


def rejections(reach_TD: Array, left: int, number: int, chance: float, found_2T: Array) -> None:
    """Add up, path by path, how often each token is drafted after accepted ones, and how often it is rejected."""
    for ahead in range(min(number, left - 1)):
        found_2T[:, left - ahead] += chance * np.array([1, 0]) * reach_TD[left, ahead]
        found_2T[1, left - ahead] += chance * (reach_TD[left, ahead] - reach_TD[left, ahead + 1])
    for accepted in range(min(number + 1, left)):
        further = 0.0 if accepted == min(number, left - 1) else reach_TD[left, accepted + 1]
        share = chance * (reach_TD[left, accepted] - further)
        rejections(reach_TD, left - accepted - 1, number, share, found_2T)


def test_rejections_are_those_of_all_courses(reach: Array) -> None:
    wanted_2T = np.zeros((2, 10))
    rejections(reach, 8, 3, 1.0, wanted_2T)
    lengths = np.array([9])
    found = arithmetic.rejected(reach[None], arithmetic.rounds_of(reach[None], lengths, 3), 3)
    assert found[:, 0] == pytest.approx(wanted_2T, abs=1e-12)


def test_texts_of_all_lengths_are_as_if_alone() -> None:
    generator = np.random.default_rng(0)
    ratios, lengths = generator.normal(-0.2, 0.5, (4, 7)), np.array([7, 1, 4, 2])
    together = arithmetic.rounds_of(arithmetic.reach_of(arithmetic.by_left(ratios, lengths, 3)), lengths, 3)
    for place, length in enumerate(lengths):
        own, number = ratios[place : place + 1, :length], lengths[place : place + 1]
        alone = arithmetic.rounds_of(arithmetic.reach_of(arithmetic.by_left(own, number, 3)), number, 3)
        assert together.mean_B[place] == pytest.approx(alone.mean_B[0], abs=1e-14)
        assert together.variance_B[place] == pytest.approx(alone.variance_B[0], abs=1e-14)
    assert together.mean_B[1] == 0, "the prefill's token needs no round"


def test_one_scalar_says_how_often_a_race_that_the_target_won_is_the_drafts_too() -> None:
    """The shipped rule draws by races of 200,000 rows; a false alarm of 4 standard deviations is 1 in 16,000."""
    num_rows = 200_000
    logits_2V = torch.randn(2, 5, generator=torch.Generator().manual_seed(4))
    rule: Rule = make_rule(SAMPLING, VerificationConfig(rule="coupled"))
    zeros_B1 = torch.zeros(num_rows, 1, dtype=torch.long)
    keys_B = torch.arange(num_rows) * 0x9E3779B97F4A7C1 + 11
    context = Context(zeros_B1, keys_B, zeros_B1[:, 0], zeros_B1)
    half_B12 = torch.full((num_rows, 1, 2), 0.5)
    of_target, of_draft = (
        rule.draw(logits_V.expand(num_rows, 1, -1), half_B12, context)[0][:, 0] for logits_V in logits_2V
    )
    target_V, draft_V = (logits_2V / SAMPLING.temperature).softmax(-1)
    for token in range(5):
        own = of_target == token
        expected = min(float(1 / torch.maximum(target_V, draft_V * target_V[token] / draft_V[token]).sum()), 1.0)
        share, number = float((of_draft[own] == token).float().mean()), int(own.sum())
        assert abs(share - expected) < 4 * (expected * (1 - expected) / number) ** 0.5 + 1e-6
