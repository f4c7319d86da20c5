"""The records that a run leaves on disk: lines of `run.jsonl` and `benchmark.jsonl`, and `summary.json`, typed.

Reading, writing and locking are in `records`; the arithmetic from lines to a summary is in `summary`.
Times are in seconds where a name ends in `_s`, in milliseconds where it says `ms`.
"""

import json
import reprlib
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from llama_ssp.reports.reading import read_json, restore

SCHEMA_VERSION = 1
MOST_DRAFTED = 1024
"""K of any run is at most this."""
PLAIN = "plain"
SPECULATIVE = "speculative"

LineKey: TypeAlias = tuple[int, str, int]
"""The (index, mode, sample) that a finished completion is known by when a run is resumed."""
CellKey: TypeAlias = tuple[int, int, int | None]
"""The (prompt_tokens, batch_size, num_draft_tokens) that a measured cell is known by when a benchmark is resumed."""


@dataclass(frozen=True, kw_only=True)
class CompletionLine:
    """One line of `run.jsonl`: one completion of one prompt.

    Attributes:
        index: the prompt's place in its file, from 0.
        sample: which of the prompt's samples, from 0.
        mode: "plain" or "speculative".
        text: the new text alone; `token_ids` are the new ids alone.
        finish_reason: "length", "eos" or "stop".
        num_target_forwards: forwards of the target that this row took part in, its prefill included.
        accepted_lengths: for each round, how many drafted tokens were kept.
        examined_lengths: for each round, what `num_examined` says of it.
        ms: from the start of the row's prefill until its last token.
        share_s: the row's equal share of the wall time of its batch and of all copies; `ms / 1000` for a batch of one
            in one copy.
        draft_s, verify_s, other_s: the row's equal share of where the rounds of its batch spent their time.
    """

    index: int
    sample: int
    mode: str
    prompt: str
    text: str
    token_ids: list[int]
    num_new_tokens: int
    finish_reason: str
    num_rounds: int
    num_target_forwards: int
    accepted_lengths: list[int]
    examined_lengths: list[int]
    ms: float
    share_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def key(self) -> LineKey:
        """What the completion is known by when a run is resumed."""
        return self.index, self.mode, self.sample

    def to_json(self) -> bytes:
        """Write the line as UTF-8 with its line feed; lone surrogates become question marks."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> "CompletionLine":
        """Read a line back.

        Raises:
            ValueError: the line is not JSON, its fields are not exactly those above, or it has a number that cannot be.
        """
        restored = restore(cls, read_json(line), exact=True)
        if restored.mode not in {PLAIN, SPECULATIVE}:
            raise ValueError(f"mode holds {restored.mode!r}")
        if not len(restored.accepted_lengths) == len(restored.examined_lengths) == restored.num_rounds:
            raise ValueError("its rounds do not add up")
        rounds = zip(restored.accepted_lengths, restored.examined_lengths, strict=True)
        if any(max(accepted, examined) > MOST_DRAFTED or 0 < examined < accepted for accepted, examined in rounds):
            raise ValueError("it has a round that cannot be")
        return restored


@dataclass(frozen=True, kw_only=True)
class PlainSummary:
    """What plain decoding did; `summary.summarise` defines each number."""

    ms_per_token: float | None
    tokens_per_s: float | None
    num_target_forwards: int


@dataclass(frozen=True, kw_only=True)
class SpeculativeSummary:
    """What speculative decoding did; `summary.summarise` defines each number."""

    ms_per_token: float | None
    tokens_per_s: float | None
    num_rounds: int
    num_target_forwards: int
    tokens_per_round: float | None
    acceptance_rate: float | None
    accepted_histogram: list[int]
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the plan expected of the run; null where nothing was planned."""

    plain_ms_per_token: float | None = None
    speculative_ms_per_token: float | None = None
    speedup: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory: anonymous resident bytes on a CPU, the allocator's reserve on a GPU."""

    rank: int
    planned_bytes: int | None = None
    measured_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """How long rank 0 took from its beginning to each step of its start; null for a step that did not come.

    A run begins with its process, or where it is a later point of a sweep, with itself.

    Attributes:
        began_unix_s: when that was.
        composed_s: the config is sound; nothing slow has been imported.
        imported_s: what every run needs has been imported; the library's models come with the checkpoints.
        joined_s: all ranks have met.
        checked_s: checkpoints and prompts are sound, and the job has been planned.
        loaded_s: the models are there.
        first_token_s: the first token that is shown; behind a warm-up in tasks that have one. Null for typed prompts
            and for task=benchmark.
    """

    began_unix_s: float
    composed_s: float | None = None
    imported_s: float | None = None
    joined_s: float | None = None
    checked_s: float | None = None
    loaded_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the lines do not tell about a run; `num_draft_tokens` is 0 without a draft.

    `weights` is "checkpoint" or "synthetic".
    """

    task: str
    model: str
    draft: str | None
    weights: str = "checkpoint"
    placement: dict[str, Any]
    world_size: int
    seed: int
    num_draft_tokens: int
    memory: list[RankMemory]
    forecast: Forecast = Forecast()
    startup: StartUp | None = None


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """One line of `benchmark.jsonl`: a cell of the table. What was not measured is None.

    Attributes:
        ms_per_token: by candidate (plain, speculative, generate, assisted), the median over repetitions.
        forecast_ms_per_token: what the plan expected of ours; empty where nothing was planned.
        tokens_per_round: of ours.
        other_share: of our rounds, what is neither drafting nor verification.
        copy_share: time to pass over the weights that a plain step reads on a rank, at the speed of a plain copy taken
            in turns with the steps, over the time of a step; above 1 where a cache holds them.
        text_sha256: of the token ids that prompts were cut from.
        versions, git_commit: what measured it.
    """

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
        """What the cell is known by when a benchmark is resumed."""
        return self.prompt_tokens, self.batch_size, self.num_draft_tokens

    @property
    def name(self) -> str:
        """What a report calls the cell."""
        drafting = f", K = {self.num_draft_tokens}" if self.num_draft_tokens else ""
        return f"prompt {self.prompt_tokens}, batch {self.batch_size}{drafting}"

    def to_json(self) -> bytes:
        """Write the line with its line feed."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> "BenchmarkRow":
        """Read a line back.

        Raises:
            ValueError: the line is not JSON, or its fields are not exactly those above.
        """
        return restore(cls, read_json(line), exact=True)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All of `summary.json`; `plain`, `speculative` and `speedup` are null for a mode that did not run.

    What task=benchmark measured stands in `cells`; of it, prompts and new tokens are those of one completion of each.
    `startup` is that of the last part of a run that was resumed.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    model: str
    draft: str | None
    weights: str
    placement: dict[str, Any]
    world_size: int
    num_prompts: int
    num_new_tokens: int
    seed: int
    versions: dict[str, str | None]
    git_commit: str | None
    plain: PlainSummary | None
    speculative: SpeculativeSummary | None
    speedup: float | None
    forecast: Forecast
    memory: list[RankMemory]
    startup: StartUp | None = None
    cells: list[BenchmarkRow] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> "Summary":
        """Read `summary.json` back.

        Raises:
            ValueError: the text is not JSON, is of another version, or holds what no run can write.
        """
        content = read_json(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {reprlib.repr(version)}, not {SCHEMA_VERSION}")
        summary = restore(cls, content)
        fast = summary.speculative
        if fast and not 1 <= len(fast.accepted_histogram) - 1 <= MOST_DRAFTED:
            raise ValueError("speculative.accepted_histogram should hold a count for each of 0..K accepted tokens")
        return summary


def num_examined(*, num_accepted: int, num_draft_tokens: int, room: int, ended_in_draft: bool) -> int:
    """Count the drafted tokens of one round that the acceptance rate may count.

    Args:
        num_accepted: drafted tokens that the round kept.
        num_draft_tokens: K.
        room: tokens that the row could still take when the round began.
        ended_in_draft: the last kept drafted token ended the row, so that nothing behind it was looked at.

    Returns:
        The kept tokens and the first rejected one. 0 where the room was less than K + 1: the length limit cuts long
        acceptances of such a round but no short ones, so that counting it would bias the rate.
    """
    if room <= num_draft_tokens:
        return 0
    return num_accepted if ended_in_draft else min(num_accepted + 1, num_draft_tokens)
