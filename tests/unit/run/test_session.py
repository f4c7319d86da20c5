"""What a session asks of its decoder, what it measures for it, and what is written down at the end."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama_ssp import catalogue, load
from llama_ssp.ranks.comms import Comm
from llama_ssp.reports.records import Span
from llama_ssp.run.prompts import Prompt
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.results import excerpts
from llama_ssp.run.session import Session, to_line
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.lengths import CHOOSERS
from llama_ssp.settings.schema import PlacementConfig, RunConfig, SpeculationConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.sampling.rules import Rule
from llama_ssp.weights import hub
from tests.helpers.decoders import make_decoder, parts_of
from tests.helpers.extensions import copies, copying
from tests.helpers.in_process import launch
from tests.helpers.lengths import FINDER
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import FakeRecorder
from tests.helpers.runs import FAST, PLAIN

LETTERS: Any = SimpleNamespace(decode=lambda ids, **_: "".join("abc"[token] for token in ids))
COPIES: Any = SimpleNamespace(
    models=SimpleNamespace(tokenizer=LETTERS),
    config=SimpleNamespace(placement=PlacementConfig(num_replicas=2), speculation=SpeculationConfig()),
)


def request(max_new_tokens: int = 20) -> PromptRequest:
    return PromptRequest(index=3, sample=1, prompt_ids=(0, 1), max_new_tokens=max_new_tokens, source=Prompt(text="ab"))


def test_a_line_has_milliseconds_of_its_own_and_seconds_of_its_share_of_all_copies() -> None:
    completion = RowCompletion(
        request=request(),
        token_ids=[0, 2],
        num_target_forwards=2,
        accepted_lengths=[1],
        draft_lengths=[3],
        finish_reason="length",
        busy_s=8.0,
        share_s=6.0,
        part_s={"draft": 1.0, "verify": 2.0, "other": 3.0},
    )
    line = to_line(COPIES, completion, "speculative")
    assert (line.index, line.sample, line.prompt, line.text, line.num_new_tokens) == (3, 1, "ab", "ac", 2)
    assert (line.ms, line.share_s, line.draft_s, line.verify_s, line.other_s) == (8000.0, 3.0, 1.0, 2.0, 3.0)
    assert (line.num_rounds, line.num_target_forwards, line.accepted_lengths) == (1, 2, [1])


@pytest.mark.heavy
def test_the_warm_up_of_one_mode_drops_no_graph_of_another() -> None:
    """Speculative rounds need more slots: had plain ones been captured before, they would be again, and timed."""
    models = load("tiny", "tiny-draft").models
    recorders = {"plain": FakeRecorder(), "speculative": FakeRecorder()}
    decoders = {
        mode: make_decoder(models.target, draft, num_draft_tokens=number, replay=recorders[mode])
        for mode, draft, number in (("plain", None, 0), ("speculative", models.draft, 9))
    }

    def ready_decoder(mode: str, requests: Sequence[PromptRequest]) -> Decoder:
        decoders[mode].make_room(requests)
        return decoders[mode]

    session: Any = SimpleNamespace(ready_decoder=ready_decoder, _warm=set())
    with torch.inference_mode():
        Session.warm_up(session, [request(150)], [*decoders], num_requests=1)
        captured = {mode: recorder.num_recorded for mode, recorder in recorders.items()}
        for decoder in decoders.values():
            assert [*decoder.run([request(150)])]
    assert {mode: recorder.num_recorded for mode, recorder in recorders.items()} == captured
    assert all(captured.values())


def test_nothing_is_copied_from_the_text_of_a_warm_up() -> None:
    """It is the begin of the first completion, whose acceptance would be that of no other."""
    target = PrefixRunner(sharpness=1.0)

    def copying_texts(_rule: Rule) -> Drafter:
        return copying(parts_of(config=copies(longest=3, history=3)))

    def accepted(num_warm: int) -> list[int]:
        decoder = make_decoder(target, None, make_drafter=copying_texts)
        session: Any = SimpleNamespace(ready_decoder=lambda *_: decoder, _warm=set())
        one = replace(request(20), prompt_ids=(2, 3, 4, 5, 6))
        with torch.inference_mode():
            decoder.make_room([one])
            if num_warm:
                Session.warm_up(session, [one], ["speculative"], num_requests=num_warm)
            *_, (last,) = decoder.run([one])
        return last.completion.accepted_lengths

    assert accepted(1) == accepted(0)


@pytest.mark.seconds
def test_the_first_line_of_progress_counts_no_warm_up_as_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4000 samples it said 3 h 29 min, when their own ms/token came to 10 min."""

    def slow_warm_up(*arguments: Any, **options: Any) -> None:
        warm_up(*arguments, **options)
        time.sleep(0.5)  # 150 s of 300 samples, if the first one had taken it

    warm_up = Session.warm_up
    monkeypatch.setattr(Session, "warm_up", slow_warm_up)
    words = ("task=generate", "model=tiny-draft", "draft=none", "prompt=import", "num_samples=300", "max_new_tokens=4")
    said = launch(*words, f"run_dir={tmp_path}/run").err
    assert re.search(r"plain: \d+ of 300 completions at .*, \d+ s left", said), said


