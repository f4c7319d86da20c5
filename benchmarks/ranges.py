"""Fits the ranges of forecasts, and holds them to published figures: conf/ranges.yaml, docs/benchmarks/ranges.md.

    python -m benchmarks.ranges

The acceptance of a pair is fitted to the points of conf/acceptance.yaml, and the error of times by data sheets to the
plain rows of docs/benchmarks/published.md. For the page every row is forecast by a fit without it: a pair by the other
pairs, a plain row by the other rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.acceptance_fit import MOST_POINTS, fit_acceptance, fit_times
from benchmarks.points import Point, points, points_by_row
from benchmarks.published import draft_cost, fitted, plain_tokens_per_s, speculative_ms
from benchmarks.published_rows import A100, PAIRS, PLAIN, Pair
from llama_ssp.config.machines import hardware
from llama_ssp.planning.acceptance.fitted import FEATURES, AcceptanceFit, predicted
from llama_ssp.planning.acceptance.pair import DraftedPair

ROOT = Path(__file__).resolve().parents[1]
CONSTANTS, PAGE = ROOT / "conf" / "ranges.yaml", ROOT / "docs" / "benchmarks" / "ranges.md"
_ROUNDED = 4


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A published figure and its forecast by a fit without it."""

    name: str
    published: float
    low: float
    forecast: float
    high: float

    @property
    def is_inside(self) -> bool:
        """Whether the range holds the published figure."""
        return self.low <= self.published <= self.high

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return abs(self.forecast / self.published - 1)


def fitted_points() -> list[Point]:
    """The points that the fit of the package stands on."""
    return [point for point in points() if point.is_fitted]


def without_pair(pair: DraftedPair) -> AcceptanceFit:
    """The fit to all other pairs."""
    return fit_acceptance([point for point in fitted_points() if point.names != (pair.target, pair.draft)])


def checked_pairs(pairs: Sequence[Pair] = PAIRS) -> Iterator[Checked]:
    """Every published pair by a fit without the pair: milliseconds per token."""
    machine = hardware.load(A100)
    for pair in pairs:
        drafted = points_by_row()[pair.row].pair
        ratio, _ = draft_cost(pair, machine)
        ends = predicted(drafted, without_pair(drafted))
        slow, forecast, fast = (speculative_ms(pair, ratio, acceptance) for acceptance in ends)
        yield Checked(name=pair.row, published=pair.speculative_ms, low=fast, forecast=forecast, high=slow)


def time_errors() -> list[float]:
    """Of every plain row by constants that are not fitted to it: the logarithm of published over forecast time."""
    machine = hardware.load(A100)
    forecasts = [plain_tokens_per_s(row, fitted(machine, without_row=row)) for row in PLAIN]
    return [math.log(forecast / row.tokens_per_s) for forecast, row in zip(forecasts, PLAIN, strict=True)]


def checked_plain() -> Iterator[Checked]:
    """Every plain row by the constants and the errors of the others: milliseconds per token."""
    errors = time_errors()
    for place, (row, error) in enumerate(zip(PLAIN, errors, strict=True)):
        published = 1e3 / row.tokens_per_s
        forecast = published / math.exp(error)
        low, high = fit_times([*errors[:place], *errors[place + 1 :]]).ends(forecast)
        gpus = "1 GPU" if row.num_gpus == 1 else f"{row.num_gpus} GPUs"
        yield Checked(name=f"{row.name}, {gpus}", published=published, low=low, forecast=forecast, high=high)


def constants() -> dict[str, Any]:
    """The content of conf/ranges.yaml."""
    fit = fit_acceptance(fitted_points())
    acceptance = asdict(fit) | {"coefficients": dict(zip(FEATURES, fit.coefficients, strict=True))}
    content: dict[str, Any] = _rounded({"acceptance": acceptance, "times": asdict(fit_times(time_errors()))})
    return content


def _rounded(tree: Any) -> Any:  # noqa: ANN401 - any tree of figures
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_rounded(value) for value in tree]
    return round(tree, _ROUNDED) if isinstance(tree, float) else tree


def yaml_text() -> str:
    """The file conf/ranges.yaml."""
    head = "# Ranges of forecasts: fitted by `python -m benchmarks.ranges`, which writes this file.\n"
    return head + yaml.safe_dump(constants(), sort_keys=False, default_flow_style=None, width=118)


def _table(rows: Sequence[Checked]) -> str:
    lines = ["| row | published ms/token | forecast | 80 % range | inside |", "|---|---|---|---|---|"]
    for row in rows:
        ends = f"{row.low:.4g}-{row.high:.4g}"
        verdict = "yes" if row.is_inside else "**no**"
        lines.append(f"| {row.name} | {row.published:.4g} | {row.forecast:.4g} | {ends} | {verdict} |")
    return "\n".join(lines)


