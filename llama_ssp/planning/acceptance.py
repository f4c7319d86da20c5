"""How many drafted tokens a target accepts: a figure of the pair, or those of the nearest known pairs.

A figure of the pair is the user's, or what `task=latency` measured, or the package's: every folder of options may have
`pairs.yaml`, written by hand, and `measured_pairs.yaml`, which `store` writes. For any other pair conf/acceptance.yaml
has points of known pairs: the nearest one is the figure, and the nearest three say how low and how high it may be.

Tokens per round: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.architectures.family import inventory
from llama_ssp.errors import ConfigError, SspError, one_message
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings import catalogue
from llama_ssp.settings.drafters import draft_name, has_own_tokenizer
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import ModelShape, RunConfig, TextKind
from llama_ssp.settings.tasks import LOCAL
from llama_ssp.settings.trees import TreeShape

PAIRS, MEASURED, POINTS = "pairs.yaml", "measured_pairs.yaml", "acceptance.yaml"
NUM_NEAREST = 3
_OTHER_FAMILY, _OTHER_TOKENIZER, _OTHER_TEXT = 1.0, 2.0, 0.5
"""Distances of pairs, next to the logarithm of size ratios; and of a point by text or rule, next to temperatures."""
PER_TEMPERATURE = 0.15
"""Acceptance that a unit of temperature costs: 0.12 to 0.19 from 0.4 to 1, by docs/benchmarks/acceptance.md."""
_UNKNOWN_RATIO, _UNKNOWN_TEMPERATURE = 8.0, 0.5
_HEAD = (
    "# Acceptance of pairs as measured here: written by task=latency with task.store=true. pairs.yaml comes first.\n"
)

Gain = Callable[[float, int], float]
"""Expected tokens of a round by the acceptance and K."""


@dataclass(frozen=True, kw_only=True)
class DraftedPair:
    """A target and its draft, and all that its acceptance depends on; None where it is not known.

    Attributes:
        target, draft: names; a draft without a model has the name of its kind.
        size_ratio: parameters of the target over those of the draft.
        family: `model_type` of the target.
        own_tokenizer: the draft has a tokenizer of its own.
        is_head: the draft is a head; heads are compared with heads alone.
    """

    target: str
    draft: str
    has_model: bool = True
    size_ratio: float | None = None
    family: str | None = None
    temperature: float | None = None
    text: TextKind = TextKind.any
    rule: str = DEFAULT
    own_tokenizer: bool = False
    is_head: bool = False


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted.

    Attributes:
        source: where it is from.
        low, high: of the nearest known pairs, or of a file of pairs; None where it is a single figure.
        is_forecast: nobody has measured the pair.
    """

    probability: float
    source: str
    low: float | None = None
    high: float | None = None
    is_forecast: bool = False

    @property
    def ends(self) -> tuple[float, float] | None:
        """The low and the high figure, if it has both."""
        return None if self.low is None or self.high is None else (self.low, self.high)


