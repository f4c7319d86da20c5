"""The end of a run: excerpts for its report, by who chose each token, and what is left where the report fails."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.records import Span
from llama_ssp.run.results import excerpts
from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from tests.helpers.in_process import launch
from tests.helpers.runs import FAST, PLAIN

pytestmark = pytest.mark.seconds


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(hub.resolve(catalogue.load("tiny")))
    return found


def test_tokens_are_told_apart_by_round(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = tokenizer.encode("import os\nimport sys\nprint(sys.argv)", add_special_tokens=False)[:8]
    line = replace(FAST, token_ids=token_ids, accepted_lengths=[2, 0, 2], examined_lengths=[2, 1, 2])
    (found,) = excerpts([line], tokenizer)
    spans = ((0, 1, False), (1, 3, True), (3, 5, False), (5, 7, True), (7, 8, False))
    assert found.spans == [Span(text=str(tokenizer.decode(token_ids[a:b])), drafted=drafted) for a, b, drafted in spans]
    assert "".join(span.text for span in found.spans) == tokenizer.decode(token_ids)


def test_the_first_prompts_are_shown_once_each_in_the_best_mode(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = [
        replace(kind, index=index, sample=sample, prompt="p" * 9999)
        for index in (7, 3, 1, 5) for sample in (1, 0) for kind in (PLAIN, FAST)
    ]  # fmt: skip
    found = excerpts(lines, tokenizer)
    assert [(each.index, each.sample, each.mode) for each in found] == [(n, 0, "speculative") for n in (1, 3, 5)]
    assert len(found[0].prompt) < 1000
    plain = replace(PLAIN, token_ids=tokenizer.encode("import os", add_special_tokens=False))
    assert [each.spans for each in excerpts([plain], tokenizer)] == [[Span(text="import os", drafted=False)]]


def test_a_run_that_cannot_draw_its_report_is_done_and_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib")

    monkeypatch.setattr(RunFolder, "write_report", fail)
    ended = launch("task=generate", "prompt=import os", "max_new_tokens=2", f"run_dir={tmp_path}/run")
    assert (ended.code, ended.status) == (0, "done\n")
    last = ended.err.splitlines()[-1]
    assert last == "drawing needs matplotlib: pip install matplotlib; llama-ssp report writes report.html later"
    assert (tmp_path / "run" / "summary.json").exists()
