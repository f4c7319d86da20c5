"""The share of drafted tokens that a target accepts: a figure of the user's, a measured one of the pair, or a default.

Records that know pairs are asked first (`planning.spec.KnownPairs`). Every folder of options may have `pairs.yaml`, a
table of measured pairs with their sources. For a pair in no table, a plan takes the default of the package's table,
with its low and its high figure.

A drafted token is accepted less often the further it is from the round's first: a figure without positions declines as
published ones do, and has the tokens per round of a constant at the K at which it was measured.

Tokens per round: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, repeat
from operator import mul
from pathlib import Path
from typing import Any

from llama_ssp import catalogue
from llama_ssp.catalogue import LOCAL
from llama_ssp.errors import ConfigError, one_message
from llama_ssp.planning.printed import accepted, command
from llama_ssp.planning.spec import FindAcceptance, PlannedPair, PlanSpec
from llama_ssp.settings.drafters import SAME
from llama_ssp.settings.lengths import finder
from llama_ssp.settings.tasks import task_specs
from llama_ssp.settings.trees import TreeShape

PAIRS = "pairs.yaml"
PER_TEMPERATURE = 0.15
"""Acceptance that a unit of temperature costs: 0.12 to 0.19 from 0.4 to 1, by docs/benchmarks/acceptance.md."""
DECLINE, HEAD_DECLINE = 0.99, 0.97
"""Acceptance at a position over that at the one before, of models and of heads: medians of 7 settings of the shipped
pair and of 14 published curves (docs/findings/acceptance.md)."""
USUAL_K = 4
"""K of a figure that names none."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted.

    Attributes:
        source: where the probability is from.
        ends: the low and the high probability, where the table has both; None for a single one.
        is_forecast: whether the pair has not been measured.
        num_draft_tokens: K at which the pair was measured.
        known: by position, the probability that a token is accepted if those before it are; empty if unknown.
        decline: the factor by which the probability falls with each later position.
        between: the acceptances at two temperatures, each with its share, if this one is interpolated; else empty.
        is_of_texts: whether finished texts were measured, so that the tokens per round of such prompts are known.
    """

    probability: float
    source: str
    ends: tuple[float, float] | None = None
    is_forecast: bool = False
    num_draft_tokens: int = USUAL_K
    known: tuple[float, ...] = ()
    decline: float = DECLINE
    between: tuple[tuple[float, "Acceptance"], ...] = ()
    is_of_texts: bool = False

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        """Trees whose own tokens per round are known, so that they need not follow from the figures of chains."""
        return ()

    def tokens_by_length(self, probability: float, longest: int) -> list[float]:
        """Expected tokens per round of K = 1, 2, ..., where the figure is `probability`, or one of `ends`."""
        return tokens_by_length(self.by_position(probability, longest))

    def tokens_of_tree(self, probability: float, tree: TreeShape) -> float:
        """Expected tokens per round of a tree, where the figure is `probability`, or one of `ends`."""
        return tree_tokens(self.by_position(probability, tree.depth), tree)

    def by_position(self, probability: float, number: int) -> tuple[float, ...]:
        """The acceptance at the first `number` positions where the figure is `probability`, or one of `ends`."""
        scale = probability / self.probability if self.probability else 1.0
        if self.between:
            shares, figures = zip(*self.between, strict=True)
            both = [replace(one, decline=self.decline) for one in figures]
            parts = zip(*(one.by_position(min(scale * one.probability, 1.0), number) for one in both), strict=True)
            return tuple(sum(map(mul, shares, part)) for part in parts)
        first, decline = _declining(probability, self.num_draft_tokens, self.decline)
        known = [min(scale * one, 1.0) for one in self.known] or [first]
        further = accumulate(repeat(decline, number), mul, initial=known[-1])
        return (*known[:-1], *further)[:number]


_UNKNOWN_KIND = Acceptance(
    probability=0.3,
    ends=(0.05, 0.8),
    is_forecast=True,
    source="no figure of this kind of draft: give speculation.acceptance=, or measure it",
)


def expected_of_spec(spec: PlanSpec) -> Acceptance:
    """The acceptance that the user gave, else what is expected of the pair."""
    decline = HEAD_DECLINE if spec.has_head else DECLINE
    if spec.num_forced is not None:
        forced = acceptance_of(spec.num_forced, spec.num_draft_tokens)
        source = "that of speculation.forced_lengths, whose texts are not lossless"
        return Acceptance(probability=forced, source=source, decline=1.0)
    if spec.acceptance is not None:
        return Acceptance(probability=spec.acceptance, source="given as speculation.acceptance", decline=decline)
    return expected(spec.pair, spec.known_by, has_model=spec.draft is not None, decline=decline)


def acceptance_of(num_accepted: float, num_draft_tokens: int) -> float:
    """The acceptance, equal at every position, by which a round accepts `num_accepted` of K tokens on average."""
    powers = range(1, num_draft_tokens + 1)
    return _solved(lambda acceptance: sum(acceptance**power for power in powers), num_accepted, num_halvings=50)


def _solved(rising: Callable[[float], float], wanted: float, *, least: float = 0.0, num_halvings: int) -> float:
    """The argument at which a rising function reaches `wanted`, between `least` and 1."""
    low, high = least, 1.0
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high


def expected(
    pair: PlannedPair, known_by: Sequence[FindAcceptance] = (), *, has_model: bool = True, decline: float = DECLINE
) -> Acceptance:
    """The pair's own figure, else the default; raises ConfigError for a user's file that is wrong."""
    found: Acceptance | None = next(filter(None, (find(pair) for find in known_by)), None)
    return found or replace(_in_tables(pair, has_model=has_model), decline=decline)


def _in_tables(pair: PlannedPair, *, has_model: bool) -> Acceptance:
    if found := known(pair.target, pair.draft, temperature=pair.temperature):
        return found
    if not has_model:
        return _UNKNOWN_KIND
    return replace(_figure(all_pairs(tuple(catalogue.folders()))[-1]["default"], None), is_forecast=True)


def remarks(spec: PlanSpec, acceptance: Acceptance | None, best_ks: tuple[int, int] | None) -> Iterator[str]:
    """A note of a plan on an acceptance that is not measured; `best_ks` are the best K at its ends."""
    if not (acceptance and acceptance.is_forecast):
        return
    draft, said = spec.draft_name, list[str]()
    if best_ks and best_ks[0] < best_ks[1]:
        said = [f"the best K is {best_ks[0]} to {best_ks[1]}"]
        if (chooser := finder()) and accepted(setting := f"speculation.num_draft_tokens={chooser.name}"):
            said[0] += f", which {setting} finds"
    if spec.free_terms.layers:
        said.append("a run measures it, and speculation.acceptance= takes what it prints")
    for task in () if spec.free_terms.layers else task_specs().values():
        if task.stores_acceptance and LOCAL in (spec.target.name, draft):  # names of any folder, which store no pair
            said.append(f"measure the pair once with task={task.name}: speculation.acceptance= takes what it prints")
        elif task.stores_acceptance:
            other = spec.vocabulary if spec.vocabulary is not SAME else None
            own = [f"draft.{other.setting}={other.name}"] if other else []
            pair = f"model={spec.target.name}", f"draft={draft}", *own
            if measuring := command("run", f"task={task.name}", task.stores_acceptance, *pair):
                said.append(f"measure the pair once: {measuring}")
    yield from ["; ".join(said)] if said else []


def known(target: str, draft: str, *, temperature: float | None = None) -> Acceptance | None:
    """Return the acceptance of a pair, else of its draft with any target; None if no file has either.

    An 8-bit model has the acceptance of its base model. Between temperatures the acceptance is interpolated linearly;
    outside of them, that of the nearest temperature is adjusted. Raises ConfigError for a file of another form than the
    package's.
    """
    names = target.removesuffix("_8bit"), draft.removesuffix("_8bit")
    files = all_pairs(tuple(catalogue.folders()))
    pairs = ([one for one in content.get("pairs", []) if (one["target"], one["draft"]) == names] for content in files)
    of_draft = ([one] if (one := content.get("drafts", {}).get(draft)) else [] for content in files)
    of_user = ([one] if (one := content.get("default")) else [] for content in files[:-1])
    found = next(filter(None, (*pairs, *of_draft, *of_user)), None)
    return _at(found, temperature) if found else None


def _at(entries: Sequence[Mapping[str, Any]], temperature: float | None) -> Acceptance:
    """The figure of a pair at a temperature, by its entries."""
    by_temperature = {entry.get("temperature"): entry for entry in reversed(entries)}
    if temperature in by_temperature:
        return _figure(by_temperature[temperature], temperature)
    if temperature is None or None in by_temperature:
        return _figure(by_temperature[None] if None in by_temperature else entries[0], temperature)
    known_at = sorted(map(float, by_temperature))
    low = max((one for one in known_at if one <= temperature), default=known_at[0])
    high = min((one for one in known_at if one >= temperature), default=known_at[-1])
    if low == high:
        return _figure(by_temperature[low], temperature)
    share = (temperature - low) / (high - low)
    parts = tuple((part, _figure(by_temperature[one], one)) for part, one in ((1 - share, low), (share, high)))
    ends = [known.ends or (known.probability, known.probability) for _, known in parts]
    below, above = (sum(part * one[end] for (part, _), one in zip(parts, ends, strict=True)) for end in (0, 1))
    return Acceptance(
        probability=sum(part * known.probability for part, known in parts),
        source=f"between temperature {low:g} and {high:g}: {'; '.join(known.source for _, known in parts)}",
        ends=(below, above) if any(known.ends for _, known in parts) else None,
        between=parts,
    )


def _figure(entry: Mapping[str, Any], temperature: float | None) -> Acceptance:
    """A figure of a table, moved from its own temperature."""
    known_at, source, moved = entry.get("temperature"), entry["source"], 0.0
    if known_at is not None and temperature is not None and known_at != temperature:
        moved = PER_TEMPERATURE * (known_at - temperature)
        source = f"{source}; {moved:+.2f} from temperature {known_at:g} to {temperature:g}"
    names = ("acceptance", "low", "high") if entry.keys() >= {"low", "high"} else ("acceptance",)
    probability, *ends = (min(max(entry[name] + moved, 0.0), 1.0) for name in names)
    known = tuple(min(max(one + moved, 0.0), 1.0) for one in entry.get("by_position", ()))
    return Acceptance(
        probability=probability,
        source=source,
        ends=(ends[0], ends[1]) if ends else None,
        known=known,
        num_draft_tokens=entry.get("num_draft_tokens", USUAL_K),
    )


@cache
def all_pairs(where: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Return the tables of pairs of several folders, in the order of the search; the package's own is the last."""
    return [read_pairs(file) for folder in where if (file := folder / PAIRS).is_file()]