_LIKE_NOTHING = Acceptance(
    probability=0.3, low=0.05, high=0.8, is_forecast=True,
    source="no figure of this kind of draft: give speculation.acceptance=, or measure it",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KnownPoint:
    """One figure of a known pair.

    Attributes:
        row: its row in docs/benchmarks/published.md, if it has one.
        is_known: its K is published; no other pair is forecast by a point without it.
    """

    pair: DraftedPair
    num_draft_tokens: int
    tokens_per_round: float
    source: str
    row: str | None = None
    is_known: bool = True

    @property
    def publisher(self) -> str:
        """Who measured it: the begin of `source`."""
        return re.split(r"[,:]", self.source)[0]

    @property
    def acceptance(self) -> float:
        """The acceptance that the tokens per round imply."""
        return implied_acceptance(self.tokens_per_round, self.num_draft_tokens)


def pair_of_job(job: PlanSpec) -> DraftedPair:
    """The pair of a job with a draft."""
    draft, shape = (job.draft.name, job.draft.shape) if job.draft else (str(job.free_draft), None)
    return _pair(
        job.target.name, job.target.shape, draft, shape, has_model=job.draft is not None,
        temperature=job.temperature, text=job.text, rule=job.rule, own_tokenizer=job.own_tokenizer,
    )  # fmt: skip


def pair_of_run(config: RunConfig) -> DraftedPair:
    """The pair of a run with a draft."""
    model = config.draft.model
    return _pair(
        config.model.name, config.model.shape, str(draft_name(config.draft)), model.shape if model else None,
        has_model=model is not None, temperature=config.sampling.temperature, text=config.speculation.text,
        rule=config.verification.rule, own_tokenizer=has_own_tokenizer(config.draft),
    )  # fmt: skip


def _pair(
    target: str, target_shape: ModelShape | None, draft: str, draft_shape: ModelShape | None,
    **others: Any,  # noqa: ANN401 - fields of a pair
) -> DraftedPair:  # fmt: skip
    sizes = [inventory(shape).num_parameters for shape in (target_shape, draft_shape) if shape]
    return DraftedPair(
        target=target, draft=draft, family=target_shape.model_type if target_shape else None,
        size_ratio=sizes[0] / sizes[1] if target_shape and draft_shape else None,
        is_head=draft_shape is not None and draft_shape.is_head, **others,
    )  # fmt: skip


def expected_of_job(job: PlanSpec) -> Acceptance:
    """The acceptance that the user gave, else what is expected of the pair."""
    if job.acceptance is not None:
        return Acceptance(probability=job.acceptance, source="given as speculation.acceptance")
    return expected(pair_of_job(job))


def expected(pair: DraftedPair) -> Acceptance:
    """The pair's own figure, else that of the nearest; raises ConfigError for a user's file that is wrong."""
    return known(pair) or (nearest(pair) if pair.has_model else _LIKE_NOTHING)


@lru_cache(maxsize=1024)  # a search asks for the same few pairs
def nearest(pair: DraftedPair, *, without: str | None = None) -> Acceptance:
    """The figure of the nearest known pair, between the lowest and the highest of the nearest three.

    Pairs of the publisher `without` do not count.

    A draft that is smaller for its target than all three has the lowest. Of several points of a known pair, the nearest
    in temperature, text and rule counts.
    """
    found = _nearest_points(pair, without)
    figures = [point.acceptance for point in found]
    first, *others = (
        f"{point.pair.target} with {point.pair.draft} ({figure:.2f})"
        for point, figure in zip(found, figures, strict=True)
    )
    ratios = [point.pair.size_ratio or 0.0 for point in found]
    is_smaller = not pair.is_head and pair.size_ratio is not None and pair.size_ratio > max(ratios)
    smaller = "; the draft is smaller than theirs, and has the lowest" if is_smaller else ""
    return Acceptance(
        probability=min(figures) if is_smaller else figures[0], low=min(figures), high=max(figures), is_forecast=True,
        source=f"no figure of this pair: nearest is {first}, then {' and '.join(others)}{smaller}",
    )  # fmt: skip


def _nearest_points(pair: DraftedPair, without: str | None) -> list[KnownPoint]:
    others: dict[tuple[str, str], list[KnownPoint]] = {}
    for point in points():
        is_alike = point.is_known and point.pair.is_head == pair.is_head and point.publisher != without
        if is_alike and (point.pair.target, point.pair.draft) != (pair.target, pair.draft):
            others.setdefault((point.pair.target, point.pair.draft), []).append(point)
    by_pair = [min(found, key=lambda point: _distance_of_draws(pair, point.pair)) for found in others.values()]
    return sorted(by_pair, key=lambda point: _distance_of_models(pair, point.pair))[:NUM_NEAREST]


def _distance_of_models(one: DraftedPair, other: DraftedPair) -> float:
    ratios = (each.size_ratio or _UNKNOWN_RATIO for each in (one, other))
    apart = abs(math.log(next(ratios) / next(ratios))) + _OTHER_FAMILY * (one.family != other.family)
    return apart + _OTHER_TOKENIZER * (one.own_tokenizer != other.own_tokenizer)


def _distance_of_draws(one: DraftedPair, other: DraftedPair) -> float:
    first, second = (_UNKNOWN_TEMPERATURE if each.temperature is None else each.temperature for each in (one, other))
    texts = {one.text, other.text} - {TextKind.any}
    is_greedy = one.temperature == 0  # all rules coincide
    return (
        abs(first - second) + _OTHER_TEXT * (len(texts) > 1) + _OTHER_TEXT * (one.rule != other.rule and not is_greedy)
    )


@cache
def points() -> tuple[KnownPoint, ...]:
    """All points of conf/acceptance.yaml, by pair."""
    found = []
    for entry in catalogue.read(catalogue.conf_dir() / POINTS)["pairs"]:
        target_size, draft_size = entry["parameters"]
        for point in entry["points"]:
            pair = DraftedPair(
                target=entry["target"], draft=entry["draft"], family=entry["family"],
                size_ratio=target_size / draft_size, own_tokenizer=entry.get("own_tokenizer", False),
                is_head=entry.get("head", False),
                temperature=point["temperature"], text=TextKind[point["text"]], rule=point.get("rule", DEFAULT),
            )  # fmt: skip
            found.append(
                KnownPoint(
                    pair=pair, num_draft_tokens=point["K"], tokens_per_round=point["tokens_per_round"],
                    source=point["source"], row=point.get("row"), is_known=point.get("k_is_published", True),
                )
            )  # fmt: skip
    return tuple(found)


def remarks(job: PlanSpec, acceptance: Acceptance | None, best_ks: tuple[int, int] | None) -> Iterator[str]:
    """What a plan notes of an acceptance that nobody has measured; `best_ks` are the best K at its ends."""
    if not (acceptance and acceptance.is_forecast):
        return
    if best_ks and best_ks[0] < best_ks[1]:
        yield (
            f"the best K is {best_ks[0]} to {best_ks[1]}, by the acceptance: no K is recommended before the pair is "
            "measured; speculation.num_draft_tokens=auto finds it while it runs"
        )
    draft = job.draft.name if job.draft else job.free_draft
    if LOCAL in (job.target.name, draft):  # a name of any folder, which no pair is stored by
        yield "to know it, measure the pair once with task=latency; speculation.acceptance= takes what it prints"
        return
    own = " draft.tokenizer=own" if job.own_tokenizer else ""
    command = f"llama-ssp run task=latency task.store=true model={job.target.name} draft={draft}{own}"
    yield f"to know it, measure the pair once: {command}"


def known(pair: DraftedPair) -> Acceptance | None:
    """The figure of a pair, or of its draft with any target; quantized models have the figure of their base.

    Of figures at several temperatures, the nearest is taken, and moved to the pair's. None if no file has one; a file
    without the form of the package's raises ConfigError.
    """
    files = _files(tuple(catalogue.folders()))
    names = pair.target.removesuffix("_8bit"), pair.draft.removesuffix("_8bit")

    def distance(entry: Mapping[str, Any]) -> float:
        known_at = entry.get("temperature")
        return abs(known_at - pair.temperature) if known_at is not None and pair.temperature is not None else 0.0

    of_pair = (
        min((entry for entry in content.get("pairs", []) if (entry["target"], entry["draft"]) == names), key=distance,
            default=None)
        for content in files
    )  # fmt: skip
    of_draft = (_of_text(content.get("drafts", {}).get(pair.draft), pair.text) for content in files)
    entry = next(filter(None, (*of_pair, *of_draft, *(content.get("default") for content in files))), None)
    if entry is None:
        return None
    return _at_temperature(entry, pair.temperature)


def _of_text(entry: dict[str, Any] | None, text: TextKind) -> dict[str, Any] | None:
    """The figure of a draft for a kind of text, if it has one of its own."""
    return entry and entry.get("by_text", {}).get(text.name, entry)


def _at_temperature(entry: Mapping[str, Any], temperature: float | None) -> Acceptance:
    """A figure at another temperature than its own."""
    known_at, source, moved = entry.get("temperature"), entry["source"], 0.0
    if known_at is not None and temperature is not None and known_at != temperature:
        moved = PER_TEMPERATURE * (known_at - temperature)
        source = f"{source}; {moved:+.2f} from temperature {known_at:g} to {temperature:g}"
    ends = {name: entry.get(name) for name in ("acceptance", "low", "high")}
    shifted = {name: None if end is None else min(max(end + moved, 0.0), 1.0) for name, end in ends.items()}
    return Acceptance(probability=shifted["acceptance"] or 0.0, source=source, low=shifted["low"], high=shifted["high"])


def store(entry: Mapping[str, Any]) -> Path:
    """Write a measured pair to the user's own file in place of an earlier one at its temperature; returns the file.

    Raises SspError if it cannot be written, ConfigError if the file is there and has another form.
    """

    def key(each: Mapping[str, Any]) -> tuple[object, ...]:
        return each["target"], each["draft"], each.get("temperature")

    file = catalogue.user_dir() / MEASURED
    old = _read(file).get("pairs", []) if file.is_file() else []
    kept = [each for each in old if key(each) != key(entry)]
    text = yaml.safe_dump({"pairs": [*kept, dict(entry)]}, sort_keys=False, allow_unicode=True, width=160)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_HEAD + text, encoding="utf-8")
    except OSError as error:
        raise SspError(f"{file} cannot be written ({error.strerror}): make its folder writable") from error
    _files.cache_clear()
    return file


