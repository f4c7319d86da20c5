"""Every record of a filter or penalty keeps what the rest of the package takes from records, the page's example too."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from llama_ssp.settings.fields import with_value
from llama_ssp.settings.processors import PROCESSORS, Filter, Penalty, Processor
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.processors import SortedCandidates
from tests.helpers.plugins import examples

LOGITS_BTV = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1))
TRIED = (0.01, 0.3, 0.9, 1, 3, 50)


def of_the_page() -> Processor:
    found: dict[str, Any] = {}
    exec(examples("A filter")[0], found)
    record = found["TOP_A"]
    assert isinstance(record, Filter)
    return record


ALL = [*PROCESSORS.all().values(), of_the_page()]
every = pytest.mark.parametrize("record", ALL, ids=lambda record: record.name)


class Seen:
    """Counts of two tokens."""

    def of_text(self) -> torch.Tensor:
        return torch.zeros_like(LOGITS_BTV).index_fill_(-1, torch.tensor([3, 5]), 2)

    def of_all(self) -> torch.Tensor:
        return self.of_text().index_fill_(-1, torch.tensor([7]), 1)


def of_number(record: Processor, number: float | torch.Tensor) -> torch.Tensor:
    """The output of a record's function."""
    if isinstance(record, Penalty):
        return record.change(LOGITS_BTV, Seen(), number)
    assert isinstance(record, Filter)
    candidates = SortedCandidates(LOGITS_BTV if record.reads_logits else torch.empty(0), LOGITS_BTV.softmax(-1))
    return record.keep(candidates, number)


@every
def test_rows_with_one_number_get_what_a_run_with_it_gets(record: Processor) -> None:
    """Bit for bit; of a filter that says so, without the logits."""
    tried = [number for number in TRIED if record.allows(number)]
    assert len(tried) > 1
    for number in tried:
        given = int(number) if isinstance(record.off, int) else float(number)
        of_rows = torch.full((2, 1, 1), number, dtype=torch.float64 if isinstance(record, Filter) else torch.float32)
        assert of_number(record, of_rows).equal(of_number(record, given)), number


@every
def test_a_filter_leaves_the_best_token_and_nothing_forbidden(record: Processor) -> None:
    if not isinstance(record, Filter):
        return
    logits = LOGITS_BTV.index_fill(-1, torch.arange(20), float("-inf"))
    for number in filter(record.allows, TRIED):
        given = int(number) if isinstance(record.off, int) else float(number)
        is_kept = record.keep(SortedCandidates(logits, logits.softmax(-1)), given)
        assert is_kept.gather(-1, logits.argmax(-1, keepdim=True)).all()
        assert not (is_kept & (logits.softmax(-1) > 0))[..., :20].any()


@every
def test_its_number_is_a_setting_which_is_off_by_default(record: Processor) -> None:
    if record is ALL[-1]:
        return
    assert record.name in [one.name for one in fields(SamplingConfig)]
    default = getattr(SamplingConfig(), record.name)
    assert default == (None if isinstance(record, Filter) else record.off)
    on = with_value(SamplingConfig(), record.name, next(filter(record.allows, TRIED)))
    assert (on.truncates, on.penalizes) == (isinstance(record, Filter), isinstance(record, Penalty))
    assert not with_value(SamplingConfig(), record.name, record.off).truncates
    assert record.audited is None or record.allows(record.audited)