def _shares(groups: dict[str, list[Checked]]) -> str:
    lines = ["| | rows | inside their ranges | median error | largest error |", "|---|---|---|---|---|"]
    for name, rows in groups.items():
        inside, errors = sum(row.is_inside for row in rows), [row.error for row in rows]
        share = f"{inside} of {len(rows)}, {inside / len(rows):.0%}"
        lines.append(f"| {name} | {len(rows)} | {share} | {median(errors):.0%} | {max(errors):.0%} |")
    return "\n".join(lines)


_MEANINGS = {
    "level": "odds at a ratio of 8, temperature 0.5, half prose and half code",
    "size": "the target e times as large, relative to its draft",
    "temperature": "temperature 1 instead of 0",
    "code": "code instead of prose",
    "block": "`verification=block` instead of `speculative`",
    "coupled": "`verification=coupled` instead of `speculative`",
    "own_tokenizer": "the draft has its own tokenizer",
    "trained_together": "the target was trained to be predictable for its draft, as the shipped pair",
}


def _coefficients(fit: AcceptanceFit) -> str:
    lines = ["| effect | change of log odds | standard error |", "|---|---|---|"]
    for place, (name, value) in enumerate(zip(FEATURES, fit.coefficients, strict=True)):
        lines.append(f"| {_MEANINGS[name]} | {value:+.2f} | {math.sqrt(fit.covariance[place][place]):.2f} |")
    return "\n".join(lines)


def _examples(fit: AcceptanceFit) -> str:
    """What the fit says of some pairs that nobody has published."""
    lines = ["| target / draft | temperature | acceptance | 80 % range |", "|---|---|---|---|"]
    for ratio, temperature in product((2, 8, 16, 56), (0.0, 0.8)):
        pair = DraftedPair(target="", draft="", size_ratio=ratio, temperature=temperature)
        low, middle, high = predicted(pair, fit)
        lines.append(f"| {ratio} | {temperature:g} | {middle:.2f} | {low:.2f}-{high:.2f} |")
    return "\n".join(lines)


def page() -> str:
    """The page docs/benchmarks/ranges.md."""
    fit, times = fit_acceptance(fitted_points()), fit_times(time_errors())
    pairs, plain = [*checked_pairs()], [*checked_plain()]
    low_ms, high_ms = times.ends(1.0)
    return TEXT.format(
        shares=_shares({"speculative pairs": pairs, "plain rows": plain, "all": [*pairs, *plain]}),
        num_pairs=len(fit.pairs), num_points=fit.num_points, coefficients=_coefficients(fit), examples=_examples(fit),
        between=fit.between_pairs, within=fit.within_pair, quantile=fit.quantile, most_points=MOST_POINTS,
        pairs=_table(pairs), plain=_table(plain), low=low_ms, high=high_ms, num_rows=len(plain),
    )  # fmt: skip


TEXT = """# Ranges of forecasts

`python -m benchmarks.ranges` makes this page and `conf/ranges.yaml`. It says how wide the 80 % ranges of a plan are,
what they rest on, and how many published figures they hold.

## Share inside

Every row is forecast by a fit without it. A pair is left out with all its points, so a row of 30B with 7B is forecast
by other pairs alone. A plain row is forecast by constants that are not fitted to it, and its range comes from the
errors of the other rows.

{shares}

An 80 % range should hold four rows of five.

## Acceptance of a pair

The log odds of the acceptance are linear in the logarithm of the ratio of parameters, the temperature, the kind of text
and the rule. Every pair deviates by an amount of its own, every measurement of a pair by another.
`conf/acceptance.yaml` has the points that this is fitted to, {num_points} of {num_pairs} pairs, each with its source. A
pair with more than {most_points} points counts in the coefficients as if it had {most_points}. They have wide priors
around 0.

{coefficients}

The spread between pairs is {between:.2f}, within a pair {within:.2f}. A range ends {quantile:.2f} standard deviations
from its median (Student's t, by the number of pairs). Both spreads are averages over what the points allow. A first fit
took the likeliest ones (0.10 each, the least that it allowed), and its ranges held 18 of the 25 figures: with so few
pairs, the likeliest spread between them is next to none.

The points do not tell families apart from pairs, so the family only picks the nearest pairs that a plan names. A figure
of the pair itself has the spread within a pair alone. Pairs that nobody has published, whatever they write:

{examples}

## Speculative pairs

The plain time and, where it is published, the cost ratio c are the published ones, as in [Published
speeds](published.md): this table tests the acceptance. No point is fitted whose K is not published (transformers and
gpt-fast).

{pairs}

transformers' rows of 70B imply 4.96 and 5.2 tokens from rounds of at most 5, if K was 4, which is not published. No
acceptance below 1 gives that.

## Plain rows

Times of a GPU that is described by its data sheet are {low:.2f} to {high:.2f} times the forecast, by {num_rows} rows
that others measured on A100s. A plan widens its ranges by that until `task=calibrate` has measured the machine.

{plain}
"""


def main() -> None:
    """Write the constants and the page."""
    CONSTANTS.write_text(yaml_text(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