@cache
def _files(where: tuple[Path, ...]) -> list[dict[str, Any]]:
    """The contents of the files of several folders, the first to be asked first."""
    named = [folder / name for folder in where for name in (PAIRS, MEASURED)]
    return [_read(file) for file in named if file.is_file()]


def _read(file: Path) -> dict[str, Any]:
    content = catalogue.read(file)
    parts = {"pairs": list, "drafts": dict, "default": dict}
    problems = [f"{key} is none of {', '.join(parts)}" for key in content if key not in parts]
    wrong = [key for key, kind in parts.items() if not isinstance(content.get(key, kind()), kind)]
    problems += [f"{key} must have the form that conf/pairs.yaml shows" for key in wrong]
    entries: dict[str, Any] = {}
    if not wrong:
        entries = {f"pair {number}": entry for number, entry in enumerate(content.get("pairs", []), start=1)}
        for name, entry in content.get("drafts", {}).items():
            texts = entry.get("by_text", {}) if isinstance(entry, dict) else {}
            of_texts = texts if isinstance(texts, dict) else {"by_text": texts}
            entries |= {f"draft {name}": entry} | {f"draft {name}, {text}": each for text, each in of_texts.items()}
        entries |= {"default": content["default"]} if "default" in content else {}
    problems += [f"{name} {problem}" for name, entry in entries.items() if (problem := _problem(name, entry))]
    if problems:
        raise ConfigError(f"{catalogue.shown(file)}: {one_message(problems)}")
    for entry in entries.values():
        entry.setdefault("source", catalogue.shown(file))
    return content