def read_pairs(file: Path) -> dict[str, Any]:
    """Read a table of pairs; raises ConfigError for one of another form."""
    content = catalogue.read(file)
    parts = {"pairs": list, "drafts": dict, "default": dict}
    problems = [f"{key} is none of {', '.join(parts)}" for key in content if key not in parts]
    wrong = [key for key, kind in parts.items() if not isinstance(content.get(key, kind()), kind)]
    problems += [f"{key} must have the form that conf/pairs.yaml shows" for key in wrong]
    entries: dict[str, Any] = {}
    if not wrong:
        entries = {f"pair {number}": entry for number, entry in enumerate(content.get("pairs", []), start=1)}
        entries |= {f"draft {name}": entry for name, entry in content.get("drafts", {}).items()}
        entries |= {"default": content["default"]} if "default" in content else {}
    problems += [f"{name} {problem}" for name, entry in entries.items() if (problem := _problem(name, entry))]
    if problems:
        raise ConfigError(f"{catalogue.shown(file)}: {one_message(problems)}")
    for entry in entries.values():
        entry.setdefault("source", catalogue.shown(file))
    return content


def _problem(name: str, entry: object) -> str | None:
    found = [entry[key] for key in ("low", "acceptance", "high") if key in entry] if isinstance(entry, dict) else []
    if not (isinstance(entry, dict) and "acceptance" in entry and all(map(_is_share, found))):
        return "needs an acceptance between 0 and 1, such as acceptance: 0.8"
    positions, number = entry.get("by_position", [0.0]), entry.get("num_draft_tokens", USUAL_K)
    names = [entry.get(key) for key in ("target", "draft") if name.startswith("pair ")]
    wrong = {
        "needs low <= acceptance <= high, the ends of its range": found != sorted(found),
        "needs target and draft, two names of models": not all(isinstance(one, str) for one in names),
        f"has temperature: {entry.get('temperature')}, which must be a number, such as 0.8": not isinstance(
            entry.get("temperature", 0.0), int | float
        ),
        "has by_position, which must be a list of the acceptance at each position, such as [0.8, 0.75]": not (
            isinstance(positions, list) and positions and all(map(_is_share, positions))
        ),
        f"has num_draft_tokens: {number}, which must be the K of its figure, such as 4": not (
            isinstance(number, int) and number >= 1
        ),
    }
    return next((fault for fault, is_wrong in wrong.items() if is_wrong), None)


