"""The law of a text over all courses of rounds of a model that keeps something of its text, and is taken back.

Shapes: B rows, T positions, V vocabulary, K drafted tokens, G courses, N paths.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.rules import make_rule
from tests.helpers.exact_law import round_verdicts
from tests.helpers.table_models import TableModel, joint_law, random_table

V, K, LENGTH = 3, 2, 3
PATHS = [*product(range(V), repeat=K)]
Course = tuple[tuple[tuple[int, ...], int, int], ...]
"""Rounds: drafted tokens, how many are accepted, and the next token."""
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From ids and positions (B, T) and how many tokens of each row count (B) to logits (B, T, V).

The token at position 0 stands for none.
"""


class RolledBack(Protocol):
    """A model whose rows are taken back to earlier tokens."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits (V) after a text, by definition."""

    def start(self, num_rows: int) -> Forward:
        """Begin rows without a text."""


def code(ids: Sequence[int]) -> int:
    return sum(token * V**place for place, token in enumerate(reversed(ids)))


def text_of(course: Course) -> tuple[int, ...]:
    return tuple(token for path, accepted, following in course for token in (*path[:accepted], following))


def replayed(model: RolledBack, courses: Sequence[Course]) -> TableModel:
    """The logits of a round behind each course, for every draft: rows go through the rounds together, and then rest."""
    rows = [(course, path) for course in courses for path in PATHS]
    forward = model.start(len(rows))
    logits_BTV = torch.zeros(len(rows), K + 1, V, dtype=torch.float64)
    for number in range(max(map(len, courses)) + 1):
        texts = [text_of(course[:number]) for course, _ in rows]
        drafts = [course[number][0] if number < len(course) else path for course, path in rows]
        ids_BT = torch.tensor(
            [[*text[-1:], *[0] * (not text), *path] for text, path in zip(texts, drafts, strict=True)]
        )
        positions_BT = torch.tensor([[len(text)] for text in texts]) + torch.arange(K + 1)
        counts_B = torch.tensor([number <= len(course) for course, _ in rows])
        found_BTV = forward(ids_BT, positions_BT, counts_B * (K + 1))
        logits_BTV = torch.where(counts_B[:, None, None], found_BTV, logits_BTV)
    by_path = logits_BTV.view(len(courses), len(PATHS), K + 1, V)
    return TableModel(tuple(by_path[:, :: V ** (K - place), place] for place in range(K + 1)))


def text_law(model: RolledBack) -> Tensor:
    """The law (V^LENGTH) of the first tokens of a text, over all courses of rounds, most of which roll back."""
    rule = make_rule(SamplingConfig(temperature=1.0), VerificationConfig())
    drafts = random_table(seed=3, num_tables=1, max_length=LENGTH + K, vocab_size=V).logits
    masses: dict[Course, float] = {(): 1.0}
    law = torch.zeros(V**LENGTH, dtype=torch.float64)
    while masses:
        courses = [*masses]
        tables = []
        for place in range(K):
            firsts = [(len(text), code(text) * V**place) for text in map(text_of, courses)]
            tables.append(torch.stack([drafts[number + place][0, at : at + V**place] for number, at in firsts]))
        _, law_GN, verdicts_GNTV = round_verdicts(rule, replayed(model, courses), TableModel(tuple(tables)), K)
        longer: dict[Course, float] = {}
        for place, number, accepted, token in (law_GN[..., None, None] * verdicts_GNTV).nonzero().tolist():
            course = (*courses[place], (PATHS[number], accepted, token))
            mass = masses[courses[place]] * float(law_GN[place, number] * verdicts_GNTV[place, number, accepted, token])
            if len(text := text_of(course)) >= LENGTH:
                law[code(text[:LENGTH])] += mass
            else:
                longer[course] = mass
        masses = longer
    return law


def wanted_law(model: RolledBack) -> Tensor:
    """The law (V^LENGTH) of the first tokens of a text, by the model's definition."""
    by_length = [[model.logits(ids) for ids in product(range(V), repeat=length)] for length in range(LENGTH)]
    return joint_law(tuple(torch.stack(logits)[None].softmax(-1) for logits in by_length))[0]
