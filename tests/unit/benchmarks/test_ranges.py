"""Ranges against published figures: nothing is fitted to the row it predicts, and four rows of five are inside."""

from dataclasses import replace

import pytest
import yaml

from benchmarks import published, ranges
from benchmarks.acceptance_fit import fit_acceptance, fit_times, student_quantile
from benchmarks.points import Point, points, points_by_row
from benchmarks.published_rows import A100, PAIRS, PLAIN, PlainRow
from llama_ssp.config.machines import hardware
from llama_ssp.planning.acceptance.fitted import FEATURES, features, predicted, probability_of, shipped_fit
from llama_ssp.planning.acceptance.rounds import tokens_per_round


def test_every_published_pair_is_a_point_with_the_tokens_that_its_times_imply() -> None:
    machine = hardware.load(A100)
    assert len(PAIRS) == len(points_by_row()) == 14
    for pair in PAIRS:
        point, (ratio, _) = points_by_row()[pair.row], published.draft_cost(pair, machine)
        implied = pair.plain_ms / pair.speculative_ms * (1 + pair.num_draft_tokens * ratio)
        assert point.num_draft_tokens == pair.num_draft_tokens
        assert point.tokens_per_round == pytest.approx(implied, abs=0.006), pair.name
        assert point.is_fitted == ("[^k]" not in pair.name)


def test_every_point_has_a_source() -> None:
    assert all(point.source and point.tokens_per_round >= 1 for point in points())


def test_a_range_needs_no_figure_of_the_pair_that_it_predicts() -> None:
    """Other figures of the pair change the fit of the package, and not the forecast of the pair."""
    chosen = ranges.fitted_points()
    pair = points_by_row()["SmolLM2 1.7B with 135M"].pair

    def changed(point: Point) -> Point:
        return replace(point, tokens_per_round=2.0) if point.names == (pair.target, pair.draft) else point

    others = [point for point in map(changed, chosen) if point.names != (pair.target, pair.draft)]
    assert predicted(pair, fit_acceptance(others)) == predicted(pair, ranges.without_pair(pair))
    assert predicted(pair, fit_acceptance([*map(changed, chosen)])) != predicted(pair, fit_acceptance(chosen))


@pytest.mark.parametrize("row", [PLAIN[0], PLAIN[3]], ids=lambda row: row.name)
def test_the_constants_of_a_plain_row_are_not_fitted_to_it(row: PlainRow, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = hardware.load(A100)
    without = published.fitted(machine, without_row=row)
    other = replace(row, tokens_per_s=2 * row.tokens_per_s)
    monkeypatch.setattr(published, "PLAIN", tuple(other if each == row else each for each in PLAIN))
    assert published.fitted(machine, without_row=other) == without
    assert published.fitted(machine) != without


def test_four_published_rows_of_five_are_inside_their_ranges() -> None:
    pairs, plain = [*ranges.checked_pairs()], [*ranges.checked_plain()]
    assert (len(pairs), len(plain)) == (14, 11)
    inside = sum(row.is_inside for row in (*pairs, *plain))
    assert 0.72 <= inside / 25 <= 0.88
    assert sum(row.is_inside for row in pairs) >= 10
    assert sum(row.is_inside for row in plain) >= 8


def test_the_constants_and_the_page_are_those_of_the_points() -> None:
    assert yaml.safe_load(ranges.CONSTANTS.read_text()) == ranges.constants()
    assert ranges.PAGE.read_text() == ranges.page()


def test_a_fit_finds_what_points_were_made_from() -> None:
    """Points on a line without noise: the coefficients of the line, up to what the priors pull."""
    made = []
    for point in points():
        pair = replace(point.pair, trained_together=False, own_tokenizer=False, rule="speculative")
        size, temperature = features(pair)[1:3]
        tokens = tokens_per_round(probability_of(1.2 - 0.3 * size - 0.8 * temperature), 4)
        made.append(replace(point, pair=pair, tokens_per_round=tokens, num_draft_tokens=4))
    fit = fit_acceptance(made)
    found = dict(zip(FEATURES, fit.coefficients, strict=True))
    assert found["level"] == pytest.approx(1.2, abs=0.05)
    assert found["size"] == pytest.approx(-0.3, abs=0.05)
    assert found["temperature"] == pytest.approx(-0.8, abs=0.1)


def test_students_quantiles_are_those_of_the_tables() -> None:
    assert [student_quantile(freedom) for freedom in (4, 6, 10)] == pytest.approx([1.533, 1.440, 1.372], abs=5e-3)


def test_the_error_of_times_is_for_one_row_more() -> None:
    found = fit_times([0.0, 0.1, 0.2, 0.1])
    assert found.mean == pytest.approx(0.1)
    assert found.ends(2.0)[0] < 2.0 < found.ends(2.0)[1]


def test_the_figure_of_a_published_pair_is_near_the_points_of_the_pair() -> None:
    for pair in shipped_fit().pairs:
        of_pair = [point for point in points() if point.names == (pair.target, pair.draft)]
        least, most = min(p.acceptance for p in of_pair), max(p.acceptance for p in of_pair)
        assert least - 1e-4 <= pair.acceptance <= most + 1e-4
