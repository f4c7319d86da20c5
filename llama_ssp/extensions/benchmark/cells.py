"""The cells of a benchmark: lines of `benchmark.jsonl`, and their tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from llama_ssp.reports.records import PLAIN, SPECULATIVE, Line, ResultFigures, ResultTable
from llama_ssp.reports.tables import number
from llama_ssp.text.messages import decimal, share

CellKey: TypeAlias = tuple[int, int, int | None]
"""The (prompt_tokens, batch_size, num_draft_tokens) that identifies a measured cell when a benchmark is resumed."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkCell(Line):
    """One line of `benchmark.jsonl`: a cell of the table. None means not measured.

    Attributes:
        ms_per_token: median over repetitions, by candidate (plain, speculative, generate, assisted).
        forecast_ms_per_token: the plan's forecast for our own candidates; empty without a plan.
        other_share: share of our rounds' time that is neither drafting nor verification.
        copy_share: time to copy the weights that a rank reads in a plain step, over the step's time; above 1 if a
            cache holds them.
        text_sha256: hash of the token ids that prompts are cut from.
    """

    file: ClassVar[str] = "benchmark.jsonl"
    noun: ClassVar[str] = "cell"

    model: str
    draft: str | None
    dtype: str
    quantization: str
    world_size: int
    temperature: float
    max_new_tokens: int
    num_draft_tokens: int | None
    prompt_tokens: int
    batch_size: int
    ms_per_token: dict[str, float]
    forecast_ms_per_token: dict[str, float]
    tokens_per_round: float | None
    other_share: float | None
    copy_share: float | None
    text_sha256: str
    versions: dict[str, str | None]
    git_commit: str | None

    @property
    def key(self) -> CellKey:
        """The key that identifies the cell when a benchmark is resumed."""
        return self.prompt_tokens, self.batch_size, self.num_draft_tokens

    @property
    def name(self) -> str:
        """The cell's name in a report."""
        drafting = f", K = {self.num_draft_tokens}" if self.num_draft_tokens else ""
        return f"prompt {self.prompt_tokens}, batch {self.batch_size}{drafting}"

    @property
    def figures(self) -> ResultFigures:
        """The cell's figures, for one completion of each row."""
        num_new_tokens = self.batch_size * self.max_new_tokens
        return ResultFigures(self.name, self.batch_size, num_new_tokens, self.ms_per_token, self.forecast_ms_per_token)

    @property
    def columns(self) -> list[float | None]:
        """The cell's times in ms/token, for a table: plain, forecast, generate, speculative, forecast, assisted."""
        measured, forecast = self.ms_per_token, self.forecast_ms_per_token
        ours = [(measured.get(mode), forecast.get(mode)) for mode in (PLAIN, SPECULATIVE)]
        return [*ours[0], measured.get("generate"), *ours[1], measured.get("assisted")]

    @classmethod
    def on_screen(cls, results: Sequence["BenchmarkCell"]) -> ResultTable:
        """Lay out the cells for a terminal."""
        headings = (
            "K",
            "prompt",
            "batch",
            "plain",
            "fore-\ncast",
            "gene-\nrate",
            "specu-\nlative",
            "fore-\ncast",
            "assis-\nted",
            "tokens\n/round",
            "other",
            "copy",
        )
        found = [
            [
                "-" if cell.num_draft_tokens is None else str(cell.num_draft_tokens),
                str(cell.prompt_tokens),
                str(cell.batch_size),
                *(decimal(time) for time in cell.columns),
                decimal(cell.tokens_per_round),
                share(cell.other_share),
                share(cell.copy_share),
            ]
            for cell in results
        ]
        title = "ms/token of a completion, prompt included; generate and assisted are transformers'"
        meaning = "other: of a round, outside both models; copy: time to copy the weights, over a plain step's"
        return ResultTable((title, meaning), headings, found)

    @classmethod
    def on_page(cls, results: Sequence["BenchmarkCell"]) -> ResultTable:
        """Lay out the cells for a report."""
        headings = ("cell", "plain", "forecast", "generate", "speculative", "forecast", "assisted", "tokens/round")
        found = [[cell.name, *map(number, [*cell.columns, cell.tokens_per_round])] for cell in results]
        meaning = "Times are ms/token, over the tokens of all rows; generate and assisted are transformers'."
        return ResultTable((meaning,), headings, found)
