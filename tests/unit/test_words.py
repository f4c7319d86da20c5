"""Numbers in sentences and tables."""

import pytest

from llama_ssp.words import rounded

SHOWN = {0.5543: "0.554", 9.4: "9.40", 9.996: "10.0", 99.96: "100", 999.6: "1000", 10324.0: "10324", 0: "0.00"}


@pytest.mark.parametrize(("value", "shown"), SHOWN.items())
def test_a_number_keeps_its_digits_and_has_no_exponent(value: float, shown: str) -> None:
    assert rounded(value) == shown


def test_more_digits_may_be_asked_for() -> None:
    assert (rounded(999.96, 4), rounded(99.996, 4), rounded(1.5, 4)) == ("1000", "100.0", "1.500")
