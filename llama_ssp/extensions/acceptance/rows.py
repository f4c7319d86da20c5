"""The answers of a trace as rows: tokens per round by draft, rule, temperature and K, and their tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import numpy as np

from llama_ssp.extensions.acceptance.arithmetic import least_cost
from llama_ssp.extensions.acceptance.trace import PROPOSED, Replay, Trace
from llama_ssp.reports.records import Line, PointOverK, ResultFigures, ResultTable
from llama_ssp.text.messages import share

RowKey = tuple[str, str, float, int, str | None]
Costs = Mapping[str, Mapping[int, float]]
"""Seconds of a round, by draft and K; K = 0 is a plain step."""
CostsOfTrees = Mapping[tuple[str, str], float]
"""Seconds of a round, by draft and tree."""
Auto = Callable[[str, Sequence[Replay], Sequence[Mapping[int, float]]], float]
"""Seconds of K = auto for the first NUM_SIMULATED texts of replays of a draft, and of copies in its place."""
Decode = Callable[[list[int]], str]
NUM_SIMULATED, COPIES = 256, "ngram"
_NUM_LOST, _NUM_SAID, _NUM_BEFORE = 10, 2, 8


@dataclass(frozen=True, kw_only=True)
class LostRounds:
    """Places at which a draft's rounds end with a certain rejected proposal in place of a certain token of the text.

    Attributes:
        before: the text before that one of these places at which most rounds end.
        wanted, proposed: the target's token, and the most probable one of the draft.
        num_places: number of such places in the texts read.
        accepted: the share of rounds that accept these tokens, among rounds that get to them.
        share: of all rejections.
    """

    before: str
    wanted: str
    proposed: str
    num_places: int
    accepted: float
    share: float


@dataclass(frozen=True, kw_only=True)
class AcceptanceRow(Line):
    """One line of `acceptance.jsonl`: what rounds of one draft, rule, temperature and K would do on the texts read.

    Attributes:
        low, high: the 95 % interval of `tokens_per_round` over prompts.
        by_position: shares of rounds that accept the drafted token at each position.
        by_category: tokens per round of the prompts of each category.
        share_of_best: tokens per second, by the costs of the plan, over those of the fastest row of the temperature;
            without a plan the same ratio of tokens per round.
        headroom: by how much rounds would be faster than `num_draft_tokens=auto` if each had the best K, chosen with
            what will be accepted known; 0 without a plan, or without that extension.
        with_copies: the speed of `auto` with `draft.fallback=ngram`, over that without; 1 unless ngram has read too.
        lost: where most rounds end, for the fastest row of chains of the draft and temperature.
        num_prompts, num_new_tokens: numbers of prompts and of new tokens in the texts that were read.
        tree: what rounds draft in place of a chain, with K nodes; its positions are depths.
    """

    file: ClassVar[str] = "acceptance.jsonl"
    noun: ClassVar[str] = "row"

    draft: str
    rule: str
    temperature: float
    num_draft_tokens: int
    tokens_per_round: float
    low: float
    high: float
    share_of_best: float
    by_position: list[float]
    num_prompts: int
    num_new_tokens: int
    by_category: dict[str, float] = field(default_factory=dict)
    headroom: float = 0.0
    with_copies: float = 1.0
    lost: list[LostRounds] = field(default_factory=list)
    tree: str | None = None

    @property
    def key(self) -> RowKey:
        """The draft, rule, temperature, K and tree of its rounds."""
        return self.draft, self.rule, self.temperature, self.num_draft_tokens, self.tree

    @property
    def way(self) -> str:
        """The tree that rounds draft, or their rule."""
        return f"tree {self.tree}" if self.tree else self.rule

    @property
    def point(self) -> PointOverK:
        """The row's point in a figure."""
        panel, line = f"Tokens per round, T = {self.temperature:g}", f"{self.draft}, {self.way}"
        return PointOverK(panel, line, self.num_draft_tokens, self.tokens_per_round, self.low, self.high)

    @property
    def name(self) -> str:
        """The row's name in a report."""
        return f"{self.draft}, {self.way}, T = {self.temperature:g}, K = {self.num_draft_tokens}"

    @property
    def figures(self) -> ResultFigures:
        """No figures: rows have no times, and all rows have the same texts, which are counted elsewhere."""
        return ResultFigures(self.name, 0, 0, {}, {})

    @classmethod
    def on_screen(cls, results: Sequence["AcceptanceRow"]) -> ResultTable:
        """Lay out a line for each draft, rule or tree, and temperature, at the fastest K."""
        groups: dict[tuple[str, str, float], list[AcceptanceRow]] = {}
        for row in results:
            groups.setdefault((row.draft, row.way, row.temperature), []).append(row)
        headings = (
            "draft",
            "rule" + ", tree" * any(row.tree for row in results),
            "T",
            "tokens/round, K = 1, 2, ...",
            "best K",
            "its 95 %",
            "of best",
            "left",
            "copies",
        )
        found = []
        for (draft, way, temperature), rows in groups.items():
            best = max(rows, key=lambda row: row.share_of_best)
            by_k = " ".join(f"{row.tokens_per_round:.2f}" for row in rows)
            interval = f"{best.low:.2f}..{best.high:.2f}"
            of_best = share(best.share_of_best)
            found.append([draft, way, f"{temperature:g}", by_k, str(best.num_draft_tokens), interval, of_best])
            found[-1] += ["", ""] if best.tree else [share(best.headroom), f"{best.with_copies:.2f}x"]
        return ResultTable((_title(results), _MEANING, *_lost_said(results)), headings, found)

    @classmethod
    def on_page(cls, results: Sequence["AcceptanceRow"]) -> ResultTable:
        """Lay out the rows for a report."""
        headings = ("draft, rule, temperature, K", "tokens/round", "95 %", "accepted by position", "share of best")
        found = [
            [
                row.name,
                f"{row.tokens_per_round:.2f}",
                f"{row.low:.2f} to {row.high:.2f}",
                " ".join(f"{one:.2f}" for one in row.by_position),
                share(row.share_of_best),
            ]
            for row in results
        ]
        return ResultTable((_title(results), _MEANING, *_lost_said(results)), headings, found)