def _is_share(figure: object) -> bool:
    return isinstance(figure, int | float) and 0 <= figure <= 1


def tokens_by_length(by_position: Sequence[float]) -> list[float]:
    """Expected tokens per round of K = 1, 2, ..., each 1 to K + 1: the accepted prefix and one token of the target."""
    return [*accumulate(accumulate(by_position, mul), initial=1.0)][1:]


@lru_cache(maxsize=4096)  # a search asks for the same few pairs
def _declining(acceptance: float, num_draft_tokens: int, decline: float) -> tuple[float, float]:
    """Return the acceptance of the first position and its decline that give as many tokens per round as a constant.

    If no declining acceptance can reach that number, the constant is returned with a decline of 1.
    """
    factors = [decline ** (number * (number - 1) / 2) for number in range(1, num_draft_tokens + 1)]

    def tokens(first: float) -> float:
        return math.fsum((1.0, *map(mul, factors, accumulate(repeat(first, num_draft_tokens), mul))))

    wanted = tokens_by_length((acceptance,) * num_draft_tokens)[-1]
    if tokens(1.0) < wanted:
        return acceptance, 1.0
    return _solved(tokens, wanted, least=acceptance, num_halvings=27), decline


@lru_cache(maxsize=4096)
def overlapped_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Return the expected tokens of a round whose drafting overlaps verification, between 1 and K.

    The rounds between two rejections are a renewal cycle. The first round of a cycle examines one token. With
    probability a this token is accepted, and then each round examines K tokens until one is rejected, which takes
    1 / (1 - a^K) rounds on average. A cycle thus has 1 + a / (1 - a^K) rounds, and gives 1 / (1 - a) tokens with the
    corrected one. The result is the ratio of tokens to rounds.
    """
    examined = sum(acceptance**power for power in range(num_draft_tokens))
    return examined / (1 + acceptance - acceptance**num_draft_tokens)


def overlapped_corrections(acceptance: float, num_draft_tokens: int) -> float:
    """Expected rejections per round with overlap; for each, the `overlapped_tokens` contain one token of the target."""
    whole = acceptance**num_draft_tokens
    return (1 - whole) / (1 + acceptance - whole)


def tree_tokens(by_depth: Sequence[float], tree: TreeShape) -> float:
    """Expected tokens of a round that drafts a tree.

    `by_depth` is the acceptance of a node's first child. The child that is examined after r rejected ones is assumed to
    be accepted 2 r times less often, as measured on the shipped models (docs/findings/acceptance.md). Of a dynamic
    tree, the `num_nodes` nodes that are most often reached count.
    """
    tokens, level, reached = 1.0, [1.0], [1.0]
    for width, acceptance in zip(tree.widths, by_depth, strict=True):
        by_rank, rest = [acceptance], 1 - acceptance
        for num_rejected in range(1, max(tree.widths)):
            share = acceptance / (2 * num_rejected)
            by_rank.append(rest * share)
            rest *= 1 - share
        if tree.is_dynamic:
            level = [reaching * share for reaching in sorted(level, reverse=True)[:width] for share in by_rank]
            reached += level
        else:
            level = [level[0] * sum(by_rank[:width])]
            tokens += level[0]
    return sum(sorted(reached, reverse=True)[: tree.num_nodes + 1]) if tree.is_dynamic else tokens
