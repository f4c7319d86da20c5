"""The answers of a trace as rows: tokens per round by draft, rule, temperature and K, and their tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from llama_ssp.reports.records import Line, ResultFigures, ResultTable
from llama_ssp.rooms.acceptance.arithmetic import least_cost
from llama_ssp.rooms.acceptance.trace import Replay, Trace
from llama_ssp.words import share

RowKey = tuple[str, str, float, int]
Costs = Mapping[str, Mapping[int, float]]
"""Seconds of a round, by draft and K; 0 is a plain step."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceRow(Line):
    """One line of `acceptance.jsonl`: what rounds of one draft, rule, temperature and K would do on the texts read.

    Attributes:
        low, high: the 95 % interval of `tokens_per_round` over prompts.
        by_position: shares of rounds that accept the drafted token at each position.
        by_category: tokens per round of the prompts of each category.
        share_of_best: tokens per second over those of the fastest row of the temperature, by the costs of the plan; of
            tokens per round without a plan.
        headroom: by how much whoever knows what will be accepted, and chooses K for each round, would be faster than
            the fastest K or plain decoding; 0 without a plan.
        num_prompts, num_new_tokens: of the texts that were read.
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

    @property
    def key(self) -> RowKey:
        """What it is of."""
        return self.draft, self.rule, self.temperature, self.num_draft_tokens

    @property
    def name(self) -> str:
        """Its name in a report."""
        return f"{self.draft}, {self.rule}, T = {self.temperature:g}, K = {self.num_draft_tokens}"

    @property
    def figures(self) -> ResultFigures:
        """It has no times; every row is of the same texts, which are counted elsewhere."""
        return ResultFigures(self.name, 0, 0, {}, {})

    @classmethod
    def on_screen(cls, results: Sequence["AcceptanceRow"]) -> ResultTable:
        """Lay out a line for each draft, rule and temperature, at the fastest K."""
        groups: dict[tuple[str, str, float], list[AcceptanceRow]] = {}
        for row in results:
            groups.setdefault(row.key[:3], []).append(row)
        headings = ("draft", "rule", "T", "tokens/round, K = 1, 2, ...", "best K", "its 95 %", "of best", "left")
        found = []
        for (draft, rule, temperature), rows in groups.items():
            best = max(rows, key=lambda row: row.share_of_best)
            by_k = " ".join(f"{row.tokens_per_round:.2f}" for row in rows)
            interval = f"{best.low:.2f}..{best.high:.2f}"
            of_best = share(best.share_of_best)
            found.append([draft, rule, f"{temperature:g}", by_k, str(best.num_draft_tokens), interval, of_best])
            found[-1].append(share(best.headroom))
        return ResultTable((_title(results), _MEANING), headings, found)

    @classmethod
    def on_page(cls, results: Sequence["AcceptanceRow"]) -> ResultTable:
        """Lay out the rows for a report."""
        headings = ("draft, rule, temperature, K", "tokens/round", "95 %", "accepted by position", "share of best")
        found = [
            [
                row.name, f"{row.tokens_per_round:.2f}", f"{row.low:.2f} to {row.high:.2f}",
                " ".join(f"{one:.2f}" for one in row.by_position), share(row.share_of_best),
            ]
            for row in results
        ]  # fmt: skip
        return ResultTable((_title(results), _MEANING), headings, found)


_MEANING = (
    "95 % intervals over prompts; shares are of the tokens per second of the fastest at a temperature, by the plan; "
    "left is what a K for each round could still gain for whoever knows what will be accepted"
)


def _title(results: Sequence[AcceptanceRow]) -> str:
    first = results[0]
    return f"Expected rounds of texts of {first.num_prompts} prompts, {first.num_new_tokens} tokens"


def _headroom(replay: Replay, costs: Mapping[int, float]) -> float:
    """What `AcceptanceRow.headroom` says, by the seconds of a plain step and of rounds by K."""
    longest = replay.reach_BTD.shape[2] - 1
    fixed = [float(replay.rounds(number).mean_B.sum()) * costs[number] for number in range(longest + 1)]
    known = {number: costs[number] for number in range(longest + 1)}
    least = float(least_cost(replay.reach_BTD, replay.lengths_B, known).sum())
    return max(min(fixed) / least - 1, 0.0)  # rounding


def rows_of(trace: Trace, costs: Costs) -> Iterator[AcceptanceRow]:
    """The rows of a trace, K from 1 to its longest; without the costs of a draft a round costs 1."""
    for law, temperature in enumerate(trace.temperatures):
        texts = trace.texts(law)
        if not len(texts):
            continue
        categories = trace.arrays["text_category"][texts]
        measured = {
            (draft, rule, number): (replay, replay.tokens_per_round(number))
            for draft in trace.drafts
            for rule in trace.rules(draft, law)
            for replay in [trace.replay(draft, law, rule, trace.about["longest"])]
            for number in range(1, replay.reach_BTD.shape[2])
        }
        speeds = {key: value[0] / costs.get(key[0], {}).get(key[2], 1.0) for key, (_, value) in measured.items()}
        headrooms = {
            key[:2]: _headroom(replay, costs[key[0]]) for key, (replay, _) in measured.items() if costs.get(key[0])
        }
        for (draft, rule, number), (replay, (tokens, low, high)) in measured.items():
            yield AcceptanceRow(
                draft=draft, rule=rule, temperature=temperature, num_draft_tokens=number,
                tokens_per_round=tokens, low=low, high=high,
                share_of_best=speeds[draft, rule, number] / max(speeds.values()),
                by_position=replay.by_position(number),
                by_category={
                    str(name): replay.tokens_per_round(number, of_texts=categories == name)[0]
                    for name in sorted({*categories} - {""})
                },
                headroom=headrooms.get((draft, rule), 0.0),
                num_prompts=len({*trace.arrays["text_index"][texts]}),
                num_new_tokens=int(trace.arrays["text_length"][texts].sum()),
            )  # fmt: skip
