"""The law of a text over all courses of rounds of a model that keeps something of its text, and is taken back.

Shapes: B rows, T positions, V vocabulary, K drafted tokens, G courses, N paths.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.speculate.drafters.drafter import TreeTables
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.trees import Tree
from tests.helpers import ahead_law
from tests.helpers.exact_law import round_verdicts
from tests.helpers.models import tiny_model
from tests.helpers.table_models import TableModel, joint_law, random_table

V, K, LENGTH = 3, 2, 3
CAPACITY = 16
"""Slots of a row of a library's model."""
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


def overlap_law(model: RolledBack) -> Tensor:
    """The law (V^LENGTH) of the first tokens of a text whose drafts are verified while the next ones are drafted."""
    rule = make_rule(SamplingConfig(temperature=1.0), VerificationConfig())
    drafts = random_table(seed=3, num_tables=1, max_length=LENGTH + 2 * K - 2, vocab_size=V)

    def score(paths: Sequence[ahead_law.Path], num_ahead: int) -> Tensor:
        forward, logits_NKV = model.start(len(paths)), torch.empty(0)
        for number in range(len(paths[0].before) + 1):
            rounds = [(*path.before, (len(path.text), path.flight))[number] for path in paths]
            ids_NK = torch.tensor(
                [
                    [*path.text[length - 1 : length], *[0] * (not length), *(flight or [0] * num_ahead)]
                    for path, (length, flight) in zip(paths, rounds, strict=True)
                ]
            )
            positions_NK = torch.tensor([[length] for length, _ in rounds]) + torch.arange(num_ahead + 1)
            logits_NKV = forward(ids_NK, positions_NK, torch.full((len(paths),), num_ahead + 1))
        return logits_NKV

    return ahead_law.law_of_text(rule, score, drafts, num_drafted=K, wanted=LENGTH, remembers=True)


class OfLibrary:
    """A model of the library in fp64 and, adapted, as the modules of a runner; see `RolledBack`."""

    def __init__(self, kind: str, adapt: Callable[[PreTrainedModel], None], **sizes: Any) -> None:
        self._library, model = (tiny_model(kind, vocab_size=V, **sizes).double() for _ in range(2))
        adapt(model)
        self.runner = ModuleRunner(model, comm=Comm.single())

    def library(self, ids: Sequence[int]) -> Tensor:
        """The logits (V) after all tokens, without a cache."""
        found: Tensor = self._library(torch.tensor([ids]), use_cache=False).logits[0, -1]
        return found.float().double()  # as a runner returns them

    def logits(self, ids: Sequence[int]) -> Tensor:
        """See `RolledBack`."""
        return self.library([0, *ids])

    def start(self, num_rows: int) -> Forward:
        """See `RolledBack`."""
        self.runner.allocate(batch_size=num_rows, capacity=CAPACITY)
        return lambda ids, places, _: self.runner.forward(ids, places, bucket=CAPACITY).double()


def apart_on_trees(model: OfLibrary, *, moves: bool = True) -> float:
    """How far the logits of two rounds of trees are from the library's; each row accepts another path.

    The tree has all paths. Unless it `moves`, what the cache holds of a path stays where it was.
    """
    tree, apart = Tree(tree_shape("3x3"), torch.device("cpu")), 0.0
    paths = [path for length in range(tree.depth + 1) for path in product(range(V), repeat=length)]
    nodes, tables = tree.nodes(len(paths)), TreeTables(tree.num_drafted, torch.device("cpu"))
    model.runner.allocate(batch_size=len(paths), capacity=CAPACITY)
    texts: list[tuple[int, ...]] = [(place % V,) for place in range(len(paths))]
    for _ in range(2):
        root_B1 = torch.tensor([[len(text) - 1] for text in texts])
        positions_BT, places = tables.places(root_B1, 0, nodes.depths_BT, nodes.ancestors_BTT, bucket=CAPACITY)
        ids_BT = torch.tensor([[text[-1], *(path[-1] for path in paths[1:])] for text in texts])
        found_BTV = model.runner.forward(ids_BT, positions_BT, bucket=CAPACITY, tree=places).double()
        wanted_BTV = torch.stack([torch.stack([model.library([*text, *path]) for path in paths]) for text in texts])
        apart = max(apart, float((found_BTV - wanted_BTV).abs().max()))
        accepted_B1, path_BD = nodes.path_to(torch.arange(len(paths))[:, None])
        assert [*accepted_B1[:, 0]] == [*map(len, paths)]
        if moves:
            model.runner.move(root_B1 + path_BD, root_B1 + 1 + torch.arange(tree.depth))
        texts = [(*text, *path) for text, path in zip(texts, paths, strict=True)]
    return apart