_MEANING = (
    "95 % intervals over prompts; shares are of the tokens per second of the fastest at a temperature, by the plan; "
    "left is what a K for each round could still gain over K = auto for whoever knows what will be accepted, and "
    "copies what draft.fallback=ngram makes of auto"
)


def _lost_said(results: Sequence[AcceptanceRow]) -> Iterator[str]:
    for row in results:
        places = [
            f"{one.wanted!r} where it proposes {one.proposed!r}, as after {one.before!r} ({share(one.share)}, in "
            f"{one.num_places} places that accept {share(one.accepted)})"
            for one in row.lost[:_NUM_SAID]
        ]
        if places:
            yield f"{row.name} has most rejections of {' and '.join(places)}"


def _title(results: Sequence[AcceptanceRow]) -> str:
    first = results[0]
    return f"Expected rounds of texts of {first.num_prompts} prompts, {first.num_new_tokens} tokens"


def _headroom(replay: Replay, costs: Mapping[int, float], auto_s: float) -> float:
    """Return `AcceptanceRow.headroom`.

    `costs` has the seconds of a round by K (key 0: a plain step), and `auto_s` the seconds of `auto`.
    """
    reach_BTD, lengths_B = replay.reach_BTD[:NUM_SIMULATED], replay.lengths_B[:NUM_SIMULATED]
    known = {number: costs[number] for number in range(reach_BTD.shape[2])}
    return max(auto_s / float(least_cost(reach_BTD, lengths_B, known).sum()) - 1, 0.0)


def _lost(trace: Trace, row: AcceptanceRow, law: int, decode: Decode) -> list[LostRounds]:
    """The pairs of a token of the texts and a proposal at which most rounds end."""
    replay = trace.replay(row.draft, law, row.rule, trace.about["longest"])
    tokens, tried, rejected = trace.rejected(replay, law, row.num_draft_tokens)
    tokens = tokens.astype(np.int64)
    wanted, proposed = trace.arrays["token_id"][tokens], trace.arrays[f"{row.draft}/{PROPOSED}"][tokens, 0]
    pairs, pair_of = np.unique(np.stack([wanted, proposed], axis=1), axis=0, return_inverse=True)
    lost = np.bincount(pair_of, weights=rejected)
    found = []
    for pair in np.argsort(-lost, kind="stable")[:_NUM_LOST]:
        places = np.flatnonzero(pair_of == pair)
        worst = int(tokens[places[rejected[places].argmax()]])
        before = trace.arrays["token_id"][max(trace.first_of(worst), worst - _NUM_BEFORE) : worst]
        found.append(
            LostRounds(
                before=decode([*map(int, before)]),
                wanted=decode([int(pairs[pair, 0])]),
                proposed=decode([int(pairs[pair, 1])]),
                num_places=len(places),
                accepted=1 - float(lost[pair] / max(tried[places].sum(), lost[pair], 1e-12)),
                share=float(lost[pair] / max(rejected.sum(), 1e-12)),
            )
        )
    return found