@pytest.mark.parametrize(("a_row_s", "wanted"), [(0.25, 3.0), (0.5, 1.0), (0.0, math.inf)])
def test_the_rows_that_cost_a_reading_of_the_weights_are_measured_once(a_row_s: float, wanted: float) -> None:
    """A plain round of one row takes 1 s; every third measurement was slowed down by others."""
    timed = list[int | None]()

    def time_rounds(choices: Sequence[DraftChoice], *, num_slots: int, num_rows: int | None = None) -> list[float]:
        timed.append(num_rows)
        return [(1.0 if num_rows else 1.0 + 15 * a_row_s) * (9.0 if len(timed) % 3 else 1.0)]

    round_ = SimpleNamespace(drafters=[object()], steps=object())
    decoder: Any = SimpleNamespace(
        round=round_, make_room=len, picks_rows=True, batch_size=16, reading_rows=math.inf, time_rounds=time_rounds
    )
    config = replace(load("tiny", "tiny-draft").config, speculation=SpeculationConfig(num_draft_tokens=4))
    numbers = list[int]()
    for _ in range(2):
        make_ready(decoder, [request()], config, comm=Comm.single())
        numbers.append(len(timed))
        assert decoder.reading_rows == wanted
    assert {*timed} == {1, None}
    assert numbers[0] == numbers[1] or wanted == math.inf


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
        for index in (7, 3, 1, 5)
        for sample in (1, 0)
        for kind in (PLAIN, FAST)
    ]
    found = excerpts(lines, tokenizer)
    assert [(each.index, each.sample, each.mode) for each in found] == [(n, 0, "speculative") for n in (1, 3, 5)]
    assert len(found[0].prompt) < 1000
    plain = replace(PLAIN, token_ids=tokenizer.encode("import os", add_special_tokens=False))
    assert [each.spans for each in excerpts([plain], tokenizer)] == [[Span(text="import os", drafted=False)]]


def test_what_chooses_k_is_made_once_for_a_decoder_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Two(FixedLength):
        """Some other way to choose."""

    def make(_decoder: Decoder, _config: RunConfig, *, num_slots: int, **_more: object) -> FixedLength:
        made.append(num_slots)
        return Two(2)

    monkeypatch.setattr("llama_ssp.run.tuning.imported", lambda *_, **__: make)
    CHOOSERS.all()
    monkeypatch.setitem(CHOOSERS.records, "found", FINDER)
    config = replace(load("tiny", "tiny-draft").config, speculation=SpeculationConfig(num_draft_tokens="found"))
    target = PrefixRunner()
    for draft, wanted in ((PrefixRunner(seed=1), [FixedLength, Two, Two]), (None, [FixedLength] * 3)):
        decoder = make_decoder(target, draft, num_draft_tokens=4)
        kinds: list[type[FixedLength]] = [type(decoder.length)]
        for _ in range(2):
            make_ready(decoder, [request()], config, comm=Comm.single())
            kinds.append(type(decoder.length))
        assert kinds == wanted
    assert made == [12]