def _problem(name: str, entry: object) -> str | None:
    """The first fault of an entry."""
    found = [entry[key] for key in ("low", "acceptance", "high") if key in entry] if isinstance(entry, dict) else []
    if not (isinstance(entry, dict) and "acceptance" in entry) or not all(
        isinstance(each, int | float) and 0 <= each <= 1 for each in found
    ):
        return "needs an acceptance between 0 and 1, such as acceptance: 0.8"
    if found != sorted(found):
        return "needs low <= acceptance <= high, the ends of its range"
    if name.startswith("pair ") and not all(isinstance(entry.get(key), str) for key in ("target", "draft")):
        return "needs target and draft, two names of models"
    if not isinstance(entry.get("temperature", 0.0), int | float):
        return f"has temperature: {entry['temperature']}, which must be a number, such as 0.8"
    return None


@lru_cache(maxsize=4096)  # a search asks for the same few pairs
def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens per round, 1 to K + 1: the accepted prefix and one token of the target."""
    return sum(acceptance**power for power in range(num_draft_tokens + 1))


@lru_cache(maxsize=4096)
def overlapped_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round whose drafting overlaps verification, 1 to K.

    Rounds renew at each rejection. The next round examines one token, and with probability a the rounds that follow
    examine K each until one rejects, which takes 1 / (1 - a^K) of them on average. 1 / (1 - a) tokens come from one
    rejection to the next, the corrected one included, in 1 + a / (1 - a^K) rounds. Their ratio is the result.
    """
    examined = sum(acceptance**power for power in range(num_draft_tokens))
    return examined / (1 + acceptance - acceptance**num_draft_tokens)


def overlapped_corrections(acceptance: float, num_draft_tokens: int) -> float:
    """Of `overlapped_tokens`, how many follow a rejection: the rejections per round."""
    whole = acceptance**num_draft_tokens
    return (1 - whole) / (1 + acceptance - whole)


@lru_cache(maxsize=4096)
def tree_tokens(acceptance: float, tree: TreeShape) -> float:
    """Expected tokens of a round that drafts a tree.

    `acceptance` is that of a node's first child. One that is examined after r others were rejected is taken to be
    accepted 2 r times less often, as measured on the shipped models (docs/findings/acceptance.md). Of a dynamic tree
    the nodes that are most often accepted count.
    """
    by_rank, rest = [acceptance], 1 - acceptance
    for num_rejected in range(1, max(tree.widths)):
        share = acceptance / (2 * num_rejected)
        by_rank.append(rest * share)
        rest *= 1 - share
    if not tree.is_dynamic:
        tokens = reaching = 1.0
        for width in tree.widths:
            reaching *= sum(by_rank[:width])
            tokens += reaching
        return tokens
    level, reached = [1.0], [1.0]
    for width in tree.widths:
        level = [reaching * share for reaching in sorted(level, reverse=True)[:width] for share in by_rank]
        reached += level
    return sum(sorted(reached, reverse=True)[: tree.num_nodes + 1])


def implied_acceptance(num_tokens: float, num_draft_tokens: int) -> float:
    """Inverse of `tokens_per_round` by the acceptance; 1 beyond K + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(middle, num_draft_tokens) < num_tokens else (low, middle)
    return high


def token_times(rounds_s: Sequence[float], acceptance: float, gain: Gain = tokens_per_round) -> tuple[float, ...]:
    """Seconds per token for K = 1, 2, ... from those of a round."""
    return tuple(seconds / gain(acceptance, number) for number, seconds in enumerate(rounds_s, start=1))


def fastest(times: Sequence[float]) -> int:
    """The K that takes the least time per token."""
    return 1 + min(range(len(times)), key=times.__getitem__)
