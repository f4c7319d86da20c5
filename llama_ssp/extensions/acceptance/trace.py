"""The trace of finished texts: its numbers for every place, its file, and what rounds of any K and rule would do.

Needs numpy alone, so that plans read it without torch. `page.md` says what each array means.

Shapes: N tokens of all texts, J tokens ahead of a beginning, B texts of one law, T places by tokens left, K drafted
tokens, D = K + 1.
"""

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_ssp.errors import ConfigError, one_message
from llama_ssp.extensions.acceptance import arithmetic
from llama_ssp.extensions.acceptance.arithmetic import Array, ExpectedRounds
from llama_ssp.extensions.acceptance.records import TRACE_FILE
from llama_ssp.settings.rules import AT_ZERO
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.settings.tasks import default_of
from llama_ssp.settings.trees import TreeShape, tree_shape

Numbers = NDArray[np.integer[Any]]
VERSION = 1
SPECULATIVE, BLOCK, COUPLED = "speculative", "block", "coupled"
RULES = (SPECULATIVE, BLOCK, COUPLED)
NOT_OF_LAW = {"from_model", "bad_ids", "eos_ids", "by_row"}
"""Settings of sampling that only say where other settings come from, or repeat them."""
OF_TEXTS = ("text_index", "text_sample", "text_law", "text_length", "text_category")
OF_TOKENS = ("token_id", "log_p", "expected_log_p", "variance_log_p")
LOG_Q, LOG_RACE, PROPOSED, TREE = "log_q", "log_race", "proposed", "tree="
_NUM_BOOTSTRAPS, _NUM_AT_ONCE = 1000, 512
_NEAR_TIE = 0.5
"""The most by which the logit of a greedy token may be below the best one, if other rounding chose the token."""


def law_of(sampling: SamplingConfig) -> dict[str, Any]:
    """The settings that make the law of texts, as a trace records them: all but defaults, and the temperature."""
    names = [entry.name for entry in fields(sampling) if entry.name not in NOT_OF_LAW]
    found = {name: getattr(sampling, name) for name in names}
    kept = {name: value for name, value in found.items() if value != default_of(sampling, name)}
    if sampling.logit_bias:
        kept["logit_bias"] = {str(token): bias for token, bias in sorted(sampling.logit_bias.items())}
    return kept | {"temperature": sampling.temperature}


