"""The answers of a trace as rows: tokens per round by draft, rule, temperature and K, and their tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from llama_ssp.reports.records import Line, ResultFigures, ResultTable
from llama_ssp.rooms.acceptance.trace import Trace
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
        """Lay out the rows for a terminal."""
        return _table(results, "of best")

    @classmethod
    def on_page(cls, results: Sequence["AcceptanceRow"]) -> ResultTable:
        """Lay out the rows for a report."""
        return _table(results, "share of the fastest")


def _table(results: Sequence[AcceptanceRow], of_best: str) -> ResultTable:
    first = results[0]
    title = f"Tokens per round on {first.num_prompts} prompts, {first.num_new_tokens} tokens"
    meaning = "95 % intervals over prompts; the share is of the tokens per second of the fastest at its temperature"
    headings = ("draft", "rule", "T", "K", "tokens/round", "95 %", "accepted by position", of_best)
    found = [
        [
            row.draft, row.rule, f"{row.temperature:g}", str(row.num_draft_tokens), f"{row.tokens_per_round:.2f}",
            f"{row.low:.2f}..{row.high:.2f}", " ".join(f"{one:.2f}"[1:] if one < 1 else "1" for one in row.by_position),
            share(row.share_of_best),
        ]
        for row in results
    ]  # fmt: skip
    return ResultTable((title, meaning), headings, found)


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
                num_prompts=len({*trace.arrays["text_index"][texts]}),
                num_new_tokens=int(trace.arrays["text_length"][texts].sum()),
            )  # fmt: skip