def rows_of(
    trace: Trace,
    costs: Costs,
    of_trees: CostsOfTrees | None = None,
    *,
    auto: Auto | None = None,
    decode: Decode | None = None,
) -> Iterator[AcceptanceRow]:
    """Yield the rows of a trace: chains of K from 1 to its longest, and trees.

    A round of a draft without `costs` costs 1. `auto` returns the seconds of K = auto, and `decode` the text of tokens;
    without one of them, rows lack the figures that follow from it.
    """
    for law in range(len(trace.temperatures)):
        if not len(trace.texts(law)):
            continue
        found = [
            row
            for draft in trace.drafts
            for row in (
                *chain.from_iterable(
                    _rows(trace, costs, auto, law=law, draft=draft, rule=rule) for rule in trace.rules(draft, law)
                ),
                *_rows_of_trees(trace, of_trees or {}, law=law, draft=draft),
            )
        ]
        fastest = max(row.share_of_best for row in found)
        chains = [row for row in found if not row.tree]
        best = {draft: max((row for row in chains if row.draft == draft), key=_speed).key for draft in trace.drafts}
        for row in found:
            is_shown = row.key == best[row.draft] and f"{row.draft}/{PROPOSED}" in trace.arrays
            lost = _lost(trace, row, law, decode) if decode and is_shown else []
            yield replace(row, share_of_best=row.share_of_best / fastest, lost=lost)


def _speed(row: AcceptanceRow) -> float:
    return row.share_of_best


def _rows(trace: Trace, costs: Costs, auto: Auto | None, *, law: int, draft: str, rule: str) -> Iterator[AcceptanceRow]:
    """The rows of chains of one draft, law and rule, whose `share_of_best` is the tokens per second."""
    own, replay = costs.get(draft, {}), trace.replay(draft, law, rule, trace.about["longest"])
    headroom, with_copies = 0.0, 1.0
    if auto and own:
        auto_s = auto(draft, [replay], [own])
        headroom = _headroom(replay, own, auto_s)
        if draft != COPIES and COPIES in costs:
            copies = trace.replay(COPIES, law, trace.rules(COPIES, law)[0], trace.about["longest"])
            with_copies = auto_s / auto(draft, [replay, copies], [own, costs[COPIES]])
    for number in range(1, replay.reach_BTD.shape[2]):
        row = _row(trace, replay, number, own.get(number, 1.0), law=law, draft=draft, rule=rule)
        yield replace(row, num_draft_tokens=number, headroom=headroom, with_copies=with_copies)


def _rows_of_trees(trace: Trace, costs: CostsOfTrees, *, law: int, draft: str) -> Iterator[AcceptanceRow]:
    """Yield the rows of the trees of one draft and law, which all rules verify alike."""
    for name, tree in trace.trees(draft).items():
        replay, rule = trace.replay_tree(name, law), trace.rules(draft, law)[0]
        row = _row(trace, replay, tree.depth, costs.get((draft, tree.text), 1.0), law=law, draft=draft, rule=rule)
        yield replace(row, num_draft_tokens=tree.num_nodes, tree=tree.text)


def _row(trace: Trace, replay: Replay, longest: int, cost: float, *, law: int, draft: str, rule: str) -> AcceptanceRow:
    """Make the row of rounds that accept at most `longest` tokens."""
    texts, (tokens, low, high) = trace.texts(law), replay.tokens_per_round(longest)
    categories = trace.arrays["text_category"][texts]
    return AcceptanceRow(
        draft=draft,
        rule=rule,
        temperature=trace.temperatures[law],
        num_draft_tokens=longest,
        tokens_per_round=tokens,
        low=low,
        high=high,
        share_of_best=tokens / cost,
        by_position=replay.by_position(longest),
        by_category={
            str(name): replay.tokens_per_round(longest, of_texts=categories == name)[0]
            for name in sorted({*categories} - {""})
        },
        num_prompts=len({*trace.arrays["text_index"][texts]}),
        num_new_tokens=int(trace.arrays["text_length"][texts].sum()),
    )