def odd_settings(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ between two mappings of `law_of`, apart from the temperature.

    Each is `name=value`, with the value of `given`.
    """
    names = sorted({*given, *wanted} - {"temperature"})
    return [f"{name}={given.get(name, 'default')}" for name in names if given.get(name) != wanted.get(name)]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The rounds that texts of one law have with a draft, a rule and a K.

    Attributes:
        reach_BTD: G of `arithmetic`, up to the longest K.
        lengths_B: number of new tokens of each text.
        prompts_B: the number of each text's prompt.
    """

    reach_BTD: Array
    lengths_B: Any
    prompts_B: Any

    def rounds(self, num_draft_tokens: int) -> ExpectedRounds:
        """The rounds of all texts."""
        parts = [
            arithmetic.rounds_of(self.reach_BTD[some], self.lengths_B[some], num_draft_tokens)
            for some in _some_at_a_time(len(self.lengths_B))
        ]
        return ExpectedRounds(*(np.concatenate(values) for values in zip(*parts, strict=True)))

    def tokens_per_round(self, num_draft_tokens: int, *, of_texts: Numbers | None = None) -> tuple[float, float, float]:
        """Return new tokens, without those of prefills, per expected round, with a 95 % interval over prompts."""
        chosen_B = np.ones(len(self.lengths_B), dtype=bool) if of_texts is None else of_texts
        tokens_B, rounds_B = (self.lengths_B - 1)[chosen_B], self.rounds(num_draft_tokens).mean_B[chosen_B]
        _, prompts_B = np.unique(self.prompts_B[chosen_B], return_inverse=True)
        tokens_P, rounds_P = (np.bincount(prompts_B, weights=values) for values in (tokens_B, rounds_B))
        weights = np.random.default_rng(0).multinomial(
            len(tokens_P), np.full(len(tokens_P), 1 / len(tokens_P)), _NUM_BOOTSTRAPS
        )
        low, high = np.quantile((weights @ tokens_P) / (weights @ rounds_P), (0.025, 0.975))
        return float(tokens_P.sum() / rounds_P.sum()), float(low), float(high)

    def by_position(self, num_draft_tokens: int) -> list[float]:
        """Shares of rounds that accept the token at each position."""
        return arithmetic.by_position(self.reach_BTD, self.rounds(num_draft_tokens), num_draft_tokens).tolist()  # type: ignore[no-any-return]


class Trace:
    """A trace in memory.

    Attributes:
        about: facts about the models and texts: `target`, `drafts`, `laws` and `longest`, as `page.md` says.
        arrays: the arrays by name.
    """

    def __init__(self, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        self.about, self.arrays = about, arrays

    def to_bytes(self) -> bytes:
        """The file's content."""
        stream = io.BytesIO()
        np.savez(stream, about=np.array(json.dumps(self.about, sort_keys=True)), **self.arrays)
        return stream.getvalue()

    @classmethod
    def read(cls, file: Path, *, asked: str) -> "Trace":
        """Read a trace file, or the one in a folder; ConfigError, whose message begins with the setting `asked`."""
        file = file / TRACE_FILE if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(f"{asked} has no {TRACE_FILE}: give the folder of a finished run of task=acceptance")
        try:
            with np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
            about = json.loads(str(arrays.pop("about")))
            version = about["version"]
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{asked}: {file} is no trace of task=acceptance ({error})") from error
        if version != VERSION:
            raise ConfigError(
                f"{asked}: {file} has version {version}, and this llama-ssp reads {VERSION}: read the texts anew"
            )
        return cls(about, arrays)

    @classmethod
    def joined(cls, parts: Sequence["Trace"]) -> "Trace":
        """Join parts into one trace, with the texts in the order of their prompts and samples."""
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
        of_texts = [name for name in arrays if name in OF_TEXTS]
        order = np.lexsort([arrays["text_sample"], arrays["text_index"]])
        ends = np.cumsum(arrays["text_length"])
        tokens = np.concatenate([np.arange(ends[text] - arrays["text_length"][text], ends[text]) for text in order])
        return cls(
            parts[0].about, {name: values[order if name in of_texts else tokens] for name, values in arrays.items()}
        )

    @property
    def drafts(self) -> dict[str, dict[str, Any]]:
        """The facts about each draft, by name."""
        found: dict[str, dict[str, Any]] = self.about["drafts"]
        return found

    @property
    def temperatures(self) -> list[float]:
        """The temperature of each law."""
        return [float(law["temperature"]) for law in self.about["laws"]]

    @cached_property
    def _firsts(self) -> Numbers:
        lengths: Numbers = self.arrays["text_length"]
        return np.cumsum(lengths) - lengths

    def first_of(self, token: int) -> int:
        """Return the number of the first token of the text that contains a token."""
        return int(self._firsts[np.searchsorted(self._firsts, token, side="right") - 1])

    def texts(self, law: int) -> Numbers:
        """Return the numbers of the texts of a law that have a round: those of two tokens or more."""
        return np.flatnonzero((self.arrays["text_law"] == law) & (self.arrays["text_length"] > 1))

    def padded(self, name: str, texts: Numbers, *, filling: float = 0.0, num_tokens: int = 0) -> Array:
        """Return an array of tokens with a row for each text, padded to `num_tokens` or to the longest text."""
        values, lengths = self.arrays[name], self.arrays["text_length"][texts]
        found = np.full((len(texts), num_tokens or int(lengths.max()), *values.shape[1:]), filling, dtype=np.float64)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            found[row, :length] = values[self._firsts[text] : self._firsts[text] + length]
        return found

    def rules(self, draft: str, law: int) -> tuple[str, ...]:
        """Return the rules that differ for the draft's rounds; rules do not differ if proposals are certain."""
        if self.temperatures[law] == 0:
            return (AT_ZERO,)
        return (SPECULATIVE,) if self.drafts[draft]["is_certain"] else RULES

    def trees(self, draft: str) -> dict[str, TreeShape]:
        """Return the trees that the trace has for a draft, by the names of their arrays."""
        names = [name for name in self.arrays if name.startswith(f"{draft}/{TREE}")]
        return {name: tree_shape(name.removeprefix(f"{draft}/{TREE}")) for name in names}

    def replay_tree(self, name: str, law: int) -> Replay:
        """The rounds of the law's texts with a tree, by the name of its array; K is its depth."""
        texts = self.texts(law)
        lengths = self.arrays["text_length"][texts].astype(np.int64)
        depth, length = self.arrays[name].shape[1], int(lengths.max())
        reaches = [
            arithmetic.reach_of(
                arithmetic.by_left_from(
                    self.padded(name, texts[some], filling=-np.inf, num_tokens=length), lengths[some], depth
                )
            )
            for some in _some_at_a_time(len(texts))
        ]
        return Replay(reach_BTD=np.concatenate(reaches), lengths_B=lengths, prompts_B=self.arrays["text_index"][texts])

    def replay(self, draft: str, law: int, rule: str, longest: int) -> Replay:
        """The rounds of the law's texts with a draft and a rule, up to K = `longest`."""
        texts = self.texts(law)
        lengths = self.arrays["text_length"][texts].astype(np.int64)
        is_ratio, width = rule in {SPECULATIVE, BLOCK} and len(self.rules(draft, law)) > 1, self.drafts[draft]["width"]
        reaches, length = [], int(lengths.max())
        for some in _some_at_a_time(len(texts)):
            name = f"{draft}/{LOG_Q if is_ratio else LOG_RACE}"
            steps = self.padded(name, texts[some], filling=-np.inf, num_tokens=length)
            if is_ratio:
                steps -= _ahead(self.padded("log_p", texts[some], num_tokens=length), width)
            if width == 1:
                placed = arithmetic.by_left(steps[..., 0], lengths[some], longest)
            else:
                placed = arithmetic.by_left_from(steps, lengths[some], min(longest, width))
            reaches.append(arithmetic.reach_of(placed, as_block=rule == BLOCK))
        reach = np.concatenate(reaches)
        return Replay(reach_BTD=reach, lengths_B=lengths, prompts_B=self.arrays["text_index"][texts])

    def rejected(self, replay: Replay, law: int, num_draft_tokens: int) -> Array:
        """Return each token's number, the expected rounds that draft it, and those that reject it.

        The first token of each text is left out.
        """
        of_texts = arithmetic.rejected(replay.reach_BTD, replay.rounds(num_draft_tokens), num_draft_tokens)
        rows = zip(self._firsts[self.texts(law)], replay.lengths_B, of_texts.swapaxes(0, 1), strict=True)
        found = [
            np.vstack([np.arange(first + 1, first + length), counts[:, 1:length][:, ::-1]])
            for first, length, counts in rows
        ]
        return np.concatenate(found, axis=1)

    def most_drafted(self, draft: str) -> int | None:
        """Return the largest K of a draft in the trace; None if all K follow from it."""
        width = int(self.drafts[draft]["width"])
        return None if width == 1 else width

    def law_of(self, sampling: Mapping[str, Any], *, asked: str) -> int:
        """Return the number of the law with these settings; raises ConfigError if the trace has no texts of it."""
        for number, law in enumerate(self.about["laws"]):
            if law == sampling:
                return number
        wanted = sampling["temperature"]
        others = [f"temperature {law['temperature']:g}" for law in self.about["laws"]]
        odd = min((odd_settings(sampling, law) for law in self.about["laws"]), key=len)
        than = one_message(odd) if odd else f"temperature {wanted:g}"
        raise ConfigError(
            f"{asked} has texts of {', '.join(others)}, and texts of one law say nothing of {than}: read texts of that "
            "law with task=acceptance"
        )

    def unlikely(self, law: int) -> tuple[float, float]:
        """Return the share of a law's tokens that the target never writes, and how improbable the other tokens are.

        The second number is how far their sum of log-probabilities is below the target's expectation, in standard
        deviations of its own texts; it is negative if they are more probable. With greedy texts, the target never
        writes a token but the most probable one, and the second number is 0.
        """
        texts = self.texts(law)
        own, expected, variance = (
            np.concatenate([self.padded(name, texts[place : place + 1])[0] for place in range(len(texts))])
            for name in OF_TOKENS[1:]
        )
        is_possible = own > (-_NEAR_TIE if self.temperatures[law] == 0 else -np.inf)
        apart = (expected - own)[is_possible].sum() / max(float(variance[is_possible].sum()) ** 0.5, 1e-9)
        return 1 - float(is_possible.mean()), 0.0 if self.temperatures[law] == 0 else float(apart)


def _some_at_a_time(num_texts: int) -> Iterator[slice]:
    """Divide texts, so that intermediate results of all of them are never in memory at once."""
    return (slice(first, first + _NUM_AT_ONCE) for first in range(0, num_texts, _NUM_AT_ONCE))


def _ahead(values_BN: Array, width: int) -> Array:
    """Return the numbers (B, N, J) of the tokens 0, 1, ... positions after each token."""
    padded = np.pad(values_BN, ((0, 0), (0, width)))
    return np.stack([padded[:, ahead : ahead + values_BN.shape[1]] for ahead in range(width)], axis=-1)
